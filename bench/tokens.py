"""What tools cost a model's context: everything loaded, or a catalog and what a task loads.

    python bench/tokens.py [--groups 33] [--tools 600] [--fleet FOLDER] [--only real|large] [--json]

Two catalogs behind a running installation (`manage.py serve`): the five real servers of the tests,
and a large one of many servers (bench/fleet.py; --fleet takes real definitions). An agent opens a
session with everything loaded, and one that defers; there it does a typical task over REST: one
search, three tools loaded, three called. Every figure is counted by catalog.tokens from what the
API answered, and compared with the ledger the product keeps itself.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fleet  # noqa: E402
import jsonschema_rs  # noqa: E402

from tests.e2e.live.test_real_servers import real_servers  # noqa: E402
from tests.support import parts  # noqa: E402
from tests.support.installation import Installation  # noqa: E402
from toolcrib.lib.json_codec import canonical  # noqa: E402
from toolcrib.lib.token_counter import count, estimator  # noqa: E402

NAMES_AT_MOST = 7  # tokens a tool
META_AT_MOST = 700
BUDGET = 2_000
PLENTY = 1_000_000
REAL_TASK = (
    ("filesystem__list_directory", lambda folder: {"path": str(folder)}),
    ("time__get_current_time", lambda folder: {"timezone": "Europe/Oslo"}),
    ("memory__read_graph", lambda folder: {}),
)


class Caller:
    """An agent over REST."""

    def __init__(self, toolcrib, name, **settings):
        self.toolcrib = toolcrib
        self.name = name
        self.path = ""
        body = {"name": name, "all_groups": True, **settings}
        self._told(toolcrib.api("POST", "/agents", body))
        self.key = self._told(toolcrib.api("POST", f"/agents/{name}/keys", {}))["key"]

    def _told(self, answer):
        status, body = answer
        assert status in (200, 201), f"{self.name}: {status} {body}"
        return body

    def open(self, **body):
        told = self._told(self.toolcrib.api("POST", "/sessions", body, self.key))
        self.path = f"/sessions/{told['id']}"
        return told

    def ask(self, what, body):
        return self._told(self.toolcrib.api("POST", self.path + what, body, self.key))

    def read(self, what):
        return self._told(self.toolcrib.api("GET", self.path + what, None, self.key))


def cost(answer):
    return count(canonical(answer))


def do_task(caller, query, chosen):
    """Search, load three, call three; return the tokens of each and the tools."""
    found = caller.ask("/search", {"query": query})
    picked = chosen(found["tools"])
    loads = [
        caller.ask("/load", {"group_id": group, "tool_names": [name]}) for group, name, _ in picked
    ]
    calls = []
    for (_, name, arguments), load in zip(picked, loads, strict=True):
        given = fleet.arguments_for(load["schemas"][0]["parameters"]) | arguments
        call = caller.ask("/call", {"tool_name": name, "arguments": given})
        assert not call["is_error"], call
        calls.append(call)
    return {
        "search": cost(found),
        "load": sum(cost(load["schemas"]) for load in loads),
        "call": sum(call["tokens"] for call in calls),
        "task_tools": [name for _, name, _ in picked],
    }


def name_lines(text):
    """The lines of a catalog that hold nothing but names."""
    return [line for line in text.splitlines() if line.startswith("  ")]


def measure(toolcrib, label, query, chosen):
    everything = Caller(toolcrib, f"{label}-full", mode="full").open()
    wide = Caller(toolcrib, f"{label}-wide", mode="deferred", catalog_budget=PLENTY).open()
    caller = Caller(toolcrib, label, mode="deferred")
    opened = caller.open()
    meta = [tool for tool in opened["tools"] if tool["source"] == "builtin"]
    text = wide["catalog"]["text"]
    tools = opened["stats"]["total_registered"]
    row = {
        "label": label,
        "groups": text.count("\n- `") + text.startswith("- `"),
        "tools": tools,
        "everything": cost(everything["tools"]),
        "catalog": count(opened["catalog"]["text"]),
        "left_out": (opened["catalog"]["left_out"] or {}).get("names", 0),
        "meta": cost(meta),
        "all_names": count(text),
        "a_name": sum(count(line + "\n") for line in name_lines(text)) / tools,
        "a_tool": count(text) / tools,
        **do_task(caller, query, chosen),
    }
    row["start"] = row["catalog"] + cost(opened["tools"])
    row["after"] = row["start"] + row["search"] + row["load"] + row["call"]
    row["ratio_start"] = row["everything"] / row["start"]
    # Results cost the same either way.
    row["ratio_after"] = (row["everything"] + row["call"]) / row["after"]
    row["ledger"] = caller.read("/stats")["tokens"]["delivered"]
    return row


def imported(toolcrib, folder, mcp_json, *flags):
    file = folder / "mcp.json"
    file.write_text(json.dumps(mcp_json))
    done = toolcrib.command("import_servers", str(file), "--wait", "--json", *flags)
    assert done.returncode == 0, done.stdout + done.stderr


def real_row(folder):
    files = folder / "files"
    files.mkdir(parents=True)
    (files / "note.txt").write_text("Nothing to see here.\n")

    def chosen(hits):
        return [(f"mcp:{name.partition('__')[0]}", name, made(files)) for name, made in REAL_TASK]

    with Installation(folder / "data") as toolcrib:
        imported(toolcrib, folder, {"mcpServers": real_servers(files)}, "--allow-stdio")
        return measure(toolcrib, "real", "list the files in a folder", chosen)


def fleet_row(folder, options):
    folder.mkdir(parents=True)

    schemas = {
        (server, tool["name"]): tool["inputSchema"]
        for server, tools in fleet.load_servers(options).items()
        for tool in tools
    }

    def callable_with_little(hit):
        schema = schemas.get((hit["server"], hit["name"].partition("__")[2]))
        return schema and jsonschema_rs.is_valid(schema, fleet.arguments_for(schema))

    def chosen(hits):
        usable = [hit for hit in hits if callable_with_little(hit)]
        assert len(usable) >= 3, hits
        return [(hit["group_id"], hit["name"], {}) for hit in usable[:3]]

    with fleet.running(options) as mcp_json, Installation(folder / "data") as toolcrib:
        imported(toolcrib, folder, mcp_json)
        return measure(toolcrib, "large", "search issues by words and label", chosen)


def verdicts(row):
    """The promises, each with its figure."""
    yield f"a name costs {row['a_name']:.2f} tokens", row["a_name"] <= NAMES_AT_MOST, NAMES_AT_MOST
    yield f"the catalog has {row['catalog']:,} tokens", row["catalog"] <= BUDGET, f"{BUDGET:,}"
    yield f"the meta-tools have {row['meta']:,} tokens", row["meta"] < META_AT_MOST, META_AT_MOST
    same = row["after"] == row["ledger"]
    yield (
        f"the product's own ledger says {row['ledger']:,} after the task",
        same,
        f"{row['after']:,}",
    )


COLUMNS = {
    "label": "catalog",
    "groups": "groups",
    "tools": "tools",
    "everything": "all loaded",
    "catalog": "catalog",
    "meta": "meta-tools",
    "start": "at start",
    "search": "+search",
    "load": "+load 3",
    "call": "+call 3",
    "after": "after task",
    "ratio_start": "all ÷ start",
    "ratio_after": "all ÷ after",
}


def cell(value):
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else value


def tell(rows):
    print(f"tokens, counted by {estimator()}; sessions of `manage.py serve` over REST")
    table = [list(COLUMNS.values()), *([cell(row[key]) for key in COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in table) for at in range(len(COLUMNS))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    for row in rows:
        print(
            f"\n{row['label']}: with all names the catalog has {row['all_names']:,} tokens, "
            f"{row['a_tool']:.2f} a tool; within {BUDGET:,} it leaves out {row['left_out']:,} "
            f"names of {row['tools']:,}. The task used {', '.join(row['task_tools'])}."
        )
        for sentence, holds, limit in verdicts(row):
            print(f"  {'OK  ' if holds else 'OVER'} {sentence} (wanted: {limit})")


def main():
    parser = argparse.ArgumentParser()
    fleet.add_options(parser)
    parser.add_argument("--only", choices=("real", "large"), help="one of the two catalogs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as name:
        folder = Path(name)
        if options.only == "large":
            pass
        elif parts.npm_folder() and parts.pyservers_bin():
            rows.append(real_row(folder / "real"))
        else:
            sys.stderr.write(
                "left out: the five real servers are not installed; python -m tests.support.parts "
                "installs them\n"
            )
        if options.only != "real":
            rows.append(fleet_row(folder / "large", options))
    if options.json:
        print(json.dumps(rows))
        return
    tell(rows)


if __name__ == "__main__":
    main()
