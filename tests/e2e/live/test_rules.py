"""Rules in a running installation: exactly the calls that match, and flow after fork and resume."""

import pytest

from tests.support.agents import make_agent
from tests.support.servers import register
from tests.support.upstreams.running import running_http

READ = ("weather__get_forecast", {"city": "Oslo", "days": 1})
OSLO = {"path": "/city", "op": "eq", "value": "Oslo"}
SEND = ("other__get_forecast", {"city": "Rome", "days": 1})


@pytest.fixture(scope="module")
def agent(toolcrib):
    with running_http("healthy") as one, running_http("healthy") as two:
        register(toolcrib, "weather", one)
        register(toolcrib, "other", two)
        yield make_agent(toolcrib, "reader")


@pytest.fixture
def add_rule(toolcrib):
    names = []

    def add(name, effect="deny", **match):
        body = {"name": name, "effect": effect, "match": match}
        status, answer = toolcrib.api("POST", "/rules", body)
        assert status == 201, answer
        names.append(name)

    yield add
    for name in names:
        assert toolcrib.api("DELETE", f"/rules/{name}")[0] == 204


def outcome(session, call):
    tool, arguments = call
    answer = session.call(tool, arguments)
    return answer["error"]["code"] if answer.get("error") else answer["state"]


def test_a_rule_stops_exactly_the_calls_that_match(agent, add_rule):
    session = agent.open()
    assert outcome(session, READ) == "succeeded"
    condition = {"path": "/city", "op": "matches", "value": "^(Oslo|Bergen)$"}
    add_rule("norway", tools=["*__get_*"], arguments=[condition])
    assert outcome(session, READ) == "denied_by_rule"
    assert outcome(session, SEND) == "succeeded"


def test_a_rule_holds_exactly_the_calls_with_the_argument(agent, add_rule):
    add_rule("oslo", effect="hold", tools=["*__get_*"], arguments=[OSLO])
    session = agent.open()
    assert outcome(session, (READ[0], {"city": "Oslo", "days": 1})) == "held"
    assert outcome(session, (READ[0], {"city": "Rome", "days": 1})) == "succeeded"
    assert outcome(session, SEND) == "succeeded"


def test_flow_is_kept_by_a_fork_and_by_a_resumed_session(agent, add_rule):
    add_rule("flow", after=["weather"], not_servers=["weather"])
    session = agent.open()
    assert outcome(session, SEND) == "succeeded"
    assert outcome(session, READ) == "succeeded"
    assert outcome(session, SEND) == "denied_by_rule"
    assert outcome(session, READ) == "succeeded"
    assert outcome(session.fork(), SEND) == "denied_by_rule"
    resumed = agent.open(resume={**session.get("/state"), "session_id": session.id})
    assert outcome(resumed, SEND) == "denied_by_rule"
    assert outcome(agent.open(), SEND) == "succeeded"


def test_the_first_use_of_a_tool_by_an_agent_is_recognized(toolcrib, agent, add_rule):
    newcomer = make_agent(toolcrib, "newcomer")
    session = newcomer.open()
    assert outcome(session, READ) == "succeeded"
    add_rule("first", first_use=True)
    assert outcome(session, READ) == "succeeded"
    assert outcome(session, SEND) == "denied_by_rule"
