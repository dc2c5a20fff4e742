"""Large catalog for benches: many MCP servers in one process, the same in every run.

    python bench/fleet.py [--groups 33] [--tools 600] [--folder FOLDER]

Each server has its own path, `/<slug>/mcp`. Definitions are generated with realistic sizes, or read
from a folder: `tools*.jsonl` with one tool per line (`server`, `name`, `description`,
`input_schema`), or one `*.json` per server with its `tools/list` result.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# slug: description, and the nouns of its tools.
SERVICES = {
    "github": ("Issues, pull requests, code", "issue pull_request branch release workflow_run"),
    "gitlab": ("Merge requests and pipelines", "merge_request pipeline runner snippet milestone"),
    "jira": ("Tickets, sprints and boards", "ticket sprint board worklog component"),
    "linear": ("Product planning", "cycle project roadmap label initiative"),
    "slack": ("Channels and messages", "channel message thread reaction user_group"),
    "gmail": ("Mail", "email draft filter mail_label attachment"),
    "calendar": ("Events and free times", "event calendar invitation reminder free_slot"),
    "drive": ("Files and folders", "file folder permission revision comment"),
    "notion": ("Pages and databases", "page database block template workspace"),
    "confluence": ("Team documentation", "space wiki_page page_tree macro page_version"),
    "postgres": ("SQL databases", "table index query_plan extension schema"),
    "redis": ("Keys and streams", "key stream consumer_group cache_entry script"),
    "s3": ("Object storage", "bucket object lifecycle_rule access_policy upload"),
    "kubernetes": ("Clusters", "pod deployment namespace config_map node"),
    "docker": ("Containers and images", "container image volume network registry_tag"),
    "terraform": ("Infrastructure as code", "plan state_file module variable run"),
    "sentry": ("Errors and releases", "error_event alert_rule crash_report team project_key"),
    "datadog": ("Metrics, logs and monitors", "metric monitor dashboard log_query incident"),
    "grafana": ("Dashboards and alerts", "panel datasource alert annotation folder_tree"),
    "pagerduty": ("On-call and incidents", "escalation_policy oncall_shift service page responder"),
    "stripe": ("Payments", "payment_intent invoice subscription refund customer"),
    "salesforce": ("Sales records", "account opportunity lead contact campaign"),
    "hubspot": ("Marketing", "deal company form mailing_list email_campaign"),
    "zendesk": ("Customer support", "support_ticket macro satisfaction_rating help_article view"),
    "figma": ("Designs", "frame design_component style design_file prototype"),
    "playwright": ("A browser", "browser_tab page_element screenshot network_request dialog"),
    "filesystem": ("Files on a disk", "text_file directory symlink file_info archive"),
    "shell": ("Commands on a machine", "command process environment_variable job terminal"),
    "search": ("The public web", "web_page news_article image_result suggestion site"),
    "maps": ("Places and routes", "place route distance_matrix geocode elevation"),
    "weather": ("Forecasts and observations", "forecast observation weather_alert station tide"),
    "analytics": ("Web analytics", "report segment funnel goal audience"),
    "finance": ("Markets", "quote portfolio watchlist order_book dividend"),
}
VERBS = ("list", "get", "create", "update", "delete", "search", "archive", "export", "assign",
         "compare", "move", "copy")  # fmt: skip
LEADS = {
    "list": "List {many} of {of}, newest first, with filters and pages.",
    "get": "Get one {one} of {of} by its identifier, with everything known about it.",
    "create": "Create a {one} in {of}. Returns it with its new identifier.",
    "update": "Update fields of a {one} in {of}; what is left out stays as it is.",
    "delete": "Delete a {one} from {of}. This cannot be undone.",
    "search": "Search {many} of {of} by words and filters, the best match first.",
    "archive": "Archive a {one} of {of}, so that it is no longer listed.",
    "export": "Export {many} of {of} as CSV or JSON and return where to fetch the file.",
    "assign": "Assign a {one} of {of} to somebody and tell them.",
    "compare": "Compare two {many} of {of} and list what differs.",
    "move": "Move a {one} of {of} to another place and keep its history.",
    "copy": "Copy a {one} of {of}, with or without what belongs to it.",
}
MORE = (
    " Use this when the identifier is known; otherwise search first.",
    " Needs write access. Fails with a sentence that names the missing permission.",
    " Large answers are cut; ask for the next page with the cursor that was returned.",
    "",
)
TEXT = {"type": "string"}
PLACES = {
    "workspace": {**TEXT, "description": "Workspace or organisation the request is made in"},
    "fields": {
        "type": "array",
        "items": TEXT,
        "description": "Names of the fields to return; all of them if left out",
    },
    "dry_run": {
        "type": "boolean",
        "default": False,
        "description": "Only check what would happen and change nothing",
    },
    "idempotency_token": {**TEXT, "maxLength": 64, "description": "Makes repeating it harmless"},
}
PAGES = {
    "cursor": {**TEXT, "description": "Where the last page ended, as it was returned"},
    "page_size": {"type": "integer", "minimum": 1, "maximum": 100, "default": 30},
    "sort": {
        "type": "string",
        "enum": ["created", "updated", "name", "priority"],
        "description": "What to order by",
    },
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
}
FILTER = {
    "type": "object",
    "description": "Conditions that must all hold",
    "properties": {
        "state": {"type": "string", "enum": ["open", "closed", "archived", "any"]},
        "labels": {"type": "array", "items": TEXT, "description": "All of these labels"},
        "created_after": {**TEXT, "format": "date-time", "description": "ISO 8601, inclusive"},
        "created_before": {**TEXT, "format": "date-time", "description": "ISO 8601, exclusive"},
        "owner": {**TEXT, "description": "Login or e-mail of who owns it"},
    },
    "additionalProperties": False,
}
PAGE_SIZE = 1_000  # tools in one page of a list
Definition = dict[str, Any]


def generate_servers(groups: int, tools: int, *, even: bool = False) -> dict[str, list[Definition]]:
    """Return generated definitions by server; the total is exact. Without `even` sizes differ."""
    slugs = list(SERVICES)[:groups]
    slugs += [f"service-{number}" for number in range(len(slugs), groups)]
    weights = [1 if even else 1 + (7 * at) % 13 for at in range(groups)]
    sizes = [max(1, tools * weight // sum(weights)) for weight in weights]
    at = 0
    while sum(sizes) != tools:
        step = 1 if sum(sizes) < tools else -1
        if sizes[at % groups] + step >= 1:
            sizes[at % groups] += step
        at += 1
    return {slug: _generate_tools(slug, size) for slug, size in zip(slugs, sizes, strict=True)}


def _generate_tools(slug: str, size: int) -> list[Definition]:
    things = SERVICES.get(slug, ("", "item record entry note task"))[1].split()
    names = [(verb, thing) for verb in VERBS for thing in things]
    chance = random.Random(slug)  # noqa: S311 - the same in every run
    return [
        _definition(slug, *names[at % len(names)], at // len(names), chance) for at in range(size)
    ]


def _definition(slug: str, verb: str, thing: str, turn: int, chance: random.Random) -> Definition:
    one = thing.replace("_", " ")
    plural = thing + "s" if verb in ("list", "search", "export") else thing
    description = LEADS[verb].format(one=one, many=f"{one}s", of=slug) + chance.choice(MORE)
    properties: dict[str, Any] = {}
    required: list[str] = []
    if verb in ("list", "search", "export"):
        if verb == "search":
            properties["query"] = {**TEXT, "description": f"Words to look for in {one}s"}
            required = ["query"]
        properties |= {"filter": FILTER, **PAGES}
    else:
        properties[f"{thing}_id"] = {**TEXT, "description": f"Identifier of the {one}"}
        required = [f"{thing}_id"]
    if verb in ("create", "update", "copy", "move", "assign"):
        properties |= {
            "title": {**TEXT, "maxLength": 200, "description": f"Short title of the {one}"},
            "body": {**TEXT, "description": "Its text, in Markdown"},
            "assignees": {"type": "array", "items": TEXT, "description": "Logins, at most ten"},
            "priority": {"type": "string", "enum": ["low", "normal", "high", "urgent"]},
        }
    for name in chance.sample(sorted(PLACES), chance.randint(1, 3)):
        properties[name] = PLACES[name]
    return {
        "name": f"{verb}_{plural}" + (f"_v{turn + 1}" if turn else ""),
        "description": description,
        "inputSchema": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


def read_folder(folder: Path, most: int | None = None) -> dict[str, list[Definition]]:
    """Return the definitions in a folder by server, at most `most`."""
    servers: dict[str, list[Definition]] = {}
    for file in sorted(folder.glob("*.json")):
        body = json.loads(file.read_text())
        for tool in body.get("tools", []) if isinstance(body, dict) else body:
            if isinstance(tool, dict):
                _add_tool(servers, str(tool.get("server") or file.stem), tool)
    for file in sorted(folder.glob("tools*.jsonl")):
        for line in file.read_text().splitlines():
            tool = json.loads(line)
            _add_tool(servers, str(tool.get("server") or file.stem), tool)
    if not servers:
        raise SystemExit(f"{folder} contains no tools in *.json or tools*.jsonl files.")
    limited: dict[str, list[Definition]] = {}
    for slug, tools in servers.items():
        remaining = (most or 10**9) - sum(map(len, limited.values()))
        if remaining > 0:
            limited[slug] = tools[:remaining]
    return limited


def _add_tool(servers: dict[str, list[Definition]], server: str, tool: dict[str, Any]) -> None:
    slug = re.sub(r"[^a-z0-9]+", "-", server.lower()).strip("-")[:32].strip("-") or "server"
    name = str(tool.get("name") or "")
    schema = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object"}
    tools = servers.setdefault(slug, [])
    if name and all(known["name"] != name for known in tools):
        description = tool.get("description") or ""
        tools.append({"name": name, "description": description, "inputSchema": schema})


def load_servers(options: argparse.Namespace) -> dict[str, list[Definition]]:
    """Return definitions by server, from the folder or generated."""
    if options.folder:
        return read_folder(Path(options.folder), options.most)
    return generate_servers(options.groups, options.tools, even=options.even)


def arguments_for(schema: dict[str, Any]) -> dict[str, Any]:
    """Return minimal valid arguments for a common schema."""
    properties = schema.get("properties", {})
    return {name: _value(properties.get(name, {})) for name in schema.get("required", [])}


def _value(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return arguments_for(schema)
    if kind == "array":
        return [_value(schema.get("items", {}))] * schema.get("minItems", 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(kind, "42")


# --- Serving ------------------------------------------------------------------------------------


def _server(slug: str, definitions: list[Definition]) -> Any:
    from mcp.server import Server
    from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

    tools = [Tool.model_validate(definition) for definition in definitions]

    async def list_tools(ctx: Any, params: Any) -> Any:
        start = int(params.cursor) if params and params.cursor else 0
        end = start + PAGE_SIZE
        return ListToolsResult(
            tools=tools[start:end], next_cursor=str(end) if end < len(tools) else None
        )

    async def call_tool(ctx: Any, params: Any) -> Any:
        result = {"tool": params.name, "arguments": params.arguments, "state": "done"}
        return CallToolResult(content=[TextContent(type="text", text=json.dumps(result))])

    return Server(slug, version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


def serve(servers: dict[str, list[Definition]]) -> None:
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    apps = {
        slug: _server(slug, tools).streamable_http_app(
            transport_security=security, streamable_http_path=f"/{slug}/mcp"
        )
        for slug, tools in servers.items()
    }

    async def route(scope: Any, receive: Any, send: Any) -> None:
        slug = scope["path"].split("/")[1] if scope["type"] == "http" else ""
        if slug in apps:
            await apps[slug](scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            route, log_level="error", lifespan="off", timeout_graceful_shutdown=1, ws="none"
        )
        async with AsyncExitStack() as stack:
            for app in apps.values():
                await stack.enter_async_context(app.router.lifespan_context(app))
            sys.stdout.write(f"listening on 127.0.0.1:{listener.getsockname()[1]}\n")
            sys.stdout.flush()
            await uvicorn.Server(config).serve(sockets=[listener])

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


@contextmanager
def running(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the servers and yield an mcp.json for them."""
    from tests.support.installation import Process, clean_environment

    servers = load_servers(options)
    argv = [sys.executable, str(Path(__file__)), *_flags(options)]
    with Process(argv, clean_environment({})) as process:
        address = process.wait_for_line("listening on ")
        yield {
            "mcpServers": {
                slug: {
                    "url": f"http://{address}/{slug}/mcp",
                    "description": SERVICES.get(slug, ("",))[0],
                }
                for slug in servers
            }
        }


def _flags(options: argparse.Namespace) -> list[str]:
    if options.folder:
        most = ["--most", str(options.most)] if options.most else []
        return ["--folder", str(options.folder), *most]
    even = ["--even"] if options.even else []
    return ["--groups", str(options.groups), "--tools", str(options.tools), *even]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=33, help="servers, each with a group")
    parser.add_argument("--tools", type=int, default=600)
    parser.add_argument("--even", action="store_true", help="servers of the same size")
    parser.add_argument("--folder", "--fleet", dest="folder", help="folder with real definitions")
    parser.add_argument("--most", type=int, help="maximum number of tools from the folder")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_options(parser)
    serve(load_servers(parser.parse_args()))
