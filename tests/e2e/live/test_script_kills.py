"""`kill -9` at random moments of scripts with ten calls: no call runs twice, none is lost.

KILL_ROUNDS sets the number of rounds.
"""

import http.client
import os
import random
import threading
from collections import Counter
from contextlib import suppress

import pytest

from tests.support.agents import Agent, make_agent
from tests.support.installation import Installation
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

ROUNDS = int(os.environ.get("KILL_ROUNDS", "10"))
CALLS = 10  # of a script; the sixth is held
HELD_AFTER = 5
RULE = {"name": "Ask before counting", "effect": "hold", "match": {"tools": ["office__count"]}}
CODE = """
for number in range(5):
    await office.stamp(paper=f"{input}-{number}")
await office.count()
for number in range(5, 9):
    await office.stamp(paper=f"{input}-{number}")
"done"
"""


class Round:
    """One script, sent with a key until its end is known."""

    def __init__(self, toolcrib, agent, session, journal, number):
        self.toolcrib, self.agent, self.session = toolcrib, agent, session
        self.journal, self.name = journal, f"round-{number}"
        self.answer = {}

    def send(self):
        path, key = f"{self.session.path}/scripts", {"Idempotency-Key": self.name}
        with suppress(OSError, http.client.HTTPException):  # the installation is killed
            response = self.agent.send("POST", path, {"code": CODE, "input": self.name}, key)
            self.answer = response.json

    def stamped(self):
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [line for line in lines if line.startswith(f"stamp {self.name}-")]

    def held(self):
        items = self.toolcrib.api("GET", "/calls?state=held")[1]["items"]
        return [item["call_id"] for item in items]

    def allow(self):
        wait_for(self.held, 30, what="a call is held")
        for call_id in self.held():
            status, body = self.toolcrib.api(
                "POST", f"/calls/{call_id}/decision", {"decision": "allow"}
            )
            assert status == 200, body

    def run_until(self, stamps):
        """Run the script until so many papers are stamped, and kill Toolcrib then."""
        sender = threading.Thread(target=self.send)
        sender.start()
        if stamps > HELD_AFTER:
            self.allow()
        wait_for(lambda: len(self.stamped()) >= stamps, 30, every=0.001, what="the moment")
        if stamps == HELD_AFTER:
            wait_for(self.held, 30, what="the script is paused")
        self.toolcrib.kill()
        sender.join()

    def end(self):
        """Ask for the script until it has ended; allow what is held."""
        self.send()
        while self.answer["status"] in ("running", "held"):
            if self.held():
                self.allow()
            self.answer = self.agent.send("GET", f"/scripts/{self.answer['run_id']}?wait=5").json
        return self.answer


@pytest.mark.timeout(90 * ROUNDS)
def test_no_call_of_a_killed_script_runs_twice_or_is_lost(tmp_path):
    journal, chance = tmp_path / "journal", random.Random(19)  # noqa: S311 - moments, not secrets
    ends = Counter()
    with (
        running_http("counting", "--journal", str(journal)) as url,
        Installation(tmp_path / "data") as toolcrib,
    ):
        register(toolcrib, "office", url)
        assert toolcrib.api("POST", "/rules", RULE)[0] == 201
        agent: Agent = make_agent(toolcrib, "clerk", code_mode=True)
        session = agent.open()
        for number in range(ROUNDS):
            moment = HELD_AFTER if number % 3 == 0 else chance.randint(1, CALLS - 1)
            script = Round(toolcrib, agent, session, journal, number)
            script.run_until(moment)
            before = script.stamped()
            toolcrib.start()
            answer = script.end()
            after = script.stamped()
            kind = "completed" if answer["status"] == "completed" else answer["error"]["type"]
            ends[kind] += 1
            assert kind in ("completed", "interrupted"), answer
            assert len(set(after)) == len(after), f"twice: {after}"
            if kind == "interrupted":
                assert after == before, "a script went on that was interrupted"
            else:
                assert len(after) == CALLS - 1
            recorded = [call for call in answer["calls"] if call["tool"] == "office__stamp"]
            assert len(recorded) >= len(after), (answer, after)
            assert sum(call["state"] == "succeeded" for call in recorded) <= len(after)
            assert not {call["state"] for call in recorded} & {"accepted", "sent"}, answer
    assert set(ends) == {"completed", "interrupted"}, ends
