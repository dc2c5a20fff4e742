"""`kill -9` during a sync leaves a complete tool list and no child processes."""

import sqlite3

import pytest

from tests.support.installation import Installation, is_alive
from tests.support.servers import list_sync_runs
from tests.support.upstreams.running import ROOT, running_http, stdio_argv
from tests.support.waiting import wait_for

TOOLS = 400


def rows(folder, query):
    """Query the SQLite file directly."""
    with sqlite3.connect(f"file:{folder / 'toolcrib.sqlite3'}?mode=ro", uri=True) as connection:
        return connection.execute(query).fetchall()


def versions_in_the_catalog(folder):
    counts = rows(
        folder,
        "select d.body, count(*) from catalog_tool t "
        "join catalog_definition d on d.id = t.approved_id where t.state = 'available' "
        "group by json_extract(d.body, '$.description')",
    )
    return [count for _, count in counts]


@pytest.mark.timeout(240)
def test_kill_9_during_a_sync_leaves_the_complete_old_or_new_list(tmp_path):
    data = tmp_path / "data"
    seen = set()
    with running_http("versions", "--tools", str(TOOLS)) as url, Installation(data) as toolcrib:
        body = {"name": "versions", "transport": "http", "url": url}
        assert toolcrib.api("POST", "/servers", body)[0] == 201
        toolcrib.api("PATCH", "/servers/versions", {"trust": "auto"})
        wait_for(lambda: versions_in_the_catalog(data) == [TOOLS], 30)
        for phase in ("connecting", "listing", "saving") * 2:
            last = max(run["id"] for run in list_sync_runs(toolcrib, "versions"))
            toolcrib.api("POST", "/servers/versions/sync")
            moment = f"select outcome, phase from servers_syncrun where id > {last}"  # noqa: S608
            wait_for(
                lambda phase=phase, moment=moment: any(
                    outcome != "running" or at == phase for outcome, at in rows(data, moment)
                ),
                30,
                every=0.001,
            )
            toolcrib.kill()
            counts = versions_in_the_catalog(data)
            seen.add(tuple(rows(data, moment)))
            assert counts == [TOOLS], f"half a list after a kill while {phase}: {counts}"
            toolcrib.start()
        # The interrupted sync is marked as interrupted, and a new one runs.
        toolcrib.api("POST", "/servers/versions/sync")
        wait_for(lambda: list_sync_runs(toolcrib, "versions")[0]["outcome"] == "ok", 60)
        wait_for(
            lambda: (
                "running" not in {run["outcome"] for run in list_sync_runs(toolcrib, "versions")}
            )
        )
        assert "interrupted" in {run["code"] for run in list_sync_runs(toolcrib, "versions")}
    assert any(outcome == "running" for runs in seen for outcome, _ in runs), (
        "no kill hit a running sync, so the test proves nothing"
    )


def test_no_child_process_outlives_a_killed_installation(tmp_path):
    command, *args = stdio_argv("raw_stdio", "--do", "ignore_term", "--stay")
    body = {"name": "stubborn", "transport": "stdio", "command": command, "args": args}
    body |= {"cwd": str(ROOT), "confirm_argv": [command, *args]}
    with Installation(tmp_path / "data") as toolcrib:
        status, response = toolcrib.api("POST", "/servers", body)
        assert status == 201, response
        wait_for(lambda: list_sync_runs(toolcrib, "stubborn") and len(toolcrib.children()) >= 2, 30)
        children = toolcrib.children()

        toolcrib.kill()

    wait_for(
        lambda: not any(is_alive(pid) for pid in children), 15, what="the children have exited"
    )


def test_commits_are_soon_checkpointed_into_the_database_file(tmp_path):
    """A power failure may lose the end of the WAL, which SQLite does not checkpoint by itself."""
    file, copy = tmp_path / "data" / "toolcrib.sqlite3", tmp_path / "toolcrib.sqlite3"

    def groups():
        copy.write_bytes(file.read_bytes())  # without the WAL
        try:
            return rows(tmp_path, "select group_id from catalog_group where group_id = 'team:new'")
        except sqlite3.DatabaseError:  # the copy was taken during a write
            return []

    with Installation(tmp_path / "data") as toolcrib:
        body = {"group_id": "team:new", "display_name": "New"}
        status, response = toolcrib.api("POST", "/groups", body)
        assert status == 201, response
        wait_for(groups, 30)
