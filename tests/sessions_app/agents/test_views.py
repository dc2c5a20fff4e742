"""The agents' pages: who may see and change what, what they say, and what they never keep."""

import ast
import html
import json
import re
import shlex
from datetime import timedelta

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
from sessions_app.models import Agent, AgentSession, ApiKey
from sessions_app.urls import agent_pages
from tests.support.factories import make_server, make_tool

BACKEND = "django.contrib.auth.backends.ModelBackend"
# route: (method, status for operators, status for admins). Outsiders always get 403 and
# anonymous people the sign-in page; a route that is missing here fails the test.
ROUTES = {
    "agents": ("get", 200, 200),
    "agent-add": ("get", 403, 200),
    "agent": ("get", 200, 200),
    "agent-groups": ("post", 403, 302),
    "agent-keys": ("get", 200, 200),
    "key-rotate": ("post", 403, 201),
    "key-revoke": ("post", 403, 302),
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
# Pages whose POST needs more than their GET.
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


def address(name):
    route = next(str(one.pattern) for one in agent_pages if one.name == name)
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
    """The key a page shows."""
    found = re.findall(r"tcb_[\w-]{40,}", response.content.decode())
    assert len(set(found)) == 1
    return found[0]


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


# --- Who may ------------------------------------------------------------------------------------


def test_every_address_is_in_the_table():
    assert {one.name for one in agent_pages} == set(ROUTES)


@pytest.mark.parametrize("name", ROUTES)
def test_each_route_answers_everybody_as_the_table_says(name, scout, admin, operator, outsider):
    method, for_operator, for_admin = ROUTES[name]
    path = address(name)

    def answer(user):
        body = BODIES.get(name, {}) if method == "post" else {}
        return getattr(signed_in(user), method)(path, body)

    asked = answer(None)
    assert asked.status_code == 302
    assert asked["Location"] == f"/sign-in?next={path}"
    assert answer(outsider).status_code == 403
    assert answer(operator).status_code == for_operator
    assert answer(admin).status_code == for_admin


def kept():
    return list(Agent.objects.values()), list(ApiKey.objects.values()), AuditEntry.objects.count()


@pytest.mark.parametrize("name", POSTS)
def test_operators_change_nothing(name, scout, operator):
    before, path = kept(), address(name)

    assert signed_in(operator).post(path, BODIES.get(name, {})).status_code == 403
    assert kept() == before


@pytest.mark.parametrize("name", POSTS)
def test_a_post_without_the_csrf_token_is_refused(name, scout, admin):
    before, path = kept(), address(name)
    client = signed_in(admin, enforce_csrf_checks=True)

    assert client.post(path, BODIES.get(name, {})).status_code == 403
    assert kept() == before


@pytest.mark.parametrize("name", [name for name in ROUTES if name not in READS])
def test_what_changes_something_cannot_be_fetched(name, scout, ada):
    assert ada.get(address(name)).status_code == 405


@pytest.mark.parametrize("name", [name for name in READS if name != "agent-add"])
def test_operators_see_no_button_that_would_be_refused(name, scout, operator):
    page = signed_in(operator).get(address(name)).content.decode()

    forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page)
    assert set(forms) <= {"/theme", "/sign-out"}
    assert "/agents/new/add" not in page


@pytest.mark.parametrize("path", ["/agents/nobody", "/agents/nobody/keys", "/agents/%00"])
def test_an_agent_that_is_not_there_is_told_in_words(path, ada):
    answer = ada.get(path)

    assert answer.status_code == 404
    assert "There is no agent of this name." in text_of(answer)


def test_another_agents_key_is_not_reached_through_this_one(scout, ada):
    agent_actions.create("drifter", actor=SYSTEM)

    answer = ada.post(f"/agents/drifter/keys/{ApiKey.objects.get().pk}/revoke")

    assert answer.status_code == 404
    assert ApiKey.objects.get().revoked_at is None


