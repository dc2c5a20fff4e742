"""Session queries: the list, the pages of a timeline, the export; usage of tools."""

import json
from datetime import timedelta

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.http import QueryDict
from django.test import Client
from django.utils import timezone

from sessions_app.models import Expansion
from sessions_app.review import queries as review_queries
from sessions_app.review.queries import SessionFilter
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.searches import failed_searches
from sessions_app.usage.tool_usage import ToolUsage, tool_usage
from tests.support.factories import (
    make_agent,
    make_call,
    make_event,
    make_server,
    make_session,
    make_tool,
)

pytestmark = pytest.mark.django_db
AGO = timedelta(days=30)


@pytest.fixture
def forecast(db):
    return make_tool(make_server(slug="weather"), "get_forecast", description="Say the weather.")


@pytest.fixture
def purge(db):
    return make_tool(make_server(slug="files"), "purge")


@pytest.fixture
def scout(db):
    return make_agent("scout")


def list_sessions(address):
    page = review_queries.list_sessions(SessionFilter.read(QueryDict(address)))
    return [row.session for row in page.rows]


# --- The list -----------------------------------------------------------------------------------


def test_sessions_are_filtered_by_agent_state_errors_and_tool(scout, forecast, purge):
    healthy = make_session(scout)
    failing = make_session(scout, state="closed", errors=2)
    other = make_session(state="expired")
    make_call(healthy, forecast)
    make_call(failing, forecast)
    make_call(failing, purge)

    assert list_sessions("") == [other, failing, healthy]
    assert list_sessions("agent=scout") == [failing, healthy]
    assert list_sessions("state=open") == [healthy]
    assert list_sessions("state=closed&state=expired") == [other, failing]
    assert list_sessions("errors=1") == [failing]
    assert list_sessions("tool=weather__get_forecast") == [failing, healthy]
    assert list_sessions("tool=files__purge&agent=scout&state=open") == []
    assert list_sessions("agent=nobody") == []
    assert list_sessions("state=nonsense") == [other, failing, healthy]
    assert list_sessions("agent=%00scout&after=abc&before=99999999999999999999") == [
        failing,
        healthy,
    ]


def test_pages_of_the_list_contain_every_session_once_and_link_back(scout):
    sessions = [make_session(scout) for _ in range(7)][::-1]

    def fetch(**cursor):
        page = review_queries.list_sessions(SessionFilter(**cursor), size=3)
        return [row.session for row in page.rows], page

    first, page = fetch()
    make_session(scout)  # a new session does not shift the pages
    second, page = fetch(after=int(page.next_cursor))
    third, last = fetch(after=int(page.next_cursor))

    assert [first, second, third] == [sessions[:3], sessions[3:6], sessions[6:]]
    assert (last.next_cursor, bool(last.previous_cursor)) == ("", True)
    back, _ = fetch(before=int(page.previous_cursor))
    assert back == first


def test_a_session_row_has_its_loads_and_its_savings(scout):
    session = make_session(
        scout,
        tokens_all=10_000,
        tokens_catalog=400,
        tokens_search=300,
        tokens_load=300,
        tokens_call=90_000,
    )
    Expansion.objects.create(session=session, group_id="a", names=["x", "y"], sequence=1)
    Expansion.objects.create(
        session=session, group_id="b", names=None, listed=["p", "q", "r"], sequence=2
    )

    row = review_queries.list_sessions(SessionFilter()).rows[0]

    assert row.loaded == 5
    assert row.session.token_figures.given == 1_000
    assert session.token_figures.saved_percent == 90
    assert [part.kind for part in row.bar.segments] == ["preload", "rest"]
    assert make_session(tokens_all=0).token_figures.saved_percent is None
    costly = make_session(tokens_all=100, tokens_load=150).token_figures
    assert costly.saved_percent == -50
    assert "≈50 tokens more than all definitions (≈100)" in costly.explanation


# --- The timeline -------------------------------------------------------------------------------


