"""Sessions served by two web processes with one PostgreSQL and one Redis."""

import json
from collections import Counter

import psycopg
import pytest

from tests.support.agents import make_agent, sync_server
from tests.support.installation import redis_server
from tests.support.payloads import DATA_KEYS, PayloadReader
from tests.support.production import Production
from tests.support.servers import call_upstream, register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]
GROUP = "mcp:weather"


@pytest.fixture(scope="module")
def two(postgres, migrated, tmp_path_factory):
    """Two web processes and a worker, with a Redis that tests may stop."""
    url = postgres.create("two_webs", template=migrated)
    with redis_server() as redis, running_http("healthy") as weather:
        running = Production(url, redis.url, tmp_path_factory.mktemp("two"))
        running.redis, running.weather = redis, weather
        try:
            running.start_all("web", "web", "worker")
            register(running, "weather", weather)
            yield running
        finally:
            running.stop()


def both(two, session):
    """Return the session at each of the two processes, starting with the second."""
    return [session.at_url(url) for url in reversed(two.urls)]


def test_a_session_has_the_same_bytes_in_two_processes(two):
    first = make_agent(two, "alternating").open(mode="deferred", preload=["list_stations"])
    sides = both(two, first)
    surface = [side.surface() for side in sides]
    assert surface[0] == surface[1]
    loads = [side.load(GROUP, ["get_forecast"]) for side in sides]
    assert loads[0] == loads[1]
    # Loads through one process are visible in the other, and later loads build on them.
    assert sides[1].load(GROUP, ["get_temperature"]) == sides[0].load(GROUP, ["get_temperature"])
    loaded = sides[0].load(GROUP, ["get_forecast"])
    assert json.loads(loaded)["schemas"] == json.loads(loads[0])["schemas"]
    assert sides[0].get("/state") == sides[1].get("/state")
    assert len(sides[0].get("/state")["expanded_groups"][GROUP]) == 2

    call_upstream(two.weather, "rename_description", name="get_forecast", text="Tell what comes.")
    call_upstream(
        two.weather, "add_tool", name="warn_sailors", description="Warn sailors of a storm."
    )
    assert sync_server(two, "weather")["changed"] == 1
    assert two.api("POST", "/tools/weather__get_forecast/approve")[0] == 200
    for side in sides:
        assert side.surface() == surface[0]
        assert side.load(GROUP, ["get_forecast"]) == loaded
        assert side.search_names(query="storm warning for sailors")[0] == "weather__warn_sailors"
        assert side.call("warn_sailors", {"text": "storm"})["state"] == "succeeded"
    fresh = [side.agent.open(mode="deferred").load(GROUP, ["get_forecast"]) for side in sides]
    assert fresh[0] == fresh[1]
    assert b"Tell what comes." in fresh[0]


def test_calls_through_both_processes_are_in_one_ledger_and_one_timeline(two):
    first = make_agent(two, "ledger").open(mode="deferred")
    sides = both(two, first)
    for number in range(6):
        result = sides[number % 2].call("get_forecast", {"city": f"city-{number}"})
        assert result["structured_content"]["city"] == f"city-{number}"
    # An idempotency key used in one process is valid in the other.
    responses = [side.post_call("get_temperature", {"city": "Oslo"}, key="once") for side in sides]
    assert responses[0].body == responses[1].body
    query = (
        "select c.arguments, c.state, c.holder from sessions_app_call c "
        "join sessions_app_agentsession s on s.id = c.session_id where s.session_id = %s "
        "order by c.id"
    )
    with psycopg.connect(two.env["DATABASE_URL"]) as connection:
        rows = connection.execute(query, (first.id,)).fetchall()
        keys = [ciphertext for (ciphertext,) in connection.execute(DATA_KEYS)]
    payloads = PayloadReader(two.env["TOOLCRIB_ENCRYPTION_KEYS"], keys)
    cities = [json.loads(payloads.read(arguments))["city"] for arguments, _, _ in rows]
    assert cities == [*(f"city-{number}" for number in range(6)), "Oslo"]
    assert {state for _, state, _ in rows} == {"succeeded"}
    assert len({holder for _, _, holder in rows}) == 2
    for side in sides:
        assert Counter(event["kind"] for event in side.events())["called"] == 7
        assert side.get("/stats") == first.get("/stats")


def test_a_key_revoked_in_one_process_is_rejected_by_the_other_immediately(two):
    for number in range(2):
        agent = make_agent(two, f"revoked-{number}")
        first, second = agent.at_url(two.urls[number]), agent.at_url(two.urls[1 - number])
        session = second.open()
        assert session.call("get_forecast", {"city": "Oslo"})["state"] == "succeeded"
        _, listed = two.api("GET", f"/agents/{agent.name}/keys")
        admin, token = two.web_process(number), two.token("admin")
        status, _ = admin.api("POST", f"/keys/{listed['items'][0]['id']}/revoke", token=token)
        assert status == 200
        for side in (second, first):
            assert side.send("GET", session.path).status == 401
            assert side.send("POST", "/sessions", {}).status == 401
        assert session.post_call("get_forecast", {"city": "Oslo"}).status == 401


def test_a_group_revoked_in_one_process_is_unavailable_in_the_other_immediately(two):
    agent = make_agent(two, "shrinking", groups=[GROUP])
    for number in range(2):
        session = agent.at_url(two.urls[1 - number]).open(mode="deferred")
        surface = session.surface()
        assert session.call("get_forecast", {"city": "Oslo"})["state"] == "succeeded"
        admin, token = two.web_process(number), two.token("admin")
        assert admin.api("PATCH", "/agents/shrinking", {"groups": []}, token=token)[0] == 200
        refused = session.call("get_forecast", {"city": "Oslo"})
        assert (refused["state"], refused["error"]["code"]) == ("refused", "unknown_tool")
        assert session.search(query="forecast")["total_matches"] == 0
        loaded = session.post("/load", {"group_id": GROUP}).json
        assert loaded["error"]["code"] == "unknown_group"
        assert "weather__" not in json.dumps([loaded, refused])
        assert session.surface() == surface, "text that the model has received cannot be revoked"
        assert session.agent.open().opened["tools"] == []
        assert admin.api("PATCH", "/agents/shrinking", {"groups": [GROUP]}, token=token)[0] == 200
        assert session.call("get_forecast", {"city": "Oslo"})["state"] == "succeeded"


def count_accepted(responses):
    """Return how many calls ran; all others must be rejected by the rate limit."""
    refused = [response for response in responses if response.status != 200]
    assert {(response.status, response.code) for response in refused} == {(429, "rate_limited")}
    assert all(1 <= int(response.headers["retry-after"]) <= 120 for response in refused)
    return len(responses) - len(refused)


def test_the_rate_limit_counts_both_processes_and_calls_work_without_redis(two):
    sides = both(two, make_agent(two, "limited", calls_per_minute=6).open())
    responses = [
        sides[number % 2].post_call("get_forecast", {"city": "Oslo"}) for number in range(12)
    ]
    # One more fits if a minute ends during the test: the window slides.
    assert count_accepted(responses) in (6, 7)

    two.redis.stop()
    sides = both(two, make_agent(two, "without-redis", calls_per_minute=4).open())
    for side in sides:
        # Each process now counts separately.
        assert count_accepted(
            [side.post_call("get_forecast", {"city": "Oslo"}) for _ in range(8)]
        ) in (4, 5)
        assert side.search_names(query="forecast")
        assert json.loads(side.load(GROUP, ["get_forecast"]))["expanded"]
    two.redis.start()
    wait_for(lambda: two.readiness()["status"] == "ok", 30)
