"""Rule pages: roles, order, presets, form with conditions, test, a rule from a recorded call."""

import html
import json
import re

import pytest
from django.urls import reverse

from catalog.models import AuditEntry
from sessions_app.models import Call, Rule
from sessions_app.rules.forms import RuleForm, read_value, show_value
from sessions_app.rules.presets import PRESETS
from sessions_app.urls import rule_pages
from tests.sessions_app.rules.test_api import Api
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.support.agent_client import add_tools, make_agent_client
from tests.support.factories import make_call, make_session, make_tool

# route: (method, status for operators, status for admins)
ROUTES = {
    "rules": ("get", 200, 200),
    "rule-export": ("get", 200, 200),
    "rule-add": ("get", 403, 200),
    "rule-preset": ("post", 403, 302),
    "rule": ("get", 200, 200),
    "rule-move": ("post", 403, 302),
    "rule-enable": ("post", 403, 302),
    "rule-disable": ("post", 403, 302),
    "rule-delete": ("post", 403, 302),
}
HOSTILE = '"><script>alert(1)</script>'


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    return client


def text_of(response):
    stripped = re.sub(r"<[^>]*>", " ", response.content.decode())
    return " ".join(html.unescape(stripped).split())


def fields(form):
    """Return the fields of a form as a browser would send them."""
    values = {
        bound.html_name: bound.value() for bound in form if bound.value() not in (None, False)
    }
    for name in ("path", "op", "value"):
        values[f"condition_{name}"] = [getattr(row, name) for row in form.shown_rows]
    return values


def test_the_table_of_routes_is_complete():
    assert {page.name for page in rule_pages} == ROUTES.keys()


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("who", ["operator", "admin"])
def test_operators_read_and_admins_write(name, who, client, request):
    client.force_login(
        request.getfixturevalue(who), backend="django.contrib.auth.backends.ModelBackend"
    )
    add_rule("house", effect="allow", tools=["x*"])
    method, *statuses = ROUTES[name]
    takes_name = name not in ("rules", "rule-export", "rule-add", "rule-preset")
    path = reverse(name, args=["house"] if takes_name else [])
    assert getattr(client, method)(path).status_code == statuses[who == "admin"]
    if name in ("rule", "rule-add"):
        assert client.post(path, {}).status_code == (422 if who == "admin" else 403)


def test_exported_rules_are_accepted_by_the_api(signed_in, admin_token):
    for slug in ("shop", "mail"):
        add_tools(slug, "send")
    add_rule("two", effect="deny", reason="Why ü", servers=["shop"], first_use=True)
    add_rule("one", arguments=[{"path": "/to/*", "op": "eq", "value": "x"}], after=["mail"])
    exported = signed_in.get("/rules.json")
    assert exported["Content-Disposition"] == 'attachment; filename="rules.json"'
    assert AuditEntry.objects.filter(verb="rule.export").count() == 1
    Rule.objects.all().delete()
    for body in exported.json()["rules"]:
        assert Api(admin_token)("POST", body=body)[0] == 201

    assert signed_in.get("/rules.json").json() == exported.json()
    assert [rule["name"] for rule in exported.json()["rules"]] == ["two", "one"]


def test_rules_are_moved_disabled_and_deleted(signed_in):
    for name in ("one", "two", "three"):
        add_rule(name)
    page = signed_in.post("/rules/three/move", {"act": "up"}, follow=True)
    assert [rule.name for rule in Rule.objects.all()] == ["one", "three", "two"]
    focused = re.search(r'value="up"\s+autofocus', page.content.decode())
    assert focused is not None  # on the button that was pressed
    signed_in.post("/rules/one/move", {"act": "down"})
    assert [rule.name for rule in Rule.objects.all()] == ["three", "one", "two"]
    assert "Disabled the rule one." in text_of(signed_in.post("/rules/one/disable", follow=True))
    assert Rule.objects.get(name="one").enabled is False
    signed_in.post("/rules/one/delete")
    assert [rule.position for rule in Rule.objects.all()] == [0, 1]
    assert set(AuditEntry.objects.values_list("verb", flat=True)) == {
        "rule.reorder",
        "rule.update",
        "rule.delete",
    }


