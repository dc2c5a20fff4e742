"""Search in production: the worker computes vectors, beat schedules golden query runs."""

import pytest

from tests.e2e.production.test_compose import add
from tests.support.production import Production
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]


@pytest.fixture
def embedding(database_url, shared_redis, tmp_path):
    """A deployment with web, worker, beat and the embedding model."""
    running = Production(
        database_url, shared_redis.create(), tmp_path, {"TOOLCRIB_EMBEDDINGS": "1"}
    )
    try:
        running.start_all("web", "worker", "beat")
        yield running
    finally:
        running.stop()
        print(running.log)  # noqa: T201 (pytest prints it if the test fails)


def strategy(production, query):
    status, body = production.api("GET", f"/search?query={query.replace(' ', '+')}")
    assert status == 200, body
    return body["answer"]["strategy"]


def runs(production):
    status, body = production.api("GET", "/search/golden/standing")
    assert status == 200, body
    return {run["revision"]: run["scores"] for run in body["runs"]}


def test_a_worker_computes_vectors_and_beat_runs_golden_queries_at_each_revision(embedding):
    with running_http("healthy") as url:
        add(embedding, url)
        wait_for(lambda: "get_forecast" in embedding.tool_names("weather"), 60)
        wait_for(lambda: strategy(embedding, "rain tomorrow") == "hybrid", 90, what="vectors")
        marked = {"query": "will it rain", "tools": ["weather__get_forecast"]}
        status, body = embedding.api("POST", "/search/golden", marked)
        assert status == 201, body
        before = set(runs(embedding))

        add(embedding, url, "other")
        wait_for(lambda: embedding.tool_names("other"), 60)
        wait_for(lambda: set(runs(embedding)) - before, 90, what="a run at the new revision")

    newest = runs(embedding)[max(runs(embedding))]
    assert newest["hybrid"]["queries"] == newest["bm25"]["queries"] == 1
