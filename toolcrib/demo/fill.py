"""Fill an empty installation for a demonstration, through its own API: nothing is written past it.

Servers of our own that run offline, one of them broken, groups, agents, and then the agents at
work (`toolcrib.demo_sessions`). `toolcrib.demo_history` dates all of it afterwards.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolcrib.demo.sessions import SCRIPTS, Door, work

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0  # seconds for a server to be read
TURNS = 12  # how often each agent does all it can
SERVERS = {
    "toolbox": ("Toolbox", "Text, numbers, dates, units and colours"),
    "tickets": ("Tickets", "Tickets of the support team, with comments and labels"),
    "notes": ("Notes", "Notes of the team in Markdown, in folders"),
    "calendar": ("Calendar", "Meetings and mail of the team"),
    "analytics": ("Analytics", "Visits, orders and revenue of the web shop, by day"),
    "crm": ("CRM", "Customers and contracts"),
}
BROKEN = "crm"  # somebody forgot its token
MIXED = {
    "daily:support": (
        "Support day",
        "Answer a customer: the ticket, the people, a time to talk",
        ("tickets__get_ticket", "tickets__comment_on_ticket", "calendar__find_free_slot",
         "calendar__create_event", "calendar__send_mail", "notes__search_notes"),
    ),
    "daily:figures": (
        "Figures",
        "Look at the week and write it down",
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
PILOT = "trial:everything"  # all tools, preloaded: what it was like before
FORKS = "analyst"
KEY_DAYS = {"archivist": 4}  # a key that ends soon
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


@dataclass(frozen=True)
class Figures:
    servers: int
    agents: int
    sessions: int
    calls: int


def fill(admin: Door, released: Path, turns: int = TURNS) -> Figures:
    """Fill the installation behind this door. `released`: see servers.demo_office."""
    add_servers(admin, released)
    make_groups(admin)
    fill_search(admin)
    doors = {name: make_agent(admin, name, **wanted) for name, wanted in AGENTS.items()}
    with ThreadPoolExecutor(len(SCRIPTS)) as side_by_side:
        for turn in range(turns):
            running = [
                side_by_side.submit(work, doors[name], name, turn)
                for name in SCRIPTS
                if name != FORKS
            ]
            for one in running:
                one.result()
            work(doors[FORKS], FORKS, turn)  # alone: a fork is the next session after its parent
    release(admin, released)
    sessions = list(each(admin, "/sessions"))
    calls = sum(session["calls"] for session in sessions)
    return Figures(len(SERVERS), len(AGENTS), len(sessions), calls)


def add_servers(admin: Door, released: Path) -> None:
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
        admin.ask("POST", "/servers", body)
    until("the servers are read", lambda: all(map(_settled, each(admin, "/servers"))))


def _settled(server: dict[str, Any]) -> bool:
    return bool(server["tools"]) or (server["slug"] == BROKEN and server["state"] == "failing")


def make_groups(admin: Door) -> None:
    for group, (name, description, tools) in MIXED.items():
        body = {"group_id": group, "display_name": name, "description": description}
        admin.ask("POST", "/groups", body)
        admin.ask("POST", f"/groups/{group}/members", {"tools": tools})
    preload = {"tools": ["tickets__list_tickets", "tickets__search_tickets"], "preload": True}
    admin.ask("PATCH", "/groups/mcp:tickets/members", preload)
    preload = {"tools": ["tickets__get_ticket", "calendar__find_free_slot"], "preload": True}
    admin.ask("PATCH", "/groups/daily:support/members", preload)
    every = [tool["name"] for tool in each(admin, "/tools")]
    said = {"display_name": "First trial", "description": "Every tool in full, kept to compare"}
    admin.ask("POST", "/groups", {"group_id": PILOT, "preload_default": True, **said})
    admin.ask("POST", f"/groups/{PILOT}/members", {"tools": every})
    reason = {"reason": "Tickets are kept until the audit in autumn"}
    admin.ask("POST", "/tools/tickets__delete_ticket/hold", reason)
    admin.ask("PATCH", "/tools/notes__delete_note", {"call_policy": "deny"})


def make_agent(admin: Door, name: str, **wanted: Any) -> Door:
    admin.ask("POST", "/agents", {"name": name, **wanted})
    wanted_key = {"name": "first", "days": KEY_DAYS.get(name)}
    return Door(admin.port, admin.ask("POST", f"/agents/{name}/keys", wanted_key)["key"])


def release(admin: Door, released: Path) -> None:
    """Bring out the newer analytics; its changed tool then waits for an approval."""
    released.touch(mode=0o600)
    for enabled in (False, True):
        admin.ask("PATCH", "/servers/analytics", {"enabled": enabled})
    admin.ask("POST", "/servers/analytics/sync")
    path = "/tools/analytics__compare_periods"
    until("the change waits", lambda: admin.ask("GET", path)["state"] == "waiting")


def each(admin: Door, path: str) -> Any:
    """Go through all pages of a list."""
    cursor = ""
    while cursor is not None:
        told = admin.ask("GET", f"{path}?limit=100&cursor={cursor}")
        yield from told["items"]
        cursor = told["next_cursor"]


def until(what: str, holds: Callable[[], Any]) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError(f"It took over {PATIENCE:g} s until {what}.")
        time.sleep(0.1)


def fill_search(admin: Door) -> None:
    for name, hints in HINTS.items():
        for kind, text in hints:
            admin.ask("POST", f"/tools/{name}/hints", {"kind": kind, "text": text})
    for query, name in GOLDEN.items():
        admin.ask("POST", "/search/golden", {"query": query, "tools": [name]})
