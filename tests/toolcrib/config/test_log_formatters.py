"""Repeated errors do not fill the log, and a log file that cannot be written is reported once."""

import io
import logging
from contextlib import suppress
from types import SimpleNamespace

import pytest

from toolcrib.config import log_formatters
from toolcrib.config.log_formatters import OneLineFormatter, PrivateLogFile, RepeatFilter


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(log_formatters, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def log(clock):
    """A logger with two handlers that share a filter, and the lines of each."""
    repeats, streams = RepeatFilter(), [io.StringIO(), io.StringIO()]
    logger = logging.Logger("tests")  # noqa: LOG001 - without handlers of others
    for stream in streams:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(OneLineFormatter())
        handler.addFilter(repeats)
        logger.addHandler(handler)
    logger.lines = lambda: [stream.getvalue().splitlines() for stream in streams]
    return logger


def test_a_repeated_error_is_logged_five_times_a_minute_and_counted(log, clock):
    for number in range(830):
        log.error("Database unavailable: %s", f"reason {number}")
    assert [len(lines) for lines in log.lines()] == [5, 5]
    clock.now += 61
    log.error("Database unavailable: %s", "again")
    for lines in log.lines():
        assert lines[5:] == [lines[-1]]
        assert lines[-1].endswith("Database unavailable: again (and 825 more since the last line)")


def test_other_errors_and_information_are_not_dropped(log):
    for number in range(50):
        log.error("Request %s failed", number)
        log.info("Synced %s", number)
    log.error("Something else")
    try:
        raise LookupError
    except LookupError:
        log.exception("Request %s failed", 51)
    lines = log.lines()[0]
    assert sum("Synced" in line for line in lines) == 50
    assert sum("Request" in line for line in lines) == 6, "an exception is another error"
    assert any(line.endswith("Something else") for line in lines)


def test_the_memory_of_the_filter_is_bounded(log):
    for number in range(3 * log_formatters.MAX_SEEN):
        log.error("Text %d".replace("%d", str(number)))
    assert len(log.handlers[0].filters[0]._seen) <= log_formatters.MAX_SEEN + 1


def test_a_log_file_that_cannot_be_written_is_reported_in_one_line(capsys, clock):
    file = PrivateLogFile("/dev/full", encoding="utf-8", delay=True)
    logger = logging.Logger("tests")  # noqa: LOG001 - without handlers of others
    logger.addHandler(file)
    for _ in range(830):
        logger.error("Something")
    assert capsys.readouterr().err == "The log file cannot be written: No space left on device.\n"
    clock.now += 61
    logger.error("Something")
    assert capsys.readouterr().err.count("\n") == 1
    logger.error("%d", "not a number")
    assert "Logging error" in capsys.readouterr().err, "an error of ours keeps its traceback"
    with suppress(OSError):
        file.close()


def test_a_line_of_the_log_has_no_hidden_characters():
    text = "read\u202e \u200ba\x1b[31m\nfile"
    record = logging.LogRecord("servers", logging.ERROR, "", 0, "Failed: %s", (text,), None)

    line = OneLineFormatter().format(record)

    assert line.endswith("Failed: read⟨U+202E⟩ ⟨U+200B⟩a⟨U+001B⟩[31m | file")
