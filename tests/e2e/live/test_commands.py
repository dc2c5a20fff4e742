"""Management commands with a running installation, and on-demand servers."""

import json

import pytest

from tests.support.servers import list_sync_runs, register
from tests.support.upstreams.running import ROOT, running_http, stdio_argv
from tests.support.waiting import wait_for


def test_a_sync_started_by_a_command_is_run_by_the_running_installation(toolcrib):
    with running_http("healthy") as url:
        register(toolcrib, "beside", url)
        before = len(list_sync_runs(toolcrib, "beside"))
        assert toolcrib.command("sync", "beside").returncode == 0
        # Without the 30 s timeout of a message in a queue without a consumer.
        wait_for(lambda: len(list_sync_runs(toolcrib, "beside")) > before, 15)
        toolcrib.api("DELETE", "/servers/beside")


@pytest.mark.parametrize(
    "change", [{"connection_policy": "on_demand"}, {"isolation": "per_session"}]
)
def test_a_server_that_is_not_kept_connected_is_synced(toolcrib, change):
    command, *args = stdio_argv("healthy")
    body = {"name": "visited", "slug": "visited", "transport": "stdio", "command": command}
    body |= {"args": args, "cwd": str(ROOT), "confirm_argv": [command, *args]}
    assert toolcrib.api("POST", "/servers", body)[0] == 201
    assert toolcrib.api("PATCH", "/servers/visited", change)[0] == 200
    wait_for(
        lambda: (
            list_sync_runs(toolcrib, "visited")
            and list_sync_runs(toolcrib, "visited")[0]["finished_at"]
        ),
        30,
    )
    for _ in range(3):
        before = len(list_sync_runs(toolcrib, "visited"))
        toolcrib.api("POST", "/servers/visited/sync")
        wait_for(lambda before=before: len(list_sync_runs(toolcrib, "visited")) > before, 30)
        wait_for(lambda: list_sync_runs(toolcrib, "visited")[0]["finished_at"], 30)
        assert list_sync_runs(toolcrib, "visited")[0]["outcome"] == "ok"
    toolcrib.api("DELETE", "/servers/visited")


def test_a_secret_in_a_url_sent_to_the_api_is_moved_to_a_variable(toolcrib):
    secret = "sk-4f9d8a7c6b5e4d3c2b1a0f9e8d7c6b5a"
    with running_http("raw_http") as url:
        body = {"name": "keyed", "slug": "keyed", "transport": "http"}
        status, body = toolcrib.api(
            "POST", "/servers", {**body, "url": f"{url}/tools?api_key={secret}"}
        )
        assert status == 201
        responses = [body, *(toolcrib.api("GET", path)[1] for path in ("/servers/keyed", "/audit"))]
        assert secret not in json.dumps(responses)
        assert body["url"].endswith("?api_key=${KEYED_API_KEY}")
        wait_for(lambda: toolcrib.api("GET", "/servers/keyed")[1]["last_synced_at"], 30)
        toolcrib.api("DELETE", "/servers/keyed")


def test_the_interactive_api_documentation_needs_no_other_host(toolcrib):
    status, page = toolcrib.get("/api/v1/docs")
    assert status == 200
    assert b"//cdn" not in page
    assert b"/static/ninja/swagger-ui-bundle.js" in page
    assert toolcrib.get("/static/ninja/swagger-ui-init.js")[0] == 200
    assert toolcrib.get("/api/v1/openapi.json", headers={"Host": "evil.test"})[0] == 421


@pytest.mark.parametrize("path", ["/sign-in", "/api/v1/servers", "/nowhere"])
def test_a_request_body_over_the_limit_is_rejected_while_it_is_received(toolcrib, path):
    status, body = toolcrib.get(path, method="POST", data=b"x" * 3_000_000)
    assert status == 413
    if path.startswith("/api/"):
        assert json.loads(body)["error"]["code"] == "too_large"
    else:
        assert body.decode().startswith("The request body exceeds ")
    assert toolcrib.get("/livez")[0] == 200
