"""The writer of the ledger when the database, or a job, is at fault: it goes on regardless."""

import asyncio
import threading
from typing import Any

import pytest
from django.db import OperationalError

from sessions_app.ledger import batch_writer
from sessions_app.ledger.batch_writer import WriteJob, commit
from tests.support.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def run(scenario: Any) -> Any:
    async def inside() -> Any:
        async with asyncio.timeout(30), batch_writer.run_writer():
            return await scenario()

    return asyncio.run(inside())


async def at_once(*jobs: WriteJob[Any]) -> list[Any]:
    """Have these in one batch: they wait behind one that is held."""
    held, release = threading.Event(), threading.Event()

    def hold(cursor: Any) -> None:
        held.set()
        release.wait(20)

    first = asyncio.create_task(commit(WriteJob(hold)))
    await asyncio.to_thread(held.wait, 20)
    tasks = [asyncio.create_task(commit(job)) for job in jobs]
    writer = batch_writer._here
    assert writer is not None
    await asyncio.to_thread(wait_for, lambda: len(writer._waiting) == len(jobs))
    release.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


class Locked:
    """Work that finds the database locked so many times."""

    def __init__(self, times: int) -> None:
        self.times, self.tried = times, 0

    def __call__(self, cursor: Any) -> str:
        self.tried += 1
        if self.tried <= self.times:
            raise OperationalError("database is locked")
        return "written"


def test_a_database_that_is_locked_is_tried_twice_and_not_once_for_each_that_waits():
    locked = Locked(10**6)
    found = run(lambda: at_once(*(WriteJob(locked) for _ in range(20))))
    assert [type(each) for each in found] == [OperationalError] * 20
    assert locked.tried == 2


def test_a_connection_that_broke_costs_nobody_a_call():
    found = run(lambda: at_once(*(WriteJob(work) for work in [Locked(1), lambda cursor: "other"])))
    assert found == ["written", "other"]


def test_a_calls_end_is_tried_until_the_database_is_back_and_others_are_told_at_once(monkeypatch):
    monkeypatch.setattr(batch_writer, "PAUSE", 0)
    ends = [Locked(30), Locked(0)]
    found = run(
        lambda: at_once(WriteJob(Locked(10**6)), *(WriteJob(end, must=True) for end in ends))
    )
    assert isinstance(found[0], OperationalError)
    assert found[1:] == ["written", "written"]


def test_a_calls_end_is_not_tried_for_ever(monkeypatch):
    monkeypatch.setattr(batch_writer, "AGAIN_WITHIN", 0.2)
    found = run(
        lambda: at_once(WriteJob(Locked(10**6), must=True), WriteJob(Locked(10**6), must=True))
    )
    assert [type(each) for each in found] == [OperationalError] * 2


def test_a_job_that_fails_for_its_own_reasons_takes_no_other_with_it():
    def wrong(cursor: Any) -> None:
        raise LookupError("of its own")

    found = run(
        lambda: at_once(WriteJob(lambda cursor: 1), WriteJob(wrong), WriteJob(lambda cursor: 2))
    )
    assert (found[0], type(found[1]), found[2]) == (1, LookupError, 2)


def test_a_writer_that_fails_itself_tells_those_who_wait_and_goes_on(monkeypatch):
    def broken(error: BaseException) -> None:
        raise RuntimeError("the connection could not be closed")

    async def scenario():
        with monkeypatch.context() as once:
            once.setattr(batch_writer, "_fresh_connection", broken)
            found = await at_once(WriteJob(Locked(1)), WriteJob(Locked(0)))
        return found, await commit(WriteJob(lambda cursor: "fine"))

    found, after = run(scenario)
    assert [type(each) for each in found] == [RuntimeError] * 2
    assert after == "fine"


def test_what_comes_after_the_end_is_refused_and_waits_for_nobody():
    async def scenario():
        async with batch_writer.run_writer():
            writer = batch_writer._here
        with pytest.raises(batch_writer.QueueFull):
            await writer.take(WriteJob(lambda cursor: None))
        # One that slipped in as the thread ended.
        writer._stopping, writer._thread = False, threading.current_thread()
        slipped = asyncio.create_task(writer.take(WriteJob(lambda cursor: None)))
        await asyncio.to_thread(wait_for, lambda: writer._waiting)
        writer._thread = threading.Thread()
        writer._thread.start()
        writer.stop()
        with pytest.raises(batch_writer.QueueFull):
            await slipped

    asyncio.run(asyncio.wait_for(scenario(), 30))
