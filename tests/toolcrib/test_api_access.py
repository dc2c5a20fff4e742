"""API access: keys, scopes and error format, generated from the OpenAPI schema."""

import json
import re

import pytest
from django.test import Client

from catalog.audit import SYSTEM
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ApiKey, KeyScope
from tests.support.agent_client import make_agent_client, make_group
from tests.support.asgi_requests import send_api
from tests.support.people import make_person
from toolcrib.api import api
from toolcrib.lib.roles import Role

PATH_PARAMETERS = {
    "slug": "nowhere",
    "name": "nowhere__tool",
    "group_id": "mcp:nowhere",
    "key": "tcb_nowhere",
    "audit_id": "999999",
    "hint_id": "999999",
    "golden_id": "999999",
    "webhook_id": "999999",
    "session_id": "ses_" + "0" * 32,
}

DOCUMENT = json.loads(json.dumps(api.get_openapi_schema()))


def operations():
    for path, methods in DOCUMENT["paths"].items():
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
    if auth_class(operation) == "AgentAuth" and method != "DELETE"
]  # deleting a session is for admins, on a path that agents read
ADMIN_ROUTES = [route for route in ROUTES if route not in AGENT_ROUTES]
# Routes of sessions that operators and admins may read.
READABLE = [
    f"/api/v1/sessions{what}"
    for what in ("", *(f"/{{session_id}}{part}" for part in (
        "", "/catalog", "/tools", "/state", "/stats", "/events", "/events/stream",
        "/sdk", "/servers")))
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


OF_OPERATORS = {  # decisions about held calls
    ("POST", "/api/v1/calls/{call_id}/decision"),
    ("POST", "/api/v1/calls/decisions"),
    ("DELETE", "/api/v1/grants/{grant_id}"),
}


@pytest.mark.parametrize(
    ("method", "path"),
    [route for route in ROUTES if route[0] != "GET" and route not in OF_OPERATORS],
)
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


def smallest(schema, components):
    """Return a small value that a schema allows."""
    if "$ref" in schema:
        return smallest(components[schema["$ref"].rpartition("/")[2]], components)
    if "anyOf" in schema:
        return smallest(schema["anyOf"][0], components)
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        required = schema.get("required", [])
        return {name: smallest(schema["properties"][name], components) for name in required}
    if schema.get("type") == "array":
        return [smallest(schema["items"], components)] * schema.get("minItems", 0)
    values = {"string": "https://example.org", "integer": 1, "number": 1, "boolean": True}
    return values.get(schema.get("type"), {})


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_unknown_query_parameters_are_rejected(method, path, agent_token, admin_token):
    operation, components = DOCUMENT["paths"][path][method.lower()], DOCUMENT["components"]
    query = [item for item in operation["parameters"] if item["in"] == "query"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    sent = json.dumps(smallest(body.get("schema", {}), components["schemas"])).encode()
    required = "".join(f"&{item['name']}=1" for item in query if item["required"])
    token = agent_token if (method, path) in AGENT_ROUTES else admin_token
    response = send(method, f"{path}?bogus=1{required}", token, sent)
    assert response.status_code == 422
    (problem,) = json.loads(response.content)["error"]["details"]["problems"]
    assert problem["at"] == "query.bogus"
    known = ", ".join(sorted(item["name"] for item in query)) or "none"
    assert problem["problem"] == f"unknown parameter; known are: {known}"


@pytest.mark.parametrize("path", sorted({path for _, path in ROUTES}))
def test_an_undefined_method_is_not_allowed(path, agent_token):
    known = {method for method, other in ROUTES if other == path}
    if path == "/api/v1/calls/decisions":
        known.add("GET")  # there it is the id of a call
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - known:
        response = send(method, path, agent_token)
        assert response.status_code == 405
        assert known - {"GET"} <= set(response.headers["Allow"].replace(" ", "").split(","))


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


@pytest.mark.parametrize(
    ("method", "path", "body", "at", "problem"),
    [
        ("POST", "/groups", b"", "body", "Field required"),
        ("POST", "/groups", b"[]", "body", "Input should be a valid dictionary"),
        ("POST", "/groups", b'{"group_id": 1, "display_name": "x"}', "group_id", "Input should be"),
        ("POST", "/rules", b'{"name": "r", "effect": "x"}', "effect", "Input should be 'allow'"),
        (
            "POST", "/groups/x/members", b'{"tools": ["a"], "tool_names": ["b"]}',
            "body", "tools and tool_names differ; send one of them",
        ),
        ("GET", "/tools?limit=0", b"", "query.limit", "Input should be greater"),
    ],
)  # fmt: skip
def test_a_problem_has_the_path_of_the_field_as_it_was_sent(
    method, path, body, at, problem, admin_token
):
    response = send(method, f"/api/v1{path}", admin_token, body)
    assert response.status_code == 422
    [first, *_] = json.loads(response.content)["error"]["details"]["problems"]
    assert (first["at"], first["problem"][: len(problem)]) == (at, problem)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/groups", {"group_id": "a", "display_name": "A", "follows": "none"}),
        ("PATCH", "/groups/own", {"follows": "none"}),
        ("PUT", "/groups", {"group_ids": ["none"]}),
        ("POST", "/groups/own/members", {"tool_names": ["none"]}),
        ("PUT", "/groups/own/members", {"tool_names": ["none"]}),
        ("PATCH", "/groups/own/members", {"tool_names": ["none"], "preload": True}),
        ("DELETE", "/groups/own/members?tool_names=none", None),
        ("POST", "/tools", {"name": "a", "inputSchema": {"type": "object"}, "group_id": "none"}),
        ("POST", "/search/golden", {"query": "a", "tools": ["none"]}),
        ("GET", "/search?query=a&agent=none", None),
        ("POST", "/agents", {"name": "a", "groups": ["none"]}),
        ("PATCH", "/agents/scout", {"groups": ["none"]}),
        ("POST", "/rules/order", {"names": ["none"]}),
        ("POST", "/rules/test", {"name": "none"}),
        ("POST", "/rules", {"name": "a", "effect": "deny", "match": {"servers": ["none"]}}),
        ("PATCH", "/settings", {"values": {"none": 1}}),
    ],
)
def test_what_a_request_names_and_does_not_exist_is_a_422(method, path, body, admin_token, db):
    make_group("own")
    make_agent_client("scout")
    data = b"" if body is None else json.dumps(body).encode()
    response = send(method, f"/api/v1{path}", admin_token, data)
    assert response.status_code == 422, response.content