# --- The list -----------------------------------------------------------------------------------


def test_the_list_says_groups_keys_sessions_and_limits(scout, ada):
    open_session(scout)
    old = open_session(scout, state="closed")
    AgentSession.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=2))
    agent_actions.create("everything", all_groups=True, actor=SYSTEM)
    agent_actions.disable(agent_actions.create("drifter", actor=SYSTEM), actor=SYSTEM)

    page = text_of(ada.get("/agents"))

    assert "3 agents may ask for tools." in page
    assert "scout mcp:files , mcp:weather none 1 never 1 1 open 600 20" in page
    assert "drifter Disabled none: sees no tools none 0 never 0 600 20" in page
    assert "everything all groups none 0" in page


@pytest.mark.parametrize("name", READS)
def test_a_page_costs_the_same_however_many_agents_there_are(name, scout, ada):
    path = address(name)

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


def test_more_than_a_page_of_agents_is_paged(ada):
    for number in range(53):
        Agent.objects.create(name=f"agent-{number:02}")

    first, second = ada.get("/agents"), ada.get("/agents?after=50")

    assert "1 to 50 of 53 agents" in text_of(first)
    assert "51 to 53 of 53 agents" in text_of(second)
    assert "agent-52" in text_of(second)
    assert "agent-49" not in text_of(second)


def test_without_agents_the_list_is_the_form_and_operators_are_told(ada, operator):
    assert "Add your first agent" in text_of(ada.get("/agents"))
    assert "No agents yet" in text_of(signed_in(operator).get("/agents"))


def test_the_navigation_leads_there_with_a_count(scout, ada):
    page = ada.get("/groups").content.decode()

    link = re.search(r'<a href="/agents" data-go="a">(.*?)</a>', page, re.S)
    assert re.sub(r"<[^>]+>|\s", "", link[1]) == "Agents1ga"


# --- Making one ---------------------------------------------------------------------------------


def test_a_name_is_enough_and_the_key_is_shown_with_lines_that_hold_it(ada, settings):
    settings.PUBLIC_URL = "https://crib.example.org"

    answer = ada.post("/agents/new/add", {"name": "scout"})

    assert answer.status_code == 201
    text = key_in(answer)
    assert api_keys.find_key(text).agent.name == "scout"
    page = html.unescape(answer.content.decode())
    assert f"export TOOLCRIB_KEY={text}" in page
    assert "https://crib.example.org/api/v1" in page
    assert "it is not shown again" in page


def test_groups_are_ticked_or_all_of_them(scout, ada):
    ada.post("/agents/new/add", {"name": "chosen", "groups": ["mcp:weather"]})
    ada.post("/agents/new/add", {"name": "everything", "all_groups": "on"})

    assert agent_actions.group_ids(agent_actions.find_agent("chosen")) == ["mcp:weather"]
    assert agent_actions.find_agent("everything").all_groups


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": ""}, "This field is required."),
        ({"name": "scout"}, "There is an agent called scout already. Choose another name"),
        ({"name": "a/b"}, "it has no / and more than dots."),
        ({"name": "x", "groups": ["mcp:nope"]}, "There is no group called mcp:nope."),
        ({"name": "x", "groups": ["mcp:files"], "all_groups": "on"}, "not both."),
        ({"name": HOSTILE}, "it has no /"),
    ],
)
def test_what_is_refused_is_told_beside_the_form_which_stays(body, words, scout, ada):
    answer = ada.post("/agents/new/add", body)

    assert answer.status_code == 422
    assert words in text_of(answer)
    assert HOSTILE not in answer.content.decode()
    assert Agent.objects.count() == 1


