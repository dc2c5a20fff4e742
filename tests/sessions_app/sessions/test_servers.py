"""An agent's own view of the servers in scope of its session."""

import pytest

from servers.models import Server
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, make_server


@pytest.fixture
def session(db):
    add_tools("github", "create_issue", "list_issues")
    add_tools("slack", "post_message")
    add_tools("vault", "read_secret")
    Server.objects.filter(slug="github").update(description="Issues.", state="failing")
    make_group("own", *Server.objects.get(slug="slack").tools.all())
    return make_agent_client("scout", "own", "mcp:github", "mcp:slack").open()


def test_the_servers_in_scope_are_listed_with_groups_tools_and_state(session):
    github, slack = session.get("/servers")["items"]
    assert github == {
        "slug": "github",
        "name": Server.objects.get(slug="github").name,
        "description": "Issues.",
        "groups": ["mcp:github"],
        "tools": 2,
        "state": "failing",
    }
    assert (slack["slug"], slack["groups"], slack["tools"]) == ("slack", ["own", "mcp:slack"], 1)


def test_the_list_is_paginated_and_narrowed_as_the_session_is(session):
    first = session.get("/servers?limit=1").json
    assert [row["slug"] for row in first["items"]] == ["github"]
    second = session.get(f"/servers?limit=1&cursor={first['next_cursor']}").json
    assert ([row["slug"] for row in second["items"]], second["next_cursor"]) == (["slack"], None)
    assert session.get("/servers?limit=201").status == 422
    narrow = session.client.open(servers=["slack"])
    assert [row["slug"] for row in narrow.get("/servers")["items"]] == ["slack"]
    assert session.client.open(without_mcp=True).get("/servers")["items"] == []


def test_a_server_without_tools_for_the_agent_is_not_listed(db):
    ingest_tools(make_server(slug="empty"))
    add_tools("github", "create_issue")
    session = make_agent_client("scout", "mcp:github").open()
    assert [row["slug"] for row in session.get("/servers")["items"]] == ["github"]
