"""Two groups, and agents with and without them."""

import pytest

from sessions_app.models import Agent
from tests.support.agent_client import AgentClient, add_tools, make_agent_client


@pytest.fixture
def github(db):
    """The group mcp:github, of five tools."""
    return add_tools(
        "github",
        *("create_issue", "list_issues", "search_code", "merge_pull", "get_file"),
        create_issue="Create an issue in a repository.",
        search_code="Search code in all repositories.",
    )


@pytest.fixture
def slack(db):
    """The group mcp:slack; both it and github have a tool called `search_code`."""
    return add_tools("slack", "post_message", "search_code")


@pytest.fixture
def scout(github, slack):
    """An agent with every group."""
    return make_agent_client("scout", mode="deferred")


@pytest.fixture
def session(scout):
    return scout.open()


@pytest.fixture
def drifter(db):
    """An agent with no group."""
    return AgentClient(Agent.objects.create(name="drifter", mode="deferred"))