# --- Groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "group", "left"),
    [
        ("up", "mcp:weather", ["mcp:weather", "mcp:files"]),
        ("down", "mcp:files", ["mcp:weather", "mcp:files"]),
        ("remove", "mcp:files", ["mcp:weather"]),
        ("add", "mcp:late", ["mcp:files", "mcp:weather", "mcp:late"]),
        ("chosen", "", []),
    ],
)
def test_groups_are_moved_added_and_removed(act, group, left, scout, ada):
    make_server(slug="late")

    answer = ada.post("/agents/scout/groups", {"act": act, "group": group})

    assert answer["Location"] == "/agents/scout"
    assert agent_actions.group_ids(scout) == left
    assert AuditEntry.objects.filter(verb="agent.groups", actor_kind="user").count() == 1


def test_all_groups_are_given_by_one_button_and_taken_back_by_another(scout, ada):
    ada.post("/agents/scout/groups", {"act": "all"})
    page = text_of(ada.get("/agents/scout"))

    assert Agent.objects.get().all_groups
    assert "It has all groups, and those to come." in page
    assert "Choose its groups instead" in page
    assert "Remove" not in page


def test_the_page_shows_the_groups_in_order_with_their_tools(scout, ada):
    page = text_of(ada.get("/agents/scout"))

    assert "mcp:files Files 0" in page
    assert "mcp:weather Weather 1" in page
    assert page.index("mcp:files Files") < page.index("mcp:weather Weather")


def test_an_agent_without_groups_is_said_to_see_nothing(ada):
    agent_actions.create("drifter", actor=SYSTEM)

    assert "This agent sees no tools" in text_of(ada.get("/agents/drifter"))


@pytest.mark.parametrize(("act", "group", "status"), [("turn", "x", 422), ("up", "mcp:no", 404)])
def test_an_act_that_cannot_be_done_is_told(act, group, status, scout, ada):
    answer = ada.post("/agents/scout/groups", {"act": act, "group": group})

    assert answer.status_code == status


# --- Keys ---------------------------------------------------------------------------------------


def ways_to_a_key(client, scout):
    pk = scout.keys.latest("id").pk
    yield client.post("/agents/new/add", {"name": "ranger"})
    yield client.post("/agents/scout/keys", {"name": "server"})
    yield client.post(f"/agents/scout/keys/{pk}/rotate")


def test_a_key_stands_in_one_answer_and_nowhere_else(scout, ada, caplog):
    for answer in ways_to_a_key(ada, scout):
        text = key_in(answer)
        assert answer.status_code == 201  # and no redirect
        assert "no-store" in answer["Cache-Control"]
        assert api_keys.find_key(text)
        assert text not in str(answer.cookies) + str(dict(ada.session)) + caplog.text
        stored = [one.get_decoded() for one in Session.objects.all()]
        rows = [*ApiKey.objects.values(), *AuditEntry.objects.values(), *stored]
        assert text[10:] not in json.dumps(rows, default=str)
        for path in ("/agents", "/agents/scout/keys", "/agents/ranger/keys", "/audit"):
            assert text[10:] not in ada.get(path).content.decode()


def test_later_a_key_is_known_by_its_prefix_its_maker_and_its_use(scout, ada):
    text = key_in(ada.post("/agents/scout/keys", {"name": "server", "days": "30"}))
    api_keys.find_key(text)

    page = text_of(ada.get("/agents/scout/keys"))

    assert f"{text[:10]}… server Active ends in 29 days just now ada@example.org just now" in page
    assert "laptop Active just now Toolcrib never" in page


def test_a_key_without_a_name_has_its_agents(scout, ada):
    ada.post("/agents/scout/keys", {})

    assert ApiKey.objects.filter(name="scout", created_by="ada@example.org").count() == 1


@pytest.mark.parametrize("body", [{"days": "7"}, {"name": "x" * 121}, {"name": "a\0b"}])
def test_a_key_that_cannot_be_made_is_told_beside_the_form(body, scout, ada):
    answer = ada.post("/agents/scout/keys", body)

    assert answer.status_code == 422
    assert 'aria-invalid="true"' in answer.content.decode()
    assert ApiKey.objects.count() == 1


