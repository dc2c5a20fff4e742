"""Agent pages: permissions, texts, and keys that are shown only once."""

import ast
import html
import json
import re
import shlex
import tomllib
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.sessions.models import Session
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import AuditEntry, CatalogSnapshot
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys, snippets
from sessions_app.agents.forms import SettingsForm
from sessions_app.agents.queries import find_agent
from sessions_app.models import Agent, AgentSession, ApiKey
from sessions_app.urls import agent_pages
from tests.support.factories import make_server, make_session, make_tool

BACKEND = "django.contrib.auth.backends.ModelBackend"
# route: (method, status for operators, status for admins). Outsiders always get 403, anonymous
# users the sign-in page. A route that is missing here fails the test.
ROUTES = {
    "agents": ("get", 200, 200),
    "agent-add": ("get", 403, 200),
    "agent": ("get", 200, 200),
    "agent-groups": ("post", 403, 302),
    "agent-keys": ("get", 200, 200),
    "key-rotate": ("post", 403, 201),
    "key-revoke": ("post", 403, 302),
    "agent-activity": ("get", 200, 200),
    "agent-connect": ("get", 200, 200),
    "agent-settings": ("get", 200, 200),
    "agent-enable": ("post", 403, 302),
    "agent-disable": ("post", 403, 302),
    "agent-delete": ("post", 403, 302),
}
BODIES = {
    "agent-add": {"name": "ranger"},
    "agent-groups": {"act": "remove", "group": "mcp:files"},
    "agent-delete": {"typed_name": "scout"},
}
READS = [name for name, row in ROUTES.items() if row[0] == "get"]
# Routes with a POST that requires the admin role.
POSTS = [name for name in ROUTES if name not in READS] + [
    "agent-add",
    "agent-keys",
    "agent-settings",
]
HOSTILE = '"><script>alert(1)</script>'


@pytest.fixture
def scout(db):
    """An agent with two groups, one of which has a tool, and a key."""
    schema = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
    make_tool(make_server(slug="weather"), "get_forecast", inputSchema=schema)
    make_server(slug="files")
    agent = agent_actions.create("scout", groups=["mcp:files", "mcp:weather"], actor=SYSTEM)
    api_keys.create_key("laptop", "agent", agent=agent, actor=SYSTEM)
    return agent


@pytest.fixture
def ada(admin):
    return signed_in(admin)


def path_of(name):
    route = next(str(page.pattern) for page in agent_pages if page.name == name)
    arguments = ["scout"] if "<str:name>" in route else []
    return reverse(name, args=arguments + ([ApiKey.objects.get().pk] if "key_id" in route else []))


def signed_in(user, **options):
    client = Client(**options)
    if user is not None:
        client.force_login(user, backend=BACKEND)
    return client


def text_of(response):
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", response.content.decode())).split())


def key_in(response):
    """Return the key that a page contains."""
    keys = re.findall(r"tcb_[\w-]{40,}", response.content.decode())
    assert len(set(keys)) == 1
    return keys[0]


def open_session(agent, **fields):
    snapshot, _ = CatalogSnapshot.objects.get_or_create(
        sha256="0" * 64, defaults={"text": "", "body": "{}", "tokens": 0}
    )
    return AgentSession.objects.create(
        agent=agent,
        strategy="dispatch",
        mode="deferred",
        decided_by="forced",
        snapshot=snapshot,
        revision=1,
        last_used_at=timezone.now(),
        **fields,
    )


# --- Permissions --------------------------------------------------------------------------------


def test_every_route_is_in_the_table():
    assert {page.name for page in agent_pages} == set(ROUTES)


@pytest.mark.parametrize("name", ROUTES)
def test_each_route_has_the_expected_status_for_each_role(name, scout, admin, operator, outsider):
    method, for_operator, for_admin = ROUTES[name]
    path = path_of(name)

    def request(user):
        body = BODIES.get(name, {}) if method == "post" else {}
        return getattr(signed_in(user), method)(path, body)

    anonymous = request(None)
    assert anonymous.status_code == 302
    assert anonymous["Location"] == f"/sign-in?next={path}"
    assert request(outsider).status_code == 403
    assert request(operator).status_code == for_operator
    assert request(admin).status_code == for_admin


