"""Callers that disconnect while their rows are being committed."""

import asyncio

import pytest

from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.writer import BatchWriter, WriteJob


def manual_writer():
    """Return a writer that writes nothing: the test resolves its jobs."""
    writer = BatchWriter(asyncio.get_running_loop(), None)
    writer._write_safely = lambda batch: None
    return writer


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_abandoned_job_reports_its_result_once(when):
    """The result arrives just before the cancellation, or just after."""

    async def scenario():
        writer = manual_writer()
        abandoned = []
        job = WriteJob(lambda cursor: 5, on_abandoned=abandoned.append)
        waiting = asyncio.create_task(writer.submit(job))
        await asyncio.sleep(0)
        if when == "before":
            ledger_writer._resolve([(job, 5, None)])
            waiting.cancel()
        else:
            waiting.cancel()
            await asyncio.wait({waiting})
            ledger_writer._resolve([(job, 5, None)])
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        writer.stop()
        return abandoned

    assert asyncio.run(scenario()) == [5]


def test_failed_jobs_and_awaited_jobs_are_not_reported_as_abandoned():
    async def scenario():
        writer = manual_writer()
        abandoned = []
        failed, waited_for = (
            WriteJob(lambda cursor: 5, on_abandoned=abandoned.append) for _ in range(2)
        )
        leaving, staying = (asyncio.create_task(writer.submit(job)) for job in (failed, waited_for))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        ledger_writer._resolve([(failed, None, OSError()), (waited_for, 5, None)])
        assert await staying == 5
        writer.stop()
        return abandoned

    assert asyncio.run(scenario()) == []
