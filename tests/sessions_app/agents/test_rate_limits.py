"""Rate limits: the sliding window of a minute, and the cost of every request."""

import asyncio
import math
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessions_app.agents import rate_limits
from sessions_app.agents.rate_limits import BYTES_PER_COST, Charge, LocalWindow
from sessions_app.models import Agent
from tests.support.agent_client import add_tools, make_agent_client
from toolcrib.api import api
from toolcrib.lib.errors import ToolcribError

MINUTE = 29_000_000 * 60.0


@pytest.fixture
def window():
    return LocalWindow()


def hit(window, at, cost=1.0, limit=10, what="calls", agent=1):
    """Charge a request, and return the seconds to wait if it was refused."""
    return window.hit([Charge(what, agent, limit, cost)], MINUTE + at)[0]


def hits(window, count, at, **charge):
    return sum(not hit(window, at, **charge) for _ in range(count))


# --- The window -----------------------------------------------------------------------------------


def test_a_minute_has_room_for_as_many_requests_as_the_limit(window):
    assert hits(window, 15, at=0) == 10
    assert hits(window, 5, at=59.9) == 0


def test_the_last_minute_counts_by_its_share_in_the_window(window):
    assert hits(window, 10, at=30) == 10
    assert hits(window, 10, at=60) == 0
    assert hits(window, 10, at=90) == 5
    assert hits(window, 10, at=119.9) == 4


def test_a_quiet_minute_empties_the_window(window):
    assert hits(window, 10, at=0) == 10
    assert hits(window, 10, at=180) == 10


def test_agents_and_limits_are_counted_apart(window):
    assert hits(window, 10, at=0) == 10
    assert hits(window, 10, at=0, agent=2) == 10
    assert hits(window, 10, at=0, what="searches") == 10


def test_costs_add_up_in_fractions(window):
    assert hits(window, 5, at=0, cost=2.5) == 4
    assert hits(window, 1, at=0, cost=0.5) == 0
    assert hits(window, 5, at=75, cost=2.5) == 1  # three quarters of the last minute are left


def test_a_request_is_charged_to_all_windows_or_to_none(window):
    calls, cost = Charge("calls", 1, 3), Charge("cost", 1, 2.5)
    refusals = [any(window.hit([calls, cost], MINUTE)) for _ in range(4)]
    assert refusals == [False, False, True, True]
    assert hits(window, 3, at=0, limit=3) == 1  # two of three calls are counted


@pytest.mark.parametrize(
    ("filled_at", "asked_at", "wait"),
    [
        (0, 0, 66),  # the next minute begins full; a tenth of it later there is room for one
        (30, 59, 7),
        (30, 62, 4),
        (59, 66.1, 0),
    ],
)
def test_a_retry_is_suggested_for_the_time_when_the_window_has_room(
    filled_at, asked_at, wait, window
):
    assert hits(window, 10, at=filled_at) == 10
    assert math.ceil(hit(window, asked_at)) == wait


@given(
    charges=st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 9)), max_size=30),
    cost=st.floats(0.01, 10),
)
def test_a_retry_at_the_suggested_time_succeeds_and_an_earlier_one_does_not(charges, cost):
    window, now = LocalWindow(), 0.0
    for pause, charge in charges:
        now += pause
        hit(window, now, cost=charge, limit=math.inf)
    wait = hit(window, now, cost=cost)
    for early in (0.5, 0.9, 0.99) if wait else ():
        assert hit(window, now + early * wait, cost=cost) > 0
    assert wait <= 120
    assert not hit(window, now + wait + 1e-6 if wait else now + 121, cost=cost)


# --- The cost of requests -------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Stop the clock of the windows at the start of a minute."""
    clock = SimpleNamespace(now=MINUTE)
    time = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: 0.0)
    monkeypatch.setattr(rate_limits, "time", time)
    return clock


def refusal(check, *args):
    with pytest.raises(ToolcribError) as error:
        check(*args)
    return error.value


def test_the_bytes_of_a_response_count_against_later_requests(clock):
    agent = Agent(pk=1, name="scout", cost_per_minute=10)
    rate_limits.check_cost(agent, 2)
    rate_limits.add_cost(agent, 12 * BYTES_PER_COST)

    error = refusal(rate_limits.check_cost, agent, 1)

    assert (error.code, error.status) == ("rate_limited", 429)
    assert error.message == ("Rate limit exceeded: the requests of scout may cost 10 per minute.")
    assert error.details == {"retry_after": 82}  # 14 · (1 − 22/60) < 9
    assert error.hint == "Retry in 82 s."
    clock.now += 81
    assert refusal(rate_limits.check_cost, agent, 1).details == {"retry_after": 1}
    clock.now += 1
    rate_limits.check_cost(agent, 1)


