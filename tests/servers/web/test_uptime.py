"""Uptime of servers, from the changes of their states."""

from datetime import UTC, datetime, timedelta

import pytest

from catalog.audit import SYSTEM
from servers.errors import UpstreamError
from servers.models import StateChange
from servers.registration import state_history
from servers.registration.actions import report_state, set_enabled
from servers.web.uptime import DAYS, count_uptime
from tests.support.factories import make_server

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def test_days_are_split_at_midnight_and_time_without_data_does_not_count():
    changes = [
        (NOW - 2 * DAY, "connected"),
        (NOW - DAY - 6 * HOUR, "failing"),
        (NOW - DAY + 6 * HOUR, "connected"),
        (NOW - 6 * HOUR, "disabled"),
    ]
    uptime = count_uptime(changes, NOW)
    before, yesterday, today = uptime.days[-3:]
    assert len(uptime.days) == DAYS
    assert (before.up, before.down) == (12 * HOUR, timedelta(0))
    assert (yesterday.up, yesterday.down, yesterday.tone) == (12 * HOUR, 12 * HOUR, "some")
    assert (today.up, today.down) == (6 * HOUR, timedelta(0))
    assert {day.tone for day in uptime.days[:-3]} == {"none"}
    assert uptime.summary == "71.43% in 90 days, 1 failure."
    assert yesterday.label == "2026-11-17: 50.00%, failing for 720 minutes"


def test_a_state_before_the_first_day_counts_from_its_start():
    uptime = count_uptime([(NOW - 200 * DAY, "connected")], NOW)
    assert uptime.summary == "100% in 90 days, 0 failures."
    assert uptime.days[0].up == DAY
    assert count_uptime([], NOW).summary == "No data in 90 days."


@pytest.mark.django_db
def test_each_change_of_a_state_is_a_row_and_old_ones_are_deleted(client, operator):
    server = make_server(slug="crm")
    for state in ("connected", "failing", "failing", "connected"):
        error = UpstreamError("x", code="refused") if state == "failing" else None
        report_state(server.pk, server.generation, state, error)
    set_enabled(server, False, actor=SYSTEM)
    states = list(StateChange.objects.values_list("state", flat=True))
    assert states == ["connected", "failing", "connected", "disabled"]
    client.force_login(operator)
    page = client.get("/servers/crm").content.decode()
    assert "in 90 days, 1 failure." in page

    old = StateChange.objects.exclude(state="disabled")
    for days, change in zip((100, 99, 98), old, strict=True):
        StateChange.objects.filter(pk=change.pk).update(at=NOW - days * DAY)
    assert state_history.prune(NOW) == 2  # the newest of the old ones stays
    kept = list(StateChange.objects.values_list("state", flat=True))
    assert kept == ["connected", "disabled"]
