"""Calls through a running installation: results, errors, interruptions and isolation."""

import json
import os
import re
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.agents import make_agent, read_ledger, register_stdio, sync_server, update_server
from tests.support.installation import is_alive
from tests.support.payloads import PayloadReader
from tests.support.servers import call_upstream, register
from tests.support.upstreams import rich
from tests.support.upstreams.running import running_http
from tests.support.waiting import scaled, wait_for


@pytest.fixture(scope="module")
def agent(toolcrib):
    return make_agent(
        toolcrib, "caller", calls_in_flight=100, calls_per_minute=10_000, cost_per_minute=10_000
    )


@pytest.fixture(scope="module", params=["modern", "handshake", "stdio"])
def talkative(request, toolcrib):
    """The slug of a server with every content type, over each transport."""
    slug = f"rich-{request.param}"
    if request.param == "stdio":
        register_stdio(toolcrib, slug, "rich")
        yield slug
        return
    with running_http("rich", *(["--legacy"] if request.param == "handshake" else [])) as url:
        register(toolcrib, slug, url)
        version = toolcrib.api("GET", f"/servers/{slug}")[1]["protocol_version"]
        assert (version == "2026-07-28") == (request.param == "modern")
        yield slug


def send_call(session, tool, arguments):
    """Send a call and return the connection without reading the response."""
    connection = session.agent.connect()
    body = json.dumps({"tool_name": tool, "arguments": arguments})
    connection.request("POST", f"/api/v1{session.path}/call", body, session.agent.headers())
    return connection


class CountingServer:
    """A counting server over HTTP, with its journal."""

    def __init__(self, toolcrib, agent, slug, url, journal):
        self.toolcrib, self.slug, self.url, self.journal = toolcrib, slug, url, journal
        self.session = agent.open(groups=[f"mcp:{slug}"])

    def lines(self):
        return Path(self.journal).read_text().splitlines() if Path(self.journal).exists() else []

    def rows(self):
        return read_ledger(self.toolcrib.data_dir, self.session)

    def wait_until_ended(self, number):
        """Wait until `number` calls have ended, and return the last row."""
        wait_for(lambda: len([row for row in self.rows() if row["finished_at"]]) == number, 30)
        return self.rows()[-1]


@pytest.fixture
def counting(request, toolcrib, agent, tmp_path):
    slug = "counting-" + re.sub(r"\W+", "-", request.node.name.replace("_", "-"))[-16:].strip("-")
    journal = tmp_path / "journal"
    with running_http("counting", "--journal", str(journal)) as url:
        register(toolcrib, slug, url)
        yield CountingServer(toolcrib, agent, slug, url, journal)
    toolcrib.api("DELETE", f"/servers/{slug}")


# --- Results --------------------------------------------------------------------------------------


def test_every_content_type_is_passed_on_unchanged(agent, talkative):
    session = agent.open(groups=[f"mcp:{talkative}"], mode="deferred")
    response = session.call(f"{talkative}__show_all")
    assert (response["state"], response["is_error"]) == ("succeeded", False)
    assert "error" not in response
    assert response["implicit_load"] is True
    # Compared as text, so that 1, 1.0 and true differ.
    for got, sent in (
        (response["content"], rich.CONTENT),
        (response["structured_content"], rich.STRUCTURED),
    ):
        assert json.dumps(got, sort_keys=True) == json.dumps(sent, sort_keys=True)


def test_an_error_of_the_tool_is_passed_on_unchanged(agent, talkative):
    session = agent.open(groups=[f"mcp:{talkative}"])
    response = session.call("fail")
    assert response["content"] == [{"type": "text", "text": rich.FAILURE}]
    assert (response["state"], response["is_error"]) == ("failed", True)
    assert response["tool_name"] == f"{talkative}__fail"
    assert response["error"]["code"] == "tool_error"


def test_output_that_violates_the_output_schema_is_an_error_and_stored_for_operators(
    toolcrib, agent, talkative
):
    session = agent.open(groups=[f"mcp:{talkative}"])
    good = session.call("weigh", {"answer": {"kilograms": 3}})
    assert (good["state"], good["structured_content"]) == ("succeeded", {"kilograms": 3})
    for broken in ({"kilograms": "three"}, None):
        response = session.call("weigh", {"answer": broken})
        assert (response["is_error"], response["error"]["code"]) == (True, "output_invalid")
        assert response["structured_content"] is None
        assert "output schema" in response["content"][0]["text"]
    states = [(row["state"], row["error_code"]) for row in read_ledger(toolcrib.data_dir, session)]
    assert states == [("succeeded", "")] + [("failed", "output_invalid")] * 2
    stored = read_ledger(toolcrib.data_dir, session)[1]["result_copy"]
    assert "three" in PayloadReader.of_folder(toolcrib.data_dir).read(stored)