def test_rotating_shows_the_new_key_and_says_when_the_old_one_ends(scout, ada):
    old = ApiKey.objects.get()

    answer = ada.post(f"/agents/scout/keys/{old.pk}/rotate")

    assert f"The old one, {old.prefix}…, ends in 24 hours." in text_of(answer)
    old.refresh_from_db()
    assert old.expires_at is not None


def test_revoking_states_its_effect_first_and_is_marked_after(scout, ada):
    for _ in range(2):
        open_session(scout)
    key = ApiKey.objects.get()
    page = text_of(ada.get("/agents/scout/keys"))
    assert "The next request with it is refused. scout has 2 open sessions." in page

    ada.post(f"/agents/scout/keys/{key.pk}/revoke")

    page = text_of(ada.get("/agents/scout/keys"))
    assert f"{key.prefix}… is revoked." in page
    assert "laptop Revoked" in page
    assert "Revoke key" not in page


# --- Connecting ---------------------------------------------------------------------------------


def test_the_lines_name_this_host_and_a_tool_the_agent_really_has(scout, ada, settings):
    settings.PUBLIC_URL = "https://crib.example.org"

    page = html.unescape(ada.get("/agents/scout/connect").content.decode())

    assert "TOOLCRIB=https://crib.example.org/api/v1" in page
    assert '"tool_name": "weather__get_forecast", "arguments": {"city": "text"}' in page
    assert '"group_id": "mcp:weather"' in page
    assert "has no tools yet" not in page
    assert "export TOOLCRIB_KEY='tcb_…'" in page


def test_the_tool_to_try_is_one_that_changes_nothing_where_there_is_one(scout, ada):
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


def test_no_tool_of_a_group_the_agent_lacks_is_named(scout, ada):
    agent_actions.set_groups(scout, ["mcp:files"], actor=SYSTEM)
    make_tool(make_server(slug="secret"), "open_vault")

    page = ada.get("/agents/scout/connect")

    assert "vault" not in page.content.decode()
    assert "scout has no tools yet" in text_of(page)


def test_every_way_to_connect_is_there_to_choose_and_the_first_is_chosen(scout, ada):
    page = ada.get("/agents/scout/connect").content.decode()

    chosen = re.findall(r'name="way" value="([a-z-]+)"( checked)?', page)

    assert chosen == [
        ("claude-code", " checked"),
        *((way, "") for way in (
            "claude-desktop", "vs-code", "cursor", "mcp-inspector", "anthropic-sdk", "openai-sdk",
            "langchain", "python", "plain-python", "curl",
        )),
    ]  # fmt: skip


def is_plain(node):
    return not any(isinstance(one, ast.Name | ast.JoinedStr) for one in ast.walk(node))


def test_programs_are_sound_whatever_stands_in_them():
    arguments = {"e": "f'\"$g\n", "h": [True, None, 1.5], "ü": {}}
    awkward = snippets.Example("it's $HOME `x` {y}", 'a"b', "c'd", arguments)
    sent = [
        {"query": awkward.query},
        {"group_id": 'a"b', "tool_names": ["c'd"]},
        {"tool_name": "c'd", "arguments": arguments},
    ]

    ways = {one.title: one for one in snippets.for_agent("https://x.org/", "t'k", example=awkward)}

    python, curl = ways["Plain Python"], ways["curl"]
    for way in ways.values():
        if way.language == "python":
            ast.parse(way.text)
        elif way.language == "json":
            json.loads(way.text)
        else:
            assert "t'k" in " ".join(shlex.split(way.text, comments=True))
    asked = [one for one in ast.walk(ast.parse(python.text)) if isinstance(one, ast.Dict)]
    written = [ast.literal_eval(one) for one in asked if is_plain(one)]
    assert all(body in written for body in sent)
    words = shlex.split(curl.text, comments=True)
    assert [json.loads(word) for word in words if word.startswith('{"')] == sent


