"""Rankers of other distributions, found by their entry points."""

import pytest

from catalog.search import rankers
from catalog.search.engine import search
from catalog.search.index import Index
from tests.support.agent_client import add_tools, make_agent_client

CODE = """
def by_length(query, tools):
    assert query
    return [len(tool.name) for tool in tools]

def broken(query, tools):
    raise RuntimeError("no model")

def short(query, tools):
    return [1.0]

def nan(query, tools):
    return [float("nan")] * len(tools)

def none(query, tools):
    return [-1] * len(tools)
"""
NAMES = ("by_length", "broken", "short", "nan", "none")


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    """Install a distribution with rankers; one of them has the name of a built-in strategy."""
    (tmp_path / "fake_rankers.py").write_text(CODE)
    info = tmp_path / "fake_rankers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-rankers\nVersion: 1.0\n")
    lines = [f"{name.replace('_', '-')} = fake_rankers:{name}" for name in NAMES]
    lines += ["bm25 = fake_rankers:by_length", "missing = fake_rankers:nothing"]
    (info / "entry_points.txt").write_text("\n".join(["[toolcrib.rankers]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    rankers.clear()
    yield
    monkeypatch.undo()
    rankers.clear()


@pytest.fixture
def session(db):
    add_tools("github", "create_issue", "list_all_open_issues")
    return make_agent_client("scout", mode="deferred").open()


def names(found):
    return [tool["name"] for tool in found["tools"]]


def test_an_installed_ranker_is_a_strategy(session):
    found = session.search("create an issue", strategy="by-length")
    assert found.status == 200, found.bytes
    assert found["strategy"] == "by-length"
    assert names(found) == ["github__list_all_open_issues", "github__create_issue"]


def test_it_ranks_only_tools_of_the_session(session):
    add_tools("slack", "post_a_very_long_message_to_everybody")
    own = make_agent_client("own", "mcp:github", mode="deferred").open()
    assert own.search("issue", strategy="by-length")["total_matches"] == 2


@pytest.mark.parametrize("name", ["broken", "short", "nan", "missing"])
def test_a_ranker_that_fails_is_replaced_by_the_built_in_one(session, name, caplog):
    found = session.search("create an issue", strategy=name)
    assert names(found)[0] == "github__create_issue"
    assert found["strategy"] in ("hybrid", "bm25")
    assert f"The ranker {name} failed" in found["message"]
    assert f"The ranker {name}" in caplog.text


def test_no_score_is_no_match(session):
    assert session.search("create an issue", strategy="none")["status"] == "no_matches"


def test_built_in_names_are_not_replaced(session, caplog):
    found = session.search("create an issue", strategy="bm25")
    assert names(found)[0] == "github__create_issue"
    assert "bm25" not in rankers.names()
    assert rankers.names() == ("broken", "by-length", "missing", "nan", "none", "short")


def test_an_unknown_strategy_is_refused_with_the_installed_ones(session):
    refused = session.search("create", strategy="magic")
    assert refused.status == 422
    assert "by-length" in refused["error"]["hint"]
    assert session.search("create", strategy="x" * 101).status == 422


def test_an_index_without_tools_has_no_matches():
    assert search(Index((), None), query="anything", strategy="none").total == 0