# --- Slow, cancelled and interrupted calls --------------------------------------------------------


def test_a_call_past_its_deadline_is_timed_out_in_the_response_and_the_ledger(counting):
    response = counting.session.call("wait", {"name": "slow", "seconds": 60}, timeout=0.5)
    assert (response["state"], response["is_error"]) == ("timed_out", True)
    assert response["error"]["code"] == "timeout"
    assert "0.5 s" in response["content"][0]["text"]
    row = counting.wait_until_ended(1)
    assert (row["state"], row["error_code"]) == ("timed_out", "timeout")
    assert row["sent_at"]
    assert counting.lines() == ["wait slow"]
    # A slow call does not close the connection: the next call uses it.
    assert counting.session.call("stamp", {"paper": "next"})["state"] == "succeeded"


def test_a_result_after_the_deadline_is_noted_and_changes_nothing_else(counting):
    response = counting.session.call("wait", {"name": "late", "seconds": 1}, timeout=0.3)
    assert response["state"] == "timed_out"
    wait_for(lambda: counting.rows()[0]["note"], 20, what="the late result is noted")
    assert "after its deadline" in counting.rows()[0]["note"]
    assert counting.rows()[0]["state"] == "timed_out"


def test_a_call_continues_when_its_session_is_closed_and_is_recorded(counting):
    session = counting.session
    with ThreadPoolExecutor(1) as caller:
        future = caller.submit(session.call, "queue", {"name": "closing"})
        wait_for(lambda: counting.lines() == ["queue closing"], 20)
        session.close()
        call_upstream(counting.url, "open_gate")
        assert future.result(scaled(30))["state"] == "succeeded"
    assert counting.wait_until_ended(1)["state"] == "succeeded"
    assert [event["kind"] for event in session.events()] == ["opened", "closed", "called"]


def test_when_the_caller_disconnects_the_call_is_cancelled_and_its_outcome_unknown(counting):
    session = counting.session
    connection = send_call(session, "wait", {"name": "left", "seconds": 60})
    wait_for(lambda: counting.lines() == ["wait left"], 20, what="the call arrived")
    wait_for(lambda: [row["state"] for row in counting.rows()] == ["sent"], 20, what="it is sent")

    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()

    wait_for(lambda: "cancelled left" in counting.lines(), 20, what="the call is cancelled")
    row = counting.wait_until_ended(1)
    assert (row["state"], row["error_code"], row["is_error"]) == ("unknown", "cancelled", 1)
    kinds = [event["kind"] for event in session.events()]
    assert kinds[-1] == "called"


def test_a_full_server_answers_503_with_retry_after_and_disconnecting_callers_free_slots(counting):
    session = counting.session

    def queue(name):
        return session.post_call("queue", {"name": name})

    # Callers that disconnect while waiting must release their slots.
    for number in range(3):
        connection = send_call(session, "queue", {"name": f"left-{number}"})
        wait_for(lambda number=number: f"queue left-{number}" in counting.lines(), 20)
        connection.close()
        wait_for(lambda number=number: f"cancelled left-{number}" in counting.lines(), 20)

    with ThreadPoolExecutor(30) as callers:
        waiting = [callers.submit(queue, f"caller-{number}") for number in range(23)]
        wait_for(lambda: len([line for line in counting.lines() if "caller" in line]) == 8, 30)
        wait_for(lambda: len(counting.rows()) == 3 + 23, 30)
        impatient = send_call(session, "queue", {"name": "impatient"})
        wait_for(lambda: len(counting.rows()) == 3 + 24, 30)
        responses = [
            callers.submit(queue, f"refused-{number}").result(scaled(30)) for number in range(3)
        ]
        assert [response.status for response in responses] == [503] * 3, responses
        assert {response.code for response in responses} == {"busy"}
        assert all(int(response.headers["retry-after"]) >= 1 for response in responses)

        # A caller that disconnects frees its place in the queue.
        impatient.close()
        wait_for(lambda: "cancelled" in [row["state"] for row in counting.rows()], 20)
        waiting.append(callers.submit(queue, "caller-23"))
        wait_for(lambda: len(counting.rows()) == 3 + 24 + 3 + 1, 30)
        assert not any(future.done() for future in waiting)
        call_upstream(counting.url, "open_gate")
        done = [future.result(scaled(60)) for future in waiting]
    assert [response.json["state"] for response in done] == ["succeeded"] * 24
    ran = [line for line in counting.lines() if line.startswith("queue caller")]
    assert len(ran) == len(set(ran)) == 24
    assert not any("refused" in line or "impatient" in line for line in counting.lines())
    states = Counter(row["state"] for row in counting.rows())
    assert states == {"unknown": 3, "succeeded": 24, "refused": 3, "cancelled": 1}


