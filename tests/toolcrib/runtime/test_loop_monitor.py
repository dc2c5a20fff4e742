"""The gauge of the event loop, and where an operator reads it."""

import asyncio
import time

import pytest

from tests.support.waiting import wait_for
from toolcrib.runtime.lifespan import runtime
from toolcrib.runtime.loop_monitor import LoopMonitor


def test_the_longest_stall_and_the_99th_of_100_are_told_for_a_minute():
    pulse = LoopMonitor()
    for number in range(200):
        pulse.note(0.001 * (number == 7), now=100.0)
    pulse.note(0.4, now=130.0)
    stalls = pulse.stalls(now=140.0)
    assert (stalls.longest_ms, stalls.p99_ms, stalls.is_long) == (400.0, 0.0, True)
    for late in (0.2, 0.2, 0.2):
        pulse.note(late, now=130.0)
    assert pulse.stalls(now=140.0).p99_ms == 200.0
    assert pulse.stalls(now=180.0).longest_ms == 400.0
    assert pulse.stalls(now=191.0).seconds == 0


def test_a_loop_that_is_held_shows():
    async def scenario():
        async with pulse.beating():
            await asyncio.to_thread(wait_for, lambda: pulse.stalls().seconds)
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                pass
            await asyncio.to_thread(wait_for, lambda: pulse.stalls().longest_ms > 200)

    pulse = LoopMonitor()
    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert pulse.stalls().is_long


def test_operators_read_it_over_the_api(client, operator_token):
    def ask(token):
        return client.get("/api/v1/health", headers={"Authorization": f"Bearer {token}"})

    answer = ask(operator_token)
    assert answer.status_code == 200
    assert answer.json()["event_loop"] == {"longest_ms": 0.0, "p99_ms": 0.0, "seconds": 0}
    assert answer.json()["servers"] == []
    assert answer.json()["process"]
    assert ask("tcb_nothing").status_code == 401


@pytest.fixture
def late(monkeypatch):
    pulse = LoopMonitor()
    pulse.note(1.5, now=time.monotonic())
    monkeypatch.setattr(runtime, "pulse", pulse)


def test_a_long_stall_is_a_fault_on_the_page_for_reports(late, client, admin):
    client.force_login(admin)
    page = client.get("/settings/about").content.decode()
    assert "late by at most 1,500 ms in the last minute" in page
