"""Pruning of definitions: what nothing refers to goes, and sessions keep their bytes."""

from datetime import timedelta

import pytest
from django.utils import timezone

from catalog import cache
from catalog.approvals.actions import approve
from catalog.audit import SYSTEM
from catalog.models import CatalogSnapshot, Definition, DefinitionChange, Tool
from servers.registration import actions as server_actions
from sessions_app.models import AgentSession, Call
from sessions_app.sessions import definition_pruning
from sessions_app.sessions.definition_pruning import KEPT_CHANGES
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_call, make_server, tool_object

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def first_pass(monkeypatch):
    monkeypatch.setattr(definition_pruning, "_unreferenced", frozenset())


def age(model=Definition, **by):
    model.objects.update(created_at=timezone.now() - timedelta(**(by or {"hours": 2})))


def prune():
    """Run the two passes after which an unused definition is gone."""
    age()
    definition_pruning.prune()
    return definition_pruning.prune()


def version(number, name="search"):
    return tool_object(name, description=f"Version {number}.")


def descriptions():
    return {definition.description for definition in Definition.objects.all()}


def test_definitions_of_a_deleted_server_go():
    server = make_server(slug="gone")
    ingest_tools(server, version(1), version(1, "other"))
    keep = make_server(slug="kept")
    ingest_tools(keep, version(2))
    server_actions.delete_server(server, actor=SYSTEM)

    counts = prune()

    assert counts["definitions"] == 2
    assert descriptions() == {"Version 2."}


def test_a_new_definition_and_one_that_was_used_until_now_are_left_alone():
    server = make_server()
    ingest_tools(server, version(1))
    server.delete()
    definition_pruning.prune()
    definition_pruning.prune()
    assert descriptions() == {"Version 1."}

    age()
    definition_pruning.prune()
    assert descriptions() == {"Version 1."}


@pytest.mark.parametrize("trust", ["auto", "review_changes", "strict"])
def test_a_tool_that_changes_on_every_sync_keeps_a_bounded_history(trust):
    server = make_server(trust=trust)
    for number in range(KEPT_CHANGES + 30):
        ingest_tools(server, version(number))
        if number % 10 == 9:
            prune()
            assert Definition.objects.count() <= KEPT_CHANGES + 12

    prune()

    assert DefinitionChange.objects.count() <= KEPT_CHANGES + 1
    assert f"Version {KEPT_CHANGES + 29}." in descriptions()
    if trust == "review_changes":
        assert Tool.objects.get().approved.description == "Version 0."


def test_a_tool_in_review_keeps_its_pending_change():
    server = make_server()
    ingest_tools(server, version(0))
    ingest_tools(server, version(1))
    DefinitionChange.objects.update(at=timezone.now() - timedelta(days=900))
    for number in range(KEPT_CHANGES + 5):
        DefinitionChange.objects.create(
            tool=Tool.objects.get(),
            after=Definition.objects.first(),
            at=timezone.now() - timedelta(minutes=number),
            outcome="superseded",
        )

    prune()

    assert DefinitionChange.objects.filter(outcome="waiting").count() == 1
    assert approve(Tool.objects.get(), actor=SYSTEM).approved.description == "Version 1."


# --- Sessions -----------------------------------------------------------------------------------


def forget_history():
    DefinitionChange.objects.all().delete()


def test_a_session_keeps_the_definition_of_its_snapshot_and_gives_it_up_when_it_is_deleted():
    server = make_server(slug="weather", trust="auto")
    ingest_tools(server, version(1))
    session = make_agent_client().open(mode="deferred")
    before = session.load("mcp:weather")["schemas"]
    ingest_tools(server, version(2))
    forget_history()
    prune()
    cache.clear()

    assert session.load("mcp:weather")["schemas"] == before

    AgentSession.objects.all().delete()
    age(CatalogSnapshot, days=2)
    prune()
    assert descriptions() == {"Version 2."}
    assert CatalogSnapshot.objects.count() == 0


def test_a_tool_that_was_added_and_loaded_later_is_kept_by_its_load():
    server = make_server(slug="weather", trust="auto")
    ingest_tools(server, version(1))
    session = make_agent_client().open(mode="deferred")
    ingest_tools(server, version(1), version(5, "late"))
    cache.clear()
    before = session.load("mcp:weather", "weather__late").bytes
    ingest_tools(server, version(1), version(6, "late"))
    forget_history()

    prune()
    cache.clear()

    assert session.load("mcp:weather", "weather__late").bytes == before
    assert "Version 5." in descriptions()


def test_a_fork_keeps_the_bytes_of_its_deleted_parent():
    server = make_server(slug="weather", trust="auto")
    ingest_tools(server, version(1))
    client = make_agent_client()
    parent = client.open(mode="deferred")
    before = parent.load("mcp:weather")["schemas"]
    child = parent.post("/fork")["id"]
    ingest_tools(server, version(2))
    forget_history()
    AgentSession.objects.get(session_id=parent.id).delete()

    prune()
    cache.clear()

    loaded = client.send("POST", f"/sessions/{child}/load", {"group_id": "mcp:weather"})
    assert loaded["schemas"] == before


def test_a_recorded_call_keeps_its_definition():
    server = make_server(trust="auto")
    ingest_tools(server, version(1))
    make_call(tool=Tool.objects.select_related("approved", "server").get())
    server.delete()

    prune()
    assert descriptions() == {"Version 1."}
    Call.objects.all().delete()
    prune()
    assert descriptions() == set()


def test_a_snapshot_without_sessions_stays_for_a_day():
    ingest_tools(make_server(slug="weather"), version(1))
    make_agent_client().open()
    AgentSession.objects.all().delete()
    prune()
    assert CatalogSnapshot.objects.count() == 1

    age(CatalogSnapshot, days=2)
    prune()
    assert CatalogSnapshot.objects.count() == 0


# --- Tools that a server no longer lists ----------------------------------------------------------


def drop(server, days):
    ingest_tools(server, allow_removals=True)
    Tool.objects.update(missing_since=timezone.now() - timedelta(days=days))


def test_tools_that_were_dropped_long_ago_go_with_their_definitions():
    server = make_server()
    ingest_tools(server, version(1))
    drop(server, days=29)
    prune()
    assert Tool.objects.count() == 1

    drop(server, days=31)
    prune()
    assert (Tool.objects.count(), Definition.objects.count()) == (0, 0)


def test_a_dropped_tool_that_a_person_worked_with_stays():
    server = make_server()
    ingest_tools(server, version(1))
    Tool.objects.update(description_override="Better words.")
    drop(server, days=31)

    prune()

    assert Tool.objects.count() == 1
