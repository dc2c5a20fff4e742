"""Search indexes are rebuilt in the background after a catalog change, one thread at a time."""

import threading

import pytest
from django.db import DatabaseError

from catalog import cache
from catalog.search import index_cache as index
from servers.models import Server
from sessions_app.sessions import scope
from tests.support.factories import ingest_tools, tool_object
from tests.support.waiting import scaled, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def warm_and_wait():
    """Start warming and wait until its threads have finished."""
    scope.warm_indexes_in_background(cache.current().revision)
    for thread in threading.enumerate():
        if thread.name == "warming":
            thread.join(scaled(30))


def test_the_first_search_after_a_change_uses_a_warm_index(session, monkeypatch):
    session.search("issue")
    server = Server.objects.get(slug="github")
    ingest_tools(server, tool_object("create_issue"), tool_object("paint_a_fence"))
    warm_and_wait()

    def fail(*args):
        raise AssertionError("an index was built during a search")

    monkeypatch.setattr(index, "Index", fail)
    assert "paint_a_fence" in session.search("paint a fence").bytes.decode()


def test_a_running_thread_serves_requests_that_arrive_meanwhile(monkeypatch):
    rounds, started, resume = [], threading.Event(), threading.Event()

    def rebuild_slowly():
        rounds.append(threading.current_thread())
        started.set()
        assert resume.wait(scaled(30))

    monkeypatch.setattr(scope, "rebuild_recent_indexes", rebuild_slowly)
    scope.warm_indexes_in_background(1)
    assert started.wait(scaled(30))
    for revision in range(2, 9):
        scope.warm_indexes_in_background(revision)
    wait_for(lambda: sum(thread.name == "warming" for thread in threading.enumerate()) == 1)
    resume.set()
    warm_and_wait()
    # The first round, one for all later requests, and possibly one for `warm_and_wait`.
    assert 2 <= len(rounds) <= 3
    assert rounds[0] is rounds[1]


def test_warming_works_again_after_a_database_error(monkeypatch, caplog):
    def fail():
        raise DatabaseError("gone")

    monkeypatch.setattr(scope, "rebuild_recent_indexes", fail)
    warm_and_wait()
    assert "Index warming failed" in caplog.text
    rebuilt = threading.Event()
    monkeypatch.setattr(scope, "rebuild_recent_indexes", rebuilt.set)
    warm_and_wait()
    assert rebuilt.is_set()