@pytest.mark.parametrize("key", PRESETS)
def test_a_preset_is_switched_on_with_one_click(key, signed_in, session):
    answers = session.call("github__get_file", {"what": "x"}).status
    body = {"preset": key, "server": "github"}
    page = signed_in.post("/rules/new/preset", body, follow=True)
    rule = Rule.objects.get()
    assert f"Created the rule {rule.name}." in text_of(page)
    assert rule.enabled
    assert rule.reason
    answer = session.call("slack__post_message", {"what": "x"}).json
    outcome = answer["error"]["code"] if answer.get("error") else answer["state"]
    expected = {"leaving": "stopping", "not-read-only": "denied_by_rule"}
    assert outcome == expected.get(key, "held")
    assert answers == 503
    again = signed_in.post("/rules/new/preset", body, follow=True)
    assert "already exists" in text_of(again)


def test_the_leaving_preset_names_the_chosen_server(signed_in, github, slack):
    signed_in.post("/rules/new/preset", {"preset": "leaving", "server": "slack"})
    assert Rule.objects.get().match == {"after": ["slack"], "not_servers": ["slack"]}
    page = signed_in.post("/rules/new/preset", {"preset": "leaving", "server": "no"}, follow=True)
    assert "there is no server 'no'" in text_of(page)


def test_an_unknown_preset_is_reported(signed_in):
    page = signed_in.post("/rules/new/preset", {"preset": "x"}, follow=True)
    assert "There is no such preset." in text_of(page)


FULL = {
    "name": "Mine",
    "effect": "hold",
    "reason": "Because.",
    "approver": "operator",
    "enabled": "on",
    "tools": "github__*\n\nslack__post_message",
    "servers": ["github"],
    "agents": ["scout"],
    "readOnlyHint": "false",
    "origin": "any",
    "read_from": ["slack"],
    "after_scope": "agent",
    "condition_path": ["/n", "", "/text", "/gone", "/list", "/digits"],
    "condition_op": ["gt", "eq", "matches", "missing", "in", "eq"],
    "condition_value": ["5", "", "^[0-9]$", "", '["a", 1]', '"5"'],
}


def test_a_rule_is_written_in_the_form_and_read_back(signed_in, scout):
    assert signed_in.post("/rules/new", FULL).status_code == 302
    rule = Rule.objects.get()
    assert rule.match == {
        "tools": ["github__*", "slack__post_message"],
        "servers": ["github"],
        "agents": [{"id": scout.agent.pk, "name": "scout"}],
        "annotations": {"readOnlyHint": False},
        "after": ["slack"],
        "after_scope": "agent",
        "arguments": [
            {"path": "/n", "op": "gt", "value": 5},
            {"path": "/text", "op": "matches", "value": "^[0-9]$"},
            {"path": "/gone", "op": "missing"},
            {"path": "/list", "op": "in", "value": ["a", 1]},
            {"path": "/digits", "op": "eq", "value": "5"},
        ],
    }
    shown = signed_in.get("/rules/Mine").context["form"]
    again = signed_in.post("/rules/Mine", {**fields(shown), "reason": "Other."})
    assert again.status_code == 302
    changed = Rule.objects.get()
    assert (changed.match, changed.reason) == (rule.match, "Other.")


def test_a_rule_for_calls_of_scripts_is_written_in_the_form_and_shown(signed_in, scout):
    body = {"name": "Scripts", "effect": "hold", "enabled": "on", "origin": "script"}
    assert signed_in.post("/rules/new", FULL | body).status_code == 302
    assert Rule.objects.get().match["origin"] == "script"
    page = signed_in.get("/rules/Scripts").content.decode()
    assert '<option value="script" selected>Called by a script</option>' in page


@pytest.mark.parametrize("value", [5, 5.5, "5", "text", 'say "x"', True, None, [1], {"a": "b"}, ""])
def test_values_survive_the_form(value):
    assert read_value("eq", show_value("eq", value)) == value


