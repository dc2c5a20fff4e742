"""Calls through a running installation: what passes, what is refused, and what is left behind."""

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
from tests.support.servers import call_upstream, register
from tests.support.upstreams import rich
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def agent(toolcrib):
    return make_agent(toolcrib, "caller", calls_in_flight=100, calls_per_minute=10_000)


@pytest.fixture(scope="module", params=["modern", "handshake", "stdio"])
def talkative(request, toolcrib):
    """A server with every kind of content, reached in each way."""
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


def begin(session, tool, arguments):
    """Send a call and return the connection, on which nobody waits yet."""
    connection = session.agent.connect()
    body = json.dumps({"tool_name": tool, "arguments": arguments})
    connection.request("POST", f"/api/v1{session.path}/call", body, session.agent.headers())
    return connection


class Counting:
    """A counting server over HTTP, with its journal."""

    def __init__(self, toolcrib, agent, slug, url, journal):
        self.toolcrib, self.slug, self.url, self.journal = toolcrib, slug, url, journal
        self.session = agent.open(groups=[f"mcp:{slug}"])

    def lines(self):
        return Path(self.journal).read_text().splitlines() if Path(self.journal).exists() else []

    def rows(self):
        return read_ledger(self.toolcrib.data_dir, self.session)

    def ended(self, number):
        """Wait until so many calls have ended, and return the last row."""
        wait_for(lambda: len([row for row in self.rows() if row["finished_at"]]) == number, 30)
        return self.rows()[-1]


@pytest.fixture
def counting(request, toolcrib, agent, tmp_path):
    slug = "counting-" + re.sub(r"\W+", "-", request.node.name.replace("_", "-"))[-16:].strip("-")
    journal = tmp_path / "journal"
    with running_http("counting", "--journal", str(journal)) as url:
        register(toolcrib, slug, url)
        yield Counting(toolcrib, agent, slug, url, journal)
    toolcrib.api("DELETE", f"/servers/{slug}")


# --- What passes ----------------------------------------------------------------------------------


def test_every_kind_of_content_passes_unchanged(agent, talkative):
    session = agent.open(groups=[f"mcp:{talkative}"], mode="deferred")
    answer = session.call(f"{talkative}__show_all")
    assert (answer["state"], answer["is_error"]) == ("succeeded", False)
    assert "error" not in answer
    assert answer["implicit_load"] is True
    # As texts, so that 1, 1.0 and true differ.
    for got, sent in (
        (answer["content"], rich.CONTENT),
        (answer["structured_content"], rich.STRUCTURED),
    ):
        assert json.dumps(got, sort_keys=True) == json.dumps(sent, sort_keys=True)


def test_an_error_of_the_tool_passes_in_its_own_words(agent, talkative):
    session = agent.open(groups=[f"mcp:{talkative}"])
    answer = session.call("fail")
    assert answer["content"] == [{"type": "text", "text": rich.FAILURE}]
    assert (answer["state"], answer["is_error"]) == ("failed", True)
    assert answer["tool_name"] == f"{talkative}__fail"
    assert answer["error"]["code"] == "tool_error"


def test_output_that_breaks_the_tools_own_schema_is_an_error_and_kept_for_the_operator(
    toolcrib, agent, talkative
):
    session = agent.open(groups=[f"mcp:{talkative}"])
    good = session.call("weigh", {"answer": {"kilograms": 3}})
    assert (good["state"], good["structured_content"]) == ("succeeded", {"kilograms": 3})
    for broken in ({"kilograms": "three"}, None):
        answer = session.call("weigh", {"answer": broken})
        assert (answer["is_error"], answer["error"]["code"]) == (True, "output_invalid")
        assert answer["structured_content"] is None
        assert "output schema" in answer["content"][0]["text"]
    states = [(row["state"], row["error_code"]) for row in read_ledger(toolcrib.data_dir, session)]
    assert states == [("succeeded", "")] + [("failed", "output_invalid")] * 2
    assert "three" in read_ledger(toolcrib.data_dir, session)[1]["result_copy"]


# --- Calls that are slow, given up or cut off -----------------------------------------------------


def test_a_call_past_its_deadline_is_timed_out_in_the_answer_and_the_ledger(counting):
    answer = counting.session.call("wait", {"name": "slow", "seconds": 60}, timeout=0.5)
    assert (answer["state"], answer["is_error"]) == ("timed_out", True)
    assert answer["error"]["code"] == "timeout"
    assert "0.5 s" in answer["content"][0]["text"]
    row = counting.ended(1)
    assert (row["state"], row["error_code"]) == ("timed_out", "timeout")
    assert row["sent_at"]
    assert counting.lines() == ["wait slow"]
    # A slow call is no fault of the connection: the next one goes over it at once.
    assert counting.session.call("stamp", {"paper": "next"})["state"] == "succeeded"


