"""Credentials in results are masked for agents, in the ledger and on pages."""

import json
import sqlite3

import pytest

from tests.support.agents import make_agent
from tests.support.installation import ROOT
from tests.support.servers import last_synced_at, register
from tests.support.upstreams.running import running_http, stdio_argv
from tests.support.waiting import wait_for

TOKEN, KEY, PIN, ENV = "TOKSECRET_1234567890", "KEYSECRET_12345", "471199", "ENVSECRET_98765"
SECRETS = (TOKEN, KEY, PIN, ENV)


@pytest.fixture(scope="module", params=["modern", "handshake", "stdio"])
def echo(request, toolcrib):
    """The slug of a server that echoes its credentials, over each transport."""
    slug = f"echo-{request.param}"
    if request.param == "stdio":
        command, *args = stdio_argv("echoing")
        body = {
            "name": slug, "slug": slug, "transport": "stdio", "command": command, "args": args,
            "cwd": str(ROOT), "env": {"UPSTREAM_TOKEN": ENV}, "confirm_argv": [command, *args],
        }  # fmt: skip
        assert toolcrib.api("POST", "/servers", body)[0] == 201
        wait_for(lambda: last_synced_at(toolcrib, slug), 30, what=f"{slug} is synced")
        yield slug
        return
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Api-Key": KEY, "X-Pin": PIN}
    with running_http("echoing", *(["--legacy"] if request.param == "handshake" else [])) as url:
        register(toolcrib, slug, url, headers=headers)
        yield slug


@pytest.mark.parametrize(
    "arguments",
    [{}, {"fail": True}, {"raise": True}, {"large": 300_000}],
    ids=["success", "error", "refusal", "large"],
)
def test_no_result_contains_a_credential_and_none_is_stored(toolcrib, echo, arguments, request):
    agent = make_agent(toolcrib, f"{echo}-{request.node.callspec.id}")
    session = agent.open(groups=[f"mcp:{echo}"])
    body = {"tool_name": f"{echo}__reveal", "arguments": arguments}
    response = agent.send("POST", f"{session.path}/call", body, {"Idempotency-Key": "k1"})
    repeated = agent.send("POST", f"{session.path}/call", body, {"Idempotency-Key": "k1"})
    assert response.json["is_error"] is bool(arguments.get("fail") or arguments.get("raise"))
    assert "***" in response.body.decode()
    assert repeated.body == response.body
    if not arguments.get("raise"):
        [image] = [item for item in response.json["content"] if item["type"] == "image"]
        assert "***" not in image["data"]
        response = json.dumps(
            {**response.json, "content": [i for i in response.json["content"] if i != image]}
        ).encode()
    else:
        response = response.body
    events = json.dumps(session.get("/events"))
    with sqlite3.connect(toolcrib.data_dir / "toolcrib.sqlite3") as database:
        stored = [
            *database.execute("SELECT result_copy, error_message FROM sessions_app_call"),
            *database.execute("SELECT body FROM sessions_app_callanswer"),
        ]
    for secret in SECRETS:
        assert secret not in response.decode()
        assert secret not in events
        assert secret not in str(stored)
        assert secret not in toolcrib.log