def stored_rows():
    return list(Agent.objects.values()), list(ApiKey.objects.values()), AuditEntry.objects.count()


@pytest.mark.parametrize("name", POSTS)
def test_operators_cannot_change_anything(name, scout, operator):
    before, path = stored_rows(), path_of(name)

    assert signed_in(operator).post(path, BODIES.get(name, {})).status_code == 403
    assert stored_rows() == before


@pytest.mark.parametrize("name", POSTS)
def test_a_post_without_a_csrf_token_is_rejected(name, scout, admin):
    before, path = stored_rows(), path_of(name)
    client = signed_in(admin, enforce_csrf_checks=True)

    assert client.post(path, BODIES.get(name, {})).status_code == 403
    assert stored_rows() == before


@pytest.mark.parametrize("name", [name for name in ROUTES if name not in READS])
def test_write_routes_reject_get(name, scout, ada):
    assert ada.get(path_of(name)).status_code == 405


@pytest.mark.parametrize("name", [name for name in READS if name != "agent-add"])
def test_operators_see_no_forms_they_cannot_submit(name, scout, operator):
    page = signed_in(operator).get(path_of(name)).content.decode()

    forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page)
    assert set(forms) <= {"/theme", "/sign-out"}
    assert "/agents/new/add" not in page


@pytest.mark.parametrize("path", ["/agents/nobody", "/agents/nobody/keys", "/agents/%00"])
def test_an_unknown_agent_is_not_found(path, ada):
    response = ada.get(path)

    assert response.status_code == 404
    assert "Agent not found." in text_of(response)


def test_a_key_of_another_agent_is_not_found(scout, ada):
    agent_actions.create("drifter", actor=SYSTEM)

    response = ada.post(f"/agents/drifter/keys/{ApiKey.objects.get().pk}/revoke")

    assert response.status_code == 404
    assert ApiKey.objects.get().revoked_at is None


# --- List ---------------------------------------------------------------------------------------


def test_the_list_shows_groups_keys_sessions_and_limits(scout, ada):
    open_session(scout)
    old = open_session(scout, state="closed")
    AgentSession.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=2))
    agent_actions.create("everything", all_groups=True, actor=SYSTEM)
    agent_actions.set_enabled(agent_actions.create("drifter", actor=SYSTEM), False, actor=SYSTEM)

    page = text_of(ada.get("/agents"))

    assert "3 agents" in page
    assert "scout mcp:files , mcp:weather None 1 never 1 1 open 600 /min 20" in page
    assert "drifter Disabled None: no tools available None 0 never 0 600 /min 20" in page
    assert "everything All groups None 0" in page


@pytest.mark.parametrize("name", READS)
def test_the_number_of_queries_does_not_depend_on_the_number_of_agents(name, scout, ada):
    path = path_of(name)

    def cost():
        with CaptureQueriesContext(connection) as captured:
            assert ada.get(path).status_code == 200
        return len(captured)

    ada.get(path)
    few = cost()
    for number in range(30):
        agent = agent_actions.create(f"agent-{number}", groups=["mcp:files"], actor=SYSTEM)
        api_keys.create_key("key", "agent", agent=agent, actor=SYSTEM)
        api_keys.create_key("key", "agent", agent=scout, actor=SYSTEM)
        make_server()

    assert cost() == few <= 20


def test_the_list_is_paginated(ada):
    for number in range(53):
        Agent.objects.create(name=f"agent-{number:02}")

    first, second = ada.get("/agents"), ada.get("/agents?after=50")

    assert "1 to 50 of 53 agents" in text_of(first)
    assert "51 to 53 of 53 agents" in text_of(second)
    assert "agent-52" in text_of(second)
    assert "agent-49" not in text_of(second)


def test_an_empty_list_shows_admins_the_form_and_operators_a_message(ada, operator):
    assert "Create your first agent" in text_of(ada.get("/agents"))
    assert "No agents yet" in text_of(signed_in(operator).get("/agents"))


