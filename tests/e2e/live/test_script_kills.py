"""`kill -9` of Toolcrib while scripts run or are paused: no call runs twice, none is lost.

KILL_ROUNDS sets the number of rounds; every second one is in TypeScript.
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
ASK = [{"path": "/paper", "op": "contains", "value": "-ask"}]
RULE = {
    "name": "Ask first",
    "effect": "hold",
    "match": {"tools": ["office__stamp"], "arguments": ASK},
}
CODES = {
    "python": """
for number in range(5):
    await office.stamp(paper=f"{input}-{number}")
await office.stamp(paper=f"{input}-ask")
for number in range(5, 9):
    await office.stamp(paper=f"{input}-{number}")
"done"
""",
    "typescript": """
for (let n = 0; n < 5; n++) await office.stamp({ paper: `${input}-${n}` });
await office.stamp({ paper: `${input}-ask` });
for (let n = 5; n < 9; n++) await office.stamp({ paper: `${input}-${n}` });
return "done";
""",
}
# As if so many hours had passed: sessions, held calls and their scripts are that much older.
MOVE_BACK = """
from datetime import timedelta
from django.db.models import F
from sessions_app.models import AgentSession, Call, HeldCall, ScriptRun
ago = timedelta(hours={})
AgentSession.objects.update(
    created_at=F("created_at") - ago, last_used_at=F("last_used_at") - ago
)
Call.objects.filter(state="held").update(accepted_at=F("accepted_at") - ago)
HeldCall.objects.update(held_at=F("held_at") - ago, expires_at=F("expires_at") - ago)
ScriptRun.objects.filter(state="held").update(
    started_at=F("started_at") - ago, deadline=F("deadline") - ago
)
"""


class Round:
    """One script, sent with a key until its end is known."""

    def __init__(self, toolcrib, agent, session, journal, number):
        self.toolcrib, self.agent, self.session = toolcrib, agent, session
        self.journal, self.name = journal, f"round-{number}"
        self.language = list(CODES)[number % 2]
        self.answer = {}

    def send(self):
        path, key = f"{self.session.path}/scripts", {"Idempotency-Key": self.name}
        body = {"code": CODES[self.language], "language": self.language, "input": self.name}
        with suppress(OSError, http.client.HTTPException):  # the installation is killed
            response = self.agent.send("POST", path, body, key)
            self.answer = response.json

    def stamped(self):
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [line for line in lines if line.startswith(f"stamp {self.name}-")]

    def held(self):
        """Return the held call of this script: that of an interrupted one may still wait."""
        items = self.toolcrib.api("GET", "/calls?state=held")[1]["items"]
        paper = {"paper": f"{self.name}-ask"}
        return [item["call_id"] for item in items if item["arguments"] == paper]

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

    def kind(self):
        """Return how the script ended.

        After a kill between the execution of the allowed call and its end, nobody knows whether
        that call ran: it is not repeated, and raises an error in the script.
        """
        if self.answer["status"] == "completed":
            return "completed"
        states = [call["state"] for call in self.answer["calls"]]
        is_unknown = states[-1] == "unknown" and len(states) == HELD_AFTER + 1
        type_ = self.answer["error"]["type"]
        return "unknown" if is_unknown and type_ != "interrupted" else type_


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
            kind = script.kind()
            ends[kind] += 1
            assert kind in ("completed", "interrupted", "unknown"), answer
            assert len(set(after)) == len(after), f"twice: {after}"
            if kind == "completed":
                assert len(after) == CALLS
            else:
                assert after == before, "a script went on that was interrupted"
            recorded = [call for call in answer["calls"] if call["tool"] == "office__stamp"]
            assert len(recorded) >= len(after), (answer, after)
            assert sum(call["state"] == "succeeded" for call in recorded) <= len(after)
            assert not {call["state"] for call in recorded} & {"accepted", "sent"}, answer
    assert {"completed", "interrupted"} <= set(ends) <= {"completed", "interrupted", "unknown"}


@pytest.mark.timeout(180)
def test_a_paused_script_survives_a_kill_and_is_approved_23_hours_later(tmp_path):
    journal = tmp_path / "journal"
    with (
        running_http("counting", "--journal", str(journal)) as url,
        Installation(tmp_path / "data") as toolcrib,
    ):
        register(toolcrib, "office", url)
        assert toolcrib.api("POST", "/rules", RULE)[0] == 201
        agent: Agent = make_agent(toolcrib, "clerk", code_mode=True)
        session = agent.open()
        for hours, state in ((23, "completed"), (25, "failed")):
            scripts = [Round(toolcrib, agent, session, journal, hours + n) for n in range(2)]
            for script in scripts:
                script.send()
                assert script.answer["status"] == "held", script.answer
            toolcrib.kill()
            moved = toolcrib.command("shell", "-c", MOVE_BACK.format(hours))
            assert moved.returncode == 0, moved.stderr
            toolcrib.start()
            for script in scripts:
                if state == "completed":
                    answer = script.end()
                    assert (answer["status"], answer["result"]) == ("completed", "done"), answer
                else:
                    assert_expired(agent, script.answer["run_id"])
                made = CALLS if state == "completed" else HELD_AFTER
                assert len(script.stamped()) == len(set(script.stamped())) == made


def assert_expired(agent, run_id):
    answer = {}

    def has_ended():
        answer.update(agent.send("GET", f"/scripts/{run_id}?wait=5").json)
        return answer["status"] == "failed"

    wait_for(has_ended, 60, what="the script has expired")
    assert answer["error"]["type"] == "expired"
    assert answer["error"]["message"].startswith("Nobody decided in time"), answer
