"""The ledger's batch writer: errors of the database, of a job and of the writer itself."""

import asyncio
import threading
from typing import Any

import pytest
from django.db import OperationalError

from sessions_app.ledger import batch_writer
from sessions_app.ledger.batch_writer import WriteJob, commit
from tests.support.waiting import scaled, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def run(scenario: Any) -> Any:
    async def inside() -> Any:
        async with asyncio.timeout(scaled(30)), batch_writer.run_writer():
            return await scenario()

    return asyncio.run(inside())


async def commit_in_one_batch(*jobs: WriteJob[Any]) -> list[Any]:
    """Commit jobs in one batch, by queueing them behind a job that blocks the writer."""
    blocked, release = threading.Event(), threading.Event()

    def block(cursor: Any) -> None:
        blocked.set()
        release.wait(scaled(20))

    first = asyncio.create_task(commit(WriteJob(block)))
    await asyncio.to_thread(blocked.wait, 20)
    tasks = [asyncio.create_task(commit(job)) for job in jobs]
    writer = batch_writer._writer
    assert writer is not None
    await asyncio.to_thread(wait_for, lambda: len(writer._queue) == len(jobs))
    release.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


class Locked:
    """Work that fails with a locked database the given number of times."""

    def __init__(self, failures: int) -> None:
        self.failures, self.attempts = failures, 0

    def __call__(self, cursor: Any) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise OperationalError("database is locked")
        return "written"


def test_a_locked_database_is_tried_twice_for_the_whole_batch():
    locked = Locked(10**6)
    results = run(lambda: commit_in_one_batch(*(WriteJob(locked) for _ in range(20))))
    assert [type(result) for result in results] == [OperationalError] * 20
    assert locked.attempts == 2


def test_a_broken_connection_fails_no_job():
    results = run(
        lambda: commit_in_one_batch(
            *(WriteJob(work) for work in [Locked(1), lambda cursor: "other"])
        )
    )
    assert results == ["written", "other"]


def test_results_are_retried_until_the_database_is_back_and_other_jobs_fail_at_once(monkeypatch):
    monkeypatch.setattr(batch_writer, "RETRY_INTERVAL", 0)
    attempts = [Locked(30), Locked(0)]
    results = run(
        lambda: commit_in_one_batch(
            WriteJob(Locked(10**6)), *(WriteJob(attempt, must_commit=True) for attempt in attempts)
        )
    )
    assert isinstance(results[0], OperationalError)
    assert results[1:] == ["written", "written"]


def test_retries_of_results_end(monkeypatch):
    monkeypatch.setattr(batch_writer, "RETRY_SECONDS", 0.2)
    results = run(
        lambda: commit_in_one_batch(
            WriteJob(Locked(10**6), must_commit=True), WriteJob(Locked(10**6), must_commit=True)
        )
    )
    assert [type(result) for result in results] == [OperationalError] * 2


def test_a_failing_job_does_not_fail_the_others():
    def failing(cursor: Any) -> None:
        raise LookupError("own error")

    results = run(
        lambda: commit_in_one_batch(
            WriteJob(lambda cursor: 1), WriteJob(failing), WriteJob(lambda cursor: 2)
        )
    )
    assert (results[0], type(results[1]), results[2]) == (1, LookupError, 2)


def test_an_error_of_the_writer_fails_the_batch_and_the_writer_continues(monkeypatch):
    def broken(error: BaseException) -> None:
        raise RuntimeError("the connection could not be closed")

    async def scenario():
        with monkeypatch.context() as once:
            once.setattr(batch_writer, "_close_connection", broken)
            results = await commit_in_one_batch(WriteJob(Locked(1)), WriteJob(Locked(0)))
        return results, await commit(WriteJob(lambda cursor: "fine"))

    results, after = run(scenario)
    assert [type(result) for result in results] == [RuntimeError] * 2
    assert after == "fine"


def test_jobs_after_the_stop_are_rejected():
    async def scenario():
        async with batch_writer.run_writer():
            writer = batch_writer._writer
        with pytest.raises(batch_writer.QueueFull):
            await writer.submit(WriteJob(lambda cursor: None))
        # One that late in as the thread ended.
        writer._stopping, writer._thread = False, threading.current_thread()
        late = asyncio.create_task(writer.submit(WriteJob(lambda cursor: None)))
        await asyncio.to_thread(wait_for, lambda: writer._queue)
        writer._thread = threading.Thread()
        writer._thread.start()
        writer.stop()
        with pytest.raises(batch_writer.QueueFull):
            await late

    asyncio.run(asyncio.wait_for(scenario(), scaled(30)))
