"""REST API of rules: create, edit, order, delete, problems with paths, roles, audit."""

import json
from urllib.parse import quote

import pytest

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import AuditEntry, Group
from sessions_app.models import Agent, Rule
from sessions_app.rules.presets import PRESETS
from tests.support.asgi_requests import send_api

FULL = {
    "agents": ["scout"],
    "tools": ["*__create_*"],
    "servers": ["github"],
    "groups": ["mcp:github"],
    "annotations": {"readOnlyHint": False, "destructiveHint": True},
    "origin": "direct",
    "first_use": True,
    "arguments": [
        {"path": "/what", "op": "matches", "value": "^x"},
        {"path": "/what", "op": "exists"},
        {"path": "/a", "op": "eq", "value": {"b": None}},
    ],
    "after": ["slack"],
    "after_scope": "agent",
    "not_servers": ["slack"],
    "not_tools": ["*search*"],
}


class Api:
    def __init__(self, token):
        self.token = token

    def __call__(self, method, path="", body=None):
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}"}
        response = send_api(method, f"/api/v1/rules{path}", data, headers)
        self.headers = response.headers
        return response.status_code, json.loads(response.content or b"null")


@pytest.fixture
def api(admin_token):
    return Api(admin_token)


def create(api, name="rule", effect="deny", **match):
    status, body = api("POST", body={"name": name, "effect": effect, "match": match})
    assert status == 201, body
    return body


def names(api):
    return [rule["name"] for rule in api("GET")[1]["items"]]


def test_a_rule_is_created_read_changed_and_deleted(api, scout):
    status, body = api(
        "POST",
        body={
            "name": "No issues",
            "effect": "hold",
            "reason": "People write issues.",
            "match": FULL,
            "approver": "caller",
        },
    )
    assert status == 201
    assert api.headers["Location"] == "/api/v1/rules/No%20issues"
    assert body["match"] == FULL
    assert body == api("GET", "/No%20issues")[1]
    assert (body["effect"], body["enabled"], body["position"]) == ("hold", True, 0)
    status, edited = api("PATCH", "/No%20issues", {"effect": "deny", "enabled": False})
    assert (status, edited["effect"], edited["enabled"]) == (200, "deny", False)
    assert edited["match"] == FULL
    assert api("PATCH", "/No%20issues", {"match": {}})[1]["match"] == {}
    assert api("DELETE", "/No%20issues") == (204, None)
    assert api("GET", "/No%20issues")[0] == 404
    verbs = AuditEntry.objects.filter(verb__startswith="rule.").order_by("pk")
    assert [entry.verb for entry in verbs] == [
        "rule.create",
        "rule.update",
        "rule.update",
        "rule.delete",
    ]
    assert verbs[1].before == {"effect": "hold", "enabled": True}


@pytest.mark.parametrize("position", [-1, 501, 10**30, -(10**30), 1.5, True, "first"])
def test_an_impossible_position_is_rejected_and_one_past_the_end_is_the_last(api, position):
    create(api, "a")
    body = {"name": "b", "effect": "allow", "position": position}

    status, problem = api("POST", body=body)

    assert status == 422
    assert "position" in problem["error"]["message"]
    assert api("PATCH", "/a", {"position": position})[0] == 422
    assert names(api) == ["a"]
    assert api("POST", body=body | {"position": 500})[1]["position"] == 1
    assert api("PATCH", "/a", {"position": 500})[1]["position"] == 1
    assert names(api) == ["b", "a"]


