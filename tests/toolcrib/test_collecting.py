"""Garbage is looked for once a minute, while nobody is being answered."""

import asyncio
import gc

import pytest

from tests.waiting import wait_for
from toolcrib import collecting
from toolcrib.collecting import AT_LATEST, EVERY, QUIET, SHORT, Collector


@pytest.fixture
def collector():
    made = Collector()
    made._collected = made._touched = 0.0
    return made


def test_a_short_look_is_taken_once_a_minute_whoever_is_there(collector):
    collector._touched = EVERY
    assert not collector.is_due(EVERY - 1)
    assert collector.is_due(EVERY)


def test_a_long_one_waits_until_nobody_is_answered_but_not_for_ever(collector):
    collector._took, collector._touched = 2 * SHORT, EVERY
    assert not collector.is_due(EVERY)
    assert collector.is_due(EVERY + QUIET)
    collector._touched = AT_LATEST
    assert not collector.is_due(AT_LATEST - 1)
    assert collector.is_due(AT_LATEST)


def test_python_does_no_full_look_by_itself_meanwhile_and_has_its_own_way_after(monkeypatch):
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    looks = []

    def look(phase, info):
        if phase == "start" and info["generation"] == 2:
            looks.append(info)

    async def scenario():
        collector = Collector()
        async with collector.working():
            looks.clear()
            assert gc.get_freeze_count() > 10_000
            kept = [[number] for number in range(400_000)]  # by itself it would look
            assert looks == []
            del kept
            collector._collected -= EVERY
            await asyncio.to_thread(wait_for, lambda: looks)

    monkeypatch.setattr(collecting, "LOOK", 0)
    gc.callbacks.append(look)
    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        gc.callbacks.remove(look)
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() <= frozen
