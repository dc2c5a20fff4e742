"""Only one process at a time tries to reconnect to an unreachable server."""

import asyncio
from datetime import timedelta

import pytest
from django.utils import timezone

from servers.connections import coordination, pool
from servers.connections.pool import CIRCUIT_THRESHOLD
from servers.models import Server
from tests.servers.connections.test_pool import Specs, pooled, refused, run, until
from tests.support.factories import make_server

SHORT = 0.01


@pytest.fixture
def server(db, settings):
    settings.EMBEDDED = False
    return make_server(url="https://example.org/mcp")


def test_a_reconnect_is_claimed_once_per_interval(server):
    assert [coordination.claim_reconnect(server.pk, 30) for _ in range(3)] == [True, False, False]
    Server.objects.update(dialled_at=timezone.now() - timedelta(seconds=31))
    assert [coordination.claim_reconnect(server.pk, 1800) for _ in range(2)] == [False, False]
    assert [coordination.claim_reconnect(server.pk, 30) for _ in range(2)] == [True, False]


def test_a_reachable_server_needs_no_claim(server):
    coordination.claim_reconnect(server.pk, 30)
    coordination.clear_reconnect_claim(server.pk)
    assert Server.objects.get().dialled_at is None
    assert coordination.claim_reconnect(server.pk, 30)


def test_a_single_process_makes_no_queries_for_claims(server, settings, django_assert_num_queries):
    settings.EMBEDDED = True
    with django_assert_num_queries(0):
        assert all(coordination.claim_reconnect(server.pk, 30) for _ in range(3))
        coordination.clear_reconnect_claim(server.pk)


class Claims(Specs):
    """Rejects claims, as if another process had them, until `allowed`."""

    def __init__(self, **specs):
        super().__init__(**specs)
        self.allowed, self.intervals = False, []

    async def may_reconnect(self, server_id, interval):
        self.intervals.append(interval)
        return self.allowed


def test_after_its_first_tries_a_process_reconnects_with_a_claim_or_on_request(monkeypatch):
    for name in ("FIRST_BACKOFF", "MAX_BACKOFF", "RECONNECT_INTERVAL"):
        monkeypatch.setattr(pool, name, SHORT)

    async def scenario():
        async with pooled(Claims, n1=refused()) as own:
            watcher = own.watcher
            await own.maintain({1: 1}, {1: 1}, ())
            await until(lambda: len(watcher.intervals) >= 5, "it waits for a claim")
            assert watcher.attempts == CIRCUIT_THRESHOLD
            request = asyncio.create_task(own.connection(1, 1))  # as a manual sync does
            await asyncio.wait({request})
            assert request.exception() is not None
            assert watcher.attempts == CIRCUIT_THRESHOLD + 1
            watcher.allowed = True
            await until(lambda: watcher.attempts > CIRCUIT_THRESHOLD + 2, "it reconnects")
            assert set(watcher.intervals) == {SHORT}

    run(scenario)
