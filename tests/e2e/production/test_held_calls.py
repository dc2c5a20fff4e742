"""Held calls with two web processes and one PostgreSQL: decided twice at once, executed once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.agents import make_agent
from tests.support.production import Production
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]
RULE = {
    "name": "Ask first",
    "effect": "hold",
    "match": {"tools": ["executions__stamp"]},
}
CALLS = 20


def at_url(production: Production, url: str) -> Production:
    """Return the deployment as it is seen through one of its web processes."""
    other = object.__new__(Production)
    other.__dict__.update(production.__dict__, url=url)
    return other


def test_calls_allowed_twice_at_once_in_two_processes_run_once(production, tmp_path):
    journal = tmp_path / "journal"
    production.start_all("web", "web", "worker")
    with (
        running_http("counting", "--journal", str(journal)) as upstream,
        ThreadPoolExecutor(8) as pool,
    ):
        register(production, "executions", upstream)
        assert production.api("POST", "/rules", RULE)[0] == 201
        session = make_agent(production, "careful").open(mode="deferred")
        held = [session.call("stamp", {"paper": f"paper-{n}"})["call_id"] for n in range(CALLS)]
        operator = production.token("operator")
        sides = [at_url(production, url) for url in production.urls]

        def decide(call_id, side):
            body = {"decision": "allow"}
            return side.api("POST", f"/calls/{call_id}/decision", body, operator)[0]

        jobs = [(call_id, side) for call_id in held for side in sides]
        statuses = list(pool.map(lambda job: decide(*job), jobs))
        assert sorted(statuses) == [200] * CALLS + [409] * CALLS

        def result(call_id):
            status, body = sides[1].api("GET", f"/calls/{call_id}?wait=20", token=session.agent.key)
            return status == 200 and body["state"] == "succeeded"

        assert all(pool.map(result, held))
        lines = journal.read_text().splitlines()
        stamps = [line for line in lines if line.startswith("stamp ")]
        assert sorted(stamps) == sorted(f"stamp paper-{number}" for number in range(CALLS))

        # A grant's count is kept by both processes together.
        grant = {"decision": "allow", "scope": "session", "grant": {"count": 5}}
        first = session.call("stamp", {"paper": "granted"})["call_id"]
        assert production.api("POST", f"/calls/{first}/decision", grant, operator)[0] == 200
        both = [session.at_url(url) for url in production.urls]
        made = pool.map(
            lambda n: both[n % 2].call("stamp", {"paper": f"granted-{n}"})["state"], range(16)
        )
        states = list(made)
        assert (states.count("succeeded"), states.count("held")) == (5, 11)
        wait_for(
            lambda: len(journal.read_text().splitlines()) >= CALLS + 6, 60, what="all have run"
        )
