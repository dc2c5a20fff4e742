"""Pages of script runs: the run, its calls on the session's page, and its role checks."""

import re
from datetime import timedelta
from html import unescape

import pytest

from catalog.models import AuditEntry
from sessions_app.review import queries as review_queries
from sessions_app.review import session_detail
from tests.support.factories import make_agent, make_call, make_event, make_run, make_session
from tests.support.people import make_person
from toolcrib.lib import figures
from toolcrib.lib.roles import Role

pytestmark = pytest.mark.django_db
CODE = "rows = await logs.search(query='<b>error</b>')\nprint(len(rows))\nraise ValueError('odd')\n"
ERROR = {
    "type": "ValueError",
    "message": "odd <i>value</i>",
    "line": 3,
    "traceback": 'File "script.py", line 3',
}


@pytest.fixture
def session():
    return make_session(make_agent("scout"))


@pytest.fixture
def run(session):
    """A script that made two calls and failed, between two calls of the agent itself."""
    start = session.created_at
    before = make_call(session, at=start, tool_name="logs__before")
    make_event(session, "called", call=before)
    run = make_run(
        session,
        at=start + timedelta(seconds=1),
        code=CODE,
        state="failed",
        error=ERROR,
        error_type="ValueError",
        logs="2\n",
        input={"hours": 1},
    )
    for number in (1, 2):
        call = make_call(
            session,
            at=start + timedelta(seconds=1, milliseconds=500 * number),
            tool_name=f"logs__search_{number}",
            run=run,
            path="script",
        )
        make_event(session, "implicit_load", tool_name=call.tool_name, at=call.accepted_at)
        make_event(session, "called", call=call, tokens=0)
    make_event(
        session,
        "script",
        at=start + timedelta(seconds=3),
        run_id=run.run_id,
        state="failed",
        error="ValueError",
        calls=2,
        spared=900,
    )
    after = make_call(session, at=start + timedelta(seconds=4), tool_name="logs__after")
    make_event(session, "called", call=after)
    return run


def address_of(run):
    return f"/sessions/{run.session.session_id}/scripts/{run.run_id}"


def sign_in(client, role):
    client.force_login(make_person("otto@example.org", role))
    return client


def text_of(response):
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", response.content.decode())).split())


# --- The page of a run --------------------------------------------------------------------------


def test_a_run_shows_code_with_the_failing_line_result_logs_and_calls(client, run):
    response = sign_in(client, Role.OPERATOR).get(address_of(run))
    source, text = response.content.decode(), text_of(response)
    assert '<mark class="line" id="line-3"><span class="token-keyword">raise</span>' in source
    assert source.count('class="line"') == 3
    assert "&lt;b&gt;error&lt;/b&gt;" in source
    assert "<b>error" not in source
    assert "ValueError in line 3" in text
    assert "odd <i>value</i>" in text
    assert '"hours": 1' in text
    assert "Printed text" in text
    assert re.search(r"1 logs__search_1 ok 420 ms 2 logs__search_2 ok 420 ms", text)
    assert f'title="{figures.SPARED}"' in source
    assert "Spared ≈900 tokens" in text
    assert "Given to the model ≈12 tokens" in text


def test_a_completed_run_shows_its_result(client, session):
    run = make_run(session, result={"n": [1, 2]})
    text = text_of(sign_in(client, Role.OPERATOR).get(address_of(run)))
    assert 'Result Copy { "n": [ 1, 2 ] }' in text


def test_a_held_run_names_the_call_that_waits(client, session):
    run = make_run(session, state="held", finished_at=None, tokens_given=0)
    call = make_call(session, tool_name="desk__open", run=run, state="held", finished_at=None)
    run.waiting_for = [call.call_id]
    run.save()
    text = text_of(sign_in(client, Role.OPERATOR).get(address_of(run)))
    assert "Waits for a decision about desk__open ." in text
    assert "View held calls" in text


def test_a_viewer_sees_neither_code_nor_payloads(client, run):
    response = sign_in(client, Role.VIEWER).get(address_of(run))
    source = response.content.decode()
    for secret in ("logs.search", "odd", "script.py", "Printed text", "hours", "/approvals/calls"):
        assert secret not in source, secret
    text = text_of(response)
    assert "Failed with ValueError" in text
    assert "logs__search_1" in text
    assert not AuditEntry.objects.filter(verb="session.read").exists()


def test_reading_a_run_is_recorded_once_an_hour(client, run):
    sign_in(client, Role.OPERATOR)
    for _ in range(2):
        client.get(address_of(run))
    (entry,) = AuditEntry.objects.filter(verb="session.read")
    assert entry.target_id == run.session.pk


def test_an_outsider_and_a_stranger_see_no_run(client, run, outsider):
    assert client.get(address_of(run)).status_code == 302
    client.force_login(outsider)
    assert client.get(address_of(run)).status_code == 403


def test_a_run_is_found_in_its_own_session_only(client, run):
    other = make_session(run.session.agent)
    sign_in(client, Role.OPERATOR)
    for path in (
        f"/sessions/{other.session_id}/scripts/{run.run_id}",
        f"/sessions/{run.session.session_id}/scripts/run_nowhere",
        f"/sessions/{run.session.session_id}/scripts/run%00",
    ):
        assert client.get(path).status_code == 404, path


# --- The session's page -------------------------------------------------------------------------


def test_the_steps_of_a_script_follow_a_heading_on_the_timeline(run):
    _, rows = review_queries.session_timeline(run.session)
    assert [
        "heading" if row.step is None else (row.step.event.kind, row.run is not None)
        for row in rows
    ] == [
        ("called", False),
        "heading",
        ("implicit_load", True),
        ("called", True),
        ("implicit_load", True),
        ("called", True),
        ("script", True),
        ("called", False),
    ]


def test_the_waterfall_has_the_script_with_its_calls_below(run):
    _, rows = review_queries.session_timeline(run.session)
    waterfall = session_detail.waterfall(run.session, rows, None)
    assert [(row.name, row.depth, row.tone) for row in waterfall.rows] == [
        ("logs__before", 0, "call"),
        (run.run_id[:12], 0, "bad"),
        ("logs__search_1", 2, "other"),
        ("logs__search_1", 2, "call"),
        ("logs__search_2", 2, "other"),
        ("logs__search_2", 2, "call"),
        ("logs__after", 0, "call"),
    ]
    assert waterfall.rows[1].duration == 2


def test_a_session_lists_its_scripts_also_those_that_are_held(client, run):
    held = make_run(run.session, state="held", finished_at=None, waiting_for=["call_1"])
    response = sign_in(client, Role.VIEWER).get(f"/sessions/{run.session.session_id}")
    text = text_of(response)
    assert re.search(rf"{run.run_id} Failed ValueError .* 2\.0 s 2 ≈12 ≈900", text)
    assert re.search(rf"{held.run_id} Held .* – 0 ≈12 ≈900", text)
    assert f'href="{address_of(run)}"' in response.content.decode()
    assert "logs.search" not in response.content.decode()


def test_a_call_is_opened_as_a_step_by_its_id(client, run):
    call = run.calls.order_by("pk").last()
    path = f"/sessions/{run.session.session_id}?call={call.call_id}"
    text = text_of(sign_in(client, Role.VIEWER).get(path))
    assert "Step 5 of 7" in text
    assert f"Called by script {run.run_id[:12]}…" in text
