"""Upgrades of databases of earlier versions; open sessions keep their bytes.

Each file in upgrades/ was written by make_upgrade_fixture.py of the version it is named after.
"""

import gzip
import json
import re
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.e2e.production.make_upgrade_fixture import FOLDER
from tests.support.agents import Agent, Session
from tests.support.installation import Installation
from tests.support.production import SERVICES, Production

pytestmark = [pytest.mark.needs_postgres, pytest.mark.needs_redis, pytest.mark.timeout(300)]
DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def fixture(path: Path) -> dict[str, Any]:
    """Read a fixture and shift its dates so that it is one minute old."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    sessions = document["tables"]["sessions_app_agentsession"]
    used = sessions["columns"].index("last_used_at")
    newest = max(datetime.fromisoformat(row[used]) for row in sessions["rows"])
    later = datetime.now(UTC).replace(tzinfo=None) - timedelta(minutes=1) - newest
    for table in document["tables"].values():
        dates = [
            at
            for at, name in enumerate(table["columns"])
            if name.endswith(("_at", "deadline", "_since")) or name == "at"
        ]
        for row in table["rows"]:
            for at in dates:
                if isinstance(row[at], str) and DATE.match(row[at]):
                    row[at] = (datetime.fromisoformat(row[at]) + later).isoformat(" ")
    return document


def last_migrations(document: dict[str, Any]) -> dict[str, str]:
    ours = ("catalog", "servers", "sessions_app")
    return {app: name for app, name in document["migrations"] if app in ours}


def load_sqlite(path: Path, document: dict[str, Any]) -> None:
    with sqlite3.connect(path) as connection:
        for name, table in document["tables"].items():
            connection.execute(f'DELETE FROM "{name}"')  # noqa: S608
            columns = ", ".join(f'"{column}"' for column in table["columns"])
            marks = ", ".join("?" * len(table["columns"]))
            insert = f'INSERT INTO "{name}" ({columns}) VALUES ({marks})'  # noqa: S608
            connection.executemany(insert, table["rows"])


def load_postgres(url: str, document: dict[str, Any]) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")  # rows in any order
        for name, table in document["tables"].items():
            connection.execute(f'DELETE FROM "{name}"')  # noqa: S608
            types: dict[str, str] = dict(
                connection.execute(
                    "SELECT column_name, udt_name FROM information_schema.columns "
                    "WHERE table_name = %s",
                    (name,),
                )
            )
            columns = ", ".join(f'"{column}"' for column in table["columns"])
            values = ", ".join(f"CAST(%s AS {types[column]})" for column in table["columns"])
            insert = f'INSERT INTO "{name}" ({columns}) VALUES ({values})'  # noqa: S608
            with connection.cursor() as cursor:
                rows = [
                    [None if value is None else str(value) for value in row]
                    for row in table["rows"]
                ]
                cursor.executemany(insert, rows)
            if "id" in table["columns"]:
                connection.execute(
                    f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), "  # noqa: S608
                    f'COALESCE((SELECT MAX(id) FROM "{name}"), 1))'
                )


# Fields of `format=gemini` whose spelling changed after a version: only the JavaScript SDK's is
# read by every SDK.
GEMINI_FIELDS = {
    "function_declarations": "functionDeclarations",
    "parameters_json_schema": "parametersJsonSchema",
}


def respell(shape: str, body: str) -> str:
    """Return a recorded body with the fields of today's version."""
    if shape == "gemini":
        for old, new in GEMINI_FIELDS.items():
            body = body.replace(f'"{old}":', f'"{new}":')
    return body


def check_injected(shape: str, body: str, recorded_body: str) -> None:
    """Compare the tools array of an inject catalog.

    Its text lists what can still be loaded; preloaded tools are no longer among it.
    """
    if shape == "text":
        assert "ask_person" in recorded_body
        assert "ask_person" not in body
        return
    expected = json.loads(respell(shape, recorded_body))["tools"]
    assert json.loads(body)["tools"] == expected, shape


def check_sessions(url: str, recorded: dict[str, Any]) -> None:
    """Compare the responses for open sessions with those of the earlier version, byte for byte."""
    agent = Agent(url, recorded["key"])
    for name, before in recorded["sessions"].items():
        session = Session(agent, before["id"], {})
        for shape, (body, etag) in session.surface().items():
            recorded_body = before["surface"][shape]
            if name == "inject" and shape != "tools":
                check_injected(shape, body.decode(), recorded_body)
                continue
            expected = respell(shape, recorded_body)
            assert body.decode() == expected, (name, shape)
            assert (etag == before["etags"][shape]) == (expected == recorded_body), (name, shape)
        state = session.get("/state")
        assert {key: state[key] for key in before["state"]} == before["state"], name
        assert state.keys() - before["state"].keys() <= {"load_order"}, name
        for load in before["loads"]:
            body = session.load(load["group_id"], load["tool_names"])
            assert body.decode() == load["body"], (name, load["group_id"])
    replay = recorded["idempotent"]
    replayed = Session(agent, replay["session"], {}).post_call(
        replay["tool_name"], replay["arguments"], key=replay["key"]
    )
    assert replayed.body.decode() == replay["body"]
    closed = Session(agent, recorded["ended"], {}).post_call("demo__roll_dice")
    assert (closed.status, closed.code) == (409, "session_closed")


def check_program(url: str, recorded: dict[str, Any]) -> None:
    """Check that the stored command is still confirmed and its credential decryptable."""
    session = Session(Agent(url, recorded["key"]), recorded["sessions"]["dispatch"]["id"], {})
    called = session.call("demo__count_words", {"text": "one two"}, timeout=60)
    assert called["state"] == "succeeded", called


@pytest.fixture(params=sorted(FOLDER.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def document(request):
    return fixture(request.param)


def test_a_database_of_an_earlier_version_is_upgraded_on_sqlite(document, tmp_path):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    (data_dir / "encryption.key").write_text(document["encryption_key"])
    toolcrib = Installation(data_dir)
    for app, name in last_migrations(document).items():
        done = toolcrib.command("migrate", app, name)
        assert done.returncode == 0, done.stderr
    load_sqlite(data_dir / "toolcrib.sqlite3", document)
    with toolcrib:
        check_sessions(toolcrib.url, document["answers"])
        check_program(toolcrib.url, document["answers"])


def test_a_database_of_an_earlier_version_is_upgraded_on_postgresql(
    document, postgres, shared_redis, tmp_path
):
    url = postgres.create("upgraded")
    env = {
        "TOOLCRIB_ENCRYPTION_KEYS": document["encryption_key"],
        "TOOLCRIB_ALLOW_STDIO": "1",
    }
    running = Production(url, shared_redis.create(), tmp_path, env)
    try:
        for app, name in last_migrations(document).items():
            done = running.command("migrate", app, name)
            assert done.returncode == 0, done.stderr
        load_postgres(url, document)
        done = running.run(*SERVICES["migrate"]["command"])
        assert done.returncode == 0, done.stderr
        running.start_all("web", "listener")
        check_sessions(running.url, document["answers"])
        check_program(running.url, document["answers"])
    finally:
        running.stop()