@pytest.mark.parametrize("path", ["/catalog", "/sessions/{id}/catalog"])
def test_a_catalog_that_the_client_has_is_not_sent_again(path, db):
    scout = make_agent_client("scout", mode="deferred")
    path = path.replace("{id}", scout.open().id)
    etag = scout.send("GET", path).headers["ETag"]
    for known, status in (
        (etag, 304),
        (f"W/{etag}", 304),
        (f'"other", {etag}', 304),
        ("*", 304),
        ('"other"', 200),
    ):
        response = scout.send("GET", path, If_None_Match=known)
        assert (response.status, response.headers["ETag"]) == (status, etag)


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
        assert {401, 422, 503} <= documented, (method, path)
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


# --- The description of the API -------------------------------------------------------------------


@pytest.mark.parametrize(("theme", "mode"), [("dark", ' class="dark-mode"'), ("light", "")])
def test_the_api_reference_has_the_theme_of_the_other_pages(theme, mode, db, admin, client):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    client.cookies["theme"] = theme
    page = client.get("/api/v1/docs").content.decode()
    assert f'<html lang="en" data-theme="{theme}"{mode}>' in page
    settings = re.search(r'<script id="swagger-settings"[^>]*>(.*?)</script>', page)[1]
    assert json.loads(settings)["url"] == "/api/v1/openapi.json"