def test_the_navigation_shows_the_number_of_agents(scout, ada):
    page = ada.get("/groups").content.decode()

    link = re.search(r'<a\s+href="/agents"\s+data-go="a"\s*>(.*?)</a>', page, re.S)
    assert re.sub(r"<[^>]+>|\s", "", link[1]) == "Agents1ga"


# --- Create -------------------------------------------------------------------------------------


def test_a_new_agents_key_is_shown_with_snippets_that_contain_it(ada, settings):
    settings.PUBLIC_URL = "https://crib.example.org"

    response = ada.post("/agents/new/add", {"name": "scout"})

    assert response.status_code == 201
    text = key_in(response)
    assert api_keys.find_key(text).agent.name == "scout"
    page = html.unescape(response.content.decode())
    assert f"export TOOLCRIB_KEY={text}" in page
    assert "https://crib.example.org/api/v1" in page
    assert "it is not shown again" in page


def test_the_form_grants_selected_groups_or_all_groups(scout, ada):
    ada.post("/agents/new/add", {"name": "chosen", "groups": ["mcp:weather"]})
    ada.post("/agents/new/add", {"name": "everything", "all_groups": "on"})

    assert agent_actions.group_ids(find_agent("chosen")) == ["mcp:weather"]
    assert find_agent("everything").all_groups


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": ""}, "This field is required."),
        ({"name": "scout"}, "An agent named scout already exists. Choose another name"),
        ({"name": "a/b"}, 'it cannot contain "/" or be "." or "..".'),
        ({"name": "x", "groups": ["mcp:nope"]}, "Unknown group: mcp:nope."),
        ({"name": "x", "groups": ["mcp:files"], "all_groups": "on"}, "not both."),
        ({"name": HOSTILE}, 'it cannot contain "/"'),
    ],
)
def test_an_invalid_form_is_shown_again_with_its_errors(body, words, scout, ada):
    response = ada.post("/agents/new/add", body)

    assert response.status_code == 422
    assert words in text_of(response)
    assert HOSTILE not in response.content.decode()
    assert Agent.objects.count() == 1


# --- Groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "group", "expected"),
    [
        ("up", "mcp:weather", ["mcp:weather", "mcp:files"]),
        ("down", "mcp:files", ["mcp:weather", "mcp:files"]),
        ("remove", "mcp:files", ["mcp:weather"]),
        ("add", "mcp:late", ["mcp:files", "mcp:weather", "mcp:late"]),
        ("chosen", "", []),
    ],
)
def test_groups_are_moved_added_and_removed(action, group, expected, scout, ada):
    make_server(slug="late")

    response = ada.post("/agents/scout/groups", {"act": action, "group": group})

    assert response["Location"] == "/agents/scout"
    assert agent_actions.group_ids(scout) == expected
    assert AuditEntry.objects.filter(verb="agent.groups", actor_kind="user").count() == 1


def test_all_groups_can_be_granted_and_replaced_by_selected_groups(scout, ada):
    ada.post("/agents/scout/groups", {"act": "all"})
    page = text_of(ada.get("/agents/scout"))

    assert Agent.objects.get().all_groups
    assert "This agent has all groups, including future ones." in page
    assert "Select groups instead" in page
    assert "Remove" not in page


def test_the_page_shows_the_groups_in_order_with_their_tools(scout, ada):
    page = text_of(ada.get("/agents/scout"))

    assert "mcp:files Files 0" in page
    assert "mcp:weather Weather 1" in page
    assert page.index("mcp:files Files") < page.index("mcp:weather Weather")


def test_an_agent_without_groups_is_shown_as_having_no_tools(ada):
    agent_actions.create("drifter", actor=SYSTEM)

    assert "This agent has no tools" in text_of(ada.get("/agents/drifter"))


@pytest.mark.parametrize(("action", "group", "status"), [("turn", "x", 422), ("up", "mcp:no", 404)])
def test_an_invalid_group_action_is_rejected(action, group, status, scout, ada):
    response = ada.post("/agents/scout/groups", {"act": action, "group": group})

    assert response.status_code == status


# --- Keys ---------------------------------------------------------------------------------------


