"""Small runs of the benches (`make soak`), and their reports."""

import argparse
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench import dispatch_report, fleet, inside
from tests.support.installation import ROOT, clean_environment, is_alive
from tests.support.waiting import scaled, wait_for

# Real processes: one at a time, for machines with two cores.
SMALL = ("--groups", "3", "--tools", "24")
MAX_MODULES = 20  # of a warm call


def run(name, *options):
    done = subprocess.run(
        [sys.executable, f"bench/{name}.py", *options],
        cwd=ROOT,
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=scaled(390),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_large_catalog_has_the_same_600_tools_in_33_groups_in_every_run():
    servers = fleet.generate_servers(33, 600)
    assert len(servers) == 33
    names = [f"{slug}__{tool['name']}" for slug, tools in servers.items() for tool in tools]
    assert len(set(names)) == len(names) == 600
    assert fleet.generate_servers(33, 600) == servers


def test_real_definitions_are_read_from_a_folder(tmp_path):
    tool = {"name": "a", "description": "Does it.", "input_schema": {"type": "object"}}
    lines = [{**tool, "server": "One Two"}, {**tool, "server": "three", "name": "b"}]
    (tmp_path / "tools.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    listed = {"tools": [{"name": "c", "inputSchema": {"type": "object"}}]}
    (tmp_path / "four.json").write_text(json.dumps(listed))
    servers = fleet.read_folder(tmp_path)
    assert {slug: [tool["name"] for tool in tools] for slug, tools in servers.items()} == {
        "four": ["c"],
        "one-two": ["a"],
        "three": ["b"],
    }
    assert sum(map(len, fleet.read_folder(tmp_path, most=2).values())) == 2


@pytest.mark.timeout(400)
def test_a_warm_call_passes_few_modules():
    """What each call pays for everything: `docs/architecture.md` lists them."""
    output = run("trace_request")
    passed = dict(re.findall(r"^(.+): (\d+) modules$", output, re.MULTILINE))
    calls = {title: int(count) for title, count in passed.items() if title.startswith("call over")}
    assert len(calls) == 3, output
    assert max(calls.values()) <= MAX_MODULES, output


def test_every_bench_states_its_options():
    """One process for all: it finds a bench that lacks an import or a part of the product."""
    program = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv[1:] = ["--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        runpy.run_path(f"bench/{name}.py", run_name="__main__")
    assert f"usage: {name}.py" in printed.getvalue(), name
"""
    parsing = [path.stem for path in sorted((ROOT / "bench").glob("*.py")) if _has_options(path)]
    assert {"dispatch", "tokens", "scale"} <= set(parsing)
    done = subprocess.run(
        [sys.executable, "-c", program, *parsing],
        cwd=ROOT,
        env=clean_environment({"PYTHONPATH": str(ROOT / "bench")}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _has_options(path):
    return "ArgumentParser(" in path.read_text()


def test_a_process_lives_until_its_last_thread_has_exited():
    """Only then is its port free: a restart that came earlier found the port in use."""
    program = (
        "import ctypes, socket, sys, threading\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        port = int(process.stdout.readline())
        main_thread = Path(f"/proc/{process.pid}/stat")
        wait_for(lambda: main_thread.read_text().rpartition(")")[2].split()[0] == "Z")
        assert is_alive(process.pid)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        process.kill()
        wait_for(lambda: not is_alive(process.pid))
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_tokens_are_reported_for_all_schemas_and_for_a_task_and_match_the_ledger():
    output = run("tokens", "--only", "large", *SMALL)
    head, row = output.splitlines()[1:3]
    for column in ("all schemas", "catalog", "meta-tools", "after task", "all ÷ after"):
        assert column in head
    assert row.split()[:3] == ["large", "3", "24"]
    verdicts = [line.split()[0] for line in output.splitlines() if line.startswith("  ")]
    assert verdicts[-4:] == ["OK"] * 4, output


@pytest.mark.needs_postgres
@pytest.mark.needs_redis
@pytest.mark.bench
@pytest.mark.timeout(400)
def test_rates_are_reported_for_both_databases_in_one_run():
    output = run("session", "--rounds", "1", "--seconds", "0.3", "--at", "1", "2", *SMALL)
    assert "limits are raised" in output
    for operation in (
        "sessions opened/s",
        "loads of 3 tools/s",
        "catalogs fetched/s",
        "searches/s",
    ):
        for database in ("SQLite", "PostgreSQL"):
            assert any(operation in line and database in line for line in output.splitlines()), (
                output
            )


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_every_page_is_timed_with_its_queries_and_its_size():
    sizes = ("--tools", "100", "--groups", "2", "--calls", "1000", "--sessions", "50")
    report = json.loads(run("pages", *sizes, "--rounds", "1", "--only", "group", "--json"))
    assert report["sizes"] == {"tools": 100, "groups": 2, "calls": 1000, "sessions": 50}
    pages = {row["page"]: row for row in report["pages"]}
    assert {"groups", "group", "group #board-list", "group?tab=json"} <= pages.keys()
    for row in pages.values():
        assert row["status"] in (200, 302)
        assert row["ms"] > 0
        assert row["cpu"] > 0
        assert row["queries"] > 0
    assert pages["group"]["kB"] > pages["group #board-list"]["kB"] > 1


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_search_times_are_reported_for_every_ranker_and_for_the_endpoint():
    small = ("--sizes", "60", "--queries", "3", "--endpoint-tools", "60", "--agents", "3")
    output = run("search", *small)
    for ranker in ("rank-bm25", "bm25s", "bm25", "embedding", "hybrid"):
        assert any(line.split()[:2] == ["60", ranker] for line in output.splitlines()), output
    assert "1 tool indexed, 1 text to encode" in output
    assert "p95 of 3 ÷ p50 of one" in output


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_requests_are_timed_directly_and_through_toolcrib_with_the_raised_limits():
    small = ("--quick", "--seconds", "0.05", "--no-peers")
    output = run("dispatch", *small)
    assert "Limits raised: agent 1,000,000,000 calls in flight" in output
    assert "server concurrency 64" in output
    for callers in (1, 16):
        table = output.partition(f"100 bytes, {callers} concurrent\n")[2].splitlines()
        assert table[0].split()[:4] == ["row", "p50", "÷", "direct"]
        rows = dict(zip(dispatch_report.QUICK_ROWS, table[1:], strict=False))
        for name, row in rows.items():
            figures = row.removeprefix(f"{name:>22}").split()
            assert row.strip().startswith(name), output
            assert all(float(figure.replace(",", "")) > 0 for figure in figures[:5]), output
    # Only that each limit is checked; the speed is for the real run.
    verdicts = [line[5:].partition(":")[0] for line in output.splitlines() if line[4:5] == " "]
    assert {"REST, socket", "dispatcher 2026", "dispatcher 2025"} <= set(verdicts), output


def test_a_failed_or_missing_row_has_its_error():
    cell = {"over": "http", "size": 100, "callers": 1, "pinned": False}
    good = {"p50": 1.0, "p99": 2.0, "rate": 100.0, "cpu": 3.0, "middle": 1.0, "caller": 1.0}
    rows = [
        {"round": 0, "path": "direct 2026", **cell, **good},
        {"round": 1, "path": "direct 2026", **cell, **good},
        {"round": 0, "path": "load", **cell, **good, "p50": 1.5},
        {"round": 1, "path": "load", **cell, "error": "TimeoutError"},
        {"round": 0, "path": "REST, socket", **cell, "error": "AssertionError: too large"},
    ]
    missing = {"http": {"mcp-proxy": "pip failed: no network"}}
    directs = dict.fromkeys(("direct 2026", "load", "REST, socket", "mcp-proxy"), "direct 2026")
    report = dispatch_report.Report(rows, missing, argparse.Namespace(), directs, [])

    def format_row(path):
        return report.format_row(("http", 100, 1, False, path))

    direct = format_row("direct 2026").split()
    assert direct[:6] == ["direct", "2026", "1.00", "(1.00–1.00)", "1.00", "(1.00–1.00)"]
    assert format_row("load").split()[:3] == ["load", "1.50", "1.50"]
    assert format_row("load").endswith("failed in 1 of 2 rounds: TimeoutError")
    assert format_row("REST, socket").endswith("in 1 of 1 rounds: AssertionError: too large")
    assert format_row("mcp-proxy").endswith("skipped: pip failed: no network")


def test_the_timed_stages_are_functions_of_the_product():
    for _, _, where in inside.STAGES:
        assert callable(inside.resolve(where)[2]), where
    assert callable(inside.resolve(inside.LEDGER)[2])


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_cpu_and_memory_at_rest_are_reported():
    options = ("--seconds", "1", "--settle", "0", "--pages", "2", "--json")
    figures = json.loads(run("rest", *options))
    assert figures["pages"] == 2
    assert figures["servers"] == 7
    assert figures["cpu_percent"] > 0
    assert figures["memory_mb"]["resident"] >= figures["memory_mb"]["private"] > 50


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_costs_are_reported_by_number_of_tools():
    small = ("--sizes", "20", "40", "--rounds", "1", "--requests", "2", "--settle", "0")
    output = run("scale", *small, "--flood-seconds", "1")
    for operation in ("open", "catalog", "load of ten", "call", "fork", "search by words"):
        assert sum(f"{operation} at" in line for line in output.splitlines()) == 2, output
    for text in ("40 tools: ", "full mode: ", "whole group: ", "stall of the event loop", "flood"):
        assert text in output


@pytest.mark.needs_postgres
@pytest.mark.needs_redis
@pytest.mark.bench
@pytest.mark.timeout(400)
def test_calls_per_second_are_reported_by_number_of_web_processes():
    output = run("workers", "--rounds", "1", "--seconds", "0.2", "--at", "2")
    lines = output.splitlines()
    for path in ("REST", "MCP 2026", "MCP 2025"):
        for workers in (1, 2):
            row = f"{path}, 2 callers, {workers} web processes: "
            assert any(row in line and "limited by" in line for line in lines), output


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_tokens_of_a_script_and_of_the_same_calls_are_reported():
    output = run("scripts", "--rounds", "1", "--calls", "3")
    lines = output.splitlines()
    for way in ("call by call", "python", "typescript"):
        assert any(line.strip().startswith(way) for line in lines), output
    for language in ("python", "typescript"):
        # The tokens are the same in every run; times are for the real one.
        spared, time = f"OK   tokens spared in {language}", f"a call inside a script in {language}"
        assert any(line.startswith(spared) for line in lines), output
        assert any(line[5:].startswith(time) for line in lines), output


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_the_lag_beside_hostile_scripts_is_reported_with_that_of_an_idle_process():
    output = run("script_lag", "--scripts", "3")
    assert output.startswith("3 hostile scripts; 3 failed"), output
    for process in ("hostile scripts", "idle"):
        assert any(line.strip().startswith(process) for line in output.splitlines()), output
    # Only that the limit is checked; the time is for the real run.
    assert any(line[5:].startswith("event-loop lag above") for line in output.splitlines()), output


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_stubs_of_the_tools_in_a_folder_are_timed_and_checked(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [
        {"name": name, "description": "Does it.", "input_schema": schema, "server": "one"}
        for name in ("list", "a-b", "delete")
    ]
    (tmp_path / "tools.jsonl").write_text("\n".join(json.dumps(tool) for tool in tools))
    output = run("stubs", str(tmp_path))
    for language in ("python", "typescript"):
        assert f"{language} stubs of 3 tools" in output
    assert "OK   mypy checks 3 tools\n" in output
    for checker in ("engine", "typescript"):
        assert f"OK   {checker} checks 3 tools\n" in output or f"{checker} is not" in output


@pytest.mark.bench
@pytest.mark.timeout(400)
def test_rules_are_reported_with_their_ratio_to_a_call_without_rules():
    output = run("rules", "--rounds", "1", "--calls", "5", "--rules", "10", "--json")
    report = json.loads(output)
    assert list(report) == [
        "no rules",
        "10 rules, 5 concern the tool",
        "10 rules, all concern it",
    ]
    assert all(row["cpu_us"] > 0 and row["ratio"] > 0 for row in report.values())