def test_a_call_is_unknown_if_its_program_is_killed_and_the_next_call_works(
    toolcrib, agent, tmp_path
):
    journal = tmp_path / "journal"
    register_stdio(toolcrib, "killed", "counting", "--journal", str(journal))
    session = agent.open(groups=["mcp:killed"])
    pid = session.call("count")["structured_content"]["pid"]
    with ThreadPoolExecutor(1) as caller:
        future = caller.submit(session.call, "wait", {"name": "doomed", "seconds": 60})
        wait_for(lambda: "wait doomed" in journal.read_text(), 20)
        os.kill(pid, signal.SIGKILL)
        response = future.result(scaled(30))
    assert (response["state"], response["is_error"]) == ("unknown", True)
    assert "not known" in response["content"][0]["text"]

    after = session.call("count")
    assert after["state"] == "succeeded", after
    assert after["structured_content"] == {"count": 1, "pid": after["structured_content"]["pid"]}
    assert after["structured_content"]["pid"] != pid
    assert journal.read_text().count("wait doomed") == 1
    states = [row["state"] for row in read_ledger(toolcrib.data_dir, session)]
    assert states == ["succeeded", "unknown", "succeeded"]
    toolcrib.api("DELETE", "/servers/killed")


def test_a_server_that_is_down_gives_an_error_and_works_after_recovery(toolcrib, agent, tmp_path):
    arguments = ("counting", "--journal", str(tmp_path / "journal"))
    with running_http(*arguments) as url:
        register(toolcrib, "down", url)
        session = agent.open(groups=["mcp:down"])
        assert session.call("count")["state"] == "succeeded"
    for _ in range(2):
        response = session.call("count")
        assert (response["state"], response["is_error"]) == ("failed", True), response
        assert response["error"]["message"].endswith(".")
        assert response["error"]["hint"]
    assert read_ledger(toolcrib.data_dir, session)[-1]["state"] == "failed"
    port = url.split(":")[2].split("/")[0]
    with running_http(*arguments, "--http", port):
        wait_for(lambda: session.call("count")["state"] == "succeeded", 60, every=0.5)
    toolcrib.api("DELETE", "/servers/down")


@pytest.mark.timeout(180)
def test_a_call_interrupted_by_kill_9_becomes_unknown_after_the_restart_and_is_not_resent(
    toolcrib, counting
):
    session = counting.session
    with ThreadPoolExecutor(1) as caller:
        future = caller.submit(
            session.post_call, "wait", {"name": "cut-off", "seconds": 600}, key="of-the-cut-off"
        )
        wait_for(lambda: counting.lines() == ["wait cut-off"], 20)
        toolcrib.kill()
        with pytest.raises(OSError, match=r".*"):
            future.result(scaled(20))
    # Killed at any moment: `sent` may not be committed yet; the outcome is unknown either way.
    assert [row["state"] for row in counting.rows()] in (["accepted"], ["sent"])

    toolcrib.start()
    row = counting.wait_until_ended(1)
    assert (row["state"], row["error_code"]) == ("unknown", "unknown_outcome")
    retried = session.post_call("wait", {"name": "cut-off", "seconds": 600}, key="of-the-cut-off")
    assert (retried.status, retried.json["state"]) == (200, "unknown")
    assert "not known" in retried.json["content"][0]["text"]
    assert [line for line in counting.lines() if line.startswith("wait")] == ["wait cut-off"]
    assert session.call("stamp", {"paper": "after"})["state"] == "succeeded"


@pytest.mark.timeout(180)
def test_a_call_in_flight_when_toolcrib_stops_is_unknown_and_is_not_resent(toolcrib, counting):
    session = counting.session
    with ThreadPoolExecutor(1) as caller:
        future = caller.submit(session.post_call, "wait", {"name": "stopped", "seconds": 600})
        wait_for(lambda: counting.lines() == ["wait stopped"], 20)
        toolcrib.stop()
        try:
            response = future.result(scaled(20))
        except OSError:
            response = None
    assert response is None or response.status >= 500 or response.json["state"] == "unknown", (
        response.body
    )
    toolcrib.start()
    assert counting.wait_until_ended(1)["state"] == "unknown"
    assert session.call("stamp", {"paper": "after"})["state"] == "succeeded"
    assert [line for line in counting.lines() if line.startswith("wait")] == ["wait stopped"]


# --- Isolation ------------------------------------------------------------------------------------


