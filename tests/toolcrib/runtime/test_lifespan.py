"""Background tasks continue after a failure; full garbage collections are rare."""

import asyncio
import gc

from tests.support.waiting import scaled, wait_for
from toolcrib.runtime import lifespan


def test_a_failing_step_of_the_schedule_does_not_block_the_others(monkeypatch, caplog):
    done = []

    def fails():
        done.append("failed")
        raise ValueError("unexpected failure")

    monkeypatch.setattr(lifespan.scheduling, "queue_due_syncs", fails)
    monkeypatch.setattr(lifespan.scheduling, "seconds_to_next_sync", lambda: 0.0)
    for name in ("send_embedding", "queue_golden", "tidy"):
        monkeypatch.setattr(lifespan, name, lambda name=name: done.append(name))

    async def scenario():
        schedule = asyncio.create_task(lifespan.Runtime()._run_schedule())
        await asyncio.to_thread(wait_for, lambda: "tidy" in done)
        assert not schedule.done()
        schedule.cancel()
        await asyncio.gather(schedule, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), scaled(30)))
    assert done == ["failed", "send_embedding", "queue_golden", "tidy"]
    assert "unexpected failure" in caplog.text


def test_many_new_objects_cause_no_full_collection_and_the_defaults_return():
    thresholds = gc.get_threshold()
    full = []

    def record(phase, info):
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    with lifespan.rare_collections():
        gc.callbacks.append(record)
        try:
            assert gc.get_freeze_count() > 10_000
            objects = [[number] for number in range(400_000)]  # by default these cause some
            assert full == []
            del objects
        finally:
            gc.callbacks.remove(record)
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
