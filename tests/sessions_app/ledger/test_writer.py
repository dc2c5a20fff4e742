"""The ledger's writer: errors of the database, of a job and of the writer; on the event loop."""

import asyncio
import sqlite3
import threading
from typing import Any

import pytest
from django.db import OperationalError, connections

from catalog.models import Revision
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.writer import WriteJob, commit
from tests.support.waiting import scaled, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def run(scenario: Any) -> Any:
    async def inside() -> Any:
        async with asyncio.timeout(scaled(30)), ledger_writer.run_writer(on_loop=False):
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
    writer = ledger_writer._writer
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
    monkeypatch.setattr(ledger_writer, "RETRY_INTERVAL", 0)
    attempts = [Locked(30), Locked(0)]
    results = run(
        lambda: commit_in_one_batch(
            WriteJob(Locked(10**6)), *(WriteJob(attempt, must_commit=True) for attempt in attempts)
        )
    )
    assert isinstance(results[0], OperationalError)
    assert results[1:] == ["written", "written"]


def test_retries_of_results_end(monkeypatch):
    monkeypatch.setattr(ledger_writer, "RETRY_SECONDS", 0.2)
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
            once.setattr(ledger_writer, "_close_connection", broken)
            results = await commit_in_one_batch(WriteJob(Locked(1)), WriteJob(Locked(0)))
        return results, await commit(WriteJob(lambda cursor: "fine"))

    results, after = run(scenario)
    assert [type(result) for result in results] == [RuntimeError] * 2
    assert after == "fine"


def test_jobs_after_the_stop_are_rejected():
    async def scenario():
        async with ledger_writer.run_writer(on_loop=False):
            writer = ledger_writer._writer
        with pytest.raises(ledger_writer.QueueFull):
            await writer.submit(WriteJob(lambda cursor: None))
        # One that late in as the thread ended.
        writer._stopping, writer._thread = False, threading.current_thread()
        late = asyncio.create_task(writer.submit(WriteJob(lambda cursor: None)))
        await asyncio.to_thread(wait_for, lambda: writer._queue)
        writer._thread = threading.Thread()
        writer._thread.start()
        writer.stop()
        with pytest.raises(ledger_writer.QueueFull):
            await late

    asyncio.run(asyncio.wait_for(scenario(), scaled(30)))


# --- On the event loop ----------------------------------------------------------------------------


def run_on_loop(scenario: Any) -> Any:
    async def inside() -> Any:
        async with asyncio.timeout(scaled(30)), ledger_writer.run_writer():
            return await scenario()

    return asyncio.run(inside())


def writing_thread(cursor: Any) -> tuple[str, int]:
    """Return where a job is written, and how many rows are visible there."""
    (rows,) = cursor.fetch_one("SELECT COUNT(*) FROM catalog_revision")
    return threading.current_thread().name, rows


def test_a_lone_job_is_committed_at_once_and_jobs_of_busy_turns_together():
    transactions = []

    def work(cursor: Any) -> str:
        transactions.append(cursor.fetch_one("SELECT 1"))
        return threading.current_thread().name

    async def scenario():
        names = []
        for jobs in (1, 5, 5, 1, 1):
            names += await asyncio.gather(*(commit(WriteJob(work)) for _ in range(jobs)))
            await asyncio.sleep(0)  # the next jobs come in another turn
        return names

    with pytest.MonkeyPatch.context() as patched:
        batches = []
        run_jobs = ledger_writer._run_jobs
        patched.setattr(
            ledger_writer,
            "_run_jobs",
            lambda cursor, batch: batches.append(len(batch)) or run_jobs(cursor, batch),
        )
        names = run_on_loop(scenario)
    assert set(names) == {"MainThread"}
    # The first of a turn is written at once if the turn before had no other.
    assert batches == [1, 1, 4, 5, 1, 1]


def test_the_thread_writes_while_another_thread_of_this_process_writes():
    async def scenario():
        database = connections["default"]
        assert database.write_queue.try_acquire()
        waiting = asyncio.create_task(commit(WriteJob(writing_thread)))
        writer = ledger_writer._writer
        assert writer is not None
        await asyncio.to_thread(wait_for, lambda: database.write_queue._waiting)
        database.write_queue.release()
        return await waiting, await commit(WriteJob(writing_thread))

    (first, _), (second, _) = run_on_loop(scenario)
    assert (first, second) == ("ledger", "MainThread")


