"""docker-compose.yml: its contents, and each of its commands run as a real process."""

import asyncio
import time

import pytest
from mcp import Client

from tests.support.installation import ROOT, free_port
from tests.support.production import (
    COMPOSE,
    REQUIRED_VARIABLES,
    SERVICES,
    interpolate,
    make_secrets,
)
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

OURS = ("migrate", "web", "worker", "beat", "listener")
real_parts = [pytest.mark.needs_redis, pytest.mark.needs_postgres, pytest.mark.timeout(240)]


def test_it_has_every_service():
    assert set(SERVICES) == {*OURS, "postgres", "redis"}
    assert set(COMPOSE["volumes"]) == {"postgres", "redis"}


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"migrate"}))
def test_every_long_running_service_has_a_health_check_and_restarts(name):
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] in {"CMD", "CMD-SHELL"}
    assert {"interval", "timeout", "retries"} <= check.keys()
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", ["web", "worker", "beat", "listener"])
def test_every_service_waits_for_its_dependencies(name):
    conditions = {
        service: entry["condition"] for service, entry in SERVICES[name]["depends_on"].items()
    }
    assert conditions == {
        "postgres": "service_healthy",
        "redis": "service_healthy",
        "migrate": "service_completed_successfully",
    }


@pytest.mark.parametrize("missing", REQUIRED_VARIABLES)
def test_no_service_starts_without_your_own_secrets(missing):
    variables = make_secrets()
    del variables[missing]
    texts = [
        str(text)
        for service in SERVICES.values()
        for text in service.get("environment", {}).values()
    ]
    with pytest.raises(KeyError, match=f"{missing} is not set"):
        [interpolate(text, variables) for text in texts]


def test_no_secret_is_in_the_file_or_in_the_image():
    image = (ROOT / "Dockerfile").read_text()
    assert "KEY" not in image
    assert "PASSWORD" not in image
    assert "\nUSER toolcrib\n" in image
    assert "--require-hashes" in image
    assert "MALLOC_ARENA_MAX=2" in image
    assert image.index("USER toolcrib") < image.index("\nCMD ")
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_by_default_only_this_machine_can_connect():
    (port,) = SERVICES["web"]["ports"]
    assert interpolate(port, {}) == "127.0.0.1:8000:8000"
    assert not any("ports" in SERVICES[name] for name in SERVICES if name != "web")


def call_upstream(url, tool, **arguments):
    async def call():
        async with Client(url, read_timeout_seconds=60) as client:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result

    asyncio.run(call())


def add(production, url, slug="weather"):
    body = {"name": slug, "slug": slug, "transport": "http", "url": url}
    status, response = production.api("POST", "/servers", body)
    assert status == 201, response


class TestProcesses:
    pytestmark = real_parts

    def test_a_change_of_a_server_passes_through_every_service(self, everything):
        with running_http("healthy") as url:
            add(everything, url)
            wait_for(
                lambda: "get_forecast" in everything.tool_names("weather"), 60, what="first sync"
            )
            wait_for(
                lambda: everything.api("GET", "/servers/weather")[1]["state"] == "connected", 60
            )
            # The worker may sync before the listener connects, and the listener's first list then
            # finds the first addition; from the second on it is the notification.
            for name in ("came_first", "came_later"):
                call_upstream(url, "add_tool", name=name)
                wait_for(
                    lambda name=name: name in everything.tool_names("weather"),
                    60,
                    what="the change, through listener, Redis and worker",
                )
            runs = everything.api("GET", "/servers/weather/sync-runs")[1]["items"]
            assert "list_changed" in {run["trigger"] for run in runs}

    def test_a_change_in_one_web_process_invalidates_the_other(self, everything):
        first, second = everything.web_process(0), everything.web_process(1)
        token = everything.token("admin")
        before = second.readiness()["revision"]
        body = {
            "name": "Nowhere",
            "transport": "http",
            "url": f"http://127.0.0.1:{free_port()}/mcp",
        }
        assert first.api("POST", "/servers", body, token=token)[0] == 201
        started = time.monotonic()
        wait_for(lambda: second.readiness()["revision"] > before, 20, every=0.01)
        print(f"invalidation took {time.monotonic() - started:.3f} s")  # noqa: T201

    def test_every_health_check_passes_only_while_its_service_works(self, everything):
        for name, process in everything.processes.items():
            service = name.partition("-")[0]
            wait_for(
                lambda service=service, process=process: (
                    not everything.health_error(service, process)
                ),
                60,
                what=f"{name} is healthy",
            )
        done = everything.run(
            *("python", "-m", "toolcrib.health", "beat"), TOOLCRIB_HEARTBEAT="/nowhere"
        )
        assert (done.returncode, done.stdout) == (1, "no heartbeat yet\n")
        done = everything.run(*("python", "-m", "toolcrib.health", "web"), PORT="1")
        assert done.returncode == 1
        assert "/livez does not respond" in done.stdout
