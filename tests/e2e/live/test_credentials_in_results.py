"""Credentials that a server sends back reach nobody: not the agent, not the ledger, not a page."""

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
    """The slug of a server that sends its credentials back, reached in each way."""
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
def test_no_result_holds_a_credential_and_none_is_stored(toolcrib, echo, arguments, request):
    agent = make_agent(toolcrib, f"{echo}-{request.node.callspec.id}")
    session = agent.open(groups=[f"mcp:{echo}"])
    body = {"tool_name": f"{echo}__reveal", "arguments": arguments}
    answer = agent.send("POST", f"{session.path}/call", body, {"Idempotency-Key": "k1"})
    again = agent.send("POST", f"{session.path}/call", body, {"Idempotency-Key": "k1"})
    assert answer.json["is_error"] is bool(arguments.get("fail") or arguments.get("raise"))
    assert "***" in answer.body.decode()
    assert again.body == answer.body
    if not arguments.get("raise"):
        [image] = [item for item in answer.json["content"] if item["type"] == "image"]
        assert "***" not in image["data"]
        answer = json.dumps(
            {**answer.json, "content": [i for i in answer.json["content"] if i != image]}
        ).encode()
    else:
        answer = answer.body
    events = json.dumps(session.get("/events"))
    with sqlite3.connect(toolcrib.data_dir / "toolcrib.sqlite3") as database:
        kept = [
            *database.execute("SELECT result_copy, error_message FROM sessions_app_call"),
            *database.execute("SELECT body FROM sessions_app_callanswer"),
        ]
    for secret in SECRETS:
        assert secret not in answer.decode()
        assert secret not in events
        assert secret not in str(kept)
        assert secret not in toolcrib.log