def test_what_is_wrong_is_shown_at_the_field(signed_in, scout):
    wrong = {
        **FULL,
        "agents": ["nobody"],
        "condition_path": ["/n", "n"],
        "condition_op": ["matches", "eq"],
        "condition_value": ["(", "1"],
    }
    page = signed_in.post("/rules/new", wrong)
    assert page.status_code == 422
    assert not Rule.objects.exists()
    text = text_of(page)
    assert "There is no agent 'nobody'." in text
    assert "Condition 1: Not a regular expression of RE2" in text
    assert "Condition 2: A path starts with" in text


def test_more_rows_are_added_without_saving(signed_in, scout):
    page = signed_in.post("/rules/new", {**FULL, "act": "more"})
    assert page.status_code == 200
    assert not Rule.objects.exists()
    form = page.context["form"]
    assert [row.path for row in form.shown_rows][-3:] == ["/digits", "", ""]


def test_a_rule_is_tested_before_it_is_saved(signed_in, scout):
    session = make_session(scout.agent)
    tool = make_tool(None, "wipe")
    make_call(session, tool, arguments={"n": 50})
    make_call(session, tool, arguments={"n": 1})
    body = {
        "name": "Big",
        "effect": "hold",
        "tools": "*__wipe",
        "condition_path": ["/n"],
        "condition_op": ["gt"],
        "condition_value": ["10"],
        "act": "test",
    }
    page = signed_in.post("/rules/new", body)
    assert not Rule.objects.exists()
    assert "Of 2 recorded calls, this rule alone would have held 1 and denied 0." in text_of(page)
    assert session.session_id in page.content.decode()


def test_a_rule_is_made_from_a_recorded_call(signed_in, session):
    session.call("github__get_file", {"what": "plan.txt"})
    call = Call.objects.get()
    link = f"/rules/new?call={call.call_id}"
    assert link in signed_in.get(f"/sessions/{session.id}").content.decode()
    form = signed_in.get(link).context["form"]
    assert form["tools"].value() == "github__get_file"
    assert [(row.path, row.op, row.value) for row in form.rows] == [("/what", "eq", "plan.txt")]
    assert signed_in.post("/rules/new", fields(form)).status_code == 302
    held = session.call("github__get_file", {"what": "plan.txt"})
    assert held["state"] == "held"
    other = session.call("github__get_file", {"what": "other.txt"})
    assert other["error"]["code"] == "stopping"
    assert signed_in.get("/rules/new?call=no").status_code == 404


def test_masked_and_long_arguments_make_no_conditions(signed_in, scout):
    arguments = {"password": "***", "body": "x" * 300, "a/b": 5, "list": [1]}
    call = make_call(make_session(scout.agent), make_tool(), arguments=json.dumps(arguments))
    form = signed_in.get(f"/rules/new?call={call.call_id}").context["form"]
    assert [(row.path, row.value) for row in form.rows] == [("/a~1b", "5")]


def test_hostile_text_is_escaped(signed_in):
    name = HOSTILE.replace("/", "|")
    rule = add_rule(name, reason=HOSTILE, tools=[HOSTILE], arguments=[
        {"path": f"/{HOSTILE}", "op": "eq", "value": HOSTILE}])  # fmt: skip
    for path in ("/rules", reverse("rule", args=[rule.name])):
        assert "<script>alert" not in signed_in.get(path).content.decode()


def test_deleted_names_stay_selected(signed_in, scout):
    add_rule(agents=[{"id": 999, "name": "gone"}], servers=["former"])
    form = signed_in.get("/rules/rule").context["form"]
    assert signed_in.post("/rules/rule", fields(form)).status_code == 302
    assert Rule.objects.get().match == {
        "agents": [{"id": 999, "name": "gone"}],
        "servers": ["former"],
    }


def test_an_empty_form_is_a_rule_for_every_call(db):
    from django.http import QueryDict

    add_tools("weather", "get")
    make_agent_client("other")
    form = RuleForm(QueryDict("name=All&effect=deny"))
    assert form.is_valid()
    assert form.rule is not None
    assert form.rule.match.model_dump(exclude_defaults=True) == {}