def responses_with_a_key(client, scout):
    pk = scout.keys.latest("id").pk
    yield client.post("/agents/new/add", {"name": "ranger"})
    yield client.post("/agents/scout/keys", {"name": "server"})
    yield client.post(f"/agents/scout/keys/{pk}/rotate")


def test_a_key_is_in_one_response_and_nowhere_else(scout, ada, caplog):
    for response in responses_with_a_key(ada, scout):
        text = key_in(response)
        assert response.status_code == 201  # not a redirect
        assert "no-store" in response["Cache-Control"]
        assert api_keys.find_key(text)
        assert text not in str(response.cookies) + str(dict(ada.session)) + caplog.text
        stored = [session.get_decoded() for session in Session.objects.all()]
        rows = [*ApiKey.objects.values(), *AuditEntry.objects.values(), *stored]
        assert text[10:] not in json.dumps(rows, default=str)
        for path in ("/agents", "/agents/scout/keys", "/agents/ranger/keys", "/audit"):
            assert text[10:] not in ada.get(path).content.decode()


def test_the_keys_page_shows_prefix_state_creator_and_last_use(scout, ada):
    text = key_in(ada.post("/agents/scout/keys", {"name": "server", "days": "30"}))
    api_keys.find_key(text)

    page = text_of(ada.get("/agents/scout/keys"))

    assert (
        f"{text[:10]}… server Active expires in 29 days just now ada@example.org just now" in page
    )
    assert "laptop Active just now Toolcrib never" in page


def test_a_key_has_the_agents_name_by_default(scout, ada):
    ada.post("/agents/scout/keys", {})

    assert ApiKey.objects.filter(name="scout", created_by="ada@example.org").count() == 1


@pytest.mark.parametrize("body", [{"days": "7"}, {"name": "x" * 121}, {"name": "a\0b"}])
def test_an_invalid_key_form_is_shown_again_with_its_errors(body, scout, ada):
    response = ada.post("/agents/scout/keys", body)

    assert response.status_code == 422
    assert 'aria-invalid="true"' in response.content.decode()
    assert ApiKey.objects.count() == 1


def test_rotating_shows_the_new_key_and_until_when_the_old_one_is_valid(scout, ada):
    old = ApiKey.objects.get()

    response = ada.post(f"/agents/scout/keys/{old.pk}/rotate")

    assert f"The old key {old.prefix}… stays valid for 24 hours." in text_of(response)
    old.refresh_from_db()
    assert old.expires_at is not None


def test_revoking_a_key_describes_its_effect_and_shows_the_key_as_revoked(scout, ada):
    for _ in range(2):
        open_session(scout)
    key = ApiKey.objects.get()
    page = text_of(ada.get("/agents/scout/keys"))
    assert "Requests with this key are rejected immediately. scout has 2 open sessions." in page

    ada.post(f"/agents/scout/keys/{key.pk}/revoke")

    page = text_of(ada.get("/agents/scout/keys"))
    assert f"Revoked {key.prefix}…." in page
    assert "laptop Revoked" in page
    assert "Revoke key" not in page


# --- Connect ------------------------------------------------------------------------------------


def test_the_snippets_contain_the_public_url_and_one_of_the_agents_tools(scout, ada, settings):
    settings.PUBLIC_URL = "https://crib.example.org"

    page = html.unescape(ada.get("/agents/scout/connect").content.decode())

    assert "TOOLCRIB=https://crib.example.org/api/v1" in page
    assert '"tool_name": "weather__get_forecast", "arguments": {"city": "text"}' in page
    assert '"group_id": "mcp:weather"' in page
    assert "has no tools yet" not in page
    assert "export TOOLCRIB_KEY='tcb_…'" in page


def test_the_snippets_prefer_a_read_only_tool(scout, ada):
    files = make_server(slug="more")
    make_tool(files, "a_delete", annotations={"destructiveHint": True})
    make_tool(files, "b_read", annotations={"readOnlyHint": True})
    for groups, tool in (
        ({"groups": ["mcp:more", "mcp:weather"]}, "more__b_read"),
        ({"all_groups": True}, "more__b_read"),
        ({"groups": ["mcp:weather", "mcp:more"]}, "more__b_read"),
        ({"groups": ["mcp:weather"]}, "weather__get_forecast"),
    ):
        agent_actions.set_groups(scout, **groups, actor=SYSTEM)
        page = html.unescape(ada.get("/agents/scout/connect").content.decode())
        assert f'"tool_name": "{tool}"' in page