@pytest.mark.parametrize("path", ["/api/v1/docs", "/api/v1/openapi.json"])
def test_the_description_of_the_api_is_for_people_and_keys_unless_it_is_public(path, db, settings):
    def status(browser=None, **headers):
        return (browser or Client()).get(path, headers=headers).status_code

    settings.PUBLIC_API_DOCS = True
    assert status() == 200
    settings.PUBLIC_API_DOCS = False
    rejected = Client().get(path)
    if path.endswith("docs"):
        assert rejected.headers["Location"] == "/sign-in?next=/api/v1/docs"
    else:
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (401, "unauthorized")
    assert status(Authorization="Bearer tcb_wrong") == rejected.status_code
    _, key = api_keys.create_key("ci", KeyScope.OPERATOR, actor=SYSTEM)
    assert status(Authorization=f"Bearer {key}") == 200
    for role, expected in ((Role.OPERATOR, 200), (Role.OUTSIDER, rejected.status_code)):
        browser = Client()
        browser.force_login(make_person(f"{role.label}@example.org", role, ""))
        assert status(browser) == expected


# --- HEAD and Location --------------------------------------------------------------------------

GETS = [path for method, path in ROUTES if method == "GET"]


@pytest.mark.parametrize("path", GETS)
def test_get_also_answers_head(path, agent_token, admin_token):
    """Except where a result is handed out once: HEAD must not fetch it."""
    token = agent_token if ("GET", path) in AGENT_ROUTES else admin_token
    headed, got = send("HEAD", path, token, b""), send("GET", path, token, b"")
    if path.startswith(("/api/v1/calls/", "/api/v1/scripts/")):
        assert headed.status_code == 405
        return
    assert (headed.status_code, headed.content) == (got.status_code, b"")
    assert headed.headers["Content-Type"] == got.headers["Content-Type"]
    if not hasattr(got, "streaming_content") and "Content-Length" in got.headers:
        assert headed.headers["Content-Length"] == got.headers["Content-Length"]


CREATED = {
    "/api/v1/servers": {"name": "Web", "transport": "http", "url": "https://x.example/mcp"},
    "/api/v1/groups": {"group_id": "own:group", "display_name": "Own"},
    "/api/v1/tools": {"name": "shout", "inputSchema": {"type": "object"}},
    "/api/v1/tools/{name}/hints": {"kind": "alias", "text": "yell"},
    "/api/v1/agents": {"name": "new agent"},
    "/api/v1/agents/{name}/keys": {},
    "/api/v1/keys/{key}/rotate": {},
    "/api/v1/sessions": {},
    "/api/v1/sessions/{session_id}/fork": {},
    "/api/v1/rules": {"name": "Ask first: now", "effect": "hold", "match": {"tools": ["shout"]}},
    "/api/v1/rule-presets/{key}/create": {},
    "/api/v1/search/golden": {"query": "shout a word", "tools": ["shout"]},
    "/api/v1/webhooks": {
        "name": "ops",
        "address": "https://hooks.example.org/x",
        "events": ["alert.raised"],
    },
}


def test_the_location_of_what_was_created_leads_to_it(agent_token, admin_token):
    creating = {path for method, path, operation in operations() if "201" in operation["responses"]}
    assert creating == CREATED.keys()
    names = {"/agents/": "scout", "/tools/": "shout", "/keys/": "1", "/rule-presets/": "first-use"}
    session = ""
    for path, body in CREATED.items():
        token = agent_token if ("POST", path) in AGENT_ROUTES else admin_token
        url = path.replace("{session_id}", session)
        for part, name in names.items():
            url = url.replace(part + "{name}", part + name).replace(part + "{key}", part + name)
        url = url.replace("/keys/1/", f"/keys/{ApiKey.objects.earliest('pk').pk}/")
        created = send("POST", url, token, json.dumps(body).encode())
        assert created.status_code == 201, (path, created.content)
        if path == "/api/v1/sessions":
            session = created.json()["id"]
        found = send("GET", created.headers["Location"], token, b"")
        assert found.status_code == 200, (path, created.headers["Location"])
        (key,) = [name for name in ("id", "slug", "group_id", "name") if name in created.json()][:1]
        assert found.json()[key] == created.json()[key]
