"""A caller who leaves at the worst moment: the ledger has what they waited for, and is told so."""

import asyncio

import pytest

from sessions_app.ledger import batch_writer
from sessions_app.ledger.batch_writer import BatchWriter, WriteJob


def deaf_writer():
    """A writer that leaves it to the test to say, to the moment, that rows are committed."""
    writer = BatchWriter()
    writer._write_safely = lambda batch: None
    return writer


@pytest.mark.parametrize("when", ["before", "after"])
def test_rows_that_nobody_waits_for_any_more_are_handed_back_once(when):
    """The result comes just before they are told to go, or just after."""

    async def scenario():
        writer = deaf_writer()
        back = []
        job = WriteJob(lambda cursor: 5, on_abandoned=back.append)
        waiting = asyncio.create_task(writer.submit(job))
        await asyncio.sleep(0)
        if when == "before":
            batch_writer._resolve([(job, 5, None)])
            waiting.cancel()
        else:
            waiting.cancel()
            await asyncio.wait({waiting})
            batch_writer._resolve([(job, 5, None)])
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        writer.stop()
        return back

    assert asyncio.run(scenario()) == [5]


def test_rows_that_were_not_written_or_are_waited_for_are_not_handed_back():
    async def scenario():
        writer = deaf_writer()
        back = []
        failed, waited_for = (
            WriteJob(lambda cursor: 5, on_abandoned=back.append) for _ in range(2)
        )
        leaving, staying = (asyncio.create_task(writer.submit(job)) for job in (failed, waited_for))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        batch_writer._resolve([(failed, None, OSError()), (waited_for, 5, None)])
        assert await staying == 5
        writer.stop()
        return back

    assert asyncio.run(scenario()) == []
