"""The dispatcher of tools that only read: the server's claim, and the admin's word."""

import json

import pytest
from django.urls import reverse

from catalog.audit import SYSTEM
from catalog.models import AuditEntry, Tool
from catalog.tools.actions import save_custom_tool, set_read_only
from sessions_app.models import Agent
from sessions_app.rules.agent_rules import subject_of
from sessions_app.sessions.scope import scope_of_agent
from tests.support.agent_client import make_agent_client, make_group
from tests.support.asgi_requests import send_api
from tests.support.factories import tool_object


@pytest.fixture
def session(db):
    tools = [
        save_custom_tool(tool_object(name, annotations=annotations), actor=SYSTEM)
        for name, annotations in (("look", {"readOnlyHint": True}), ("write", {}))
    ]
    make_group("own", *tools)
    return make_agent_client("scout", mode="deferred").open()


def overrule(name, value):
    set_read_only(Tool.objects.get(public_name=name), value, actor=SYSTEM)


@pytest.mark.parametrize(
    ("name", "word", "runs"),
    [
        ("look", "claimed", True),
        ("look", "no", False),
        ("write", "claimed", False),
        ("write", "yes", True),
    ],
)
def test_only_tools_that_only_read_are_run(session, name, word, runs):
    overrule(name, word)
    answer = session.post("/call", {"tool_name": name, "arguments": {}, "read_only": True})
    assert (answer["state"] == "client") is runs
    if not runs:
        assert answer["state"] == "refused"
        assert "deferred_tool_call" in answer["content"][0]["text"]
    assert session.post("/call", {"tool_name": name, "arguments": {}})["state"] == "client"


def test_rules_follow_the_admins_word(session):
    overrule("look", "no")
    scope = scope_of_agent(Agent.objects.get())
    assert subject_of(scope.tools["look"], {}).annotations["readOnlyHint"] is False


def test_page_and_api_overrule_a_claim(session, client, admin, operator, admin_token):
    url = reverse("tool-read-only", args=["look"])
    client.force_login(operator)
    assert client.post(url, {"read_only": "no"}).status_code == 403
    client.force_login(admin)
    assert client.post(url, {"read_only": "perhaps"}).status_code == 422
    client.post(url, {"read_only": "no"})
    assert 'value="no" selected' in client.get(reverse("tool", args=["look"])).text

    headers = {"Authorization": f"Bearer {admin_token}"}
    for value, status in (("yes", 200), ("perhaps", 422)):
        body = json.dumps({"read_only": value}).encode()
        response = send_api("PATCH", "/api/v1/tools/look", body, headers)
        assert response.status_code == status
    assert Tool.objects.get(public_name="look").read_only == "yes"
    assert AuditEntry.objects.filter(verb="tool.read_only").count() == 2
