"""SQLite for many threads: writers take turns in order, connections are used again."""

import os
import sqlite3
import threading
from functools import partial

import pytest
from django.db import OperationalError, connection, connections, transaction

from catalog.models import Group
from tests.support.waiting import wait_for
from toolcrib.sqlite import base, checkpoints
from toolcrib.sqlite.write_queue import WriteQueue

pytestmark = pytest.mark.skipif(
    connection.vendor != "sqlite", reason="PostgreSQL has locks of its own"
)


def started(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


class TestTurns:
    def test_who_came_first_goes_first(self):
        turns, order = WriteQueue(), []

        def write(number):
            with turns.turn(30):
                order.append(number)

        turns.take(1)
        threads = []
        for number in range(20):
            threads.append(started(write, number))
            wait_for(lambda: len(turns._waiting) == number + 1)  # noqa: B023 - called at once
        turns.give_back()
        for thread in threads:
            thread.join(30)
        assert order == list(range(20))
        turns.take(0)

    def test_who_is_out_of_patience_is_told_so_and_holds_up_nobody(self):
        turns = WriteQueue()
        turns.take(1)
        with pytest.raises(OperationalError, match="locked"):
            turns.take(0.01)
        turns.give_back()
        turns.take(0)

    def test_a_turn_ends_with_an_error_too(self):
        turns = WriteQueue()
        with pytest.raises(ValueError, match="no"), turns.turn(1):
            raise ValueError("no")
        turns.take(0)


@pytest.fixture
def waiting(transactional_db):
    """How many wait for their turn at the database."""
    return lambda: len(connection.turns._waiting)


@pytest.mark.django_db(transaction=True)
class TestWriting:
    @pytest.mark.parametrize("how", ["in a transaction", "by itself", "many"])
    def test_a_writer_waits_for_the_one_before_and_does_not_ask_again(self, waiting, how):
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
            thread = started(write)
            wait_for(lambda: waiting() == 1)
            assert not Group.objects.filter(group_id="g0").exists()
        thread.join(30)
        assert Group.objects.filter(group_id="g0").exists()
        assert not connection.holds_turn

    @pytest.mark.parametrize("failing", ["the block", "the commit", "the beginning"])
    def test_whatever_fails_the_turn_is_given_back(self, waiting, monkeypatch, failing):
        def fail(*args):
            raise OperationalError("disk I/O error")

        named = {"the commit": "_commit", "the beginning": "_start_transaction_under_autocommit"}

        def write():
            with transaction.atomic():
                Group.objects.create(group_id="g", display_name="G")
                if failing == "the block":
                    fail()

        with monkeypatch.context() as patched:
            if failing in named:
                patched.setattr(base.base.DatabaseWrapper, named[failing], fail)
            with pytest.raises(OperationalError):
                write()
        assert not connection.holds_turn
        connection.turns.take(0)
        connection.turns.give_back()
        assert not Group.objects.exists()

    def test_readers_wait_for_nobody(self, waiting):
        found = []

        def read():
            found.append(Group.objects.count())
            connection.close()

        with transaction.atomic():
            Group.objects.create(group_id="g", display_name="G")
            thread = started(read)
            thread.join(30)
        assert found == [0]


class FileAt(base.DatabaseWrapper):
    def __init__(self, path):
        super().__init__({**connections.settings["default"], "NAME": path})


@pytest.mark.django_db
class TestLog:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "a.sqlite3"

    def fill(self, writer, rows):
        with writer.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS t (text)")
            for _ in range(rows):
                cursor.execute("INSERT INTO t VALUES (zeroblob(4000))")

    def on_disk(self, path, copy):
        """How many rows the file has without its log."""
        copy.write_bytes(path.read_bytes())
        found = sqlite3.connect(copy)
        try:
            return found.execute("SELECT COUNT(*) FROM t").fetchone()[0]
        except sqlite3.OperationalError:  # not even the table
            return 0
        finally:
            found.close()

    def test_no_commit_waits_for_it_and_then_all_is_in_the_file(self, path, tmp_path):
        writer, mover = FileAt(path), FileAt(path)
        self.fill(writer, 1_500)  # over the 1,000 pages of old
        assert self.on_disk(path, tmp_path / "before") == 0
        assert checkpoints.move(mover)
        assert self.on_disk(path, tmp_path / "after") == 1_500

    def test_it_waits_for_no_writer_and_no_reader_and_says_that_something_is_left(self, path):
        writer, reader, mover = FileAt(path), FileAt(path), FileAt(path)
        self.fill(writer, 10)
        with reader.cursor() as reading:
            reading.execute("BEGIN DEFERRED")
            assert reading.execute("SELECT COUNT(*) FROM t").fetchone() == (10,)
            self.fill(writer, 10)
            with writer.cursor() as writing:
                writing.execute("BEGIN IMMEDIATE")
                assert not checkpoints.move(mover)  # the reader still needs the file as it was
                writing.execute("COMMIT")
            reading.execute("COMMIT")
        assert checkpoints.move(mover)


@pytest.mark.django_db(transaction=True)
class TestConnections:
    def in_thread(self, act):
        done = []

        def run():
            try:
                done.append(act())
            finally:
                connection.close()

        started(run).join(30)
        return done[0]

    def raw(self):
        connection.ensure_connection()
        return id(connection.connection)

    def test_a_closed_connection_is_used_again_and_no_two_threads_share_one(self):
        first = self.in_thread(self.raw)
        assert self.in_thread(self.raw) == first
        assert self.raw() != self.in_thread(self.raw)

    def test_one_that_is_left_in_a_transaction_is_not(self):
        def leave():
            found = self.raw()
            connection.connection.execute("BEGIN")
            return found

        left = self.in_thread(leave)
        spare = list(connection._spare)
        assert left not in [id(one) for _, one in spare]
        assert not any(one.in_transaction for _, one in spare)

    @pytest.mark.parametrize("how", ["django's cursor", "the driver's"])
    def test_a_question_that_was_not_read_to_its_end_does_not_hold_on_to_the_past(self, how):
        Group.objects.bulk_create(Group(group_id=f"g{n}", display_name="G") for n in range(300))
        left = []

        def leave():
            found = self.raw()
            own = connection.cursor() if how == "django's cursor" else connection.connection
            left.append(own.execute("SELECT group_id FROM catalog_group"))
            left[0].fetchone()
            return found

        first = self.in_thread(leave)
        Group.objects.create(group_id="new", display_name="G")
        again = self.in_thread(lambda: (self.raw(), Group.objects.filter(group_id="new").exists()))
        assert again == (first, True)

    def test_a_file_that_was_put_in_the_place_of_the_old_one_is_opened(self, tmp_path):
        def names(database):
            with database.cursor() as cursor:
                return [row[0] for row in cursor.execute("SELECT name FROM sqlite_master")]

        At = partial(FileAt, tmp_path / "a.sqlite3")
        one = At()
        with one.cursor() as cursor:
            cursor.execute("CREATE TABLE old (id)")
        one.close()
        assert names(At()) == ["old"]
        for path in tmp_path.iterdir():
            path.unlink()
        other = At()
        assert names(other) == []
        other.close()
        assert len(other._spare) == 1

    @pytest.mark.parametrize("how", ["closed", "looked after by Django", "by the driver"])
    def test_one_that_had_an_error_is_not_used_again(self, how):
        """It may be the reason, as one that was opened while the disk was read-only."""

        def fail():
            found = self.raw()
            asked = connection.connection if how == "by the driver" else connection.cursor()
            with pytest.raises(OperationalError), connection.wrap_database_errors:
                asked.execute("SELECT * FROM nowhere")
            if how == "looked after by Django":
                connection.close_if_unusable_or_obsolete()
                assert connection.connection is None
            return found

        failed = self.in_thread(fail)
        assert failed not in [id(one) for _, one in connection._spare]

    def test_a_forked_process_takes_neither_turns_nor_connections_with_it(self):
        kept = self.in_thread(self.raw)
        connection.turns.take(1)
        try:
            child = os.fork()
            if child == 0:  # no assertion here: nothing of pytest may run twice
                connection.turns.take(0)
                os._exit(len(connection._spare))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            connection.turns.give_back()
        assert kept in [id(one) for _, one in connection._spare]

    def test_not_more_are_kept_than_are_of_use(self):
        gate = threading.Barrier(12)

        def together():
            self.raw()
            gate.wait(30)
            connections.close_all()

        threads = [started(together) for _ in range(12)]
        for thread in threads:
            thread.join(30)
        assert len(connection._spare) <= base.MOST_IDLE
