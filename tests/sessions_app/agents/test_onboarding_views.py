"""Onboarding: token savings, the server's group, the first agent and its first request."""

import re

import pytest

from catalog.audit import Actor
from catalog.models import AuditEntry, Membership
from servers.models import Server
from servers.web import token_savings
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Agent, ApiKey
from tests.support.agent_client import AgentClient, add_tools


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


@pytest.fixture
def as_admin(client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    return client


def weighed():
    return token_savings.compute_savings(list(Server.objects.values_list("pk", flat=True)))


@pytest.mark.parametrize("preloads", [0, 2])
def test_the_predicted_savings_match_the_first_session(as_admin, github, slack, preloads):
    chosen = Membership.objects.order_by("pk")[:preloads].values_list("pk", flat=True)
    Membership.objects.filter(pk__in=list(chosen)).update(preload=True)
    promised = weighed()
    assert bool(promised.preload_tokens) == bool(preloads)

    as_admin.post("/welcome/agent")
    opened = AgentClient(Agent.objects.get(name="scout")).open()
    tokens = opened.opened["stats"]["tokens"]
    assert promised.initial_tokens == tokens["by"]["catalog"]
    assert promised.baseline_tokens == tokens["all_schemas"]


def test_a_server_without_tools_has_no_costs_and_no_savings(db):
    add_tools("empty")
    found = weighed()
    assert (found.tools, found.baseline_tokens, found.initial_tokens) == (0, 0, 0)
    assert not found.saves_tokens


def test_starting_opens_the_servers_group_with_the_agent_as_next_step(as_admin, github, slack):
    done = as_admin.post("/welcome/start", {"server": "slack"})
    assert done.headers["Location"] == "/groups/mcp:slack"
    page = text_of(as_admin.get("/groups/mcp:slack"))
    assert "Next step: Connect an agent Skip" in page
    assert "Connect an agent" not in text_of(as_admin.get("/tools"))

    as_admin.post("/welcome/skip")
    assert "Connect an agent Skip" not in text_of(as_admin.get("/groups/mcp:slack"))


@pytest.mark.parametrize("server", ["", "nothing-like-it", "a\0b"])
def test_an_unknown_server_redirects_to_the_first_group(as_admin, github, server):
    done = as_admin.post("/welcome/start", {"server": server})
    assert done.headers["Location"] == "/groups/mcp:github"


def test_without_groups_it_redirects_to_the_group_list(as_admin, db):
    assert as_admin.post("/welcome/start").headers["Location"] == "/groups"


def test_no_next_step_is_shown_if_an_agent_exists(as_admin, scout):
    as_admin.post("/welcome/start", {"server": "github"})
    assert "Connect an agent Skip" not in text_of(as_admin.get("/groups/mcp:github"))


def test_the_first_agent_is_created_once_and_its_key_is_only_in_that_response(as_admin, github):
    before = text_of(as_admin.get("/welcome/agent"))
    assert "The agent gets all groups, with tools on demand." in before
    assert not Agent.objects.exists()

    made = as_admin.post("/welcome/agent")
    assert made.status_code == 201
    assert "no-store" in made.headers["Cache-Control"]
    key = re.search(r"tcb_[\w-]{43}", made.content.decode()).group()
    agent = Agent.objects.get()
    assert (agent.name, agent.mode, agent.all_groups) == ("scout", "deferred", True)
    assert AuditEntry.objects.filter(verb="agent.add", actor_kind="user").exists()

    for again in (as_admin.post("/welcome/agent"), as_admin.get("/welcome/agent")):
        assert again.status_code == 200
        assert key not in again.content.decode()
        assert "its key was shown once" in text_of(again)
    assert ApiKey.objects.count() == 1

    other = as_admin.post("/welcome/agent", {"key": "1"})
    assert other.status_code == 201
    assert ApiKey.objects.count() == 2


def test_the_status_is_running_until_the_agent_opens_a_session(as_admin, github):
    htmx = {"headers": {"HX-Request": "true"}}
    assert as_admin.get("/welcome/agent/waiting", **htmx).headers["Location"] == "/welcome/agent"
    as_admin.post("/welcome/agent")
    waiting = as_admin.get("/welcome/agent/waiting", **htmx)
    assert 'data-poll-state="running"' in waiting.content.decode()
    assert "HX-Trigger" not in waiting.headers

    opened = AgentClient(Agent.objects.get()).open()
    done = as_admin.get("/welcome/agent/waiting", **htmx)
    assert 'data-poll-state="done"' in done.content.decode()
    assert f"/sessions/{opened.id}" in done.content.decode()
    assert "scout fetched its catalog." in done.headers["HX-Trigger"]
    assert f"/sessions/{opened.id}" in as_admin.get("/welcome/agent").content.decode()


def test_only_admins_create_agents_and_only_with_post(client, operator, github):
    client.force_login(operator, backend="django.contrib.auth.backends.ModelBackend")
    assert client.get("/welcome/agent").status_code == 403
    assert client.post("/welcome/agent").status_code == 403
    assert client.post("/welcome/start").status_code == 403
    assert client.get("/welcome/skip").status_code == 405
    assert not Agent.objects.exists()


def test_after_a_rename_the_first_agent_can_be_created_again(as_admin, github, admin):
    as_admin.post("/welcome/agent")
    agent_actions.change(Agent.objects.get(), name="ranger", actor=Actor.user(admin))
    assert as_admin.post("/welcome/agent").status_code == 201
    assert set(Agent.objects.values_list("name", flat=True)) == {"ranger", "scout"}


def test_the_first_agent_has_the_name_that_was_entered(as_admin, github):
    assert as_admin.post("/welcome/agent", {"name": "a b\0"}).status_code == 422
    assert as_admin.post("/welcome/agent", {"name": "ranger"}).status_code == 201
    assert "ranger exists" in text_of(as_admin.get("/welcome/agent"))


def test_the_groups_of_several_servers_are_listed(as_admin, github):
    assert as_admin.post("/welcome/start").headers["Location"] == "/groups"
