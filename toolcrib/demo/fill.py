"""Create demo data in an empty installation, through its own API only.

Servers that run offline (one of them failing), groups, agents, and then the sessions of the agents
(`toolcrib.demo.sessions`). `toolcrib.demo.history` backdates the result.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from toolcrib.demo.sessions import SCRIPTS, run_scripts
from toolcrib_client import Toolcrib
from toolcrib_client.requests import ApiRequest, Json

ROOT = Path(__file__).resolve().parents[2]
SYNC_TIMEOUT = 90.0  # seconds
TURNS = 12  # how often each agent runs its scripts
SERVERS = {
    "toolbox": ("Toolbox", "Text, numbers, dates, units and colours"),
    "tickets": ("Tickets", "Tickets of the support team, with comments and labels"),
    "notes": ("Notes", "Notes of the team in Markdown, in folders"),
    "calendar": ("Calendar", "Meetings and mail of the team"),
    "analytics": ("Analytics", "Visits, orders and revenue of the web shop, by day"),
    "crm": ("CRM", "Customers and contracts"),
}
FAILING_SERVER = "crm"  # its token is missing
MIXED_GROUPS = {
    "daily:support": (
        "Support day",
        "Answer a customer: the ticket, the people, a time to talk",
        ("tickets__get_ticket", "tickets__comment_on_ticket", "calendar__find_free_slot",
         "calendar__create_event", "calendar__send_mail", "notes__search_notes"),
    ),
    "daily:figures": (
        "Figures",
        "Analyze the week and write a report",
        ("analytics__run_report", "analytics__compare_periods", "toolbox__summarize_numbers",
         "notes__append_to_note"),
    ),
}  # fmt: skip
AGENTS: dict[str, dict[str, Any]] = {
    "support-desk": {
        "description": "Sorts tickets and answers customers.",
        "groups": ["mcp:tickets", "daily:support", "mcp:calendar", "mcp:notes", "mcp:toolbox"],
        "mode": "deferred",
    },
    "planner": {
        "description": "Plans meetings and keeps the minutes.",
        "groups": ["mcp:calendar", "mcp:notes", "mcp:tickets", "mcp:toolbox"],
        "strategy": "inject",
        "mode": "deferred",
    },
    "analyst": {
        "description": "Writes the weekly report, within a budget.",
        "groups": ["mcp:analytics", "daily:figures", "mcp:toolbox"],
        "budget": 1_200,
        "catalog_budget": 400,
    },
    "handyman": {
        "description": "Does odd jobs.",
        "groups": ["mcp:toolbox", "mcp:notes", "mcp:tickets", "mcp:calendar", "mcp:analytics"],
    },
    "archivist": {"description": "Keeps the notes in order.", "groups": ["mcp:notes"]},
    "pilot": {"description": "The first trial: has everything, runs rarely.", "all_groups": True},
}
TRIAL_GROUP = "trial:everything"  # all tools preloaded, as a baseline to compare with
FORKING_AGENT = "analyst"
KEY_DAYS = {"archivist": 4}  # a key that expires soon
HINTS = {
    "tickets__create_ticket": (("alias", "bug report"), ("example", "a customer has a problem")),
    "calendar__find_free_slot": (("example", "when can we all meet"),),
    "analytics__run_report": (("alias", "weekly numbers"),),
}
GOLDEN = {
    "open a ticket for a customer": "tickets__create_ticket",
    "when can we all meet": "calendar__find_free_slot",
    "send an e-mail": "calendar__send_mail",
    "how did sales do last week": "analytics__run_report",
    "write something down for the team": "notes__append_to_note",
}


def fill(admin: Toolcrib, released: Path, turns: int = TURNS) -> str:
    """Create all demo data and describe it. For `released` see servers.demo_office."""
    add_servers(admin, released)
    create_groups(admin)
    add_search_data(admin)
    clients = {name: create_agent(admin, name, **options) for name, options in AGENTS.items()}
    with ThreadPoolExecutor(len(SCRIPTS)) as threads:
        for turn in range(turns):
            running = [
                threads.submit(run_scripts, clients[name], name, turn)
                for name in SCRIPTS
                if name != FORKING_AGENT
            ]
            for future in running:
                future.result()
            # Alone: history.py expects a fork to be the next session after its parent.
            run_scripts(clients[FORKING_AGENT], FORKING_AGENT, turn)
    release_analytics(admin, released)
    sessions = list(list_all(admin, "/sessions"))
    calls = sum(session["calls"] for session in sessions)
    return f"{len(SERVERS)} servers, {len(AGENTS)} agents, {len(sessions)} sessions, {calls} calls."


def add_servers(admin: Toolcrib, released: Path) -> None:
    for slug, (name, description) in SERVERS.items():
        argv = [sys.executable, "-m", "servers.demo"]
        if slug != "toolbox":
            argv = [sys.executable, "-m", "servers.demo_office", slug]
        if slug == "analytics":
            argv += ["--released", str(released)]
        body = {
            "name": name,
            "slug": slug,
            "description": description,
            "transport": "stdio",
            "command": argv[0],
            "args": argv[1:],
            "cwd": str(ROOT),
            "confirm_argv": argv,
        }
        send(admin, "POST", "/servers", body)
    wait_until("first sync", lambda: all(map(_is_synced, list_all(admin, "/servers"))))


def _is_synced(server: dict[str, Any]) -> bool:
    if server["slug"] == FAILING_SERVER:
        return bool(server["state"] == "failing")
    return bool(server["tools"])


def create_groups(admin: Toolcrib) -> None:
    for group, (name, description, tools) in MIXED_GROUPS.items():
        body = {"group_id": group, "display_name": name, "description": description}
        send(admin, "POST", "/groups", body)
        send(admin, "POST", f"/groups/{group}/members", {"tool_names": tools})
    preload = {"tool_names": ["tickets__list_tickets", "tickets__search_tickets"], "preload": True}
    send(admin, "PATCH", "/groups/mcp:tickets/members", preload)
    preload = {"tool_names": ["tickets__get_ticket", "calendar__find_free_slot"], "preload": True}
    send(admin, "PATCH", "/groups/daily:support/members", preload)
    every_tool = [tool["name"] for tool in list_all(admin, "/tools")]
    body = {"display_name": "First trial", "description": "Every tool in full, for comparison"}
    send(admin, "POST", "/groups", {"group_id": TRIAL_GROUP, "preload_default": True, **body})
    send(admin, "POST", f"/groups/{TRIAL_GROUP}/members", {"tools": every_tool})
    reason = {"reason": "Tickets are kept until the audit in autumn"}
    send(admin, "POST", "/tools/tickets__delete_ticket/hold", reason)
    send(admin, "PATCH", "/tools/notes__delete_note", {"call_policy": "deny"})


def create_agent(admin: Toolcrib, name: str, **options: Any) -> Toolcrib:
    send(admin, "POST", "/agents", {"name": name, **options})
    key = {"name": "first", "days": KEY_DAYS.get(name)}
    return Toolcrib(admin.url, send(admin, "POST", f"/agents/{name}/keys", key)["key"])


def send(admin: Toolcrib, method: str, path: str, body: Json | None = None, **query: str) -> Any:
    """Send a request of the API for operators, for which the client has no methods."""
    return admin.send(ApiRequest(method, path, lambda answer: answer, body, query))


def release_analytics(admin: Toolcrib, released: Path) -> None:
    """Release a new version of the analytics server; its changed tool is then pending review."""
    released.touch(mode=0o600)
    for enabled in (False, True):
        send(admin, "PATCH", "/servers/analytics", {"enabled": enabled})
    send(admin, "POST", "/servers/analytics/sync")
    path = "/tools/analytics__compare_periods"
    wait_until("change to review", lambda: send(admin, "GET", path)["state"] == "waiting")


def list_all(admin: Toolcrib, path: str) -> Any:
    cursor = ""
    while cursor is not None:
        page = send(admin, "GET", path, limit="100", cursor=cursor)
        yield from page["items"]
        cursor = page["next_cursor"]


def wait_until(event: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SYNC_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Waiting for the {event} timed out after {SYNC_TIMEOUT:g} s.")
        time.sleep(0.1)


def add_search_data(admin: Toolcrib) -> None:
    for name, hints in HINTS.items():
        for kind, text in hints:
            send(admin, "POST", f"/tools/{name}/hints", {"kind": kind, "text": text})
    for query, name in GOLDEN.items():
        send(admin, "POST", "/search/golden", {"query": query, "tools": [name]})
