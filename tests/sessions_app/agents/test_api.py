"""The admin API for agents and keys."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import AuditEntry
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ApiKey
from tests.support.factories import make_server


@pytest.fixture
def api(client, admin_token):
    """Call the API: api("POST", "/agents", {...}, key=...) returns status and body."""

    def call(method, path, body=None, key=admin_token):
        response = client.generic(
            method,
            f"/api/v1{path}",
            b"" if body is None else json.dumps(body).encode(),
            content_type="application/json",
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        call.response = response
        return response.status_code, json.loads(response.content) if response.content else None

    return call


@pytest.fixture
def groups(db):
    for slug in ("weather", "files"):
        make_server(slug=slug)
    return ["mcp:weather", "mcp:files"]


@pytest.fixture
def scout(groups):
    return agent_actions.create("scout", groups=groups, actor=SYSTEM)


def is_error(answer, status, code):
    assert answer[0] == status, answer
    assert answer[1]["error"]["code"] == code
    assert answer[1]["error"]["message"].endswith((".", "…"))
    return True


# --- Agents -------------------------------------------------------------------------------------


def test_an_agent_is_created_read_updated_and_deleted(api, groups):
    body = {"name": "scout", "groups": ["mcp:files", "mcp:weather"], "mode": "deferred"}
    status, made = api("POST", "/agents", body)
    assert status == 201
    assert (made["groups"], made["mode"]) == (body["groups"], "deferred")
    assert (made["keys"], made["open_sessions"], made["last_seen_at"]) == (0, 0, None)
    assert api("GET", "/agents/scout") == (200, made)

    change = {"groups": groups, "budget": 900, "cost_per_minute": 5, "name": "ranger"}
    status, changed = api("PATCH", "/agents/scout", change)
    assert status == 200
    assert changed == {**made, **change}
    assert api("GET", "/agents/scout")[0] == 404

    assert api("DELETE", "/agents/ranger") == (204, None)
    assert not Agent.objects.exists()
    verbs = AuditEntry.objects.filter(verb__startswith="agent").order_by("id")
    expected = ["agent.add", "agent.edit", "agent.groups", "agent.delete"]
    assert list(verbs.values_list("verb", flat=True)) == expected
    assert set(verbs.values_list("actor_kind", flat=True)) == {"token"}


def test_null_removes_the_budget_and_leaves_other_settings_unchanged(api, scout):
    api("PATCH", "/agents/scout", {"budget": 900})

    status, body = api("PATCH", "/agents/scout", {"budget": None, "mode": None, "groups": None})

    assert status == 200
    assert (body["budget"], body["mode"]) == (None, "auto")
    assert body["groups"] == ["mcp:weather", "mcp:files"]


def test_all_groups_and_a_list_replace_each_other(api, scout):
    _, body = api("PATCH", "/agents/scout", {"all_groups": True})
    assert (body["all_groups"], body["groups"]) == (True, [])

    _, body = api("PATCH", "/agents/scout", {"groups": ["mcp:files"]})
    assert (body["all_groups"], body["groups"]) == (False, ["mcp:files"])

    _, body = api("PATCH", "/agents/scout", {"all_groups": False})
    assert (body["all_groups"], body["groups"]) == (False, ["mcp:files"])

    _, body = api("PATCH", "/agents/scout", {"groups": []})
    assert (body["all_groups"], body["groups"]) == (False, [])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/agents", {}),
        ("POST", "/agents", {"name": ""}),
        ("POST", "/agents", {"name": "a/b"}),
        ("POST", "/agents", {"name": "x", "key": "tcb_mine"}),
        ("POST", "/agents", {"name": "x", "strategy": "magic"}),
        ("POST", "/agents", {"name": "x", "groups": ["mcp:files"], "all_groups": True}),
        ("PATCH", "/agents/scout", {"unknown": 1}),
        ("PATCH", "/agents/scout", {"calls_in_flight": 0}),
        ("PATCH", "/agents/scout", {"calls_in_flight": 10**30}),
        ("PATCH", "/agents/scout", {"threshold_percent": 101}),
        ("PATCH", "/agents/scout", {"description": "a\0b"}),
        ("PATCH", "/agents/scout", {"groups": "mcp:files"}),
        ("POST", "/agents/scout/keys", {"days": 0}),
        ("POST", "/agents/scout/keys", {"name": ""}),
        ("POST", "/agents/scout/keys", {"scope": "admin"}),
        ("GET", "/agents?limit=0", None),
        ("GET", "/keys?limit=1000", None),
        ("GET", "/keys?scope=root", None),
    ],
)
def test_invalid_requests_are_rejected(method, path, body, api, scout):
    before = Agent.objects.values().get(), ApiKey.objects.count()

    assert is_error(api(method, path, body), 422, "invalid")
    assert (Agent.objects.values().get(), ApiKey.objects.count()) == before


def test_an_update_with_one_invalid_field_changes_nothing(api, scout):
    answer = api("PATCH", "/agents/scout", {"mode": "full", "groups": ["mcp:nope"]})

    assert is_error(answer, 422, "unknown_group")
    assert "mcp:nope" in answer[1]["error"]["message"]
    assert "mcp:weather" in answer[1]["error"]["hint"]
    assert Agent.objects.get().mode == "auto"
    assert not AuditEntry.objects.filter(verb="agent.edit").exists()


def test_a_duplicate_name_is_a_conflict(api, scout):
    assert is_error(api("POST", "/agents", {"name": "scout"}), 409, "name_taken")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/agents/nobody", None),
        ("PATCH", "/agents/nobody", {}),
        ("DELETE", "/agents/nobody", None),
        ("GET", "/agents/nobody/keys", None),
        ("POST", "/agents/nobody/keys", {}),
        ("GET", "/agents/%00", None),
        ("GET", "/keys/tcb_nobody", None),
        ("POST", "/keys/12345/rotate", None),
        ("POST", "/keys/" + "9" * 30 + "/revoke", None),
    ],
)
def test_unknown_agents_and_keys_are_not_found(method, path, body, api, scout):
    assert is_error(api(method, path, body), 404, "not_found")


def test_agents_are_paginated_with_a_constant_number_of_queries(
    api, scout, django_assert_max_num_queries
):
    for number in range(5):
        agent_actions.create(f"agent-{number}", groups=["mcp:files"], actor=SYSTEM)
    names, cursor = [], ""
    while cursor is not None:
        with django_assert_max_num_queries(6):
            _, body = api("GET", f"/agents?limit=2&cursor={cursor}")
        names += [agent["name"] for agent in body["items"]]
        cursor = body["next_cursor"]

    assert names == sorted(Agent.objects.values_list("name", flat=True))
    assert len(names) == 6


def test_a_name_with_special_characters_works_in_the_path(api, db):
    assert api("POST", "/agents", {"name": "Späher a&b?c#d%e"})[0] == 201

    path = "/agents/Sp%C3%A4her%20a&b%3Fc%23d%25e"
    assert api("GET", path)[1]["name"] == "Späher a&b?c#d%e"


# --- Keys ---------------------------------------------------------------------------------------


def test_a_keys_text_is_only_in_the_response_that_creates_it(api, scout):
    status, made = api("POST", "/agents/scout/keys", {"name": "laptop", "days": 30})
    assert status == 201
    assert api.response["Cache-Control"] == "no-store"
    assert api_keys.find_key(made["key"]).agent == scout
    assert made["expires_at"] is not None

    status, new = api("POST", f"/keys/{made['prefix']}/rotate")
    assert status == 201
    assert api.response["Cache-Control"] == "no-store"
    assert new["key"] != made["key"]

    paths = ["/agents", "/agents/scout", "/agents/scout/keys", "/keys", "/audit"]
    paths += [f"/keys/{made['id']}", f"/keys/{new['prefix']}"]
    bodies = json.dumps([api("GET", path) for path in paths])
    for text in (made["key"], new["key"]):
        assert text not in bodies
        assert text[10:] not in bodies
    assert made["prefix"] in bodies


def test_keys_are_listed_with_their_state(api, scout):
    keys = [
        api_keys.create_key(f"key {n}", "agent", agent=scout, actor=SYSTEM)[0] for n in range(3)
    ]
    api_keys.revoke(keys[0], actor=SYSTEM)
    ApiKey.objects.filter(pk=keys[1].pk).update(expires_at=timezone.now() - timedelta(days=1))

    _, body = api("GET", "/agents/scout/keys")

    assert [(key["name"], key["state"]) for key in body["items"]] == [
        ("key 2", "active"),
        ("key 1", "expired"),
        ("key 0", "revoked"),
    ]
    assert {key["agent"] for key in body["items"]} == {"scout"}
    assert api("GET", "/agents/scout")[1]["keys"] == 1
    _, first = api("GET", "/agents/scout/keys?limit=2")
    _, second = api("GET", f"/agents/scout/keys?limit=2&cursor={first['next_cursor']}")
    assert [key["name"] for key in second["items"]] == ["key 0"]


def test_keys_can_be_filtered_by_scope(api, scout):
    api_keys.create_key("laptop", "agent", agent=scout, actor=SYSTEM)

    assert {key["scope"] for key in api("GET", "/keys")[1]["items"]} == {"admin", "agent"}
    (only,) = api("GET", "/keys?scope=admin")[1]["items"]
    assert (only["name"], only["agent"]) == ("tests", None)


def test_a_key_has_the_agents_name_by_default(api, scout):
    assert api("POST", "/agents/scout/keys", {})[1]["name"] == "scout"


def test_a_revoked_key_is_rejected_from_the_next_request_on(api, scout, operator_token):
    key = api_keys.find_key(operator_token)
    assert api("GET", "/agents", key=operator_token)[0] == 200

    status, body = api("POST", f"/keys/{key.pk}/revoke")

    assert (status, body["state"]) == (200, "revoked")
    assert is_error(api("GET", "/agents", key=operator_token), 401, "unauthorized")
    assert is_error(api("POST", f"/keys/{key.pk}/rotate"), 409, "conflict")


def test_an_agent_can_be_disabled_and_enabled(api, scout):
    _, text = api_keys.create_key("laptop", "agent", agent=scout, actor=SYSTEM)

    assert api("PATCH", "/agents/scout", {"enabled": False})[1]["enabled"] is False
    assert api_keys.find_key(text) is None
    assert api("PATCH", "/agents/scout", {"enabled": True})[1]["enabled"] is True
    assert api_keys.find_key(text)
    assert api("GET", "/agents/scout")[1]["last_seen_at"] is not None