def test_a_timeline_has_calls_idle_gaps_and_tokens(scout, forecast):
    start = timezone.now() - timedelta(hours=1)
    session = make_session(scout, started=start, last_used_at=start + timedelta(minutes=41))
    make_event(session, "opened", at=start, tokens=400, mode="deferred", tools=1, groups=["a"])
    call = make_call(session, forecast, at=start + timedelta(seconds=1), ms=900_000, tokens=25)
    make_event(session, "called", call=call)
    make_event(session, "closed", at=start + timedelta(minutes=40))

    page, rows = review_queries.session_timeline(session)

    assert page.total == 3
    assert [row.step.sentence if row.step else "gap" for row in rows] == [
        "opened in deferred mode with 1 tool from 1 group",
        "called weather__get_forecast · 900.0 s · ok",
        "gap",
        "closed",
    ]
    assert [row.step.context for row in rows if row.step] == [400, 425, 425]
    assert rows[2].gap.since == call.finished_at
    assert [round(row.offset) for row in rows if row.step] == [0, 1, 2400]


def test_a_later_page_of_a_timeline_continues_numbers_tokens_and_the_gap_before_it(scout):
    session = make_session(scout)
    start = session.created_at
    for at in range(5):
        late = 3600 if at >= 3 else 0
        make_event(session, "catalog", at=start + timedelta(seconds=at + late), tokens=10)
    session.last_used_at = start + timedelta(seconds=3604)

    page, rows = review_queries.session_timeline(session, offset=3, size=3)

    assert page.describe("step") == "4 to 5 of 5 steps"
    assert rows[0].gap.seconds == 3601
    assert [(row.step.number, row.step.context) for row in rows[1:]] == [(4, 40), (5, 50)]
    assert review_queries.session_timeline(session, offset=900, size=3)[0].first == 3
    assert review_queries.session_timeline(make_session(), offset=100)[1] == []


@pytest.mark.parametrize("offset", [0, 100])
def test_a_timeline_costs_the_same_for_few_steps_and_for_many(
    offset, scout, forecast, django_assert_max_num_queries
):
    def cost(session, steps):
        for _ in range(steps):
            make_event(session, "called", call=make_call(session, forecast))
        with django_assert_max_num_queries(3):
            _, rows = review_queries.session_timeline(session, offset=offset)
            assert all(row.call.definition.sha256 for row in rows if row.step)

    cost(make_session(scout), 2)
    cost(make_session(scout), 230)


def test_an_export_contains_everything_stored(scout, forecast, django_assert_max_num_queries):
    session = make_session(scout, metadata='{"run": 7}', tokens_call=25, catalog="Exact text.")
    child = make_session(scout, parent=session)
    Expansion.objects.create(session=session, group_id="all", names=None, sequence=1)
    Expansion.objects.create(session=session, group_id="some", names=[], sequence=2)
    make_event(session, "opened", tokens=4, mode="deferred")
    for _ in range(20):
        call = make_call(
            session,
            forecast,
            tokens=25,
            arguments={"city": "Oslo"},
            result_copy='{"content":[{"ty',
            error_code="late",
            note="It came later.",
        )
        make_event(session, "called", call=call)
    make_event(session, "refused", call=make_call(session, state="refused", sent_at=None))

    with django_assert_max_num_queries(8):
        text = json.dumps(review_queries.export_session(session), cls=DjangoJSONEncoder)
    export = json.loads(text)

    assert export["id"] == session.session_id
    assert export["metadata"] == {"run": 7}
    assert export["catalog"]["text"] == "Exact text."
    assert export["expanded_groups"] == {"all": None, "some": []}
    assert export["forks"] == [child.session_id]
    assert export["tokens"]["by"]["call"] == 25
    step = export["events"][1]
    assert (step["step"], step["kind"], step["tokens_in_context"]) == (2, "called", 29)
    assert step["call"]["arguments"] == {"city": "Oslo"}
    assert step["call"]["result"] == '{"content":[{"ty'
    assert step["call"]["definition_sha256"] == forecast.approved.sha256
    assert step["call"]["error"]["code"] == "late"
    assert export["events"][-1]["call"]["definition_sha256"] is None


def test_malformed_rows_are_still_exported(scout):
    session = make_session(scout, metadata="not json")
    make_event(session, "searched", details="[1, 2")
    make_event(session, "loaded", details='"text"')

    export = review_queries.export_session(session)

    assert export["metadata"] == "not json"
    assert [event["sentence"] for event in export["events"]] == [
        "searched “”: no results",
        "loaded no tools",
    ]


# --- Usage --------------------------------------------------------------------------------------


def since():
    return timezone.now() - AGO


