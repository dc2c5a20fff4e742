"""Commits of other connections and processes wake the tasks that wait for them."""

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.support.waiting import scaled
from toolcrib.runtime.database_watch import DatabaseWatch

LONG = 3_600.0


@pytest.fixture
def database(tmp_path, settings, monkeypatch):
    path = tmp_path / "watched.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE rows (number INTEGER)")
    monkeypatch.setitem(settings.DATABASES["default"], "NAME", str(path))
    return path


def commit(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO rows VALUES (1)")
    connection.commit()
    connection.close()


def run(scenario):
    async def limited():
        watch = DatabaseWatch()
        async with asyncio.timeout(scaled(30)), watch.running():
            await watch.wait(0, 0, LONG)  # the first reading
            await scenario(watch)

    asyncio.run(limited())


def test_a_commit_wakes_all_that_wait(database):
    async def scenario(watch):
        waiting = [asyncio.create_task(watch.wait(watch.changes, 0, LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        commit(database)
        assert len(set(await asyncio.gather(*waiting))) == 1

    run(scenario)


def test_a_commit_before_the_wait_is_not_missed(database):
    async def scenario(watch):
        seen = watch.changes
        commit(database)
        assert await watch.wait(seen, 0, LONG) > seen

    run(scenario)


def test_a_statement_without_effect_and_a_read_wake_nobody(database):
    async def scenario(watch):
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("SELECT COUNT(*) FROM rows").fetchone()
        connection.execute("UPDATE rows SET number = 2 WHERE number = 99")
        connection.close()
        seen = watch.changes
        assert await watch.wait(seen, 0, 1.0) == seen

    run(scenario)


def test_a_restored_file_is_noticed_and_watched(database, tmp_path):
    async def scenario(watch):
        other = tmp_path / "restored.sqlite3"
        shutil.copy(database, other)
        other.replace(database)
        seen = await watch.wait(watch.changes, 0, LONG)
        commit(database)
        await watch.wait(seen, 0, LONG)

    run(scenario)


def test_without_a_file_the_tasks_poll(database):
    async def scenario(watch):
        database.unlink()
        seen = watch.changes
        for _ in range(2):
            seen = await watch.wait(seen, 0, LONG)

    run(scenario)


def test_without_a_watch_the_wait_is_the_shortest():
    waiting = asyncio.wait_for(DatabaseWatch().wait(0, 0.01, LONG), scaled(30))
    assert asyncio.run(waiting) == 0
