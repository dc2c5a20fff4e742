"""Which tools and texts of an installation an agent's search covers."""

import pytest

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.hints import actions as hints
from catalog.models import Revision
from catalog.search import index_cache as index
from catalog.search.engine import search, suggest_names
from catalog.tools import actions as tool_actions
from sessions_app.sessions import scope
from tests.support.factories import make_agent, make_server, make_tool

pytestmark = pytest.mark.django_db


@pytest.fixture
def run():
    """A tool with an uninformative description."""
    return make_tool(make_server(slug="s", name="S"), "run", description="Runs.")


def names(query, agent=None, **parameters):
    index = scope.scope_of_agent(agent or make_agent()).index
    return [hit.name for hit in search(index, query=query, **parameters).hits]


@pytest.mark.parametrize("query", ["walrus", "pinniped", "seaside"])
def test_the_name_and_description_of_a_group_are_searched(run, query):
    group = group_actions.create("walrus", "Pinniped desk", "For the seaside.", actor=SYSTEM).group
    group_actions.assign(group, [run], actor=SYSTEM)

    assert names(query) == ["s__run"]


@pytest.mark.parametrize("kind", ["alias", "example"])
def test_aliases_and_example_queries_are_searched(run, kind):
    hints.add(run, kind, "brew some coffee", actor=SYSTEM)

    assert names("coffee") == ["s__run"]


def test_a_description_override_replaces_the_server_description(run):
    tool_actions.override_description(run, "Feeds the walrus.", actor=SYSTEM)

    assert names("walrus") == ["s__run"]
    assert names("runs") == ["s__run"]  # its name
    assert "Runs" not in [
        tool.description for tool in scope.scope_of_agent(make_agent()).index.tools
    ]


@pytest.mark.parametrize("strategy", ["hybrid", "bm25", "embedding", "regex"])
def test_tools_outside_the_agents_scope_are_never_found(run, strategy):
    other = make_tool(make_server(slug="z"), "secret_walrus", description="Hidden walrus.")
    shown, hidden = (
        group_actions.create(name, name, actor=SYSTEM).group for name in ("open", "shut")
    )
    group_actions.assign(shown, [run], actor=SYSTEM)
    group_actions.assign(hidden, [other], actor=SYSTEM)
    agent = make_agent(all_groups=False)
    agent.groups.add(shown)
    Revision.bump()

    for query in ("secret_walrus", "z__secret_walrus", "hidden walrus", "secret", "walrs"):
        assert names(query, agent, strategy=strategy) == []
        assert suggest_names(scope.scope_of_agent(agent).index, query) == []
    assert names("walrus", strategy=strategy) == ["z__secret_walrus"]


def test_a_tool_whose_server_is_disabled_is_never_found(run):
    assert names("run") == ["s__run"]

    run.server.enabled = False
    run.server.save()
    Revision.bump()

    assert names("run") == []


@pytest.fixture(autouse=True)
def fresh():
    index._indexes.clear()
    yield
    index._indexes.clear()
