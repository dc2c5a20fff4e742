"""Commands beside a running installation, and servers it does not keep connected."""

import json

import pytest

from tests.support.servers import list_sync_runs, register
from tests.support.upstreams.running import ROOT, running_http, stdio_argv
from tests.support.waiting import wait_for


def test_a_sync_asked_for_by_command_is_run_by_the_server_beside_it(toolcrib):
    with running_http("healthy") as url:
        register(toolcrib, "beside", url)
        before = len(list_sync_runs(toolcrib, "beside"))
        assert toolcrib.command("sync", "beside").returncode == 0
        # Not after the half minute that a message into nobody's queue would cost.
        wait_for(lambda: len(list_sync_runs(toolcrib, "beside")) > before, 15)
        toolcrib.api("DELETE", "/servers/beside")


@pytest.mark.parametrize(
    "change", [{"connection_policy": "on_demand"}, {"isolation": "per_session"}]
)
def test_a_server_that_is_not_kept_connected_is_synced_all_the_same(toolcrib, change):
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


def test_a_secret_in_an_address_given_to_the_api_is_moved_out(toolcrib):
    secret = "sk-4f9d8a7c6b5e4d3c2b1a0f9e8d7c6b5a"
    with running_http("raw_http") as url:
        body = {"name": "keyed", "slug": "keyed", "transport": "http"}
        status, answer = toolcrib.api(
            "POST", "/servers", {**body, "url": f"{url}/tools?api_key={secret}"}
        )
        assert status == 201
        seen = [answer, *(toolcrib.api("GET", path)[1] for path in ("/servers/keyed", "/audit"))]
        assert secret not in json.dumps(seen)
        assert answer["url"].endswith("?api_key=${KEYED_API_KEY}")
        wait_for(lambda: toolcrib.api("GET", "/servers/keyed")[1]["last_synced_at"], 30)
        toolcrib.api("DELETE", "/servers/keyed")


def test_the_interactive_documents_need_no_other_host(toolcrib):
    status, page = toolcrib.get("/api/v1/docs")
    assert status == 200
    assert b"//cdn" not in page
    assert b"/static/ninja/swagger-ui-bundle.js" in page
    assert toolcrib.get("/static/ninja/swagger-ui-init.js")[0] == 200
    assert toolcrib.get("/api/v1/openapi.json", headers={"Host": "evil.test"})[0] == 400


@pytest.mark.parametrize("path", ["/sign-in", "/api/v1/servers", "/nowhere"])
def test_a_body_over_the_cap_is_refused_while_it_comes_in(toolcrib, path):
    status, answer = toolcrib.get(path, method="POST", data=b"x" * 3_000_000)
    assert status == 413
    if path.startswith("/api/"):
        assert json.loads(answer)["error"]["code"] == "too_large"
    else:
        assert answer.decode().startswith("The request body exceeds ")
    assert toolcrib.get("/livez")[0] == 200
