"""What runs beside requests goes on, whatever goes wrong in it once."""

import asyncio

from tests.support.waiting import wait_for
from toolcrib.runtime import lifespan


def test_a_step_of_the_schedule_that_fails_keeps_no_other_from_being_done(monkeypatch, caplog):
    done = []

    def fails():
        done.append("failed")
        raise ValueError("nobody thought of this")

    monkeypatch.setattr(lifespan.scheduling, "queue_due_syncs", fails)
    for name in ("send_embedding", "send_golden", "tidy"):
        monkeypatch.setattr(lifespan, name, lambda name=name: done.append(name))

    async def scenario():
        schedule = asyncio.create_task(lifespan._schedule())
        await asyncio.to_thread(wait_for, lambda: "tidy" in done)
        assert not schedule.done()
        schedule.cancel()
        await asyncio.gather(schedule, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert done == ["failed", "send_embedding", "send_golden", "tidy"]
    assert "nobody thought of this" in caplog.text
