"""Call counts and latency of tools and servers, on their lists and on the group board."""

from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import Group, Tool
from sessions_app.models import UsageKind
from sessions_app.usage import call_stats, series
from tests.support.factories import make_call, make_server, make_session, make_tool

pytestmark = pytest.mark.django_db
BACKEND = "django.contrib.auth.backends.ModelBackend"


@pytest.fixture
def weather(db):
    return make_server(slug="weather", state="connected")


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


def call_often(tool, times, **fields):
    session = make_session()
    for _ in range(times):
        make_call(session, tool, **fields)


def test_calls_of_the_last_thirty_days_are_counted_without_trials(weather):
    tool, other = make_tool(weather, "a"), make_tool(weather, "b")
    call_often(tool, 3)
    call_often(tool, 1, state="failed")
    call_often(tool, 1, at=timezone.now() - timedelta(days=31))
    make_call(None, tool, path="try")

    stats = call_stats.count_tool_calls([tool.pk, other.pk])

    assert set(stats) == {tool.pk}
    assert (stats[tool.pk].calls, stats[tool.pk].errors) == (4, 1)
    assert stats[tool.pk].error_rate == 25


def test_calls_of_a_server_are_counted_per_hour_with_p95(weather):
    tool = make_tool(weather, "a")
    session, hour = make_session(), timezone.now().replace(minute=0, second=0, microsecond=0)
    for hours, ms in ((0, 10), (0, 20), (3, 500), (25, 9_000)):
        make_call(session, tool, at=hour - timedelta(hours=hours), ms=ms)

    stats = call_stats.count_server_calls({weather.pk: weather.slug})[weather.pk]

    assert stats.hours == [0] * 20 + [1, 0, 0, 2]
    of_page = series.read_series("24h", UsageKind.SERVER, weather.slug).total
    assert (stats.calls, stats.p95_ms) == (3, of_page.p95)
    assert stats.p95_ms == pytest.approx(500, rel=0.2)


def test_a_server_without_calls_is_omitted(weather):
    stats = call_stats.count_server_calls({weather.pk: weather.slug})
    assert weather.pk not in stats


def test_the_lists_show_calls_errors_and_latency(weather, signed_in):
    tool = make_tool(weather, "a")
    call_often(tool, 1, ms=1_234)
    call_often(tool, 1, ms=1_234, state="failed")

    servers = signed_in.get("/servers").content.decode()
    p95 = series.read_series("24h", UsageKind.SERVER, weather.slug).total.p95
    assert p95 == pytest.approx(1_234, rel=0.2)
    assert f'{p95:,} <span class="unit">ms</span>' in servers
    assert 'class="spark"' in servers
    tools = signed_in.get("/tools").content.decode()
    assert "50.0% errors" in tools


def test_never_called_is_a_filter_in_the_url(weather, signed_in):
    tool, tried = make_tool(weather, "used"), make_tool(weather, "tried")
    call_often(tool, 1)
    make_call(None, tried, path="try")

    page = signed_in.get("/tools?unused=1")

    assert [tool.public_name for tool, _ in page.context["rows"]] == ["weather__tried"]
    html = page.content.decode()
    assert '<input type="checkbox" name="unused" value="1" checked>' in html


# --- The board ----------------------------------------------------------------------------------


def suggested(signed_in):
    board = signed_in.get("/groups/research").context["board"]
    return [(tool.name, calls) for tool, calls in board.suggestions]


@pytest.fixture
def research(weather):
    group = Group.objects.create(group_id="research", display_name="Research")
    for name, words in (("a", 3000), ("b", 3500), ("c", 4000), ("d", 4500), ("e", 10)):
        make_tool(weather, name, description="Return " + "rain and snow " * (words // 3))
    group_actions.assign(group, list(weather.tools.all()), actor=SYSTEM)
    group_actions.edit(group, preload_default=True, actor=SYSTEM)
    return group


def test_over_budget_the_most_expensive_rarely_called_tools_are_suggested(signed_in, research):
    call_often(Tool.objects.get(name="d"), 5)
    call_often(Tool.objects.get(name="c"), 4)

    assert suggested(signed_in) == [("weather__c", 4), ("weather__b", 0), ("weather__a", 0)]
    page = signed_in.get("/groups/research").content.decode()
    assert "4 calls in 30 days" in page
    assert "no calls in 30 days" in page


def test_frequently_called_preloads_are_not_suggested(signed_in, research):
    for tool in Tool.objects.all():
        call_often(tool, 5)

    assert suggested(signed_in) == []
    page = signed_in.get("/groups/research").content.decode()
    assert "all preloaded tools are called often" in page


def test_within_the_budget_nothing_is_suggested(signed_in, research):
    group_actions.edit(research, preload_default=False, actor=SYSTEM)

    assert suggested(signed_in) == []
    assert "rarely called" not in signed_in.get("/groups/research").content.decode()


def test_the_tool_page_shows_the_last_calls_and_the_top_errors(weather, signed_in):
    tool, other = make_tool(weather, "a"), make_tool(weather, "b")
    call_often(other, 1)
    call_often(tool, 19, ms=1_234)
    timeout = {"state": "timed_out", "error_code": "timeout", "error_message": "No answer in 30 s"}
    call_often(tool, 2, **timeout)
    call_often(tool, 1, state="failed", error_code="upstream_error", error_message="Boom")

    calls = call_stats.recent_calls(tool=tool)
    assert (len(calls), calls[0].error_code) == (20, "upstream_error")
    errors = call_stats.top_errors(tool=tool)
    assert [(row.code, row.count, row.message) for row in errors] == [
        ("timeout", 2, "No answer in 30 s"),
        ("upstream_error", 1, "Boom"),
    ]
    page = signed_in.get(f"/tools/{tool.public_name}").content.decode()
    assert page.index("Top errors") < page.index("No answer in 30 s") < page.index("Last calls")
    assert '1,234 <span class="unit">ms</span>' in page
    assert "no comparison" in page


def test_server_and_tool_pages_show_the_change_to_the_period_before(weather, signed_in):
    tool = make_tool(weather, "a")
    call_often(tool, 3)
    call_often(tool, 2, at=timezone.now() - timedelta(hours=26))
    for address in ("/servers/weather", f"/tools/{tool.public_name}?range=24h"):
        page = signed_in.get(address).content.decode()
        assert "+50% vs before" in page, address