def test_an_answer_after_the_deadline_is_noted_and_changes_nothing(counting):
    answer = counting.session.call("wait", {"name": "late", "seconds": 1}, timeout=0.3)
    assert answer["state"] == "timed_out"
    wait_for(lambda: counting.rows()[0]["note"], 20, what="the late answer is noted")
    assert "after its deadline" in counting.rows()[0]["note"]
    assert counting.rows()[0]["state"] == "timed_out"


def test_a_call_goes_on_when_its_session_is_closed_and_is_recorded(counting):
    session = counting.session
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(session.call, "queue", {"name": "closing"})
        wait_for(lambda: counting.lines() == ["queue closing"], 20)
        session.close()
        call_upstream(counting.url, "open_gate")
        assert asked.result(30)["state"] == "succeeded"
    assert counting.ended(1)["state"] == "succeeded"
    assert [event["kind"] for event in session.events()] == ["opened", "closed", "called"]


def test_when_the_caller_leaves_the_server_is_told_and_the_outcome_is_unknown(counting):
    session = counting.session
    connection = begin(session, "wait", {"name": "left", "seconds": 60})
    wait_for(lambda: counting.lines() == ["wait left"], 20, what="the call arrived")
    wait_for(lambda: [row["state"] for row in counting.rows()] == ["sent"], 20, what="it shows")

    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()

    wait_for(lambda: "cancelled left" in counting.lines(), 20, what="the server was told")
    row = counting.ended(1)
    assert (row["state"], row["error_code"], row["is_error"]) == ("unknown", "cancelled", 1)
    kinds = [event["kind"] for event in session.events()]
    assert kinds[-1] == "called"


def test_a_full_server_answers_503_with_retry_after_and_callers_who_leave_free_its_turns(counting):
    session = counting.session

    def queue(name):
        return session.post_call("queue", {"name": name})

    # Those who come to a closed gate and leave must not keep its turns.
    for number in range(3):
        left = begin(session, "queue", {"name": f"left-{number}"})
        wait_for(lambda number=number: f"queue left-{number}" in counting.lines(), 20)
        left.close()
        wait_for(lambda number=number: f"cancelled left-{number}" in counting.lines(), 20)

    with ThreadPoolExecutor(30) as callers:
        waiting = [callers.submit(queue, f"caller-{number}") for number in range(23)]
        wait_for(lambda: len([line for line in counting.lines() if "caller" in line]) == 8, 30)
        wait_for(lambda: len(counting.rows()) == 3 + 23, 30)
        impatient = begin(session, "queue", {"name": "impatient"})
        wait_for(lambda: len(counting.rows()) == 3 + 24, 30)
        answers = [callers.submit(queue, f"refused-{number}").result(30) for number in range(3)]
        assert [answer.status for answer in answers] == [503] * 3, answers
        assert {answer.code for answer in answers} == {"busy"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)

        # Who leaves the queue makes room in it.
        impatient.close()
        wait_for(lambda: "cancelled" in [row["state"] for row in counting.rows()], 20)
        waiting.append(callers.submit(queue, "caller-23"))
        wait_for(lambda: len(counting.rows()) == 3 + 24 + 3 + 1, 30)
        assert not any(future.done() for future in waiting)
        call_upstream(counting.url, "open_gate")
        done = [future.result(60) for future in waiting]
    assert [answer.json["state"] for answer in done] == ["succeeded"] * 24
    ran = [line for line in counting.lines() if line.startswith("queue caller")]
    assert len(ran) == len(set(ran)) == 24
    assert not any("refused" in line or "impatient" in line for line in counting.lines())
    states = Counter(row["state"] for row in counting.rows())
    assert states == {"unknown": 3, "succeeded": 24, "refused": 3, "cancelled": 1}


def test_a_program_killed_in_a_call_leaves_it_unknown_and_the_next_call_works(
    toolcrib, agent, tmp_path
):
    journal = tmp_path / "journal"
    register_stdio(toolcrib, "killed", "counting", "--journal", str(journal))
    session = agent.open(groups=["mcp:killed"])
    pid = session.call("count")["structured_content"]["pid"]
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(session.call, "wait", {"name": "doomed", "seconds": 60})
        wait_for(lambda: "wait doomed" in journal.read_text(), 20)
        os.kill(pid, signal.SIGKILL)
        answer = asked.result(30)
    assert (answer["state"], answer["is_error"]) == ("unknown", True)
    assert "not known" in answer["content"][0]["text"]

    after = session.call("count")
    assert after["state"] == "succeeded", after
    assert after["structured_content"] == {"count": 1, "pid": after["structured_content"]["pid"]}
    assert after["structured_content"]["pid"] != pid
    assert journal.read_text().count("wait doomed") == 1
    states = [row["state"] for row in read_ledger(toolcrib.data_dir, session)]
    assert states == ["succeeded", "unknown", "succeeded"]
    toolcrib.api("DELETE", "/servers/killed")


