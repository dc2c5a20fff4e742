"""A server that does not answer is dialled by one process of all, every so often."""

import asyncio
from datetime import timedelta

import pytest
from django.utils import timezone

from servers.connections import coordination, pool
from servers.connections.pool import FREE_TRIES
from servers.models import Server
from tests.servers.connections.test_pool import Specs, pooled, refused, run, until
from tests.support.factories import make_server

SHORT = 0.01


@pytest.fixture
def server(db, settings):
    settings.EMBEDDED = False
    return make_server(url="https://example.org/mcp")


def test_a_dial_is_taken_once_in_a_while_whoever_asks(server):
    assert [coordination.claim_reconnect(server.pk, 30) for _ in range(3)] == [True, False, False]
    Server.objects.update(dialled_at=timezone.now() - timedelta(seconds=31))
    assert [coordination.claim_reconnect(server.pk, 1800) for _ in range(2)] == [False, False]
    assert [coordination.claim_reconnect(server.pk, 30) for _ in range(2)] == [True, False]


def test_once_it_answers_everybody_may_dial(server):
    coordination.claim_reconnect(server.pk, 30)
    coordination.clear_reconnect_claim(server.pk)
    assert Server.objects.get().dialled_at is None
    assert coordination.claim_reconnect(server.pk, 30)


def test_where_there_is_one_process_nothing_is_asked(server, settings, django_assert_num_queries):
    settings.EMBEDDED = True
    with django_assert_num_queries(0):
        assert all(coordination.claim_reconnect(server.pk, 30) for _ in range(3))
        coordination.clear_reconnect_claim(server.pk)


class InTurn(Specs):
    """Another process dials, until it is told that this one may."""

    def __init__(self, **specs):
        super().__init__(**specs)
        self.may, self.asked = False, []

    async def may_dial(self, server_id, apart):
        self.asked.append(apart)
        return self.may


def test_after_its_first_tries_a_process_dials_when_it_is_its_turn_or_somebody_asks(monkeypatch):
    for name in ("FIRST_WAIT", "LONGEST_WAIT", "DIALS_APART"):
        monkeypatch.setattr(pool, name, SHORT)

    async def scenario():
        async with pooled(InTurn, n1=refused()) as own:
            watcher = own.watcher
            await own.keep({1: 1})
            await until(lambda: len(watcher.asked) >= 5, "it waits for its turn")
            assert watcher.dials == FREE_TRIES
            asking = asyncio.create_task(own.connection(1, 1))  # as a person's sync does
            await asyncio.wait({asking})
            assert asking.exception() is not None
            assert watcher.dials == FREE_TRIES + 1
            watcher.may = True
            await until(lambda: watcher.dials > FREE_TRIES + 2, "it is its turn")
            assert set(watcher.asked) == {SHORT}

    run(scenario)