def test_tool_usage_counts_calls_errors_durations_tokens_and_loads(scout, forecast, purge):
    session = make_session(scout)
    for ms in range(1, 101):
        make_call(session, forecast, ms=ms, tokens=2)
    make_call(session, forecast, state="failed", is_error=True, ms=100)
    last = make_call(session, forecast, state="refused", sent_at=None, ms=9_000)
    make_event(session, "loaded", names=[forecast.public_name, purge.public_name])
    make_event(session, "loaded", names=[forecast.public_name])

    rows = {row.tool_name: row for row in tool_usage(UsageFilter(start=since()))}

    usage = rows["weather__get_forecast"]
    assert (usage.calls, usage.errors, usage.tokens, usage.loads) == (102, 2, 200, 2)
    assert (usage.p50_ms, usage.p95_ms) == pytest.approx((51, 96), rel=0.2)
    assert usage.last_called == last.accepted_at
    assert rows["files__purge"] == ToolUsage("files__purge", loads=1)
    assert tool_usage(UsageFilter(start=since()), "files__purge") == [rows["files__purge"]]
    assert tool_usage(UsageFilter(start=since()), "files__pur") == []


def test_tool_usage_excludes_trials_old_calls_other_agents_and_unknown_tools(scout, forecast):
    session = make_session(scout)
    make_call(None, forecast, path="try", actor="ada")
    make_call(session, forecast, at=timezone.now() - timedelta(days=31))
    make_call(session, None, tool_name="made_up", state="refused")
    make_call(make_session(make_agent("drifter")), forecast)

    assert tool_usage(UsageFilter(start=since(), agent="scout")) == []
    assert [row.calls for row in tool_usage(UsageFilter(start=since()))] == [1]


def test_searches_without_results_are_counted_most_frequent_first(scout):
    session = make_session(scout)
    for _ in range(2):
        make_event(session, "searched", query="send fax", strategy="bm25", total=0, hits=[])
    make_event(session, "searched", pattern="^x", strategy="regex", total=0, hits=[])
    make_event(session, "searched", query="weather", strategy="bm25", total=3, hits=["a"])
    make_event(session, "searched", details="{}")
    old = timezone.now() - timedelta(days=40)
    make_event(session, "searched", at=old, query="old", total=0)

    rows = failed_searches(UsageFilter(start=since())).without_results

    assert [(row.asked, row.strategy, row.times) for row in rows] == [
        ("“send fax”", "bm25", 2),
        ("by pattern “^x”", "regex", 1),
    ]
    assert failed_searches(UsageFilter(start=since(), agent="nobody")).without_results == []


# --- The API ------------------------------------------------------------------------------------


def get_usage(path, token):
    headers = {"Authorization": f"Bearer {token}"}
    response = Client().get(f"/api/v1/usage{path}", headers=headers)
    return response.status_code, json.loads(response.content)


def test_operators_read_tool_usage_page_by_page(scout, forecast, purge, operator_token):
    session = make_session(scout)
    make_call(session, forecast)
    make_call(session, purge)

    status, first = get_usage("/tools?limit=1", operator_token)
    _, second = get_usage(f"/tools?limit=1&cursor={first['next_cursor']}", operator_token)

    assert status == 200
    assert [first["items"][0]["tool_name"], second["items"][0]["tool_name"]] == [
        "files__purge",
        "weather__get_forecast",
    ]
    assert second["next_cursor"] is None
    assert set(second["items"][0]) == {
        "tool_name", "calls", "errors", "p50_ms", "p95_ms", "tokens", "loads", "last_called"
    }  # fmt: skip


def test_operators_read_searches_without_results_page_by_page(scout, operator_token):
    session = make_session(scout)
    for query in ("a", "b"):
        make_event(session, "searched", query=query, total=0)

    _, first = get_usage("/searches?limit=1", operator_token)
    _, second = get_usage(f"/searches?limit=1&cursor={first['next_cursor']}", operator_token)

    assert [first["items"][0]["asked"], second["items"][0]["asked"]] == ["“a”", "“b”"]
    assert second["next_cursor"] is None


@pytest.mark.parametrize(
    "path",
    [
        "/tools?days=0",
        "/tools?days=367",
        "/tools?limit=0",
        "/searches?days=x",
        "/searches?cursor=x",
    ],
)
def test_a_parameter_out_of_range_gets_an_error_message(path, operator_token):
    status, body = get_usage(path, operator_token)

    assert status == 422
    assert body["error"]["message"].endswith(".")