def test_a_server_that_is_down_is_an_error_in_words_and_works_again_when_it_is_back(
    toolcrib, agent, tmp_path
):
    arguments = ("counting", "--journal", str(tmp_path / "journal"))
    with running_http(*arguments) as url:
        register(toolcrib, "down", url)
        session = agent.open(groups=["mcp:down"])
        assert session.call("count")["state"] == "succeeded"
    for _ in range(2):
        answer = session.call("count")
        assert (answer["state"], answer["is_error"]) == ("failed", True), answer
        assert answer["error"]["message"].endswith(".")
        assert answer["error"]["hint"]
    assert read_ledger(toolcrib.data_dir, session)[-1]["state"] == "failed"
    port = url.split(":")[2].split("/")[0]
    with running_http(*arguments, "--http", port):
        wait_for(lambda: session.call("count")["state"] == "succeeded", 60, every=0.5)
    toolcrib.api("DELETE", "/servers/down")


@pytest.mark.timeout(180)
def test_a_call_cut_off_by_kill_9_becomes_unknown_after_the_restart_and_is_not_sent_again(
    toolcrib, counting
):
    session = counting.session
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(
            session.post_call, "wait", {"name": "cut-off", "seconds": 600}, key="of-the-cut-off"
        )
        wait_for(lambda: counting.lines() == ["wait cut-off"], 20)
        toolcrib.kill()
        with pytest.raises(OSError, match=r".*"):
            asked.result(20)
    # Killed at any moment: that it was sent may not be written yet, and it is in doubt either way.
    assert [row["state"] for row in counting.rows()] in (["accepted"], ["sent"])

    toolcrib.start()
    row = counting.ended(1)
    assert (row["state"], row["error_code"]) == ("unknown", "unknown_outcome")
    again = session.post_call("wait", {"name": "cut-off", "seconds": 600}, key="of-the-cut-off")
    assert (again.status, again.json["state"]) == (200, "unknown")
    assert "not known" in again.json["content"][0]["text"]
    assert [line for line in counting.lines() if line.startswith("wait")] == ["wait cut-off"]
    assert session.call("stamp", {"paper": "after"})["state"] == "succeeded"


@pytest.mark.timeout(180)
def test_a_call_under_way_when_toolcrib_stops_is_unknown_and_is_not_sent_again(toolcrib, counting):
    session = counting.session
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(session.post_call, "wait", {"name": "stopped", "seconds": 600})
        wait_for(lambda: counting.lines() == ["wait stopped"], 20)
        toolcrib.stop()
        try:
            told = asked.result(20)
        except OSError:
            told = None
    assert told is None or told.status >= 500 or told.json["state"] == "unknown", told.body
    toolcrib.start()
    assert counting.ended(1)["state"] == "unknown"
    assert session.call("stamp", {"paper": "after"})["state"] == "succeeded"
    assert [line for line in counting.lines() if line.startswith("wait")] == ["wait stopped"]


# --- Isolation ------------------------------------------------------------------------------------


def test_each_session_has_a_program_of_its_own_that_ends_with_it(toolcrib, agent, tmp_path):
    register_stdio(toolcrib, "own", "counting", "--journal", str(tmp_path / "journal"))
    update_server(toolcrib, "own", isolation="per_session")
    first, second = (agent.open(groups=["mcp:own"]) for _ in range(2))
    counted = [
        session.call("count")["structured_content"] for session in (first, second, first, second)
    ]
    assert [answer["count"] for answer in counted] == [1, 1, 2, 2]
    pids = [answer["pid"] for answer in counted]
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


# --- Tools that wait or are held ------------------------------------------------------------------


@pytest.fixture
def changing(toolcrib, agent):
    """A server whose `measure` now wants more than the session was shown."""
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


def test_while_a_change_waits_calls_go_by_the_approved_definition(toolcrib, agent, changing):
    both = {"length": 1, "unit": "ft"}
    for session in (changing, agent.open(groups=["mcp:changing"])):
        # The server wants a unit now, but nobody has approved that yet.
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


def test_with_strict_trust_a_waiting_tool_is_refused_and_its_siblings_run(toolcrib, changing):
    update_server(toolcrib, "changing", trust="strict")
    refused = changing.call("measure", {"length": 1, "unit": "ft"})
    assert (refused["state"], refused["error"]["code"]) == ("refused", "waiting")
    assert "approval" in refused["content"][0]["text"]
    assert changing.call("show_all")["state"] == "succeeded"
    toolcrib.api("POST", "/tools/changing__measure/approve")
    assert changing.call("measure", {"length": 1, "unit": "ft"})["state"] == "succeeded"


def test_a_held_tool_and_a_denied_tool_are_refused_with_the_reason(toolcrib, agent, talkative):
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