def test_the_snippets_never_use_a_tool_the_agent_lacks(scout, ada):
    agent_actions.set_groups(scout, ["mcp:files"], actor=SYSTEM)
    make_tool(make_server(slug="secret"), "open_vault")

    page = ada.get("/agents/scout/connect")

    assert "vault" not in page.content.decode()
    assert "scout has no tools yet" in text_of(page)


def test_every_client_can_be_selected_and_the_first_one_is(scout, ada):
    page = ada.get("/agents/scout/connect").content.decode()

    options = re.findall(r'name="way" value="([a-z-]+)"( checked)?', page)

    assert options == [
        ("claude-code", " checked"),
        *((slug, "") for slug in (
            "claude-desktop", "codex-cli", "gemini-cli", "copilot-cli", "opencode", "vs-code",
            "cursor", "mcp-inspector", "openai-agents-sdk", "anthropic-sdk", "openai-sdk", "ai-sdk",
            "pydantic-ai", "langchain", "llamaindex", "google-adk", "semantic-kernel",
            "microsoft-agent-framework", "crewai", "python", "plain-python", "curl",
        )),
    ]  # fmt: skip


def is_plain(node):
    return not any(isinstance(child, ast.Name | ast.JoinedStr) for child in ast.walk(node))


def test_snippets_quote_special_characters():
    arguments = {"e": "f'\"$g\n", "h": [True, None, 1.5], "ü": {}}
    awkward = snippets.Example("it's $HOME `x` {y}", 'a"b', "c'd", arguments)
    bodies = [
        {"query": awkward.query},
        {"group_id": 'a"b', "tool_names": ["c'd"]},
        {"tool_name": "c'd", "arguments": arguments},
    ]

    by_title = {
        snippet.title: snippet
        for snippet in snippets.for_agent("https://x.org/", "t'k", example=awkward)
    }

    python, curl = by_title["Plain Python"], by_title["curl"]
    for snippet in by_title.values():
        if snippet.language == "python":
            ast.parse(snippet.text)
        elif snippet.language == "json":
            json.loads(snippet.text)
        elif snippet.language == "js":
            assert 'process.env.TOOLCRIB_KEY ?? "t\'k"' in snippet.text
        elif snippet.language == "toml":
            assert "t'k" in str(tomllib.loads(snippet.text))
        else:
            assert "t'k" in " ".join(shlex.split(snippet.text, comments=True))
    nodes = [node for node in ast.walk(ast.parse(python.text)) if isinstance(node, ast.Dict)]
    literals = [ast.literal_eval(node) for node in nodes if is_plain(node)]
    assert all(body in literals for body in bodies)
    words = shlex.split(curl.text, comments=True)
    assert [json.loads(word) for word in words if word.startswith('{"')] == bodies


def test_sample_arguments_contain_the_required_arguments():
    schema = {
        "required": ["a", "b", "c", "d", "e"],
        "properties": {
            "a": {"type": "integer"},
            "b": {"enum": ["red"]},
            "c": {"default": [3]},
            "d": {"examples": ["Oslo"], "type": "string"},
            "unneeded": {"type": "string"},
        },
    }

    expected = {"a": 1, "b": "red", "c": [3], "d": "Oslo", "e": "text"}
    assert snippets.sample_arguments(schema) == expected
    assert snippets.sample_arguments({"required": "a", "properties": []}) == {}


# --- Settings and deletion ----------------------------------------------------------------------


def settings_form(agent, **changes):
    """Return the settings form as a browser sends it."""
    names = [name for name in agent_actions.SETTINGS if name in Agent.__dict__]
    values = {name: getattr(agent, name) for name in names} | changes
    return {name: "" if value is None else value for name, value in values.items()}


