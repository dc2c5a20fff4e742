"""SQLite backend for many threads: fair write queue, checkpoints, connection reuse."""

import os
import sqlite3
import threading
from functools import partial

import pytest
from django.db import OperationalError, connection, connections, transaction

from catalog.models import Group
from tests.support.waiting import scaled, wait_for
from toolcrib.sqlite import base, checkpoints
from toolcrib.sqlite.write_queue import WriteQueue

pytestmark = pytest.mark.skipif(connection.vendor != "sqlite", reason="SQLite only")


def start(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


class TestWriteQueue:
    def test_writers_are_served_first_in_first_out(self):
        queue, order = WriteQueue(), []

        def write(number):
            with queue.locked(30):
                order.append(number)

        queue.acquire(1)
        threads = []
        for number in range(20):
            threads.append(start(write, number))
            wait_for(lambda: len(queue._waiting) == number + 1)  # noqa: B023 - called at once
        queue.release()
        for thread in threads:
            thread.join(scaled(30))
        assert order == list(range(20))
        queue.acquire(0)

    def test_a_writer_that_times_out_gets_an_error_and_blocks_nobody(self):
        queue = WriteQueue()
        queue.acquire(1)
        with pytest.raises(OperationalError, match="locked"):
            queue.acquire(0.01)
        queue.release()
        queue.acquire(0)

    def test_an_exception_releases_the_lock(self):
        queue = WriteQueue()
        with pytest.raises(ValueError, match="no"), queue.locked(1):
            raise ValueError("no")
        queue.acquire(0)


@pytest.fixture
def waiting(transactional_db):
    """Return a function that counts the waiting writers."""
    return lambda: len(connection.write_queue._waiting)


@pytest.mark.django_db(transaction=True)
class TestWriting:
    @pytest.mark.parametrize("how", ["in a transaction", "by itself", "many"])
    def test_a_writer_waits_for_the_previous_one_without_polling(self, waiting, how):
        rows = [Group(group_id=f"g{number}", display_name="G") for number in range(3)]

        def write():
            try:
                if how == "in a transaction":
                    with transaction.atomic():
                        rows[0].save()
                elif how == "by itself":
                    rows[0].save()
                else:
                    Group.objects.bulk_create(rows)
            finally:
                connection.close()

        with transaction.atomic():
            thread = start(write)
            wait_for(lambda: waiting() == 1)
            assert not Group.objects.filter(group_id="g0").exists()
        thread.join(scaled(30))
        assert Group.objects.filter(group_id="g0").exists()
        assert not connection.holds_write_lock

    @pytest.mark.parametrize("failing", ["the block", "the commit", "the beginning"])
    def test_the_lock_is_released_after_any_failure(self, waiting, monkeypatch, failing):
        def fail(*args):
            raise OperationalError("disk I/O error")

        methods = {"the commit": "_commit", "the beginning": "_start_transaction_under_autocommit"}

        def write():
            with transaction.atomic():
                Group.objects.create(group_id="g", display_name="G")
                if failing == "the block":
                    fail()

        with monkeypatch.context() as patched:
            if failing in methods:
                patched.setattr(base.base.DatabaseWrapper, methods[failing], fail)
            with pytest.raises(OperationalError):
                write()
        assert not connection.holds_write_lock
        connection.write_queue.acquire(0)
        connection.write_queue.release()
        assert not Group.objects.exists()

    def test_readers_do_not_wait(self, waiting):
        counts = []

        def read():
            counts.append(Group.objects.count())
            connection.close()

        with transaction.atomic():
            Group.objects.create(group_id="g", display_name="G")
            thread = start(read)
            thread.join(scaled(30))
        assert counts == [0]


class Database(base.DatabaseWrapper):
    def __init__(self, path):
        super().__init__({**connections.settings["default"], "NAME": path})


@pytest.mark.django_db
class TestCheckpoints:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "a.sqlite3"

    def fill(self, writer, rows):
        with writer.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS t (text)")
            for _ in range(rows):
                cursor.execute("INSERT INTO t VALUES (zeroblob(4000))")

    def on_disk(self, path, copy):
        """Return the number of rows in the database file without its WAL."""
        copy.write_bytes(path.read_bytes())
        database = sqlite3.connect(copy)
        try:
            return database.execute("SELECT COUNT(*) FROM t").fetchone()[0]
        except sqlite3.OperationalError:  # the table is still in the WAL
            return 0
        finally:
            database.close()

    def test_commits_do_not_checkpoint_and_a_checkpoint_copies_everything(self, path, tmp_path):
        writer, checkpointer = Database(path), Database(path)
        self.fill(writer, 1_500)  # above SQLite's default of 1,000 pages
        assert self.on_disk(path, tmp_path / "before") == 0
        assert checkpoints.checkpoint(checkpointer)
        assert self.on_disk(path, tmp_path / "after") == 1_500

    def test_a_checkpoint_does_not_wait_and_reports_whether_it_is_complete(self, path):
        writer, reader, checkpointer = Database(path), Database(path), Database(path)
        self.fill(writer, 10)
        with reader.cursor() as reading:
            reading.execute("BEGIN DEFERRED")
            assert reading.execute("SELECT COUNT(*) FROM t").fetchone() == (10,)
            self.fill(writer, 10)
            with writer.cursor() as writing:
                writing.execute("BEGIN IMMEDIATE")
                assert not checkpoints.checkpoint(checkpointer)  # the reader needs its snapshot
                writing.execute("COMMIT")
            reading.execute("COMMIT")
        assert checkpoints.checkpoint(checkpointer)


@pytest.mark.django_db(transaction=True)
class TestConnections:
    def in_thread(self, function):
        results = []

        def run():
            try:
                results.append(function())
            finally:
                connection.close()

        start(run).join(scaled(30))
        return results[0]

    def raw(self):
        connection.ensure_connection()
        return id(connection.connection)

    def test_a_closed_connection_is_reused_and_no_two_threads_share_one(self):
        first = self.in_thread(self.raw)
        assert self.in_thread(self.raw) == first
        assert self.raw() != self.in_thread(self.raw)

    def test_a_connection_left_in_a_transaction_is_not_reused(self):
        def leave():
            connection_id = self.raw()
            connection.connection.execute("BEGIN")
            return connection_id

        left_open = self.in_thread(leave)
        idle = [row for _, row in connection._idle_connections]
        assert left_open not in map(id, idle)
        assert not any(row.in_transaction for row in idle)

    @pytest.mark.parametrize("how", ["django's cursor", "the driver's"])
    def test_an_unfinished_query_does_not_keep_an_old_snapshot(self, how):
        Group.objects.bulk_create(Group(group_id=f"g{n}", display_name="G") for n in range(300))
        unfinished = []

        def leave():
            connection_id = self.raw()
            own = connection.cursor() if how == "django's cursor" else connection.connection
            unfinished.append(own.execute("SELECT group_id FROM catalog_group"))
            unfinished[0].fetchone()
            return connection_id

        first = self.in_thread(leave)
        Group.objects.create(group_id="new", display_name="G")
        again = self.in_thread(lambda: (self.raw(), Group.objects.filter(group_id="new").exists()))
        assert again == (first, True)

    def test_a_replaced_database_file_is_opened_again(self, tmp_path):
        def names(database):
            with database.cursor() as cursor:
                return [row[0] for row in cursor.execute("SELECT name FROM sqlite_master")]

        At = partial(Database, tmp_path / "a.sqlite3")
        first = At()
        with first.cursor() as cursor:
            cursor.execute("CREATE TABLE old (id)")
        first.close()
        assert names(At()) == ["old"]
        for path in tmp_path.iterdir():
            path.unlink()
        second = At()
        assert names(second) == []
        second.close()
        assert len(second._idle_connections) == 1

    @pytest.mark.parametrize("how", ["closed", "checked by Django", "by the driver"])
    def test_a_connection_with_an_error_is_not_reused(self, how):
        """It may be the cause, for example if it was opened while the disk was read-only."""

        def fail():
            connection_id = self.raw()
            target = connection.connection if how == "by the driver" else connection.cursor()
            with pytest.raises(OperationalError), connection.wrap_database_errors:
                target.execute("SELECT * FROM nowhere")
            if how == "checked by Django":
                connection.close_if_unusable_or_obsolete()
                assert connection.connection is None
            return connection_id

        failed = self.in_thread(fail)
        assert failed not in [id(row) for _, row in connection._idle_connections]

    def test_a_forked_process_inherits_neither_locks_nor_connections(self):
        idle = self.in_thread(self.raw)
        connection.write_queue.acquire(1)
        try:
            child = os.fork()
            if child == 0:  # no assertions: pytest must not run in the child
                connection.write_queue.acquire(0)
                os._exit(len(connection._idle_connections))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            connection.write_queue.release()
        assert idle in [id(row) for _, row in connection._idle_connections]

    def test_the_number_of_idle_connections_is_limited(self):
        gate = threading.Barrier(12)

        def together():
            self.raw()
            gate.wait(scaled(30))
            connections.close_all()

        threads = [start(together) for _ in range(12)]
        for thread in threads:
            thread.join(scaled(30))
        assert len(connection._idle_connections) <= base.MAX_IDLE_CONNECTIONS