def test_sample_arguments_fill_in_what_is_required():
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

    assert snippets.sample(schema) == {"a": 1, "b": "red", "c": [3], "d": "Oslo", "e": "text"}
    assert snippets.sample({"required": "a", "properties": []}) == {}


# --- Settings and the end -----------------------------------------------------------------------


def filled(agent, **changes):
    """The settings form as a browser sends it."""
    names = [name for name in agent_actions.SETTINGS if name in Agent.__dict__]
    values = {name: getattr(agent, name) for name in names} | changes
    return {name: "" if value is None else value for name, value in values.items()}


def test_settings_are_saved_and_an_unchanged_form_changes_nothing(scout, ada):
    before = AuditEntry.objects.count()
    assert ada.post("/agents/scout/settings", filled(scout)).status_code == 302
    assert AuditEntry.objects.count() == before

    changes = {"name": "ranger", "mode": "full", "budget": 900, "threshold_percent": 2.5}
    answer = ada.post("/agents/scout/settings", filled(scout, **changes))

    assert answer["Location"] == "/agents/ranger/settings"
    agent = Agent.objects.get()
    assert (agent.mode, agent.budget, agent.threshold_percent) == ("full", 900, 2.5)


@pytest.mark.parametrize(
    "changes",
    [{"mode": "fast"}, {"calls_in_flight": 0}, {"name": "a/b"}, {"threshold_percent": "nan"}],
)
def test_a_setting_that_is_refused_is_told_in_the_form_which_stays(changes, scout, ada):
    answer = ada.post("/agents/scout/settings", filled(scout, description="Kept.", **changes))

    assert answer.status_code == 422
    assert "Kept." in text_of(answer)
    assert 'class="notice bad error-summary"' in answer.content.decode()
    assert Agent.objects.get().description == ""


def test_operators_read_every_setting_in_words(scout, operator):
    page = text_of(signed_in(operator).get("/agents/scout/settings"))

    assert "Mode Auto: defer when there are many tools" in page
    assert "Defer over this many tokens 10,000" in page
    assert "Budget of loaded tokens –" in page


def test_an_agent_is_disabled_and_enabled_with_the_effect_said(scout, ada):
    ada.post("/agents/scout/disable")
    page = text_of(ada.get("/agents/scout"))
    assert "scout is disabled. Its keys are refused." in page
    assert not Agent.objects.get().enabled

    ada.post("/agents/scout/enable")
    assert Agent.objects.get().enabled


def test_deleting_needs_the_name_and_says_what_goes(scout, ada):
    open_session(scout)
    page = text_of(ada.get("/agents/scout/settings"))
    assert "Removes scout, its keys, and the record of its 1 session with their calls." in page

    refused = ada.post("/agents/scout/delete", {"typed_name": "scuot"})
    assert refused.status_code == 422
    assert "This is not the name: scuot" in text_of(refused)
    assert Agent.objects.exists()

    assert ada.post("/agents/scout/delete", {"typed_name": "scout"})["Location"] == "/agents"
    assert not Agent.objects.exists()
    assert not AgentSession.objects.exists()


def test_names_and_texts_are_escaped_on_every_page(ada):
    name = "<b>x&y?z=1#2</b>".replace("/", "-")
    agent_actions.create(name, description=HOSTILE, catalog_header=HOSTILE, actor=SYSTEM)
    api_keys.create_key("<i>key", "agent", agent=agent_actions.find_agent(name), actor=SYSTEM)

    for route in ("agent", "agent-keys", "agent-connect", "agent-settings"):
        page = ada.get(reverse(route, args=[name])).content.decode()
        assert "<script>alert" not in page
        assert "<b>x" not in page
        assert "<i>key" not in page
    assert "<script>alert" not in ada.get("/agents").content.decode()