def test_settings_are_saved_and_an_unchanged_form_changes_nothing(scout, ada):
    before = AuditEntry.objects.count()
    assert ada.post("/agents/scout/settings", settings_form(scout)).status_code == 302
    assert AuditEntry.objects.count() == before

    changes = {"name": "ranger", "mode": "full", "budget": 900, "threshold_percent": 2.5}
    response = ada.post("/agents/scout/settings", settings_form(scout, **changes))

    assert response["Location"] == "/agents/ranger/settings"
    agent = Agent.objects.get()
    assert (agent.mode, agent.budget, agent.threshold_percent) == ("full", 900, 2.5)


@pytest.mark.parametrize(
    "changes",
    [{"mode": "fast"}, {"calls_in_flight": 0}, {"name": "a/b"}, {"threshold_percent": "nan"}],
)
def test_an_invalid_settings_form_is_shown_again_with_its_errors(changes, scout, ada):
    form = settings_form(scout, description="Kept.", **changes)
    response = ada.post("/agents/scout/settings", form)

    assert response.status_code == 422
    assert "Kept." in text_of(response)
    assert 'class="notice bad error-summary"' in response.content.decode()
    assert Agent.objects.get().description == ""


def test_operators_see_the_settings_read_only(scout, operator):
    page = text_of(signed_in(operator).get("/agents/scout/settings"))

    assert "Mode Auto: defer above the thresholds below" in page
    assert "Deferral threshold (tokens) 10,000" in page
    assert "Budget (loaded tokens) –" in page


def test_an_agent_is_disabled_and_enabled_with_a_message(scout, ada):
    ada.post("/agents/scout/disable")
    page = text_of(ada.get("/agents/scout"))
    assert "Disabled scout. Its keys are rejected." in page
    assert not Agent.objects.get().enabled

    ada.post("/agents/scout/enable")
    assert Agent.objects.get().enabled


def test_deleting_requires_the_name_and_lists_what_is_deleted(scout, ada):
    open_session(scout)
    page = text_of(ada.get("/agents/scout/settings"))
    assert "Revokes the keys of scout and ends its 1 session." in page

    rejected = ada.post("/agents/scout/delete", {"typed_name": "scuot"})
    assert rejected.status_code == 422
    assert "The name does not match: scuot" in text_of(rejected)
    assert Agent.objects.exists()

    assert ada.post("/agents/scout/delete", {"typed_name": "scout"})["Location"] == "/agents"
    assert not Agent.objects.exists()
    assert AgentSession.objects.get().state == "closed"


def test_names_and_texts_are_escaped_on_every_page(ada):
    name = "<b>x&y?z=1#2</b>".replace("/", "-")
    agent_actions.create(name, description=HOSTILE, catalog_header=HOSTILE, actor=SYSTEM)
    api_keys.create_key("<i>key", "agent", agent=find_agent(name), actor=SYSTEM)

    for route in ("agent", "agent-keys", "agent-connect", "agent-settings"):
        page = ada.get(reverse(route, args=[name])).content.decode()
        assert "<script>alert" not in page
        assert "<b>x" not in page
        assert "<i>key" not in page
    assert "<script>alert" not in ada.get("/agents").content.decode()


def test_every_field_of_the_settings_form_is_on_the_page():
    """A field outside the sections would not be rendered, and saving would erase its value."""
    sections = SettingsForm().sections
    assert [title for title, _ in sections] == [
        "Identity",
        "Context",
        "Limits",
        "Storage",
        "Scripts and custom tools",
    ]
    shown = [bound.name for _, fields in sections for bound in fields]
    assert shown == list(SettingsForm.base_fields)


def test_the_catalog_that_an_agent_saw_on_a_date_is_found(scout, ada):
    for day, text in ((1, "An old catalog."), (3, "A new catalog.")):
        make_session(scout, started=datetime(2026, 3, day, tzinfo=UTC), catalog=text)
    page = text_of(ada.get("/agents/scout?on=2026-03-02T10:00"))
    assert "An old catalog." in page
    assert "A new catalog." not in page
    assert "No stored session of scout" in text_of(ada.get("/agents/scout?on=2026-02-01T10:00"))
