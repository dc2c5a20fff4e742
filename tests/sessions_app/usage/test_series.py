"""Figures by hour and day: counted from the ledger, the same before and after they are stored."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.utils import timezone

from sessions_app import tasks
from sessions_app.models import AgentSession, Call, UsageDay, UsageHour, UsageKind
from sessions_app.usage import latency, rollups
from sessions_app.usage.series import (
    read_breakdown,
    read_called_tools,
    read_series,
    read_totals,
)
from tests.support.factories import make_call, make_event, make_server, make_session, make_tool

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 3, 5, 12, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def forecast(db):
    return make_tool(make_server(slug="weather"), "get_forecast")


@pytest.fixture
def session(db):
    session = make_session(tokens_all=1_000, model="large-1")
    AgentSession.objects.filter(pk=session.pk).update(created_at=NOW - 3 * HOUR)
    return session


def fill(session, forecast):
    for hours, state, ms in (
        (3, "succeeded", 100),
        (3, "failed", 400),
        (0, "succeeded", 200),
        (30, "succeeded", 50),
    ):
        make_call(session, forecast, at=NOW - hours * HOUR, ms=ms, state=state)
    make_call(None, forecast, at=NOW, path="try")
    make_event(session, "opened", at=NOW - 3 * HOUR, tokens=120)
    make_event(session, "searched", at=NOW - 2 * HOUR, tokens=80)
    make_event(session, "loaded", at=NOW, tokens=300)


def figures_of(series):
    return [asdict(point) for point in (*series.points, series.total, series.before)]


def test_a_day_is_counted_by_hour_with_the_day_before(session, forecast):
    fill(session, forecast)

    day = read_series("24h", now=NOW)

    assert [point.calls for point in day.points] == [0] * 20 + [2, 0, 0, 1]
    assert (day.total.calls, day.total.errors, day.total.sessions) == (3, 1, 1)
    assert (day.total.searches, day.total.loads) == (1, 1)
    assert (day.total.tokens_given, day.total.tokens_saved) == (500, 500)
    assert day.before.calls == 1
    assert day.change("calls") == 200
    assert day.change("errors") is None


def test_stored_hours_give_the_same_figures_as_the_ledger(session, forecast):
    fill(session, forecast)
    live = {
        (kind, key): figures_of(read_series("7d", kind, key, now=NOW))
        for kind, key in (
            (UsageKind.ALL, ""),
            (UsageKind.AGENT, str(session.agent_id)),
            (UsageKind.SERVER, "weather"),
            (UsageKind.TOOL, forecast.public_name),
            (UsageKind.MODEL, "large-1"),
        )
    }
    tools = read_totals("7d", UsageKind.TOOL, now=NOW)

    assert rollups.count_ended_hours(NOW) == 30
    assert rollups.count_ended_hours(NOW) == 0
    assert not UsageHour.objects.filter(hour__gte=NOW.replace(minute=0)).exists()

    assert live == {key: figures_of(read_series("7d", *key, now=NOW)) for key in live}
    assert tools == read_totals("7d", UsageKind.TOOL, now=NOW)
    assert tools[forecast.public_name].calls == 4


def read_everything(within, forecast):
    """Return what charts, breakdowns and tables read of a range."""
    names = [forecast.public_name, "weather__sound_alarm"]
    series = [
        figures_of(read_series(within, kind, keys, now=NOW))
        for kind, keys in ((UsageKind.ALL, ""), (UsageKind.TOOL, names), (UsageKind.MODEL, "nil"))
    ]
    breakdown = read_breakdown(within, UsageKind.TOOL, 1, now=NOW, listed=2)
    return series, breakdown, read_totals(within, UsageKind.SERVER, now=NOW)


def test_summed_days_give_the_same_figures_as_their_hours(session, forecast):
    other = make_tool(forecast.server, "sound_alarm")
    for hours in range(0, 16 * 24, 5):
        tool, state = (other, "failed") if hours % 3 == 0 else (forecast, "succeeded")
        make_call(session, tool, at=NOW - hours * HOUR, ms=hours * 7, state=state)
    while rollups.count_ended_hours(NOW):
        pass
    of_hours = {within: read_everything(within, forecast) for within in ("24h", "7d", "90d")}

    assert rollups.sum_ended_days(NOW) == 10
    half = {within: read_everything(within, forecast) for within in of_hours}
    assert rollups.sum_ended_days(NOW) == 6
    assert rollups.sum_ended_days(NOW) == 0
    whole = {within: read_everything(within, forecast) for within in of_hours}

    assert of_hours == half == whole
    day = UsageDay.objects.filter(kind=UsageKind.ALL).latest("day")
    assert day.day == NOW.date() - timedelta(days=1)  # today has not ended
    UsageHour.objects.filter(hour__lt=NOW.replace(hour=0, minute=0)).delete()
    assert read_everything("7d", forecast) == of_hours["7d"]  # only today was read by hour


def test_the_periodic_task_counts_hours_and_sums_days(session, forecast):
    made = timezone.now() - timedelta(days=2)
    make_call(session, forecast, at=made)
    AgentSession.objects.update(created_at=made)
    tasks.tidy()
    assert UsageDay.objects.get(kind=UsageKind.ALL, day=made.date()).calls == 1


def test_tools_called_in_thirty_days_are_those_of_days_hours_and_the_ledger(session, forecast):
    assert read_called_tools() == set()
    now = timezone.now()
    for number, days in enumerate((40, 20, 1, 0)):
        tool = make_tool(forecast.server, f"tool_{number}")
        make_call(session, tool, at=now - timedelta(days=days))
        if days:
            rollups.count_ended_hours()
            rollups.sum_ended_days()
    while rollups.count_ended_hours():
        pass
    assert read_called_tools() == {f"weather__tool_{number}" for number in (1, 2, 3)}


def test_stored_hours_stay_when_their_sessions_are_deleted(session, forecast):
    fill(session, forecast)
    rollups.count_ended_hours(NOW)
    AgentSession.objects.all().delete()
    assert read_series("24h", now=NOW).total.calls == 2  # not the call of the running hour


def test_an_hour_is_counted_only_when_its_calls_have_ended(session, forecast):
    make_call(session, forecast, at=NOW - 2 * HOUR, state="succeeded")
    running = make_call(session, forecast, at=NOW - HOUR, state="sent")
    AgentSession.objects.update(created_at=NOW - 2 * HOUR)

    assert rollups.count_ended_hours(NOW) == 1
    Call.objects.filter(pk=running.pk).update(state="failed")
    assert rollups.count_ended_hours(NOW) == 1
    assert read_series("24h", now=NOW).total.errors == 1


def test_an_unknown_name_is_a_call_but_not_usage_of_a_tool(session, forecast):
    make_call(session, None, at=NOW, tool_name="made_up", state="refused")
    assert read_series("24h", now=NOW).total.calls == 1
    assert read_totals("24h", UsageKind.TOOL, now=NOW) == {}


def test_more_hours_than_are_read_at_once_are_reported_as_partial(session, forecast):
    make_call(session, forecast, at=NOW - 100 * HOUR)
    assert read_series("7d", now=NOW).is_partial
    rollups.count_ended_hours(NOW)
    week = read_series("7d", now=NOW)
    assert (week.is_partial, week.total.calls) == (False, 1)


def test_a_breakdown_has_totals_the_period_before_and_the_calls_of_the_first(session, forecast):
    fill(session, forecast)
    other = make_tool(forecast.server, "sound_alarm")
    make_call(session, other, at=NOW - HOUR)
    names = [forecast.public_name, other.public_name]
    for _ in range(2):
        both = read_series("24h", UsageKind.TOOL, names, now=NOW)
        assert [point.calls for point in both.points] == [0] * 20 + [2, 0, 1, 1]
        day = read_breakdown("24h", UsageKind.TOOL, 2, now=NOW)
        assert {name: row.calls for name, row in day.totals.items()} == {names[0]: 3, names[1]: 1}
        assert list(day.totals) == names
        assert {name: row.calls for name, row in day.before.items()} == {names[0]: 1}
        assert day.calls[names[1]] == [0] * 22 + [1, 0]
        week = read_breakdown("7d", UsageKind.TOOL, 1, now=NOW)
        assert week.calls == {names[0]: [0] * 5 + [1, 3]}
        rollups.count_ended_hours(NOW)


def test_the_database_sums_the_hours_of_a_day(session, forecast):
    for hours in range(1, 60 * 24, 7):
        make_call(session, forecast, at=NOW - hours * HOUR, ms=100)
    while rollups.count_ended_hours(NOW):
        pass
    rows: list[object] = []

    def count_rows(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if "usagehour" in sql and "SUM(" in sql:
            rows.append(sql)
        return result

    with connection.execute_wrapper(count_rows):
        quarter = read_series("90d", now=NOW)
    assert len(rows) == 1
    assert quarter.total.calls == len(range(1, 60 * 24, 7))
    assert UsageHour.objects.filter(kind=UsageKind.ALL).count() > 10 * len(quarter.points)


@pytest.mark.parametrize(("milliseconds", "bucket"), [(0, 0), (1, 0), (1.4, 1), (2, 2), (100, 14)])
def test_a_latency_is_within_its_bucket(milliseconds, bucket):
    assert latency.bucket_of(milliseconds) == bucket
    assert latency.upper_bound(bucket) >= milliseconds


def test_percentiles_are_within_a_bucket_of_the_exact_value():
    values = [round(1.13**power) for power in range(60)]
    counts: dict[int, int] = {latency.NO_ANSWER: 50}
    for value in values:
        counts[latency.bucket_of(value)] = counts.get(latency.bucket_of(value), 0) + 1
    for share in (0.5, 0.95):
        exact = values[round(share * len(values)) - 1]
        found = latency.percentile(counts, share)
        assert found is not None
        assert 2**-0.5 <= found / exact <= 2**0.5
    assert latency.percentile({latency.NO_ANSWER: 3}, 0.5) is None
