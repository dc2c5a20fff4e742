"""WEB_WORKERS: several web processes on one port that serve the same sessions."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import make_agent
from tests.support.installation import READY, Process, descendants, free_port, is_alive
from tests.support.production import SERVICES
from tests.support.restart_clients import CLIENTS, FORECAST, ConnectedClient, check_one_session
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]


def web_pids(parent):
    """Return the pids of the web processes of a parent, without their helper processes."""
    pids = []
    for pid in descendants(parent.pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - of another process
            if b"--fd" in file.read().split(b"\0"):
                pids.append(pid)
    return pids


def start_two(production, port=None):
    """Start two web processes on one port; return their parent."""
    port = port or free_port()
    production.urls, production.url = [f"http://localhost:{port}"], f"http://localhost:{port}"
    env = {**production.env, "PORT": str(port), "WEB_WORKERS": "2", "TOOLCRIB_METRICS": "1"}
    parent = production.processes["web"] = Process(SERVICES["web"]["command"], env)
    parent.wait_for_line(READY, 150)
    return parent


def test_sessions_work_on_any_worker_keys_are_revoked_on_all_and_killed_ones_are_replaced(
    production,
):
    parent = start_two(production)
    assert len(web_pids(parent)) == 2
    production.start_all("worker")
    with running_http("healthy") as weather:
        register(production, "weather", weather)
        agent = make_agent(production, "roaming")
        session = agent.open(mode="deferred")
        # One connection per call: the kernel assigns them to either process.
        for number in range(20):
            result = session.call("get_forecast", {"city": f"city-{number}"})
            assert result["structured_content"]["city"] == f"city-{number}"
        holders = production.command("shell", "-c", HOLDERS)
        assert holders.stdout.split()[-1] == "2", (holders.stdout, holders.stderr)
        what = "metrics are summed over both processes"
        wait_for(lambda: read_calls(production) == (20, 2), 30, what=what)

        victim = web_pids(parent)[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(set(web_pids(parent)) - {victim}) == 2, 30, what="it is replaced")
        wait_for(lambda: _call_succeeds(session), 30, what="calls succeed")
        assert read_calls(production)[0] >= 20  # counters never fall

        key = production.api("GET", "/agents/roaming/keys")[1]["items"][0]["id"]
        assert production.api("POST", f"/keys/{key}/revoke")[0] == 200
        assert {session.post_call("list_stations").status for _ in range(20)} == {401}
    children = web_pids(parent)
    parent.stop()
    assert parent.code == 0, parent.log
    assert not any(is_alive(pid) for pid in children)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_handshake_client_continues_its_session_after_kill_9_of_all_workers(
    production, tmp_path, kind
):
    parent = start_two(production)
    production.start_all("worker")
    with running_http("healthy") as weather:
        register(production, "weather", weather)
        agent = make_agent(production, "roaming", mode="deferred")
        with ConnectedClient(kind, agent, tmp_path) as client:
            # Several calls: the kernel assigns each connection to either process.
            assert [client.call() for _ in range(4)] == [FORECAST] * 4
            children = web_pids(parent)
            parent.kill()
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not any(map(is_alive, children)), what="all are dead")
            start_two(production, int(production.url.rpartition(":")[2]))
            assert [client.call() for _ in range(4)] == [FORECAST] * 4
            check_one_session(production, agent, calls=8)


def read_calls(production):
    """Return the calls that succeeded, and the number of processes, as any process reports them."""
    status, body = production.get("/metrics")
    assert status == 200, body
    samples = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    calls = samples.get(("toolcrib_calls_total", "succeeded"), 0)
    return calls, samples["toolcrib_processes", None]


HOLDERS = """
from sessions_app.models import Call
print(Call.objects.values("holder").distinct().count())
"""


def _call_succeeds(session):
    try:
        return session.post_call("list_stations").status == 200
    except OSError:
        return False


def test_a_call_of_a_killed_web_process_is_marked_unknown_by_the_others(production, tmp_path):
    """Only processes of the same machine can detect that it is dead; the worker waits longer."""

    def call():
        with psycopg.connect(production.env["DATABASE_URL"]) as connection:
            query = "SELECT state, holder FROM sessions_app_call WHERE tool_name LIKE '%%wait'"
            return connection.execute(query).fetchone() or ("", "")

    parent = start_two(production)
    production.start_all("worker")
    with (
        running_http("counting", "--journal", str(tmp_path / "journal")) as url,
        ThreadPoolExecutor(1) as callers,
    ):
        register(production, "counting", url)
        session = make_agent(production, "waiting").open(mode="deferred")
        arguments = {"name": "long", "seconds": 100}
        future = callers.submit(session.post_call, "wait", arguments, timeout=300)
        wait_for(lambda: call()[0] == "sent", 30, what="the call is in flight")
        os.kill(int(call()[1].split(" ")[-2]), signal.SIGKILL)
        wait_for(lambda: call()[0] == "unknown", 30, what="it is marked unknown")
        assert isinstance(future.exception(60), OSError)  # the connection broke
    parent.stop()