def test_the_thread_writes_while_another_process_writes(tmp_path):
    """SQLite's own lock: the event loop does not wait for it."""

    async def scenario():
        path = connections["default"].settings_dict["NAME"]
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(commit(WriteJob(writing_thread)))
        writer = ledger_writer._writer
        assert writer is not None
        await asyncio.to_thread(wait_for, lambda: writer._thread.is_alive() and not writer._queue)
        assert not waiting.done()
        other.execute("ROLLBACK")
        other.close()
        return (await waiting)[0]

    assert run_on_loop(scenario) == "ledger"


def test_the_thread_writes_while_other_threads_compute():
    release = threading.Event()

    async def scenario():
        computing = asyncio.create_task(ledger_writer.run_off_loop(release.wait, 30))
        await asyncio.sleep(0)
        first = await commit(WriteJob(writing_thread))
        release.set()
        await computing
        return first[0], (await commit(WriteJob(writing_thread)))[0]

    assert run_on_loop(scenario) == ("ledger", "MainThread")


def test_a_slow_commit_on_the_event_loop_is_followed_by_a_pause(monkeypatch):
    monkeypatch.setattr(ledger_writer, "MAX_LOOP_WORK", 0.0)
    monkeypatch.setattr(ledger_writer, "LOOP_PAUSE", 3600.0)

    async def scenario():
        return [(await commit(WriteJob(writing_thread)))[0] for _ in range(3)]

    assert run_on_loop(scenario) == ["MainThread", "ledger", "ledger"]


def test_a_job_that_fails_on_the_event_loop_is_rolled_back_and_tried_by_the_thread():
    def insert(cursor: Any) -> None:
        cursor.execute("UPDATE catalog_revision SET number = number + 1")

    class Failing:
        attempts = 0

        def __call__(self, cursor: Any) -> str:
            self.attempts += 1
            insert(cursor)
            if self.attempts == 1:
                raise ValueError("once")
            return "written"

    async def scenario():
        before = await commit(WriteJob(lambda cursor: cursor.fetch_one(NUMBER)[0]))
        result = await commit(WriteJob(Failing()))
        after = await commit(WriteJob(lambda cursor: cursor.fetch_one(NUMBER)[0]))
        return result, after - before

    NUMBER = "SELECT COALESCE(SUM(number), 0) FROM catalog_revision"
    Revision.bump()
    assert run_on_loop(scenario) == ("written", 1)


def test_a_result_is_written_also_after_its_caller_was_told_that_it_was_not(monkeypatch):
    monkeypatch.setattr(ledger_writer, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(ledger_writer, "RETRY_INTERVAL", 0.01)
    away, written = threading.Event(), threading.Event()
    away.set()

    def write(cursor: Any) -> None:
        if away.is_set():
            raise OperationalError("the database is away")
        written.set()

    async def scenario():
        with pytest.raises(OperationalError):
            await commit(WriteJob(write, must_commit=True))
        other = asyncio.create_task(commit(WriteJob(Locked(10**6))))
        with pytest.raises(OperationalError):  # others fail at once meanwhile
            await other
        assert not written.is_set()
        away.clear()
        assert await asyncio.to_thread(written.wait, scaled(20))
        return await commit(WriteJob(lambda cursor: "fine"))

    assert run(scenario) == "fine"


def test_a_result_that_can_never_be_written_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr(ledger_writer, "RETRY_INTERVAL", 0)

    async def scenario():
        hopeless = asyncio.create_task(commit(WriteJob(Locked(10**6), must_commit=True)))
        later = [commit(WriteJob(Locked(40), must_commit=True)) for _ in range(3)]
        results = await asyncio.gather(*later)
        hopeless.cancel()
        return results, await commit(WriteJob(lambda cursor: "fine"))

    assert run(scenario) == (["written"] * 3, "fine")


def test_a_result_is_dropped_in_the_end(monkeypatch, caplog):
    monkeypatch.setattr(ledger_writer, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(ledger_writer, "KEEP_SECONDS", 0.0)

    async def scenario():
        with pytest.raises(OperationalError):
            await commit(WriteJob(Locked(10**6), must_commit=True))
        assert not ledger_writer._writer._unwritten

    run(scenario)
    assert "Dropped the result of a call" in caplog.text
