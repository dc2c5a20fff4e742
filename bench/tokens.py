"""Context tokens of tools: all definitions, or a catalog plus the tools that a task loads.

    python bench/tokens.py [--groups 33] [--tools 600] [--fleet FOLDER] [--only real|large] [--json]

Two catalogs behind a running installation (`manage.py serve`): the five real servers of the tests,
and a large one of many servers (bench/fleet.py; --fleet takes real definitions). An agent opens a
session with all definitions and a deferred session; in the latter it does a typical task over
REST: one search, three loads, three calls. Every figure is counted by toolcrib.lib.token_counter
from the API responses, and compared with the product's own ledger.
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

MAX_TOKENS_PER_NAME = 7
MAX_META_TOKENS = 700
CATALOG_BUDGET = 2_000
UNLIMITED = 1_000_000
REAL_TASK = (
    ("filesystem__list_directory", lambda folder: {"path": str(folder)}),
    ("time__get_current_time", lambda folder: {"timezone": "Europe/Oslo"}),
    ("memory__read_graph", lambda folder: {}),
)


class Caller:
    """REST client of an agent."""

    def __init__(self, toolcrib, name, **settings):
        self.toolcrib = toolcrib
        self.name = name
        self.path = ""
        body = {"name": name, "all_groups": True, **settings}
        self._body(toolcrib.api("POST", "/agents", body))
        self.key = self._body(toolcrib.api("POST", f"/agents/{name}/keys", {}))["key"]

    def _body(self, response):
        status, body = response
        assert status in (200, 201), f"{self.name}: {status} {body}"
        return body

    def open(self, **body):
        session = self._body(self.toolcrib.api("POST", "/sessions", body, self.key))
        self.path = f"/sessions/{session['id']}"
        return session

    def post(self, path, body):
        return self._body(self.toolcrib.api("POST", self.path + path, body, self.key))

    def get(self, path):
        return self._body(self.toolcrib.api("GET", self.path + path, None, self.key))


def cost(response):
    return count(canonical(response))


def do_task(caller, query, choose):
    """Search, load three tools, call them; return the tokens of each step and the tools."""
    search = caller.post("/search", {"query": query})
    chosen = choose(search["tools"])
    loads = [
        caller.post("/load", {"group_id": group, "tool_names": [name]}) for group, name, _ in chosen
    ]
    calls = []
    for (_, name, arguments), load in zip(chosen, loads, strict=True):
        merged = fleet.arguments_for(load["schemas"][0]["parameters"]) | arguments
        call = caller.post("/call", {"tool_name": name, "arguments": merged})
        assert not call["is_error"], call
        calls.append(call)
    return {
        "search": cost(search),
        "load": sum(cost(load["schemas"]) for load in loads),
        "call": sum(call["tokens"] for call in calls),
        "task_tools": [name for _, name, _ in chosen],
    }


def name_lines(text):
    """Return the lines of a catalog text that contain only names."""
    return [line for line in text.splitlines() if line.startswith("  ")]


def measure(toolcrib, label, query, choose):
    everything = Caller(toolcrib, f"{label}-full", mode="full").open()
    wide = Caller(toolcrib, f"{label}-wide", mode="deferred", catalog_budget=UNLIMITED).open()
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
        **do_task(caller, query, choose),
    }
    row["start"] = row["catalog"] + cost(opened["tools"])
    row["after"] = row["start"] + row["search"] + row["load"] + row["call"]
    row["ratio_start"] = row["everything"] / row["start"]
    # Results cost the same in both modes.
    row["ratio_after"] = (row["everything"] + row["call"]) / row["after"]
    row["ledger"] = caller.get("/stats")["tokens"]["delivered"]
    return row


def import_servers(toolcrib, folder, mcp_json, *flags):
    file = folder / "mcp.json"
    file.write_text(json.dumps(mcp_json))
    process = toolcrib.command("import_servers", str(file), "--wait", "--json", *flags)
    assert process.returncode == 0, process.stdout + process.stderr


def real_row(folder):
    files = folder / "files"
    files.mkdir(parents=True)
    (files / "note.txt").write_text("Nothing to see here.\n")

    def choose(hits):
        return [(f"mcp:{name.partition('__')[0]}", name, make(files)) for name, make in REAL_TASK]

    with Installation(folder / "data") as toolcrib:
        import_servers(toolcrib, folder, {"mcpServers": real_servers(files)}, "--allow-stdio")
        return measure(toolcrib, "real", "list the files in a folder", choose)


def fleet_row(folder, options):
    folder.mkdir(parents=True)

    schemas = {
        (server, tool["name"]): tool["inputSchema"]
        for server, tools in fleet.load_servers(options).items()
        for tool in tools
    }

    def accepts_minimal_arguments(hit):
        schema = schemas.get((hit["server"], hit["name"].partition("__")[2]))
        return schema and jsonschema_rs.is_valid(schema, fleet.arguments_for(schema))

    def choose(hits):
        usable = [hit for hit in hits if accepts_minimal_arguments(hit)]
        assert len(usable) >= 3, hits
        return [(hit["group_id"], hit["name"], {}) for hit in usable[:3]]

    with fleet.running(options) as mcp_json, Installation(folder / "data") as toolcrib:
        import_servers(toolcrib, folder, mcp_json)
        return measure(toolcrib, "large", "search issues by words and label", choose)


def verdicts(row):
    """Yield each requirement: sentence, whether it holds, limit."""
    yield (
        f"a name costs {row['a_name']:.2f} tokens",
        row["a_name"] <= MAX_TOKENS_PER_NAME,
        MAX_TOKENS_PER_NAME,
    )
    yield (
        f"the catalog has {row['catalog']:,} tokens",
        row["catalog"] <= CATALOG_BUDGET,
        f"{CATALOG_BUDGET:,}",
    )
    yield (
        f"the meta-tools have {row['meta']:,} tokens",
        row["meta"] < MAX_META_TOKENS,
        MAX_META_TOKENS,
    )
    same = row["after"] == row["ledger"]
    yield (
        f"the ledger has {row['ledger']:,} tokens after the task",
        same,
        f"{row['after']:,}",
    )


COLUMNS = {
    "label": "catalog",
    "groups": "groups",
    "tools": "tools",
    "everything": "all schemas",
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


def format_cell(value):
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else value


def print_report(rows):
    print(f"tokens, counted by {estimator()}; sessions of `manage.py serve` over REST")
    table = [list(COLUMNS.values()), *([format_cell(row[key]) for key in COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in table) for at in range(len(COLUMNS))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    for row in rows:
        print(
            f"\n{row['label']}: with all names the catalog has {row['all_names']:,} tokens, "
            f"{row['a_tool']:.2f} per tool; within {CATALOG_BUDGET:,} it omits {row['left_out']:,} "
            f"of {row['tools']:,} names. The task used {', '.join(row['task_tools'])}."
        )
        for sentence, holds, limit in verdicts(row):
            print(f"  {'OK  ' if holds else 'OVER'} {sentence} (limit: {limit})")


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
                "skipped: the five real servers are not installed; python -m tests.support.parts "
                "installs them\n"
            )
        if options.only != "real":
            rows.append(fleet_row(folder / "large", options))
    if options.json:
        print(json.dumps(rows))
        return
    print_report(rows)


if __name__ == "__main__":
    main()
