"""From an unknown server to a tool that a user's own sentence finds."""

import json
from datetime import timedelta

import pytest
from django.db.models import F

from catalog.hints import bundled
from catalog.models import ToolHint
from catalog.search import index_cache
from catalog.search.embeddings import store as vector_store
from catalog.tasks import embed
from sessions_app.mcp import admin_server
from sessions_app.models import AgentSession, Call, Event, EventKind
from sessions_app.sessions import used_queries
from tests.support.agent_client import add_tools, make_agent_client
from tests.support.factories import make_call
from tests.support.people import make_person
from toolcrib.lib.roles import Actor, Role

pytestmark = pytest.mark.django_db

SENTENCE = "my tooth hurts a lot, who can help me today"
TOOL = "clinic__book_slot"


@pytest.fixture
def _model(settings, monkeypatch):
    """The embedding model, with vectors of this test only."""
    settings.EMBEDDINGS = True
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    monkeypatch.setattr(vector_store, "_embedded_revision", -1)
    monkeypatch.setattr(vector_store, "LOOKUP_INTERVAL", 0)
    monkeypatch.setattr(bundled, "_applied_revision", -1)
    monkeypatch.setattr(used_queries, "_last_event", 0)
    vectors = vector_store.InstalledVectors()
    monkeypatch.setattr(vector_store, "installation_vectors", vectors)
    monkeypatch.setattr(index_cache, "installation_vectors", vectors)
    index_cache._indexes.clear()
    vector_store.model.load()
    yield
    index_cache._indexes.clear()


def scripted_model(exported):
    """Write hints as the prompt asks, from what the export says and nothing else."""
    texts = {
        TOOL: ["I have a toothache", "get treated by a dentist soon", "when can a doctor see me?"],
    }
    return [
        {"name": tool["name"], "hints": texts.get(tool["name"], [f"I want to {tool['name'][-8:]}"])}
        for tool in exported["tools"]
    ]


@pytest.mark.usefixtures("_model")
def test_a_users_sentence_finds_a_tool_after_hints_were_written_and_then_is_one():
    add_tools(
        "clinic",
        "book_slot",
        book_slot="Reserve a slot of a provider by its id.",
    )
    add_tools(
        "desk",
        *("day_report", "help_pages", "list_files", "log_hours", "ask_colleague"),
        day_report="Report what happened today.",
        help_pages="Open the help pages of a program.",
        ask_colleague="Ask a colleague who can answer a question.",
    )
    admin = Actor.user(make_person("ada", Role.ADMIN))
    scout = make_agent_client("scout", mode="deferred")
    embed()

    def rank(session):
        answer = session.search(SENTENCE, limit=1).json
        return [tool["name"] for tool in answer["tools"]]

    assert TOOL not in rank(scout.open())

    exported = admin_server.export_hints({"server": "clinic"}, admin)
    written = {"items": scripted_model(exported)}
    assert admin_server.import_hints(written, admin)["changed"] == 1
    embed()

    for day in range(2):
        session = scout.open()
        assert rank(session) == [TOOL]
        made = ToolHint.objects.first().tool
        row = make_call(agent_session(session), made)
        # Move the first session to yesterday instead of waiting for tomorrow.
        shift = timedelta(days=1 - day)
        Call.objects.filter(pk=row.pk).update(accepted_at=F("accepted_at") - shift)
        Event.objects.filter(session=row.session).update(at=F("at") - shift - timedelta(minutes=2))
    used_queries.learn()

    hint = ToolHint.objects.get(source="use")
    assert (hint.tool.public_name, hint.text) == (TOOL, SENTENCE)
    assert hint.agent == scout.agent
    events = Event.objects.filter(kind=EventKind.SEARCHED).values_list("details", flat=True)
    assert all(SENTENCE in json.loads(text)["query"] for text in events)


def agent_session(session):
    return AgentSession.objects.get(session_id=session.id)