def test_each_session_has_its_own_process_that_ends_with_it(toolcrib, agent, tmp_path):
    register_stdio(toolcrib, "own", "counting", "--journal", str(tmp_path / "journal"))
    update_server(toolcrib, "own", isolation="per_session")
    first, second = (agent.open(groups=["mcp:own"]) for _ in range(2))
    counted = [
        session.call("count")["structured_content"] for session in (first, second, first, second)
    ]
    assert [response["count"] for response in counted] == [1, 1, 2, 2]
    pids = [response["pid"] for response in counted]
    assert pids[:2] == pids[2:]
    assert pids[0] != pids[1]

    first.close()
    wait_for(lambda: not is_alive(pids[0]), 20, what="the closed session's program ended")
    assert is_alive(pids[1])
    assert second.call("count")["structured_content"] == {"count": 3, "pid": pids[1]}
    refused = first.post_call("count")
    assert (refused.status, refused.code) == (409, "session_closed")
    assert "resume" in refused.json["error"]["hint"]
    second.close()
    wait_for(lambda: not is_alive(pids[1]), 20)
    toolcrib.api("DELETE", "/servers/own")


# --- Pending and hidden tools ---------------------------------------------------------------------


@pytest.fixture
def changing(toolcrib, agent):
    """A server whose `measure` has a new required argument, pending review."""
    with running_http("rich") as url:
        register(toolcrib, "changing", url)
        session = agent.open(groups=["mcp:changing"])
        session.load("mcp:changing", ["measure"])
        assert session.call("measure", {"length": 1})["state"] == "succeeded"
        call_upstream(url, "change")
        sync_server(toolcrib, "changing")
        assert toolcrib.api("GET", "/tools/changing__measure")[1]["state"] == "waiting"
        yield session
    toolcrib.api("DELETE", "/servers/changing")


def test_while_a_change_is_pending_calls_use_the_approved_definition(toolcrib, agent, changing):
    both = {"length": 1, "unit": "ft"}
    for session in (changing, agent.open(groups=["mcp:changing"])):
        # The server requires a unit now, but the change is not approved yet.
        sent = session.call("measure", {"length": 1})
        assert sent["state"] == "succeeded"
        fits = session.call("measure", both)
        assert (fits["state"], fits["structured_content"]) == ("succeeded", {"given": both})
        refused = session.call("measure", {"unit": "ft"})
        assert (refused["state"], refused["error"]["code"]) == ("refused", "invalid_arguments")
        assert "enum" not in refused["content"][0]["text"]
    toolcrib.api("POST", "/tools/changing__measure/approve")
    refused = changing.call("measure", {"length": 1})
    assert refused["error"]["code"] == "definition_changed"
    assert '"enum":["m","ft"]' in refused["content"][0]["text"], "the newer schema is in the error"
    assert changing.call("measure", both)["state"] == "succeeded"
    assert [row["state"] for row in read_ledger(toolcrib.data_dir, changing)] == [
        *("succeeded", "succeeded", "succeeded", "refused"),
        *("refused", "succeeded"),
    ]


def test_with_strict_trust_calls_of_a_pending_tool_are_refused_and_other_tools_run(
    toolcrib, changing
):
    update_server(toolcrib, "changing", trust="strict")
    refused = changing.call("measure", {"length": 1, "unit": "ft"})
    assert (refused["state"], refused["error"]["code"]) == ("refused", "waiting")
    assert "pending review" in refused["content"][0]["text"]
    assert changing.call("show_all")["state"] == "succeeded"
    toolcrib.api("POST", "/tools/changing__measure/approve")
    assert changing.call("measure", {"length": 1, "unit": "ft"})["state"] == "succeeded"


def test_calls_of_hidden_and_denied_tools_are_refused_with_the_reason(toolcrib, agent, talkative):
    session = agent.open(groups=[f"mcp:{talkative}"])
    name = f"{talkative}__show_all"
    assert toolcrib.api("POST", f"/tools/{name}/hold", {"reason": "under review"})[0] == 200
    refused = session.call(name)
    assert (refused["state"], refused["error"]["code"]) == ("refused", "held")
    assert "under review" in refused["content"][0]["text"]
    assert toolcrib.api("POST", f"/tools/{name}/release")[0] == 200
    assert session.call(name)["state"] == "succeeded"

    toolcrib.api("PATCH", f"/tools/{name}", {"call_policy": "deny"})
    refused = session.call(name)
    assert (refused["state"], refused["error"]["code"]) == ("refused", "denied")
    toolcrib.api("PATCH", f"/tools/{name}", {"call_policy": "allow"})
    rows = read_ledger(toolcrib.data_dir, session)
    assert [row["state"] for row in rows] == ["refused", "succeeded", "refused"]
    assert [row["sent_at"] is None for row in rows] == [True, False, True]
