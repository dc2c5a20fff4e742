"""What is stored of a call: the stricter setting of tool and agent, by page and by API."""

import json

import pytest
from django.urls import reverse

from catalog import cache, redaction_patterns
from catalog.audit import SYSTEM
from catalog.models import AuditEntry, Tool
from catalog.tools.actions import save_custom_tool, set_payload_storage
from sessions_app.agents.actions import change
from sessions_app.models import Call, CallAnswer
from tests.support.agent_client import make_agent_client, make_group
from tests.support.asgi_requests import send_api
from tests.support.factories import tool_object
from toolcrib.lib.redaction.redactor import set_operator_patterns

ARGUMENTS = {"city": "Oslo", "password": "hunter2"}
MASKED = {"city": "Oslo", "password": "***"}


@pytest.fixture
def tool(db):
    tool = save_custom_tool(
        tool_object("forecast", inputSchema={"type": "object", "properties": {"city": {}}}),
        actor=SYSTEM,
    )
    make_group("own", tool)
    return tool


@pytest.fixture
def scout(tool):
    return make_agent_client("scout", mode="deferred")


def stored_payloads():
    """Return arguments and result of the newest call; None for what is not stored."""
    call = Call.objects.first()
    result = json.loads(call.result_copy)["structuredContent"] if call.result_copy else None
    return json.loads(call.arguments) if call.arguments else None, result


@pytest.mark.parametrize(
    ("of_tool", "of_agent", "stored"),
    [
        ("default", "default", MASKED),
        ("all", "default", ARGUMENTS),
        ("default", "all", ARGUMENTS),
        ("all", "masked", MASKED),
        ("masked", "all", MASKED),
        ("all", "all", ARGUMENTS),
        ("nothing", "all", None),
        ("all", "nothing", None),
        ("default", "nothing", None),
    ],
)
def test_the_stricter_setting_counts(tool, scout, of_tool, of_agent, stored):
    set_payload_storage(tool, of_tool, actor=SYSTEM)
    change(scout.agent, payload_storage=of_agent, actor=SYSTEM)

    answer = scout.open().call("forecast", ARGUMENTS)

    assert answer["structured_content"] == ARGUMENTS
    assert stored_payloads() == (stored, stored)


def test_a_change_applies_to_the_next_call_of_an_open_session(tool, scout):
    session = scout.open()
    session.call("forecast", ARGUMENTS)
    set_payload_storage(tool, "nothing", actor=SYSTEM)
    session.call("forecast", ARGUMENTS)

    assert stored_payloads() == (None, None)


def test_storing_nothing_also_leaves_out_messages_that_quote_arguments(tool, scout):
    schema = {"type": "object", "properties": {"city": {"type": "integer"}}}
    save_custom_tool(tool_object("forecast", inputSchema=schema), actor=SYSTEM, tool=tool)
    set_payload_storage(tool, "nothing", actor=SYSTEM)

    answer = scout.open().call("forecast", {"city": "Oslo"})

    assert '(sent: "Oslo")' in answer["error"]["message"]
    call = Call.objects.get()
    assert (call.error_code, call.error_message) == ("invalid_arguments", "")
    assert stored_payloads() == (None, None)


def test_the_answer_of_an_idempotency_key_is_replayed_whole_whatever_is_stored(tool, scout):
    set_payload_storage(tool, "nothing", actor=SYSTEM)
    session = scout.open()
    first = session.call("forecast", ARGUMENTS, Idempotency_Key="one")

    assert session.call("forecast", ARGUMENTS, Idempotency_Key="one").json == first.json
    assert CallAnswer.objects.get().body == first.bytes.decode()
    assert Call.objects.count() == 1


def test_the_api_sets_the_storage_of_a_tool_and_an_agent(tool, scout, admin_token):
    def patch(path, body):
        headers = {"Authorization": f"Bearer {admin_token}"}
        return send_api("PATCH", f"/api/v1{path}", json.dumps(body).encode(), headers)

    for path in ("/tools/forecast", "/agents/scout"):
        response = patch(path, {"payload_storage": "nothing"})
        assert json.loads(response.content)["payload_storage"] == "nothing"
        assert patch(path, {"payload_storage": "some"}).status_code == 422
    assert AuditEntry.objects.filter(verb="tool.storage").count() == 1


def test_the_page_of_a_tool_sets_its_storage(tool, client, admin, operator):
    url = reverse("tool-storage", args=["forecast"])
    client.force_login(operator)
    assert client.post(url, {"storage": "nothing"}).status_code == 403
    client.force_login(admin)
    assert client.post(url, {"storage": "some"}).status_code == 422
    client.post(url, {"storage": "nothing"})

    assert Tool.objects.get().payload_storage == "nothing"
    assert 'value="nothing" selected' in client.get(reverse("tool", args=["forecast"])).text


def test_a_call_without_payloads_says_so_on_its_page(tool, scout, page_of, operator):
    set_payload_storage(tool, "nothing", actor=SYSTEM)
    session = scout.open()
    session.call("forecast", ARGUMENTS)

    page = page_of(operator, f"/sessions/{session.id}?step=2")
    assert "Arguments and result are not stored" in page.text


# --- Patterns of operators ------------------------------------------------------------------------


@pytest.fixture
def patterns():
    yield redaction_patterns
    set_operator_patterns([])


def test_an_operators_pattern_is_masked_from_the_next_call_on(tool, scout, patterns):
    session = scout.open()
    patterns.change([r"\bACME-\d{4}\b"], actor=SYSTEM)
    session.call("forecast", {"city": "ACME-1234"})

    assert stored_payloads() == ({"city": "***"}, {"city": "***"})
    patterns.change([], actor=SYSTEM)
    session.call("forecast", {"city": "ACME-1234"})
    assert stored_payloads() == ({"city": "ACME-1234"}, {"city": "ACME-1234"})


def test_the_page_stores_valid_patterns_and_explains_bad_ones(client, admin, operator, patterns):
    url = reverse("settings-masking")
    client.force_login(operator)
    assert client.get(url).status_code == 200
    assert client.post(url, {"patterns": "x"}).status_code == 403
    client.force_login(admin)

    bad = client.post(url, {"patterns": "ok\n(unclosed"})
    assert bad.status_code == 422
    assert "The pattern (unclosed is not a valid regular expression" in bad.text
    assert redaction_patterns.read() == []

    assert client.post(url, {"patterns": "ok\n\n ACME-\\d+ \n"}).status_code == 302
    assert redaction_patterns.read() == ["ok", r"ACME-\d+"]
    assert "ACME-\\d+" in client.get(url).text
    cache.current()
    assert client.post(url, {"patterns": ""}).status_code == 302
    assert redaction_patterns.read() == []


def test_the_api_replaces_the_patterns_and_explains_bad_ones(client, patterns, admin_token):
    def put(*patterns):
        return client.put(
            "/api/v1/settings/masking",
            {"patterns": list(patterns)},
            content_type="application/json",
            headers={"authorization": f"Bearer {admin_token}"},
        )

    bad = put("(unclosed")
    assert bad.status_code == 422
    assert "(unclosed" in bad.json()["error"]["message"]

    assert put(r"ACME-\d+").json() == {"patterns": [r"ACME-\d+"]}
    assert redaction_patterns.read() == [r"ACME-\d+"]
