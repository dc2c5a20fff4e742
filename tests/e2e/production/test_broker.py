"""Redis as the broker: hostile and stale messages, outages, and workers that are killed."""

import base64
import json
import pickle
import uuid

import psycopg
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


def message(body: bytes, content_type: str, task: str = "servers.tasks.sync_server") -> str:
    """Return a task message as Celery stores it in a Redis list."""
    mark = str(uuid.uuid4())
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": content_type,
            "headers": {"lang": "py", "task": task, "id": mark, "root_id": mark, "retries": 0},
            "properties": {
                "correlation_id": mark,
                "delivery_mode": 2,
                "delivery_info": {"exchange": "sync", "routing_key": "sync"},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": mark,
            },
        }
    )


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_hostile_and_stale_messages_have_no_effect_and_the_worker_continues(
    everything, shared_redis, tmp_path
):
    (worker,) = (
        process for name, process in everything.processes.items() if name.startswith("worker")
    )
    fired = tmp_path / "fired"
    with shared_redis.client() as client:
        bomb = pickle.dumps(([Bomb(fired)], {}, {}))
        client.lpush("sync", message(bomb, "application/x-python-serialize"))
        client.lpush("sync", message(b"[[999999999], {}, {}]", "application/json"))
        client.lpush("sync", message(b'[["weather"], {}, {}]', "application/json"))
        client.lpush("sync", message(b"[[], {}, {}]", "application/json", task="os.system"))
    wait_for(lambda: "untrusted content of type pickle" in worker.log, 60)
    wait_for(lambda: "unregistered task of type 'os.system'" in worker.log, 60)

    with running_http("healthy") as url:
        add(everything, url, "afterwards")
        wait_for(lambda: everything.tool_names("afterwards"), 60, what="the worker still syncs")
    assert worker.running
    assert not fired.exists()


def test_without_redis_pages_and_api_work_and_the_sync_runs_after_recovery(
    database_url, own_redis, tmp_path
):
    production = Production(database_url, own_redis.url, tmp_path)
    try:
        with running_http("healthy") as url:
            production.start_all("web", "worker", "beat")
            add(production, url, "before")
            wait_for(lambda: production.tool_names("before"), 60)
            assert production.readiness()["status"] == "ok"

            own_redis.stop()
            wait_for(lambda: production.readiness()["status"] == "degraded", 30)
            assert production.get("/readyz")[0] == 200
            assert production.get("/sign-in")[0] == 200
            add(production, url, "during")
            assert production.api("POST", "/servers/before/sync")[0] == 202
            assert production.api("GET", "/servers")[0] == 200
            assert production.tool_names("during") == []

            own_redis.start()
            wait_for(lambda: production.readiness()["status"] == "ok", 30)
            wait_for(
                lambda: production.tool_names("during"),
                90,
                what="the sync queued during the outage",
            )
    finally:
        production.stop()
        print(production.log)  # noqa: T201 (pytest prints it if the test fails)


def test_a_sync_interrupted_by_kill_9_is_restarted_and_every_service_stops_on_sigterm(production):
    web, worker = production.start_all("web", "worker")
    with running_http("raw_http") as url:
        add(production, f"{url}/list/hang", "slow")
        wait_for(lambda: runs(production), 60, what="the sync runs")
        worker.kill()
        # The lease would expire by itself after 30 s; the test does not wait for that.
        with psycopg.connect(production.env["DATABASE_URL"]) as connection:
            connection.execute(
                "UPDATE servers_server SET sync_lease_until = now() - '1s'::interval"
            )
        others = production.start_all("beat", "listener", "worker")
        wait_for(lambda: len(runs(production)) > 1, 60, what="a second run")
        cut_off = runs(production)[-1]
    assert (cut_off["outcome"], cut_off["code"]) == ("failed", "interrupted")
    for part in (web, *others):
        part.stop(seconds=60)
        assert part.code == 0, part.log


def runs(production):
    return production.api("GET", "/servers/slow/sync-runs")[1]["items"]
