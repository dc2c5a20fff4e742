"""Stored vectors: computed by a worker, per text, and only for new texts."""

import pytest

from catalog import cache
from catalog.models import Revision, Vector
from catalog.search import engine
from catalog.search import index as search_index
from catalog.search import index_cache as index
from catalog.search.embeddings import store as vector_store
from catalog.search.index import Searchable
from catalog.tasks import embed
from sessions_app.sessions import scope
from tests.support.factories import ingest_tools, make_agent, make_server, make_tool, tool_object

pytestmark = pytest.mark.django_db


class Counting:
    """The real model, which records the passages it encodes."""

    def __init__(self, encoder):
        self.encoder, self.passages = encoder, []

    def encode_documents(self, passages):
        self.passages += passages
        return self.encoder.encode_documents(passages)

    def encode_queries(self, texts):
        return self.encoder.encode_queries(texts)

    def release_document_session(self):
        pass


@pytest.fixture
def model(settings, monkeypatch):
    settings.EMBEDDINGS = True
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    monkeypatch.setattr(vector_store, "_embedded_revision", -1)
    vectors = vector_store.InstalledVectors()
    monkeypatch.setattr(vector_store, "installation_vectors", vectors)
    monkeypatch.setattr(index, "installation_vectors", vectors)
    monkeypatch.setattr(vector_store, "LOOKUP_INTERVAL", 0)
    index._indexes.clear()
    vector_store.model.load()
    counting = vector_store.model.encoder = Counting(vector_store.model.encoder)
    yield counting
    index._indexes.clear()


def changed(server, *items):
    """Ingest definitions, approved immediately."""
    ingest_tools(server, *items)
    return Revision.current()


def objects(count):
    return [
        tool_object(f"tool_{at}", description=f"Looks after thing number {at}.")
        for at in range(count)
    ]


def test_a_worker_computes_vectors_and_enables_semantic_search(model):
    server = make_server(slug="sky", trust="auto")
    changed(server, tool_object("get_forecast", description="Return the forecast for a city."))
    seen = scope.scope_of_agent(make_agent())
    before = engine.search(seen.index, query="will it rain tomorrow")
    assert before.strategy == "bm25"
    assert "still being computed" in before.note

    embed()

    after = engine.search(seen.index, query="will it rain tomorrow")
    assert (after.strategy, after.note) == ("hybrid", "")
    assert [hit.name for hit in after.hits] == ["sky__get_forecast"]
    assert vector_store.progress() == vector_store.Progress(1, 1, "ready")


def test_one_change_encodes_one_text_and_tokenizes_one_tool(model):
    server = make_server(slug="many", trust="auto")
    items = objects(40)
    changed(server, *items)
    assert vector_store.embed_missing() == 40
    agent = make_agent()
    assert len(scope.scope_of_agent(agent).index) == 40
    assert vector_store.embed_missing() == 0
    model.passages.clear()
    counted = search_index.index_tool.cache_info().misses

    items[7] = tool_object("tool_7", description="Feeds the penguins.")
    changed(server, *items)

    assert vector_store.progress().embedded == 39
    assert vector_store.progress().state == "working"
    assert vector_store.embed_missing() == 1
    assert len(model.passages) == 1
    assert "penguins" in model.passages[0]
    index = scope.scope_of_agent(agent).index
    assert search_index.index_tool.cache_info().misses == counted + 1
    assert (
        engine.search(index, query="give food to birds at the zoo").hits[0].name == "many__tool_7"
    )


def test_reverting_a_change_encodes_nothing(model):
    server = make_server(trust="auto")
    changed(server, tool_object(description="First."))
    vector_store.embed_missing()
    changed(server, tool_object(description="Second."))
    vector_store.embed_missing()

    changed(server, tool_object(description="First."))

    assert vector_store.embed_missing() == 0
    assert Vector.objects.count() == 2


def test_a_search_uses_the_current_catalog(model):
    server = make_server(slug="s", trust="auto")
    changed(server, tool_object("old", description="Old."))
    agent = make_agent()
    assert engine.search(scope.scope_of_agent(agent).index, query="old").total == 1

    changed(
        server, tool_object("fresh", description="Fresh."), tool_object("old", description="Old.")
    )

    assert (
        engine.search(scope.scope_of_agent(agent).index, query="fresh").hits[0].name == "s__fresh"
    )


def test_scopes_with_the_same_tools_share_an_index(model):
    make_tool(make_server(slug="one"))
    first, second = make_agent(), make_agent()

    assert scope.scope_of_agent(first).index is scope.scope_of_agent(second).index


def test_least_recently_used_indexes_are_evicted(model, monkeypatch):
    monkeypatch.setattr(index, "MAX_CACHED_TOOLS", 5)
    tools = [Searchable(f"s__{at}", str(at), "s", "", "", "", ()) for at in range(6)]

    first = index.get_index(tools[:3])
    index.get_index(tools[3:])

    assert index.get_index(tools[:3]) is not first


def test_without_a_model_search_falls_back_to_keywords_with_the_reason(settings, monkeypatch):
    settings.EMBEDDINGS = False
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    make_tool(make_server(slug="s"), "search", description="Search it.")
    vector_store.model.load()

    answer = engine.search(scope.scope_of_agent(make_agent()).index, query="search it")

    assert answer.strategy == "bm25"
    assert answer.note == "Ranked by keywords only: embeddings are disabled in this installation."
    assert vector_store.embed_missing() == 0
    assert vector_store.progress().state == "unavailable"
    assert "disabled" in vector_store.progress().reason


def test_vectors_of_unused_texts_are_deleted(model, monkeypatch):
    monkeypatch.setattr(vector_store, "MAX_UNUSED_VECTORS", 0)
    Vector.objects.bulk_create(
        Vector(model=vector_store.MODEL, text_sha256=f"{at:064}", data=b"") for at in range(5)
    )
    make_tool(make_server(slug="s"))

    vector_store.embed_missing()

    assert [one.text_sha256 for one in Vector.objects.all()] == list(vector_store.passages())


def test_hints_of_an_admin_are_indexed(model):
    tool = make_tool(make_server(slug="s"), "run", description="Runs.")
    tool.hints.create(text="brew coffee", kind="alias")
    Revision.bump()

    item = cache.cached_tool(tool.pk)
    assert item.hints == ("brew coffee",)
    assert (
        engine.search(scope.scope_of_agent(make_agent()).index, query="coffee").hits[0].name
        == "s__run"
    )


def test_other_hints_have_a_vector_of_their_own_and_leave_the_tools_alone(model):
    tool = make_tool(make_server(slug="s"), "run", description="Runs.")
    embed()
    [passage] = model.passages
    tool.hints.create(text="brew coffee", kind="example", source="model")
    Revision.bump()

    embed()

    assert model.passages == [passage, "brew coffee"]
    index_ = scope.scope_of_agent(make_agent()).index
    assert engine.search(index_, query="espresso", strategy="embedding").hits[0].name == "s__run"


def test_a_hint_of_one_agent_is_encoded_and_found_by_that_agent_only(model):
    tool = make_tool(make_server(slug="s"), "run", description="Runs.")
    scout, other = make_agent(), make_agent()
    tool.hints.create(text="brew coffee", kind="example", source="use", agent=scout)
    Revision.bump()

    embed()

    found = [
        engine.search(scope.scope_of_agent(agent).index, query="espresso").hits
        for agent in (scout, other)
    ]
    assert [len(hits) for hits in found] == [1, 0]