def test_calls_and_searches_cost_1_beside_their_own_limit(clock):
    agent = Agent(pk=1, name="scout", cost_per_minute=3)
    rate_limits.check_rate(agent, "calls", 600)
    rate_limits.check_rate(agent, "searches", 1)
    assert "1 searches per minute" in refusal(rate_limits.check_rate, agent, "searches", 1).message
    rate_limits.check_rate(agent, "calls", 600)
    assert "may cost 3 per minute" in refusal(rate_limits.check_rate, agent, "calls", 600).message


def test_a_request_above_the_limit_runs_when_the_window_is_empty(clock):
    agent = Agent(pk=1, name="scout", cost_per_minute=1)
    rate_limits.check_cost(agent, 2)
    assert refusal(rate_limits.check_cost, agent, 2).details == {"retry_after": 120}
    clock.now += 120
    rate_limits.check_cost(agent, 2)


def test_operators_are_not_charged(clock):
    for _ in range(5_000):
        rate_limits.check_cost(None, 2)
    rate_limits.add_cost(None, 10**9)


# --- Requests of the agent API --------------------------------------------------------------------


@pytest.fixture
def scout(db, clock):
    add_tools("github", "create_issue", "list_issues")
    return make_agent_client("scout", mode="deferred", cost_per_minute=50)


def cost_of(client, request):
    """Return the cost that a request adds to its agent's window, and its response."""
    before = window_sum(client)
    response = request()
    return window_sum(client) - before, response


def window_sum(client):
    return rate_limits._local._sums.get(f"cost:{client.agent.pk}", (0, 0.0))[1]


@pytest.mark.parametrize(
    ("base", "method", "path", "body"),
    [
        (2, "POST", "/sessions", {}),
        (2, "POST", "/sessions/{id}/fork", None),
        (2, "GET", "/catalog", None),
        (2, "GET", "/sessions/{id}/catalog?format=anthropic", None),
        (2, "GET", "/sessions/{id}/tools", None),
        (1, "GET", "/sessions", None),
        (1, "GET", "/sessions/{id}", None),
        (1, "GET", "/sessions/{id}/events", None),
        (1, "GET", "/sessions/{id}/state", None),
        (1, "GET", "/sessions/{id}/stats", None),
        (1, "POST", "/sessions/{id}/preload", {"tool_names": ["create_issue"]}),
        (1, "POST", "/sessions/{id}/close", None),
    ],
)
def test_a_request_costs_its_base_and_its_bytes(base, method, path, body, scout):
    path = path.format(id=scout.open().id)
    cost, response = cost_of(scout, lambda: scout.send(method, path, body))
    assert response.status in (200, 201)
    assert cost == pytest.approx(base + len(response.bytes) / BYTES_PER_COST)


def test_a_response_that_was_not_modified_costs_what_was_rendered(scout):
    first, catalog = cost_of(scout, lambda: scout.send("GET", "/catalog"))
    again, answer = cost_of(
        scout, lambda: scout.send("GET", "/catalog", If_None_Match=catalog.headers["ETag"])
    )
    assert answer.status == 304
    assert again == pytest.approx(first)


def test_an_error_costs_its_base(scout):
    cost, response = cost_of(scout, lambda: scout.send("GET", "/sessions/ses_none/events"))
    assert (response.status, cost) == (404, 1)


@pytest.mark.parametrize("path", ["/catalog", "/sessions/{id}/catalog", "/sessions/{id}/events"])
def test_a_flood_gets_429_with_the_time_to_retry_and_other_agents_do_not(path, scout, clock):
    session = scout.open()
    path = path.format(id=session.id)
    answers = [scout.send("GET", path) for _ in range(60)]

    refused = [answer for answer in answers if answer.status != 200]
    assert [answer.status for answer in answers] == [200] * (60 - len(refused)) + [429] * len(
        refused
    )
    assert len(refused) > 10
    error = refused[-1]["error"]
    assert error["code"] == "rate_limited"
    assert "may cost 50 per minute" in error["message"]
    # All requests share the limit.
    assert [session.call("nothing").status for _ in range(2)][-1] == 429
    assert make_agent_client("calm").send("GET", "/catalog").status == 200

    clock.now += int(scout.send("GET", path).headers["Retry-After"])
    assert scout.send("GET", path).status == 200


