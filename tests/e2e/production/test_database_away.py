"""PostgreSQL is away: every request is answered while it is, and no call stays open afterwards."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import fault_services
from bench.fault_bed import register, running_upstream
from tests.support.servers import call_upstream
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.needs_redis, pytest.mark.needs_postgres, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def parts():
    with fault_services.running_services() as running:
        yield running


@contextmanager
def postgres_stopped(parts):
    data = parts.stop_postgres()
    try:
        yield
    finally:
        parts.start_postgres(data)


@pytest.fixture(scope="module")
def journal(parts):
    """A server whose calls wait for a gate, and the lines that it writes."""
    path = Path(parts.folder) / "away"
    with running_upstream("counting", "--journal", str(path)) as server:
        register(parts.toolcrib, "away", url=server.url)
        yield server.url, path


def test_pages_and_the_api_answer_503_and_work_again(parts, journal):
    toolcrib = parts.toolcrib
    agent = parts.agent
    session = agent.open()
    assert session.post("/search", {"query": "x"}).status == 200
    web = toolcrib.processes["web-0"]
    logged = len(web.log)
    with postgres_stopped(parts):
        status, page = toolcrib.get("/sign-in")
        assert (status, b"Database unavailable." in page) == (503, True)
        status, page = toolcrib.get("/readyz")
        assert (status, b'"reason": "Database unavailable."' in page) == (503, True)
        assert toolcrib.get("/livez")[0] == 200
        for method, path, body in (
            ("POST", "/sessions", {}),
            ("GET", "/sessions", None),
            ("GET", "/catalog", None),
            ("GET", session.path, None),
            ("POST", f"{session.path}/call", {"tool_name": "x", "arguments": {}}),
            ("POST", f"{session.path}/search", {"query": "x"}),
            ("POST", f"{session.path}/load", {"group_id": "x"}),
        ):
            response = agent.send(method, path, body)
            assert (response.status, response.code) == (503, "busy"), (path, response.body)
            assert response.headers["retry-after"] == "2"
        body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
        headers = agent.headers({"Accept": "application/json, text/event-stream"})
        assert toolcrib.get("/mcp", method="POST", data=body, headers=headers)[0] == 503
    log = web.log[logged:]
    assert "Traceback" not in log
    assert Counter(log.splitlines()).total() < 300, log[-3000:]
    wait_for(lambda: toolcrib.readiness()["status"] == "ok", 60, what="the database is back")
    assert session.post("/search", {"query": "x"}).status == 200


def test_calls_are_answered_while_postgres_is_away_and_recorded_when_it_is_back(parts, journal):
    url, path = journal
    session = parts.agent.open(groups=["mcp:away"], mode="deferred")

    def started():
        return path.read_text().count("queue") if path.exists() else 0

    with ThreadPoolExecutor(8) as threads:
        running = [
            threads.submit(session.post_call, "queue", {"name": str(number)}, timeout=6)
            for number in range(4)
        ]
        wait_for(lambda: started() == 4, 30, what="the calls have reached the server")
        with postgres_stopped(parts):
            call_upstream(url, "open_gate")
            refused = [
                threads.submit(session.post_call, "stamp", {"paper": "x"}, timeout=3)
                for _ in range(4)
            ]
            # Answered before PostgreSQL is started again.
            answers = [call.result() for call in running]
            refusals = [call.result() for call in refused]
    assert {(answer.status, answer.code) for answer in answers} == {(502, "unknown_outcome")}
    assert {(answer.status, answer.code) for answer in refusals} == {(503, "busy")}
    wait_for(lambda: parts.query(fault_services.OPEN)[0][0] == 0, 30, what="no call is open")
    states = parts.query(
        "select state, count(*) from sessions_app_call where tool_name like '%queue' group by 1"
    )
    assert states == [("succeeded", 4)], "a result is recorded although its caller has left"
    assert "stamp" not in path.read_text()