def test_rules_are_ordered_and_listed_in_pages(api):
    for name in "abcd":
        create(api, name)
    assert names(api) == ["a", "b", "c", "d"]
    api("POST", body={"name": "first", "effect": "allow", "position": 0})
    assert names(api) == ["first", "a", "b", "c", "d"]
    assert api("POST", "/order", {"names": ["d", "c", "b", "a", "first"]})[0] == 200
    assert names(api) == ["d", "c", "b", "a", "first"]
    api("PATCH", "/first", {"position": 1})
    assert names(api) == ["d", "first", "c", "b", "a"]
    api("DELETE", "/d")
    assert [rule.position for rule in Rule.objects.all()] == [0, 1, 2, 3]
    page = api("GET", "?limit=3")[1]
    assert [rule["name"] for rule in page["items"]] == ["first", "c", "b"]
    rest = api("GET", f"?limit=3&cursor={page['next_cursor']}")[1]
    assert ([rule["name"] for rule in rest["items"]], rest["next_cursor"]) == (["a"], None)
    assert AuditEntry.objects.filter(verb="rule.reorder").count() == 2


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({"name": "", "effect": "deny"}, "name"),
        ({"name": "a/b", "effect": "deny"}, "name"),
        ({"name": "test", "effect": "deny"}, "name"),
        ({"name": "x", "effect": "ask"}, "effect"),
        ({"name": "x", "effect": "deny", "colour": "red"}, "colour"),
        ({"name": "x", "effect": "deny", "reason": "r" * 501}, "reason"),
        ({"name": "x", "effect": "deny", "approver": "agent"}, "approver"),
        ({"name": "x", "effect": "deny", "match": {"tool": ["x"]}}, "match.tool"),
        ({"name": "x", "effect": "deny", "match": {"agents": ["nobody"]}}, "match.agents.0"),
        ({"name": "x", "effect": "deny", "match": {"servers": ["no"]}}, "match.servers.0"),
        ({"name": "x", "effect": "deny", "match": {"not_servers": ["no"]}}, "match.not_servers.0"),
        ({"name": "x", "effect": "deny", "match": {"after": ["no"]}}, "match.after.0"),
        ({"name": "x", "effect": "deny", "match": {"groups": ["no"]}}, "match.groups.0"),
        ({"name": "x", "effect": "deny", "match": {"tools": [""]}}, "match.tools.0"),
        ({"name": "x", "effect": "deny", "match": {"annotations": {"x": True}}},
         "match.annotations.x"),
        ({"name": "x", "effect": "deny", "match": {"origin": "web"}}, "match.origin"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_rejected_with_the_path(api, body, at):
    status, answer = api("POST", body=body)
    assert status == 422
    assert [problem["at"] for problem in answer["error"]["details"]["problems"]] == [at]
    assert answer["error"]["message"].endswith(".")
    assert not Rule.objects.exists()


@pytest.mark.parametrize(
    ("condition", "field"),
    [
        ({"path": "what", "op": "eq", "value": 1}, "path"),
        ({"path": "/a", "op": "like", "value": 1}, "op"),
        ({"path": "/a", "op": "matches", "value": "(?<=x)"}, "value"),
        ({"path": "/a", "op": "matches", "value": "x" * 1001}, "value"),
        ({"path": "/a", "op": "in", "value": 1}, "value"),
        ({"path": "/a", "op": "gt"}, "value"),
        ({"path": "/a", "op": "eq", "values": 1}, "values"),
    ],
)
def test_a_wrong_condition_is_rejected_with_the_path(api, condition, field):
    body = {"name": "x", "effect": "deny", "match": {"arguments": [condition]}}
    status, answer = api("POST", body=body)
    assert status == 422
    at = [problem["at"] for problem in answer["error"]["details"]["problems"]]
    assert at == [f"match.arguments.0.{field}"]


def test_a_name_is_taken_once(api):
    create(api, "one")
    create(api, "two")
    assert api("POST", body={"name": "one", "effect": "deny"})[0] == 409
    assert api("PATCH", "/two", {"name": "one"})[0] == 409
    assert api("PATCH", "/two", {"name": "three"})[1]["name"] == "three"


@pytest.mark.parametrize("wrong", [["a"], ["a", "b", "c"], ["a", "a", "b"]])
def test_an_order_names_every_rule_once(api, wrong):
    create(api, "a")
    create(api, "b")
    assert api("POST", "/order", {"names": wrong})[0] == 422
    assert names(api) == ["a", "b"]


def test_a_rule_follows_the_agents_and_groups_that_it_names(api, scout, session):
    create(api, agents=["scout"], groups=["mcp:github"])
    Agent.objects.update(name="ranger")
    group = Group.objects.get(group_id="mcp:github")
    group_actions.edit(group, actor=SYSTEM, group_id="mcp:hub")
    match = api("GET", "/rule")[1]["match"]
    assert match == {"agents": ["ranger"], "groups": ["mcp:hub"]}
    answer = session.call("github__get_file", {"what": "x"})
    assert answer["error"]["code"] == "denied_by_rule"
    Agent.objects.all().delete()
    assert api("GET", "/rule")[1]["match"]["agents"] == ["scout"]
    assert api("PATCH", "/rule", {"match": {"agents": ["scout"]}})[0] == 200


def test_operators_read_and_admins_write(operator_token, api):
    create(api)
    reader = Api(operator_token)
    assert reader("GET")[0] == 200
    assert reader("GET", "/rule")[0] == 200
    for method, path in (("POST", ""), ("PATCH", "/rule"), ("DELETE", "/rule"), ("POST", "/order")):
        assert reader(method, path, {})[0] == 403


def test_agents_do_not_reach_rules(scout):
    assert Api(scout.key)("GET")[0] == 403


def test_unknown_parameters_and_cursors_are_rejected(api):
    assert api("GET", "?page=2")[0] == 422
    assert api("GET", "?cursor=x")[0] == 422


# --- Presets ------------------------------------------------------------------------------------


def presets(token, method, path="", body=None):
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"}
    return send_api(method, f"/api/v1/rule-presets{path}", data, headers)


def test_a_rule_is_created_from_a_preset_as_on_the_page(api, scout, admin_token):
    listed = presets(admin_token, "GET").json()["items"]
    assert [item["key"] for item in listed] == list(PRESETS)
    assert not any(item["is_used"] for item in listed)
    created = presets(admin_token, "POST", "/first-use/create", {})
    assert created.status_code == 201
    assert created.headers["Location"] == f"/api/v1/rules/{quote(created.json()['name'])}"
    assert created.json()["match"] == {"first_use": True}
    (used,) = (item for item in presets(admin_token, "GET").json()["items"] if item["is_used"])
    assert (used["key"], used["name"]) == ("first-use", created.json()["name"])
    assert presets(admin_token, "POST", "/first-use/create", {}).status_code == 409


def test_a_preset_about_a_server_needs_one(api, scout, admin_token):
    assert presets(admin_token, "POST", "/leaving/create", {}).status_code == 422
    assert presets(admin_token, "POST", "/first-use/create", {"server": "x"}).status_code == 422
    created = presets(admin_token, "POST", "/leaving/create", {"server": "github"}).json()
    assert created["match"] == {"after": ["github"], "not_servers": ["github"]}
    assert presets(admin_token, "POST", "/quagga/create", {}).status_code == 404