def test_an_operator_reads_without_a_limit(scout, operator_token):
    session = scout.open()
    scout.key = operator_token
    costs = {cost_of(scout, lambda: session.get("/events"))[0] for _ in range(60)}
    assert costs == {0}


# --- Floods ---------------------------------------------------------------------------------------


def test_rejections_beyond_twenty_in_a_second_are_delayed(monkeypatch):
    delays = []

    async def record_delay(seconds):
        delays.append(seconds)

    now = 100.0
    monkeypatch.setattr(rate_limits.time, "monotonic", lambda: now)
    monkeypatch.setattr(asyncio, "sleep", record_delay)
    agent = SimpleNamespace(pk=1, name="flood", calls_per_minute=1, cost_per_minute=10)
    asyncio.run(rate_limits.count_once(agent, "calls", None))

    async def reject(count):
        for _ in range(count):
            with pytest.raises(rate_limits.RateLimited):
                await rate_limits.count_once(agent, "calls", None)

    asyncio.run(reject(20))
    assert delays == []
    asyncio.run(reject(3))
    assert delays == [rate_limits.REJECTION_DELAY] * 3
    now += 1.0
    asyncio.run(reject(1))
    assert len(delays) == 3


def test_sums_that_no_longer_count_are_removed(monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_LOCAL_SUMS", 20)
    window = LocalWindow()
    for number in range(100):
        window.hit([Charge("sign-in", f"name-{number}", 5, period=10)], MINUTE + number)
    assert len(window._sums) <= 21
    assert window.hit([Charge("sign-in", "name-99", 1, period=10)], MINUTE + 99) != [0.0]


BODIES = {
    "call": {"tool_name": "github__create_issue", "arguments": {}},
    "search": {"query": "issue"},
    "load": {"group_id": "mcp:github"},
    "preload": {"tool_names": ["create_issue"]},
    "scripts": {"code": "1"},
    "result": {"content": []},
}
PARAMETERS = {"session_id": "SESSION", "name": "github__create_issue"}
OF_ADMINS = {  # on routes of agents, with an admin's key
    operation["operationId"]
    for path, operations in api.get_openapi_schema()["paths"].items()
    for method, operation in operations.items()
    if method == "delete" and path == "/api/v1/sessions/{session_id}"
}
AGENT_OPERATIONS = [
    (method.upper(), path.removeprefix("/api/v1"))
    for path, operations in api.get_openapi_schema()["paths"].items()
    for method, operation in operations.items()
    if {"AgentAuth": []} in operation["security"] and operation["operationId"] not in OF_ADMINS
]


@pytest.mark.parametrize(("method", "path"), AGENT_OPERATIONS)
def test_every_operation_of_agents_is_charged(method, path, scout):
    """Generated from the OpenAPI schema, so that a new operation has to be charged as well."""
    address = re.sub(r"\{(\w+)\}", lambda match: PARAMETERS.get(match[1], "none"), path)
    session = scout.open().id
    address = address.replace("SESSION", session)
    if path.endswith("/stream"):  # of an open session it has no end
        scout.send("POST", f"/sessions/{session}/close", {})
    body = BODIES.get(path.rsplit("/", 1)[-1], {}) if method != "GET" else None
    cost, response = cost_of(scout, lambda: scout.send(method, address, body))
    is_forbidden = response.status == 403 and path.endswith("/scripts")  # off by default
    assert response.status in (200, 201, 204, 404) or is_forbidden, response
    assert cost >= 1


# --- Headers ------------------------------------------------------------------------------------


def read_limit(response):
    names = ("Limit", "Remaining", "Reset")
    return [int(response.headers[f"RateLimit-{name}"]) for name in names]


def test_answers_before_a_429_say_what_the_limit_has_left(db):
    session = make_agent_client(searches_per_minute=3).open()
    answers = [session.search("issue") for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert [read_limit(answer)[:2] for answer in answers] == [[3, 2], [3, 1], [3, 0], [3, 0]]
    assert all(0 < read_limit(answer)[2] <= 60 for answer in answers[:3])
    assert answers[0].headers["RateLimit-Policy"] == '"searches";q=3;w=60'
    assert answers[3].headers["RateLimit-Reset"] == answers[3].headers["Retry-After"]


def test_the_headers_are_about_the_limit_that_ends_first(db):
    add_tools("github", "create_issue")
    session = make_agent_client(cost_per_minute=20, searches_per_minute=1_000).open()
    assert session.search("issue").headers["RateLimit-Policy"] == '"cost";q=20;w=60'
