"""Fixtures: two groups, and agents with and without them."""

import pytest

from sessions_app.mcp import tool_calls
from sessions_app.models import Agent
from tests.support.agent_client import AgentClient, add_tools, make_agent_client


@pytest.fixture(autouse=True)
def responses_without_events(monkeypatch):
    """A busy machine must not make an event stream of the response to an older client."""
    monkeypatch.setattr(tool_calls, "FIRST_EVENT_SECONDS", 3_600.0)


@pytest.fixture
def github(db):
    """The group mcp:github with five tools."""
    return add_tools(
        "github",
        *("create_issue", "list_issues", "search_code", "merge_pull", "get_file"),
        create_issue="Create an issue in a repository.",
        search_code="Search code in all repositories.",
    )


@pytest.fixture
def slack(db):
    """The group mcp:slack. It and mcp:github both have a tool named `search_code`."""
    return add_tools("slack", "post_message", "search_code")


@pytest.fixture
def scout(github, slack):
    """An agent with all groups."""
    return make_agent_client("scout", mode="deferred")


@pytest.fixture
def session(scout):
    return scout.open()


@pytest.fixture
def drifter(db):
    """An agent without groups."""
    return AgentClient(Agent.objects.create(name="drifter", mode="deferred"))
