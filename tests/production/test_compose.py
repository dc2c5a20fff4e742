"""docker-compose.yml: what it says, and each of its commands run by hand as a real process."""

import asyncio
import time

import pytest
from mcp import Client

from tests.installation import ROOT
from tests.production.conftest import COMPOSE, NEEDED, SERVICES, filled, make_secrets
from tests.upstreams.running import running_http
from tests.waiting import wait_for

pytestmark = pytest.mark.xdist_group("production")

OURS = ("migrate", "web", "worker", "beat", "listener")
real_parts = [pytest.mark.needs_redis, pytest.mark.needs_postgres, pytest.mark.timeout(240)]


def test_it_has_every_part():
    assert set(SERVICES) == {*OURS, "postgres", "redis"}
    assert set(COMPOSE["volumes"]) == {"postgres", "redis"}


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"migrate"}))
def test_every_part_that_stays_has_a_health_check_and_restarts(name):
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] in {"CMD", "CMD-SHELL"}
    assert {"interval", "timeout", "retries"} <= check.keys()
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", ["web", "worker", "beat", "listener"])
def test_every_part_waits_for_what_it_needs(name):
    waits = {part: how["condition"] for part, how in SERVICES[name]["depends_on"].items()}
    assert waits == {
        "postgres": "service_healthy",
        "redis": "service_healthy",
        "migrate": "service_completed_successfully",
    }


@pytest.mark.parametrize("missing", NEEDED)
def test_nothing_starts_without_a_secret_of_your_own(missing):
    variables = make_secrets()
    del variables[missing]
    texts = [
        str(text)
        for service in SERVICES.values()
        for text in service.get("environment", {}).values()
    ]
    with pytest.raises(KeyError, match=f"{missing} is not set"):
        [filled(text, variables) for text in texts]


def test_no_secret_is_written_in_it_or_in_the_image():
    image = (ROOT / "Dockerfile").read_text()
    assert "KEY" not in image
    assert "PASSWORD" not in image
    assert "\nUSER toolcrib\n" in image
    assert "--require-hashes" in image
    assert image.index("USER toolcrib") < image.index("\nCMD ")
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_only_this_machine_can_reach_it_as_it_stands():
    (port,) = SERVICES["web"]["ports"]
    assert filled(port, {}) == "127.0.0.1:8000:8000"
    assert not any("ports" in SERVICES[name] for name in SERVICES if name != "web")


def ask(url, tool, **arguments):
    async def call():
        async with Client(url, read_timeout_seconds=60) as client:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result

    asyncio.run(call())


def add(production, url, slug="weather"):
    body = {"name": slug, "slug": slug, "transport": "http", "url": url}
    status, answer = production.api("POST", "/servers", body)
    assert status == 201, answer


class TestByHand:
    pytestmark = real_parts

    def test_a_change_travels_from_a_server_through_every_part(self, production):
        web = production.start("web")
        worker, beat, listener = map(production.start, ("worker", "beat", "listener"))
        with running_http("healthy") as url:
            add(production, url)
            wait_for(
                lambda: "get_forecast" in production.tool_names("weather"), 60, what="first sync"
            )
            wait_for(
                lambda: production.api("GET", "/servers/weather")[1]["state"] == "connected", 60
            )
            wait_for(lambda: "connected" in _states(production), 60)

            ask(url, "add_tool", name="came_later")
            wait_for(
                lambda: "came_later" in production.tool_names("weather"),
                60,
                what="the change, by listener, Redis and worker",
            )
            runs = production.api("GET", "/servers/weather/sync-runs")[1]["items"]
            assert "list_changed" in {run["trigger"] for run in runs}

            parts = {"web": web, "worker": worker, "beat": beat, "listener": listener}
            for name, process in parts.items():
                wait_for(
                    lambda name=name, process=process: not production.healthy(name, process),
                    60,
                    what=f"{name} is healthy",
                )
            # Nothing holds a secret in a task argument: messages carry ids only.
            for process in parts.values():
                seconds = process.stop()
                assert process.code == 0, process.log
                assert seconds < 30

    def test_a_change_in_one_web_process_is_known_to_the_other(self, production):
        production.start("web")
        production.start("web")
        first, second = production.at(0), production.at(1)
        token = production.token("admin")
        before = second.ready()["revision"]
        body = {"name": "Nowhere", "transport": "http", "url": "http://127.0.0.1:9/mcp"}
        assert first.api("POST", "/servers", body, token=token)[0] == 201
        began = time.monotonic()
        wait_for(lambda: second.ready()["revision"] > before, 20, every=0.01)
        print(f"invalidation took {time.monotonic() - began:.3f} s")  # noqa: T201

    def test_a_stopped_part_is_seen_as_unwell(self, production):
        production.start("web")
        worker = production.start("worker")
        wait_for(lambda: not production.healthy("worker", worker), 60)
        worker.stop()
        name = next(name for name, found in production.processes.items() if found is worker)
        (production.folder / name).unlink()
        assert production.healthy("worker", worker) == "no heartbeat yet\n"
        assert production.healthy("web", production.processes["web-0"]) == ""
        production.processes["web-0"].stop()
        assert "/livez does not answer" in production.healthy("web", worker)


def _states(production):
    return {server["state"] for server in production.api("GET", "/servers")[1]["items"]}
