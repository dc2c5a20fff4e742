"""API access: keys, scopes and error format, generated from the OpenAPI schema."""

import json

import pytest
from django.test import Client

from catalog.audit import SYSTEM
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ApiKey
from tests.support.asgi_requests import send_api
from toolcrib.api import api

PATH_PARAMETERS = {
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


def auth_class(operation):
    """Return the name of the authentication class of an operation."""
    (name,) = (name for schemes in operation["security"] for name in schemes)
    return name


ROUTES = [(method, path) for method, path, _ in operations()]
AGENT_ROUTES = [
    (method, path)
    for method, path, operation in operations()
    if auth_class(operation) == "AgentAuth"
]
ADMIN_ROUTES = [route for route in ROUTES if route not in AGENT_ROUTES]
# Routes of sessions that operators and admins may read.
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
    for name, value in PATH_PARAMETERS.items():
        path = path.replace("{" + name + "}", value)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return send_api(method, path, body, headers)


def assert_error_format(response):
    error = json.loads(response.content)["error"]
    assert {"code", "message", "hint"} <= set(error)
    assert error["message"].endswith((".", "…"))
    assert set(error) <= {"code", "message", "hint", "details"}


@pytest.mark.django_db
@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("token", [None, "tcb_wrong", "x" * 5000])
def test_every_route_requires_a_valid_key(method, path, token):
    response = send(method, path, token)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert_error_format(response)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_signed_in_admin_without_a_key_is_not_authenticated(method, path, admin):
    client = Client()
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    response = client.generic(method, path.replace("{slug}", "x").replace("{name}", "y"))
    assert response.status_code == 401


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[0] != "GET"])
def test_an_operator_key_is_read_only(method, path, operator_token):
    for body in (b"{}", b"{", b'{"tool_name": "x"}'):
        response = send(method, path, operator_token, body)
        assert response.status_code == 403
        assert_error_format(response)


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_an_agent_key_cannot_use_routes_of_admins_and_operators(method, path, agent_token):
    responses = [send(method, path, agent_token, body) for body in (b"{}", b"{", b"x" * 2_000_000)]
    assert {response.status_code for response in responses} == {403}
    assert len({response.content for response in responses}) == 1
    assert_error_format(responses[0])


@pytest.mark.parametrize(("method", "path"), AGENT_ROUTES)
def test_operators_and_admins_can_read_sessions_and_not_change_them(
    method, path, admin_token, operator_token
):
    for token in (admin_token, operator_token):
        response = send(method, path, token)
        readable = method == "GET" and path in READABLE
        expected = (404 if "{" in path else 200) if readable else 403
        assert response.status_code == expected, response.content
        if expected != 200:
            assert_error_format(response)


@pytest.mark.parametrize(("method", "path"), AGENT_ROUTES)
def test_an_agent_key_can_use_every_route_of_agents(method, path, agent_token):
    response = send(method, path, agent_token)
    assert response.status_code not in (401, 403), response.content
    if "{session_id}" in path:
        assert response.status_code in (404, 422)
        assert_error_format(response)


@pytest.mark.parametrize("path", sorted({path for _, path in ROUTES}))
def test_an_undefined_method_is_not_allowed(path, agent_token):
    known = {method for method, other in ROUTES if other == path}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - known:
        response = send(method, path, agent_token)
        assert response.status_code == 405
        assert known <= set(response.headers["Allow"].replace(" ", "").split(","))


def test_the_key_of_a_disabled_agent_is_rejected_immediately(agent_token):
    assert send("GET", "/api/v1/sessions", agent_token).status_code == 200
    Agent.objects.update(enabled=False)
    response = send("GET", "/api/v1/sessions", agent_token)
    assert response.status_code == 401
    assert_error_format(response)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_missing_and_malformed_input_is_rejected_in_the_error_format(
    method, path, admin_token, agent_token
):
    token = agent_token if (method, path) in AGENT_ROUTES else admin_token
    for body in (b"{}", b"{", b"[]", b'"\xff"', b'{"a": NaN}', b"null", b'{"a": 1, "a": 1}'):
        response = send(method, path, token, body)
        assert response.status_code < 500, (body, response.content)
        if response.status_code >= 400:
            assert_error_format(response)


def test_an_unknown_path_returns_the_error_format(db):
    response = Client().get("/api/v1/nonsense")
    assert response.status_code == 404
    assert_error_format(response)


def test_a_body_over_the_limit_is_rejected(admin_token):
    body = json.dumps({"text": "x" * 1_100_000}).encode()
    response = send("POST", "/api/v1/servers/import", admin_token, body)
    assert response.status_code == 413
    assert_error_format(response)


def test_every_operation_documents_its_errors():
    for method, path, operation in operations():
        documented = {int(status) for status in operation["responses"]}
        assert {401, 403, 422} <= documented, (method, path)
        if (method, path) in AGENT_ROUTES:
            assert 429 in documented, (method, path)


def test_a_revoked_key_is_rejected_immediately(admin_token, db):
    assert send("GET", "/api/v1/servers", admin_token).status_code == 200
    api_keys.revoke(ApiKey.objects.get(), actor=SYSTEM)
    assert send("GET", "/api/v1/servers", admin_token).status_code == 401


def test_only_the_digest_of_a_key_is_stored(admin_token):
    row = ApiKey.objects.values().get()
    assert admin_token not in json.dumps(row, default=str)
    assert admin_token.startswith(row["prefix"])
