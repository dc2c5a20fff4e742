"""Secrets that an agent sends are on no page and in no download."""

import json
import logging

import pytest

from catalog.audit import SYSTEM
from catalog.tools.actions import save_custom_tool
from sessions_app.models import AgentSession, Call
from tests.support.agent_client import make_agent_client, make_group
from tests.support.every_page import page_requests
from tests.support.factories import make_run, tool_object
from tests.support.secrets import PLANTED
from tests.support.seeding import make_admin, seed
from toolcrib.config.log_formatters import OneLineFormatter

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(400)]


def find_secrets(text):
    return [planted.kind for planted in PLANTED if planted.secret in text]


def test_no_page_and_no_download_shows_a_planted_secret(client):
    examples = seed(tools=6, groups=2, calls=4, sessions=2)
    make_group("own", save_custom_tool(tool_object("note"), actor=SYSTEM))
    scout = make_agent_client(
        "planter", mode="deferred", calls_per_minute=1_000, cost_per_minute=9_999
    )
    session = scout.open(metadata={"all": [planted.value for planted in PLANTED]})
    for planted in PLANTED:
        text = json.dumps(planted.value)
        assert session.call("note", planted.value)["structured_content"] == planted.value
        session.call("note", text)
        session.call(text[:150])
        session.search(text)
    assert Call.objects.filter(session__session_id=session.id).count() == 3 * len(PLANTED)
    client.force_login(make_admin(), backend="django.contrib.auth.backends.ModelBackend")
    everything = json.dumps([planted.value for planted in PLANTED])
    run = make_run(
        AgentSession.objects.get(session_id=session.id),
        code=f"data = {everything}\nprint(data)",
        input=everything,
        result=everything,
        logs=everything,
    )
    examples |= {"session_id": session.id, "public_name": "note", "name": "planter"}
    examples["run_id"] = run.run_id

    shown = {page.label: page.send(client) for page in page_requests(examples)}
    for step in range(1, 5 * len(PLANTED)):
        shown[f"step {step}"] = client.get(f"/sessions/{session.id}?step={step}")

    pages = {label: response for label, response in shown.items() if response.status_code == 200}
    assert len(pages) > 4 * len(PLANTED)
    assert "***" in pages["session-json"].text
    assert "***" in pages["script-run"].text
    found = {label: find_secrets(_text(response)) for label, response in pages.items()}
    assert {label: kinds for label, kinds in found.items() if kinds} == {}


def _text(response):
    """Return the text of a page, or of a download that is streamed."""
    if response.streaming:
        return b"".join(response.streaming_content).decode()
    return response.text


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.kind)
def test_the_log_is_redacted(planted):
    text = json.dumps(planted.value)
    record = logging.LogRecord("servers", logging.ERROR, "", 0, "Failed: %s", (text,), None)

    assert planted.secret not in OneLineFormatter().format(record)
