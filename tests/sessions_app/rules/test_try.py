"""A person's trial of a tool: `hold` asks for a second press, `deny` refuses."""

import json

import pytest

from sessions_app.models import Call
from tests.sessions_app.rules.test_dispatch import add_rule, counting
from tests.support.asgi_requests import send_api

__all__ = ["counting"]


@pytest.fixture
def press(client, admin, counting):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    return lambda **fields: client.post("/tools/count/try", {"arguments": '{"n": 5}', **fields})


def test_a_held_trial_asks_for_a_second_press(press):
    add_rule("Careful", effect="hold", reason="It counts.")
    first = press()
    assert "The rule “Careful” asks for a confirmation. It counts." in first.content.decode()
    assert not Call.objects.exists()
    second = press(seen=first.context["confirmation"])
    assert second.context["result"]["state"] == "client"
    assert Call.objects.get().path == "try"


def test_a_confirmation_is_for_the_same_arguments(press):
    add_rule(effect="hold")
    seen = press().context["confirmation"]
    other = press(arguments='{"n": 6}', seen=seen)
    assert other.context["confirmation"] != seen
    assert not Call.objects.exists()


def test_a_denied_trial_is_refused_even_if_confirmed(press):
    add_rule("Ask", effect="hold")
    add_rule("Never", reason="Not by anyone.")
    page = press(seen=press().context["confirmation"])
    assert page.context["result"]["error"]["code"] == "denied_by_rule"
    assert "Not by anyone." in page.content.decode()


def test_rules_for_agents_flow_and_first_use_do_not_concern_people(press, scout):
    add_rule("agent", agents=[{"id": scout.agent.pk, "name": "scout"}])
    add_rule("flow", after=["github"])
    add_rule("first", first_use=True)
    assert press().context["result"]["state"] == "client"


def test_the_api_asks_for_a_confirmation_too(admin_token, counting):
    add_rule(effect="hold")

    def send(**body):
        headers = {"Authorization": f"Bearer {admin_token}"}
        data = json.dumps({"arguments": {"n": 5}, **body}).encode()
        response = send_api("POST", "/api/v1/tools/count/try", data, headers)
        return response.status_code, json.loads(response.content)

    status, answer = send()
    assert (status, answer["error"]["code"]) == (409, "confirmation_required")
    status, answer = send(confirm=True)
    assert (status, answer["state"]) == (200, "client")
