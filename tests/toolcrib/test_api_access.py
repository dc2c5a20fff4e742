"""The API's door: a key, enough scope, one error shape. Generated from its own description."""

import json

import pytest
from django.test import Client

from catalog.audit import SYSTEM
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ApiKey
from toolcrib.api import api

PLACES = {
    "slug": "nowhere",
    "name": "nowhere__tool",
    "group_id": "mcp:nowhere",
    "key": "tcb_nowhere",
    "audit_id": "999999",
    "session_id": "ses_" + "0" * 32,
}


def operations():
    for path, methods in api.get_openapi_schema()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def door(operation):
    """Whose keys an operation takes, by the name of its check."""
    (name,) = (name for doors in operation["security"] for name in doors)
    return name


ROUTES = [(method, path) for method, path, _ in operations()]
AGENT_ROUTES = [
    (method, path) for method, path, operation in operations() if door(operation) == "AgentAuth"
]
ADMIN_ROUTES = [route for route in ROUTES if route not in AGENT_ROUTES]
# Of agents' sessions, operators and admins may read what happened.
READABLE = [
    f"/api/v1/sessions{what}"
    for what in ("", *(f"/{{session_id}}{part}" for part in (
        "", "/catalog", "/tools", "/state", "/stats", "/events")))
]  # fmt: skip


@pytest.fixture
def agent_token(db):
    agent = Agent.objects.create(name="scout", all_groups=True)
    return api_keys.create_key("scout", "agent", agent=agent, actor=SYSTEM)[1]


def send(method, path, token=None, body=b"{}"):
    for name, value in PLACES.items():
        path = path.replace("{" + name + "}", value)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return Client(enforce_csrf_checks=True).generic(
        method, path, body, content_type="application/json", headers=headers
    )


def assert_one_shape(answer):
    error = json.loads(answer.content)["error"]
    assert {"code", "message", "hint"} <= set(error)
    assert error["message"].endswith((".", "…"))
    assert set(error) <= {"code", "message", "hint", "details"}


@pytest.mark.django_db
@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("token", [None, "tcb_wrong", "x" * 5000])
def test_no_route_answers_without_a_good_key(method, path, token):
    answer = send(method, path, token)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert_one_shape(answer)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_signed_in_admin_without_a_key_is_nobody_to_the_api(method, path, admin):
    client = Client()
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    answer = client.generic(method, path.replace("{slug}", "x").replace("{name}", "y"))
    assert answer.status_code == 401


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[0] != "GET"])
def test_an_operators_key_reads_and_does_not_write(method, path, operator_token):
    for body in (b"{}", b"{", b'{"tool_name": "x"}'):
        answer = send(method, path, operator_token, body)
        assert answer.status_code == 403
        assert_one_shape(answer)


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_an_agents_key_opens_no_route_of_admins_and_operators(method, path, agent_token):
    answers = [send(method, path, agent_token, body) for body in (b"{}", b"{", b"x" * 2_000_000)]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.content for answer in answers}) == 1
    assert_one_shape(answers[0])


@pytest.mark.parametrize(("method", "path"), AGENT_ROUTES)
def test_of_agents_sessions_people_read_what_happened_and_do_nothing(
    method, path, admin_token, operator_token
):
    for token in (admin_token, operator_token):
        answer = send(method, path, token)
        readable = method == "GET" and path in READABLE
        wanted = (404 if "{" in path else 200) if readable else 403
        assert answer.status_code == wanted, answer.content
        if wanted != 200:
            assert_one_shape(answer)


@pytest.mark.parametrize(("method", "path"), AGENT_ROUTES)
def test_an_agents_key_opens_every_route_of_agents(method, path, agent_token):
    answer = send(method, path, agent_token)
    assert answer.status_code not in (401, 403), answer.content
    if "{session_id}" in path:
        assert answer.status_code in (404, 422)
        assert_one_shape(answer)


@pytest.mark.parametrize("path", sorted({path for _, path in ROUTES}))
def test_a_method_that_a_path_does_not_have_is_not_allowed(path, agent_token):
    known = {method for method, other in ROUTES if other == path}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - known:
        answer = send(method, path, agent_token)
        assert answer.status_code == 405
        assert known <= set(answer.headers["Allow"].replace(" ", "").split(","))


def test_an_agent_that_is_disabled_is_refused_at_once(agent_token):
    assert send("GET", "/api/v1/sessions", agent_token).status_code == 200
    Agent.objects.update(enabled=False)
    answer = send("GET", "/api/v1/sessions", agent_token)
    assert answer.status_code == 401
    assert_one_shape(answer)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_whatever_is_missing_or_malformed_is_said_in_the_one_shape(
    method, path, admin_token, agent_token
):
    token = agent_token if (method, path) in AGENT_ROUTES else admin_token
    for body in (b"{}", b"{", b"[]", b'"\xff"', b'{"a": NaN}', b"null", b'{"a": 1, "a": 1}'):
        answer = send(method, path, token, body)
        assert answer.status_code < 500, (body, answer.content)
        if answer.status_code >= 400:
            assert_one_shape(answer)


def test_an_address_that_is_not_there_is_said_in_the_one_shape(db):
    answer = Client().get("/api/v1/nonsense")
    assert answer.status_code == 404
    assert_one_shape(answer)


def test_a_body_over_the_cap_is_refused_with_the_cap(admin_token):
    body = json.dumps({"text": "x" * 1_100_000}).encode()
    answer = send("POST", "/api/v1/servers/import", admin_token, body)
    assert answer.status_code == 413
    assert_one_shape(answer)


def test_every_operation_documents_its_errors():
    for method, path, operation in operations():
        documented = {int(status) for status in operation["responses"]}
        assert {401, 403, 422} <= documented, (method, path)
        if (method, path) in AGENT_ROUTES:
            assert 429 in documented, (method, path)


def test_a_revoked_key_and_an_expired_one_are_refused_at_once(admin_token, db):
    assert send("GET", "/api/v1/servers", admin_token).status_code == 200
    api_keys.revoke(ApiKey.objects.get(), actor=SYSTEM)
    assert send("GET", "/api/v1/servers", admin_token).status_code == 401


def test_a_key_is_kept_as_a_digest_only(admin_token):
    row = ApiKey.objects.values().get()
    assert admin_token not in json.dumps(row, default=str)
    assert admin_token.startswith(row["prefix"])
