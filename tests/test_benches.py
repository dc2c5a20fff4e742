"""The benches of sessions, tokens and pages run, on small sizes, and print what they promise."""

import json
import subprocess
import sys

import pytest

from bench import fleet
from tests.installation import ROOT, clean_environment

# Real processes: one at a time, so that two cores suffice.
SMALL = ("--groups", "3", "--tools", "24")


def run(name, *options):
    done = subprocess.run(
        [sys.executable, f"bench/{name}.py", *options],
        cwd=ROOT,
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_large_catalog_has_the_same_600_tools_in_33_groups_every_time():
    servers = fleet.made_up(33, 600)
    assert len(servers) == 33
    names = [f"{slug}__{tool['name']}" for slug, tools in servers.items() for tool in tools]
    assert len(set(names)) == len(names) == 600
    assert fleet.made_up(33, 600) == servers


def test_real_definitions_are_read_from_a_folder(tmp_path):
    tool = {"name": "a", "description": "Does it.", "input_schema": {"type": "object"}}
    lines = [{**tool, "server": "One Two"}, {**tool, "server": "three", "name": "b"}]
    (tmp_path / "tools.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    listed = {"tools": [{"name": "c", "inputSchema": {"type": "object"}}]}
    (tmp_path / "four.json").write_text(json.dumps(listed))
    found = fleet.read_folder(tmp_path)
    assert {slug: [tool["name"] for tool in tools] for slug, tools in found.items()} == {
        "four": ["c"],
        "one-two": ["a"],
        "three": ["b"],
    }
    assert sum(map(len, fleet.read_folder(tmp_path, most=2).values())) == 2


@pytest.mark.xdist_group("live")
@pytest.mark.timeout(400)
def test_tokens_are_told_for_everything_and_for_a_task_and_agree_with_the_ledger():
    told = run("tokens", "--only", "large", *SMALL)
    head, row = told.splitlines()[1:3]
    for column in ("all loaded", "catalog", "meta-tools", "after task", "all ÷ after"):
        assert column in head
    assert row.split()[:3] == ["large", "3", "24"]
    verdicts = [line.split()[0] for line in told.splitlines() if line.startswith("  ")]
    assert verdicts[-4:] == ["OK"] * 4, told


@pytest.mark.xdist_group("live")
@pytest.mark.needs_postgres
@pytest.mark.needs_redis
@pytest.mark.timeout(400)
def test_rates_are_told_for_both_databases_in_one_run():
    told = run("session", "--rounds", "1", "--seconds", "0.3", "--at", "1", "2", *SMALL)
    assert "limits are raised" in told
    for act in ("sessions opened/s", "loads of 3 tools/s", "catalogs fetched/s", "searches/s"):
        for database in ("SQLite", "PostgreSQL"):
            assert any(act in line and database in line for line in told.splitlines()), told


@pytest.mark.timeout(400)
def test_every_page_is_timed_with_its_queries_and_its_size():
    told = json.loads(run("pages", "--quick", "--rounds", "1", "--only", "group", "--json"))
    assert told["sizes"] == {"tools": 100, "groups": 2, "calls": 1000, "sessions": 50}
    pages = {row["page"]: row for row in told["pages"]}
    assert {"groups", "group", "group #board-list", "group?tab=json"} <= pages.keys()
    for row in pages.values():
        assert row["status"] in (200, 302)
        assert row["ms"] > 0
        assert row["cpu"] > 0
        assert row["queries"] > 0
    assert pages["group"]["kB"] > pages["group #board-list"]["kB"] > 1


@pytest.mark.xdist_group("live")
@pytest.mark.timeout(400)
def test_search_is_told_for_every_ranker_and_for_the_endpoint():
    small = ("--sizes", "60", "--queries", "3", "--endpoint-tools", "60", "--agents", "3")
    told = run("search", *small)
    for ranker in ("rank-bm25", "bm25s", "bm25", "embedding", "hybrid"):
        assert any(line.split()[:2] == ["60", ranker] for line in told.splitlines()), told
    assert "1 tool counted, 1 text to encode" in told
    assert "p95 of 3 ÷ p50 of one" in told
