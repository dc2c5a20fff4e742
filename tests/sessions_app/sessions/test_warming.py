"""Indexes are built ahead when the catalog changed, by one thread at a time."""

import threading

import pytest
from django.db import DatabaseError

from catalog import cache
from catalog.search import index_cache as index
from servers.models import Server
from sessions_app.sessions import scope
from sessions_app.sessions import scope as session_scope
from tests.support.factories import fold, tool_object
from tests.support.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def warmed():
    """Have it done, and wait for the threads that are at it."""
    session_scope.warm_indexes_soon(cache.current().revision)
    for thread in threading.enumerate():
        if thread.name == "warming":
            thread.join(30)


def test_after_a_change_the_first_search_finds_its_index_ready(session, monkeypatch):
    session.search("issue")
    server = Server.objects.get(slug="github")
    fold(server, tool_object("create_issue"), tool_object("paint_a_fence"))
    warmed()

    def too_late(*args):
        raise AssertionError("an index was built while a search waited")

    monkeypatch.setattr(index, "Index", too_late)
    assert "paint_a_fence" in session.search("paint a fence").bytes.decode()


def test_what_is_asked_for_while_a_thread_is_at_it_is_done_by_that_thread(monkeypatch):
    rounds, at_it, go_on = [], threading.Event(), threading.Event()

    def slowly():
        rounds.append(threading.current_thread())
        at_it.set()
        assert go_on.wait(30)

    monkeypatch.setattr(scope, "rebuild_recent", slowly)
    session_scope.warm_indexes_soon(1)
    assert at_it.wait(30)
    for revision in range(2, 9):
        session_scope.warm_indexes_soon(revision)
    wait_for(lambda: sum(one.name == "warming" for one in threading.enumerate()) == 1)
    go_on.set()
    warmed()
    assert 2 <= len(rounds) <= 3  # the first, all that came meanwhile, and perhaps `warmed` itself
    assert rounds[0] is rounds[1]


def test_a_database_that_does_not_answer_is_no_end(monkeypatch, caplog):
    def failing():
        raise DatabaseError("gone")

    monkeypatch.setattr(scope, "rebuild_recent", failing)
    warmed()
    assert "searches build them" in caplog.text
    done = threading.Event()
    monkeypatch.setattr(scope, "rebuild_recent", done.set)
    warmed()
    assert done.is_set()
