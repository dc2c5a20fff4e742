"""Write a database fixture of this version for upgrade tests of later versions.

`python -m tests.e2e.production.make_upgrade_fixture NAME` writes upgrades/NAME.json.gz: every row
of the database, its encryption key, and the API responses for its open sessions. Run it at a
release; test_upgrade.py upgrades every such file.
"""

import gzip
import json
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.agents import Session, make_agent, update_server
from tests.support.installation import Installation
from tests.support.servers import call_upstream, last_synced_at, register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

FOLDER = Path(__file__).resolve().parent / "upgrades"
CREDENTIAL = "credential-of-the-fixture"
# Found on PATH and run in Toolcrib's folder, so that it works on any machine.
PROGRAM = ["python3", "-m", "servers.demo"]
LEFT_OUT = ("django_", "axes_", "sqlite_", "auth_permission", "auth_group")


def create_data(toolcrib: Installation, upstream: str) -> dict[str, Any]:
    command, *args = PROGRAM
    body = {
        "name": "Demo",
        "slug": "demo",
        "transport": "stdio",
        "command": command,
        "args": args,
        "env": {"DEMO_TOKEN": CREDENTIAL},
        "confirm_argv": PROGRAM,
    }
    status, response = toolcrib.api("POST", "/servers", body)
    assert status == 201, response
    wait_for(lambda: last_synced_at(toolcrib, "demo"), 60, what="demo is synced")
    headers = {"Authorization": f"Bearer {CREDENTIAL}"}
    register(toolcrib, "rich", upstream, headers=headers)
    update_server(toolcrib, "rich", trust="auto")
    custom = {
        "name": "ask_person",
        "description": "Ask the person at the keyboard.",
        "inputSchema": {"type": "object", "properties": {"question": {"type": "string"}}},
    }
    assert toolcrib.api("POST", "/tools", custom)[0] == 201
    group = {"group_id": "mixed", "display_name": "Mixed", "description": "A bit of everything."}
    assert toolcrib.api("POST", "/groups", group)[0] == 201
    names = ["demo__count_words", "demo__roll_dice", "rich__measure", "ask_person"]
    status, response = toolcrib.api("POST", "/groups/mixed/members", {"tools": names})
    assert status in (200, 201), response
    toolcrib.api("PATCH", "/groups/mixed/members", {"tools": names[:1], "preload": True})

    agent = make_agent(toolcrib, "scout", mode="deferred")
    dispatch = agent.open(metadata={"fixture": True})
    dispatch.load("mixed", ["rich__measure", "demo__roll_dice"])
    dispatch.load("mcp:demo")
    injected = agent.open(strategy="inject")
    injected.load("mcp:rich", ["show_all", "measure"])
    full = agent.open(mode="full", groups=["mcp:rich"])
    dispatch.search(query="count the words of a text")
    keyed = dispatch.post_call("demo__count_words", {"text": "one two three"}, key="fixture-1")
    assert keyed.json["state"] == "succeeded", keyed.body
    # From here on the sessions above are pinned to an older definition.
    call_upstream(upstream, "change")
    assert toolcrib.api("POST", "/servers/rich/sync")[0] == 202
    wait_for(
        lambda: "unit" in json.dumps(toolcrib.api("GET", "/tools/rich__measure")[1]["definition"]),
        30,
        what="the change is approved",
    )
    child = dispatch.fork()
    closed = agent.open()
    closed.close()
    sessions = {"dispatch": dispatch, "inject": injected, "full": full, "fork": child}
    return {
        "key": agent.key,
        "sessions": {name: describe(session) for name, session in sessions.items()},
        "ended": closed.id,
        "idempotent": {
            "session": dispatch.id,
            "body": keyed.body.decode(),
            "tool_name": "demo__count_words",
            "arguments": {"text": "one two three"},
            "key": "fixture-1",
        },
        "program": PROGRAM,
        "credential": CREDENTIAL,
    }


def describe(session: Session) -> dict[str, Any]:
    """Return the bytes of a session: catalogs, tools and repeated loads."""
    surface = {name: body.decode() for name, (body, _) in session.surface().items()}
    etags = {name: etag for name, (_, etag) in session.surface().items()}
    state = session.get("/state")
    loads = [
        {"group_id": group, "tool_names": names, "body": session.load(group, names).decode()}
        for group, names in state["expanded_groups"].items()
    ]
    return {"id": session.id, "surface": surface, "etags": etags, "state": state, "loads": loads}


def rows(database: Path) -> dict[str, Any]:
    """Return every table as column names and rows, and the applied migrations."""
    document: dict[str, Any] = {}
    with sqlite3.connect(database) as connection:
        migrations = connection.execute("SELECT app, name FROM django_migrations ORDER BY id")
        document["migrations"] = [list(row) for row in migrations]
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        document["tables"] = {}
        for (name,) in sorted(tables):
            if not name.startswith(LEFT_OUT):
                cursor = connection.execute(f'SELECT * FROM "{name}"')  # noqa: S608
                columns = [column[0] for column in cursor.description]
                document["tables"][name] = {
                    "columns": columns,
                    "rows": [list(row) for row in cursor],
                }
    return document


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, running_http("rich") as upstream:
        data_dir = Path(folder) / "data"
        with Installation(data_dir) as toolcrib:
            answers = create_data(toolcrib, upstream)
        document = {
            "answers": answers,
            "encryption_key": (data_dir / "encryption.key").read_text().strip(),
            **rows(data_dir / "toolcrib.sqlite3"),
        }
    text = json.dumps(document, indent=0, ensure_ascii=False, sort_keys=True)
    target = FOLDER / f"{name}.json.gz"
    target.write_bytes(gzip.compress(text.encode(), mtime=0))
    sys.stdout.write(f"{target.name}: {len(text):,} characters, {target.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1])
