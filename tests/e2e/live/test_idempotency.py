"""A call with an Idempotency-Key runs once, however often and from however many sides it is sent.

The agent's limits are raised for it: 100,000 calls a minute, 64 in flight (600 and 20 are usual).
"""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.agents import Agent, make_agent, read_ledger
from tests.support.installation import Installation
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

CALLS = 1_000
KEYS = range(CALLS)
TEAMS = 8  # of three, each with a paper at a time
LIMITS = ("--calls-per-minute", "100000", "--calls-in-flight", "64")


@pytest.fixture(scope="module")
def office(tmp_path_factory):
    """A counting server, an agent with raised limits, and a session of it."""
    folder = tmp_path_factory.mktemp("office")
    journal = folder / "journal"
    with (
        running_http("counting", "--journal", str(journal)) as url,
        Installation(folder / "data") as toolcrib,
    ):
        register(toolcrib, "office", url)
        done = toolcrib.command("create_agent", "clerk", "--all-groups", "--json", *LIMITS)
        assert done.returncode == 0, done.stderr
        agent = Agent(toolcrib.url, json.loads(done.stdout)["key"], "clerk")
        yield toolcrib, agent.open(), journal


class Line:
    """A connection kept open for many calls."""

    def __init__(self, session):
        self.connection = session.agent.connect()
        self.path = f"/api/v1{session.path}/call"
        self.agent = session.agent

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.connection.close()

    def send(self, number):
        """Stamp a paper under its key; return the status and the body."""
        body = {"tool_name": "stamp", "arguments": {"paper": f"paper-{number}"}}
        headers = self.agent.headers({"Idempotency-Key": f"key-{number}"})
        self.connection.request("POST", self.path, json.dumps(body), headers)
        response = self.connection.getresponse()
        return response.status, response.read()


def stamped(journal):
    return Counter(
        entry.removeprefix("stamp ")
        for entry in journal.read_text().splitlines()
        if entry.startswith("stamp ")
    )


def ran(answer):
    return answer[0] == 200 and json.loads(answer[1])["state"] == "succeeded"


@pytest.mark.timeout(600)
def test_a_thousand_calls_each_sent_three_times_at_once_run_a_thousand_times(office):
    toolcrib, session, journal = office
    starts = [threading.Barrier(3) for _ in range(TEAMS)]

    def courier(team):
        """Send the team's papers, none before the two others are about to send it too."""
        with Line(session) as line:
            return {
                number: (starts[team].wait(60), line.send(number))[1]
                for number in range(team, CALLS, TEAMS)
            }

    with ThreadPoolExecutor(3 * TEAMS) as couriers:
        rounds = list(couriers.map(courier, sorted([*range(TEAMS)] * 3)))
    sent = {number: [found[number] for found in rounds if number in found] for number in KEYS}

    odd = [answer for answers in sent.values() for answer in answers if answer[0] not in (200, 409)]
    assert odd == [], toolcrib.log
    runs = stamped(journal)
    wrong = {number: sent[number] for number in KEYS if runs[f"paper-{number}"] != 1}
    assert wrong == {}, toolcrib.log
    assert runs.total() == CALLS
    statuses = Counter()
    first = {}
    for number, answers in sent.items():
        assert len(answers) == 3
        statuses.update(status for status, _ in answers)
        given = {answer[1] for answer in answers if ran(answer)}
        assert len(given) == 1, f"one outcome for key-{number}, not {given}"
        first[number] = given.pop()
        under_way = [json.loads(body)["error"]["code"] for status, body in answers if status == 409]
        assert set(under_way) <= {"idempotency_in_progress"}
    assert statuses[409] > 0, "nothing was sent at once, so nothing was shown"
    print(f"answers to {3 * CALLS} calls at once: {dict(statuses)}")  # noqa: T201

    with Line(session) as line:
        again = {number: line.send(number) for number in KEYS}
    assert again == {number: (200, body) for number, body in first.items()}
    assert stamped(journal) == runs
    rows = read_ledger(toolcrib.data_dir, session)
    assert {row["state"] for row in rows} == {"succeeded"}
    assert sorted(row["idempotency_key"] for row in rows) == sorted(f"key-{n}" for n in KEYS)


def test_a_key_used_for_another_call_is_a_conflict_and_another_agents_key_is_its_own(office):
    toolcrib, session, journal = office
    first = session.post_call("stamp", {"paper": "mine"}, key="shared")
    other = session.post_call("stamp", {"paper": "other"}, key="shared")
    assert (other.status, other.code) == (409, "idempotency_conflict")
    elsewhere = session.agent.open().post_call("stamp", {"paper": "mine"}, key="shared")
    assert (elsewhere.status, elsewhere.code) == (409, "idempotency_conflict")

    stranger = make_agent(toolcrib, "stranger").open()
    theirs = stranger.post_call("stamp", {"paper": "theirs"}, key="shared")
    assert theirs.status == 200
    assert theirs.json["call_id"] != first.json["call_id"]
    assert stamped(journal)["mine"] == stamped(journal)["theirs"] == 1
    assert stamped(journal)["other"] == 0
    assert session.post_call("stamp", {"paper": "mine"}, key="shared").body == first.body


def test_a_call_under_way_answers_its_key_with_409_and_when_to_ask_again(office):
    _, session, journal = office
    with ThreadPoolExecutor(1) as caller:
        arguments = {"name": "long", "seconds": 5}
        asked = caller.submit(session.post_call, "wait", arguments, key="long")
        wait_for(lambda: "wait long" in journal.read_text(), 20, what="the call arrived")
        meanwhile = session.post_call("wait", arguments, key="long")
        assert (meanwhile.status, meanwhile.code) == (409, "idempotency_in_progress")
        assert int(meanwhile.headers["retry-after"]) >= 1
        done = asked.result(30)
    assert session.post_call("wait", arguments, key="long").body == done.body
    assert journal.read_text().count("wait long") == 1


def test_a_refusal_is_given_again_under_its_key_and_a_key_that_is_none_is_refused(office):
    _, session, _ = office
    refused = session.post_call("stamp", {"sheet": 1}, key="refused")
    assert (refused.status, refused.json["state"]) == (200, "refused")
    assert session.post_call("stamp", {"sheet": 1}, key="refused").body == refused.body
    for bad in ("", " ", "k" * 256, "k" * 10_000, "schlüssel"):
        answer = session.post_call("stamp", {"paper": "never"}, key=bad)
        assert (answer.status, answer.code) == (422, "invalid"), (bad[:9], answer.body)
