"""Context tokens of tools: all definitions, or a catalog plus the tools that a task loads.

    python bench/tokens.py [--groups 33] [--tools 600] [--fleet FOLDER] [--only real|large|tasks]
                           [--json]

Two catalogs behind a running installation (`manage.py serve`): the five real servers of the tests,
and a large one of many servers (bench/fleet.py; --fleet takes real definitions). An agent opens a
session with all definitions and a deferred session; in the latter it does a typical task over
REST: one search, three loads, three calls. Every figure is counted by toolcrib.lib.token_counter
from the API responses, and compared with the product's own ledger.

`tasks` are seven tasks with seven more real servers, installed on demand: surface (catalog text and
tools over REST, instructions and tools over MCP), one search, one load, in tokens and as shares of
all schemas, as a model gets them. Results of calls cost the same with and without Toolcrib, so the
calls are not made: they would need accounts.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fleet  # noqa: E402
import jsonschema_rs  # noqa: E402

from tests.e2e.live.test_real_servers import real_servers  # noqa: E402
from tests.support import parts, raw_mcp  # noqa: E402
from tests.support.installation import Installation  # noqa: E402
from toolcrib.lib.json_codec import canonical  # noqa: E402
from toolcrib.lib.token_counter import count, estimator  # noqa: E402

MAX_TOKENS_PER_NAME = 7
MAX_META_TOKENS = 700
MAX_SEARCH_TOKENS = 300
CATALOG_BUDGET = 2_000
UNLIMITED = 1_000_000
REAL_TASK = (
    ("filesystem__list_directory", lambda folder: {"path": str(folder)}),
    ("time__get_current_time", lambda folder: {"timezone": "Europe/Oslo"}),
    ("memory__read_graph", lambda folder: {}),
)


MAX_TASK_PERCENT = 3.6  # of all schemas: surface, one search and one load, on average
MAX_TASK_PERCENT_WITHOUT_GROUPS = 2.5  # without the lines of the groups
PLACEHOLDER = "not-a-secret"
# Server: its program in the npm folder, and the variables without which it does not start.
TASK_SERVERS = {
    "github": ("mcp-server-github", {"GITHUB_PERSONAL_ACCESS_TOKEN": PLACEHOLDER}),
    "notion": ("notion-mcp-server", {"NOTION_TOKEN": PLACEHOLDER}),
    "firecrawl": ("firecrawl-mcp", {"FIRECRAWL_API_KEY": PLACEHOLDER}),
    "kubernetes": ("mcp-server-kubernetes", {}),
    "airtable": ("airtable-mcp-server", {"AIRTABLE_API_KEY": PLACEHOLDER}),
    "thinking": ("mcp-server-sequential-thinking", {}),
    "mongodb": (
        "mongodb-mcp-server",
        {"MDB_MCP_LOGGERS": "stderr", "MDB_MCP_TELEMETRY": "disabled"},
    ),
}
TASKS = {  # what is asked for, and the tool that it needs
    "github": ("create an issue in a repository", "create_issue"),
    "notion": ("search pages by title", "API-post-search"),
    "firecrawl": ("scrape a web page as markdown", "firecrawl_scrape"),
    "kubernetes": ("list the pods of a namespace", "kubectl_get"),
    "airtable": ("list records of a table", "list_records"),
    "thinking": ("think step by step about a problem", "sequentialthinking"),
    "mongodb": ("find documents in a collection", "find"),
}


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
        "load": sum(cost(load) for load in loads),
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
    # Ten hits with all their fields: what a search answered before it was cut to what models need.
    explained = Caller(toolcrib, f"{label}-explained", mode="deferred")
    explained.open()
    row["search_explained"] = cost(
        explained.post("/search", {"query": query, "limit": 10, "explain": True})
    )
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
        server, _, name = hit["name"].partition("__")
        schema = schemas.get((server, name))
        return schema and jsonschema_rs.is_valid(schema, fleet.arguments_for(schema))

    def choose(hits):
        usable = [hit for hit in hits if accepts_minimal_arguments(hit)]
        assert len(usable) >= 3, hits
        return [(hit["group_id"], hit["name"], {}) for hit in usable[:3]]

    with fleet.running(options) as mcp_json, Installation(folder / "data") as toolcrib:
        import_servers(toolcrib, folder, mcp_json)
        return measure(toolcrib, "large", "search issues by words and label", choose)


class McpSession:
    """A session of an agent, used over MCP."""

    def __init__(self, caller, **body):
        self.agent = SimpleNamespace(url=caller.toolcrib.url, key=caller.key)
        self.path = "/" + caller.open(**body)["id"]

    def request(self, method, **params):
        answer = raw_mcp.send_modern(self.agent, method, params, path=self.path)
        message = raw_mcp.parse_result(answer)
        assert "result" in message, message
        return message["result"]

    def tools(self):
        return self.request("tools/list")["tools"]

    def call(self, name, **arguments):
        """Call a meta-tool; return the text that the model gets."""
        result = self.request("tools/call", name=name, arguments=arguments)
        assert not result.get("isError"), result
        return "".join(item["text"] for item in result["content"])


def for_model(tools):
    """Return what clients pass on of a tools array: without annotations, titles and `_meta`."""
    return [
        {
            "name": tool["name"],
            "description": tool["description"],
            "input_schema": tool["inputSchema"],
        }
        for tool in tools
    ]


def task_rows(folder):
    """Do the seven tasks; return tokens of all schemas and a row for each task."""
    folder.mkdir(parents=True)
    programs = parts.installed_task_servers() / "node_modules" / ".bin"
    servers = {
        slug: {"command": str(programs / name), "env": variables}
        for slug, (name, variables) in TASK_SERVERS.items()
    }
    with Installation(folder / "data") as toolcrib:
        import_servers(toolcrib, folder, {"mcpServers": servers}, "--allow-stdio")
        everything = for_model(McpSession(Caller(toolcrib, "full", mode="full")).tools())
        caller = Caller(toolcrib, "tasks", mode="deferred")
        opened = caller.open()
        rest = count(opened["catalog"]["text"]) + cost(
            [
                {key: tool[key] for key in ("name", "description", "parameters")}
                for tool in opened["tools"]
            ]
        )
        rows = []
        for slug, (query, tool) in TASKS.items():
            session = McpSession(caller)
            instructions = session.request("server/discover")["instructions"]
            groups = [line for line in instructions.splitlines() if line.startswith("- `")]
            tools = session.tools()
            names = next(tool["description"] for tool in tools if tool["name"] == "search_tools")
            names = "".join(names.partition(" Groups: ")[1:])
            found = session.call("search_tools", query=query)
            name = f"{slug}__{tool}"
            loaded = session.call("load_tools", group_id=f"mcp:{slug}", tool_names=[name])
            rows.append(
                {
                    "task": query,
                    "tool": name,
                    "found": name in found,
                    "surface": cost(for_model(tools)) + count(instructions),
                    "groups": count("\n".join(groups)) + count(names),
                    "rest": rest,
                    "search": count(found),
                    "load": count(loaded),
                }
            )
        return {"tools": len(everything), "everything": cost(everything), "tasks": rows}


def print_tasks(result):
    everything, rows = result["everything"], result["tasks"]
    print(f"\n{len(rows)} tasks, {result['tools']} tools: {everything:,} tokens in all")
    print("REST: catalog and tools, search, load. MCP: the same without the lines of groups.")
    print("   REST     MCP  search    load  REST %   MCP %  task: tool")
    shares, without = [], []
    for row in rows:
        rest, mcp = row["rest"], row["surface"] - row["groups"]
        given = row["search"] + row["load"]
        shares.append(100 * (rest + given) / everything)
        without.append(100 * (mcp + given) / everything)
        missed = "" if row["found"] else " (not found by the search)"
        figures = f"{rest:7,} {mcp:7,} {row['search']:7,} {row['load']:7,}"
        percent = f"{shares[-1]:6.1f}% {without[-1]:6.1f}%"
        print(f"{figures} {percent}  {row['task']}: {row['tool']}{missed}")
    for sentence, values, limit in (
        ("a task over REST costs", shares, MAX_TASK_PERCENT),
        ("over MCP, without the lines of groups,", without, MAX_TASK_PERCENT_WITHOUT_GROUPS),
    ):
        mean = sum(values) / len(values)
        mark = "OK  " if mean <= limit else "OVER"
        print(f"  {mark} {sentence} {mean:.2f}% of all schemas on average (limit: {limit}%)")


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
    yield (
        f"a search has {row['search']:,} tokens; ten full hits {row['search_explained']:,}",
        row["search"] <= MAX_SEARCH_TOKENS,
        MAX_SEARCH_TOKENS,
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
    parser.add_argument("--only", choices=("real", "large", "tasks"), help="one of the three")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as name:
        folder = Path(name)
        if options.only in ("large", "tasks"):
            pass
        elif parts.npm_folder() and parts.pyservers_bin():
            rows.append(real_row(folder / "real"))
        else:
            sys.stderr.write(
                "skipped: the five real servers are not installed; python -m tests.support.parts "
                "installs them\n"
            )
        if options.only not in ("real", "tasks"):
            rows.append(fleet_row(folder / "large", options))
        tasks = task_rows(folder / "tasks") if options.only in (None, "tasks") else None
    if options.json:
        print(json.dumps([*rows, tasks] if tasks else rows))
        return
    if rows:
        print_report(rows)
    if tasks:
        print_tasks(tasks)


if __name__ == "__main__":
    main()
