"""A call with an Idempotency-Key runs once, however often it is sent and from how many clients.

The agent's limits are raised: 100,000 calls per minute, 64 in flight (defaults: 600 and 20).
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
from tests.support.waiting import scaled, wait_for

CALLS = 1_000
KEYS = range(CALLS)
TEAMS = 8  # of three clients that send the same call
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


class CallerConnection:
    """A keep-alive connection for many calls."""

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


def executed(journal):
    return Counter(
        entry.removeprefix("stamp ")
        for entry in journal.read_text().splitlines()
        if entry.startswith("stamp ")
    )


def succeeded(response):
    return response[0] == 200 and json.loads(response[1])["state"] == "succeeded"


@pytest.mark.timeout(600)
def test_a_thousand_calls_each_sent_three_times_concurrently_run_a_thousand_times(office):
    toolcrib, session, journal = office
    starts = [threading.Barrier(3) for _ in range(TEAMS)]

    def courier(team):
        """Send the calls of a team, each at the same time as the other two members."""
        with CallerConnection(session) as line:
            return {
                number: (starts[team].wait(scaled(60)), line.send(number))[1]
                for number in range(team, CALLS, TEAMS)
            }

    with ThreadPoolExecutor(3 * TEAMS) as couriers:
        rounds = list(couriers.map(courier, sorted([*range(TEAMS)] * 3)))
    sent = {
        number: [responses[number] for responses in rounds if number in responses]
        for number in KEYS
    }

    odd = [item for items in sent.values() for item in items if item[0] not in (200, 409)]
    assert odd == [], toolcrib.log
    runs = executed(journal)
    wrong = {number: sent[number] for number in KEYS if runs[f"paper-{number}"] != 1}
    assert wrong == {}, toolcrib.log
    assert runs.total() == CALLS
    statuses = Counter()
    first = {}
    for number, responses in sent.items():
        assert len(responses) == 3
        statuses.update(status for status, _ in responses)
        bodies = {response[1] for response in responses if succeeded(response)}
        assert len(bodies) == 1, f"one outcome for key-{number}, not {bodies}"
        first[number] = bodies.pop()
        conflicts = [
            json.loads(body)["error"]["code"] for status, body in responses if status == 409
        ]
        assert set(conflicts) <= {"idempotency_in_progress"}
    assert statuses[409] > 0, "no calls were concurrent, so the test proves nothing"
    print(f"responses to {3 * CALLS} concurrent calls: {dict(statuses)}")  # noqa: T201

    with CallerConnection(session) as line:
        repeated = {number: line.send(number) for number in KEYS}
    assert repeated == {number: (200, body) for number, body in first.items()}
    assert executed(journal) == runs
    rows = read_ledger(toolcrib.data_dir, session)
    assert {row["state"] for row in rows} == {"succeeded"}
    assert sorted(row["idempotency_key"] for row in rows) == sorted(f"key-{n}" for n in KEYS)


def test_a_key_of_another_call_is_a_conflict_and_agents_have_separate_keys(office):
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
    assert executed(journal)["mine"] == executed(journal)["theirs"] == 1
    assert executed(journal)["other"] == 0
    assert session.post_call("stamp", {"paper": "mine"}, key="shared").body == first.body


def test_a_retry_during_the_call_gets_409_with_retry_after(office):
    _, session, journal = office
    with ThreadPoolExecutor(1) as caller:
        arguments = {"name": "long", "seconds": 5}
        future = caller.submit(session.post_call, "wait", arguments, key="long")
        wait_for(lambda: "wait long" in journal.read_text(), 20, what="the call arrived")
        meanwhile = session.post_call("wait", arguments, key="long")
        assert (meanwhile.status, meanwhile.code) == (409, "idempotency_in_progress")
        assert int(meanwhile.headers["retry-after"]) >= 1
        done = future.result(scaled(30))
    assert session.post_call("wait", arguments, key="long").body == done.body
    assert journal.read_text().count("wait long") == 1


def test_a_refusal_is_replayed_for_its_key_and_invalid_keys_are_rejected(office):
    _, session, _ = office
    refused = session.post_call("stamp", {"sheet": 1}, key="refused")
    assert (refused.status, refused.json["state"]) == (200, "refused")
    assert session.post_call("stamp", {"sheet": 1}, key="refused").body == refused.body
    for bad in ("", " ", "k" * 256, "k" * 10_000, "schlüssel"):
        response = session.post_call("stamp", {"paper": "never"}, key=bad)
        assert (response.status, response.code) == (422, "invalid"), (bad[:9], response.body)
