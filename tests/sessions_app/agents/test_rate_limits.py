"""The sliding window of a minute."""

import pytest

from sessions_app.agents.rate_limits import LocalWindow, retry_after

MINUTE = 29_000_000 * 60.0


@pytest.fixture
def window():
    return LocalWindow()


def hits(window, count, at, limit=10, key="calls:1"):
    return sum(window.hit(key, limit, MINUTE + at) for _ in range(count))


def test_a_minute_has_room_for_as_many_requests_as_the_limit(window):
    assert hits(window, 15, at=0) == 10
    assert hits(window, 5, at=59.9) == 0


def test_the_last_minute_counts_by_its_share_in_the_window(window):
    assert hits(window, 10, at=30) == 10
    assert hits(window, 10, at=60) == 0
    assert hits(window, 10, at=90) == 5
    assert hits(window, 10, at=119.9) == 4


def test_a_quiet_minute_empties_the_window(window):
    assert hits(window, 10, at=0) == 10
    assert hits(window, 10, at=180) == 10


def test_keys_are_counted_apart(window):
    assert hits(window, 10, at=0) == 10
    assert hits(window, 10, at=0, key="calls:2") == 10


@pytest.mark.parametrize(("second", "wait"), [(0, 60), (30.2, 30), (59.9, 1)])
def test_a_retry_is_suggested_for_the_next_minute(second, wait):
    assert retry_after(MINUTE + second) == wait
