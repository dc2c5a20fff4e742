"""Session pages and tool trials: access, content and query counts."""

import json
import re
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from catalog.audit import Actor
from catalog.models import AuditEntry
from catalog.tools import actions as tool_actions
from sessions_app.models import AgentSession, Call, Expansion, SavedView
from sessions_app.urls import session_pages
from tests.support.factories import (
    make_agent,
    make_call,
    make_event,
    make_server,
    make_session,
    make_tool,
    tool_object,
)

BACKEND = "django.contrib.auth.backends.ModelBackend"
SCHEMA = {
    "type": "object",
    "required": ["title"],
    "properties": {"title": {"type": "string", "minLength": 1, "description": "One line."}},
    "additionalProperties": False,
}
ADMINS_ONLY = {"tool-try", "script-try"}
# session-delete accepts POST only: tests/sessions_app/sessions/test_deletion.py
NAMES = [
    str(pattern.name)
    for pattern in session_pages
    # and the page of a run: test_script_runs.py
    if pattern.name not in ("session-delete", "sessions-views", "sessions-export", "script-run")
]


@pytest.fixture
def forecast(db):
    return make_tool(
        make_server(slug="weather"), "get_forecast", annotations={"readOnlyHint": True}
    )


@pytest.fixture
def ticket(db):
    shape = tool_object("open_ticket", inputSchema=SCHEMA)
    return tool_actions.save_custom_tool(shape, actor=Actor.command("tests"))


@pytest.fixture
def scout(db):
    return make_agent("scout")


@pytest.fixture
def signed_in(client, operator):
    client.force_login(operator, backend=BACKEND)
    return client


@pytest.fixture
def as_admin(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


@pytest.fixture
def recorded(scout, forecast):
    """A session with one step of nearly every kind."""
    session = make_session(
        scout,
        metadata='{"run": "<b>7</b>"}',
        tokens_all=10_000,
        tokens_catalog=400,
        tokens_search=120,
        tokens_load=310,
        tokens_call=25,
        calls=3,
        errors=2,
        catalog="Call search_tools first. <script>alert(1)</script>",
    )
    start = session.created_at
    name = forecast.public_name
    make_event(session, "opened", tokens=400, mode="deferred", groups=["mcp:weather"], tools=1)
    make_event(
        session, "searched", query="rain <i>", strategy="bm25", total=12, hits=[name], tokens=120
    )
    make_event(session, "loaded", names=[name], how="load", unknown=["nope"], tokens=310)
    make_event(session, "implicit_load", tool_name=name)
    good = make_call(
        session,
        forecast,
        at=start + timedelta(seconds=2),
        arguments={"city": "Oslo", "api_key": "***"},
        result_copy={"content": [{"type": "text", "text": "<b>Sunny</b>\u202e"}]},
        implicit_load=True,
        result_bytes=2_000,
        tokens=25,
        note="The answer came late.",
    )
    make_event(session, "called", call=good)
    bad = make_call(
        session,
        forecast,
        at=start + timedelta(seconds=3),
        state="failed",
        is_error=True,
        error_code="tool_error",
        error_message="weather__get_forecast answered with an error.",
        result_copy={"content": [{"type": "image", "mimeType": "image/png", "data": "QUJD"}]},
    )
    make_event(session, "called", call=bad)
    refused = make_call(
        session,
        at=start + timedelta(hours=2),
        tool_name="no/such tool",
        state="refused",
        is_error=True,
        sent_at=None,
        error_code="unknown_tool",
        error_message="There is no such tool here.",
        result_copy={"content": [{"type": "text", "text": "There is no such tool here."}]},
    )
    make_event(session, "refused", call=refused)
    session.last_used_at = start + timedelta(hours=2)
    session.save()
    return session


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def address_of(name, session, tool):
    if name in ("sessions", "sessions-new", "script-try"):
        return reverse(name)
    return reverse(name, args=[tool.public_name if name.startswith("tool") else session.session_id])


# --- Access -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_pages_require_sign_in(name, client, recorded, forecast):
    response = client.get(address_of(name, recorded, forecast))

    assert response.status_code == 302
    assert response["Location"].startswith("/sign-in")


@pytest.mark.parametrize("role", ["outsider", "operator", "admin"])
@pytest.mark.parametrize("name", NAMES)
def test_each_role_gets_its_pages_and_no_others(name, role, client, request, recorded, forecast):
    client.force_login(request.getfixturevalue(role), backend=BACKEND)

    response = client.get(address_of(name, recorded, forecast))

    allowed = role == "admin" or (role == "operator" and name not in ADMINS_ONLY)
    assert response.status_code == (200 if allowed else 403)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADMINS_ONLY])
def test_read_only_pages_reject_post(name, as_admin, recorded, forecast):
    assert as_admin.post(address_of(name, recorded, forecast)).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/sessions/ses_nowhere", "/sessions/ses_nowhere.json", "/tools/nowhere/try", "/tools/no/use"],
)
def test_unknown_sessions_and_tools_are_not_found(path, as_admin):
    assert as_admin.get(path).status_code == 404


# --- The list -----------------------------------------------------------------------------------


def test_without_sessions_the_page_explains_how_to_open_one(signed_in):
    page = text_of(signed_in.get("/sessions"))

    assert "No sessions yet" in page
    assert "create_agent scout --all-groups" in page
    assert "/api/v1/sessions" in page


def test_the_list_shows_agent_duration_and_cost(signed_in, recorded):
    Expansion.objects.create(session=recorded, group_id="mcp:weather", names=["a", "b"], sequence=1)

    page = text_of(signed_in.get("/sessions"))

    assert "1 session, 1 open, 1 with errors." in page
    assert re.search(r"scout .*Open 2 h 3 2 2 ≈830 of 10,000", page)


def test_the_list_is_filtered_by_its_url(signed_in, recorded):
    make_session(make_agent("drifter"), state="closed")

    def rows(query):
        page = signed_in.get(f"/sessions{query}")
        return page.content.decode().count('<th scope="row">'), text_of(page)

    assert rows("")[0] == 2
    assert rows("?agent=scout")[0] == 1
    assert rows("?state=closed")[0] == 1
    assert rows("?errors=has+errors")[0] == 1
    assert rows("?tool=weather__get_forecast")[0] == 1
    count, page = rows("?agent=nobody&tool=<b>x</b>")
    assert count == 0
    assert "No sessions match &lt;b&gt;x&lt;/b&gt; and the agent nobody . Clear filters" in page


def test_htmx_gets_only_the_rows(signed_in, recorded):
    fragment = signed_in.get("/sessions?agent=scout&tool=", headers={"HX-Request": "true"})

    assert "<html" not in fragment.content.decode()
    assert "≈830" in fragment.content.decode()
    assert fragment["HX-Push-Url"] == "/sessions?agent=scout"
    assert json.loads(fragment["HX-Trigger"]) == {"announce": "1 session"}


def test_pages_of_the_list_contain_every_session_once(signed_in, scout):
    for _ in range(120):
        make_session(scout)

    seen, query = [], "?agent=scout"
    while query:
        page = signed_in.get(f"/sessions{query}").content.decode()
        seen += re.findall(r'href="/sessions/(ses_\w+)" data-open', page)
        following = re.search(r'href="(\?[^"]+)" rel="next"', page)
        query = following[1].replace("&amp;", "&") if following else ""

    assert len(seen) == len(set(seen)) == 120


@pytest.mark.parametrize("path", ["/sessions", "/sessions?tool=weather__get_forecast&errors=1"])
def test_the_list_costs_the_same_for_few_sessions_and_for_many(
    path, signed_in, scout, forecast, django_assert_max_num_queries
):
    def cost(number):
        for _ in range(number):
            session = make_session(scout, errors=1)
            make_call(session, forecast)
            Expansion.objects.create(session=session, group_id="a", names=["x"], sequence=1)
        signed_in.get(path)
        with django_assert_max_num_queries(20) as captured:
            signed_in.get(path)
        return len(captured)

    assert cost(2) == cost(60)


# --- One session --------------------------------------------------------------------------------


def test_a_session_shows_its_timeline_as_sentences(signed_in, recorded):
    page = signed_in.get(f"/sessions/{recorded.session_id}")
    text = text_of(page)

    assert f"Session {recorded.session_id[:8]}, scout Open" in text
    assert "Saved 92% of the baseline (all schemas)." in text
    assert "deferred: tool count reaches the threshold" in text
    for sentence in (
        "opened in deferred mode with 1 tool from 1 group",
        "searched “rain &lt;i&gt;”: 1 of 12 results",
        "loaded weather__get_forecast (≈310); 1 unknown name",
        "called weather__get_forecast directly",
        "called weather__get_forecast · 420 ms · ok ≈855",
        "called weather__get_forecast · 420 ms · failed error",
        "call to no/such tool rejected: There is no such tool here. rejected",
        "Idle for 1 h 59 min",
    ):
        assert sentence in text, sentence
    assert "≈855 tokens in context" in text


def shown_step(client, session, number):
    page = client.get(
        f"/sessions/{session.session_id}?step={number}", headers={"HX-Target": "step"}
    )
    return text_of(page), page.content.decode()


def test_the_selected_step_shows_its_arguments_and_result(signed_in, recorded, forecast):
    text, source = shown_step(signed_in, recorded, 5)
    assert "<html" not in source
    assert "Step 5 of 7" in text
    assert "Arguments of step 5" in text
    assert "&quot;city&quot;: &quot;Oslo&quot;" in source
    assert "Server response, step 5, part 1: text" in text
    assert "&lt;b&gt;Sunny&lt;/b&gt;⟨U+202E⟩" in source
    assert "called directly" in text
    assert forecast.approved.sha256[:12] in text
    assert "The answer came late." in text

    text, source = shown_step(signed_in, recorded, 6)
    assert "Tool error tool_error" in text
    assert "Server response: image, image/png, 3 B" in text
    assert "QUJD" not in source

    text, _ = shown_step(signed_in, recorded, 7)
    assert "Rejected by Toolcrib unknown_tool" in text
    assert "Response to agent, step 7, part 1: text" in text
    text, _ = shown_step(signed_in, recorded, 2)
    assert "Strategy: bm25. 12 tools matched." in text


def test_reading_a_payload_is_recorded_once_an_hour_and_an_export_each_time(signed_in, recorded):
    def verbs():
        rows = AuditEntry.objects.filter(target_id=recorded.pk, verb__startswith="session.")
        return sorted(rows.values_list("verb", flat=True))

    calls = [
        number
        for number, event in enumerate(recorded.events.order_by("pk"), 1)
        if event.call_id is not None
    ]
    signed_in.get(f"/sessions/{recorded.session_id}?step=1")
    assert verbs() == []
    for _ in range(2):
        signed_in.get(f"/sessions/{recorded.session_id}?step={calls[0]}")
    assert verbs() == ["session.read"]
    for _ in range(2):
        signed_in.get(f"/sessions/{recorded.session_id}.json")
    assert verbs() == ["session.export", "session.export", "session.read"]


def test_the_url_selects_the_step_and_defaults_to_the_first_failed_one(signed_in, recorded):
    def selected(query):
        page = signed_in.get(f"/sessions/{recorded.session_id}{query}").content.decode()
        number = re.search(r'data-shown="(\d*)"', page)[1]
        assert re.search(rf'data-step="{number}" aria-current="true"', page)
        return number

    assert selected("?step=3") == "3"
    assert selected("") == "6"
    assert selected("?step=nonsense") == "6"
    assert selected("?step=99") == "6"


def test_the_next_error_is_found_also_on_a_later_page(signed_in, scout, forecast):
    session = make_session(scout)
    for _ in range(150):
        make_event(session, "catalog", format="text")
    failed = make_call(session, forecast, state="timed_out")
    make_event(session, "called", call=failed)

    _, source = shown_step(signed_in, session, 1)
    assert re.search(r'href="\?step=151#step"\s+data-hotkey="e"', source)
    _, source = shown_step(signed_in, session, 151)
    assert 'data-hotkey="e"' not in source


def test_the_meter_summarizes_the_context_and_has_a_table(signed_in, recorded, scout):
    scout.budget = 200
    scout.save()
    recorded.tokens_loaded = 310
    recorded.save()

    text = text_of(signed_in.get(f"/sessions/{recorded.session_id}"))

    assert "≈855 tokens in context at the end; step 1 added the most (≈400)." in text
    assert "Loaded definitions use ≈310, over the budget of ≈200." in text
    assert "3 loaded weather__get_forecast (≈310); 1 unknown name 310 830" in text


def test_previous_and_next_sessions_have_keyboard_shortcuts(signed_in, scout):
    first, second, third = (make_session(scout) for _ in range(3))

    page = signed_in.get(f"/sessions/{second.session_id}").content.decode()

    assert f'href="/sessions/{first.session_id}" data-hotkey="["' in page
    assert f'href="/sessions/{third.session_id}" data-hotkey="]"' in page
    assert 'data-hotkey="["' not in signed_in.get(f"/sessions/{first.session_id}").content.decode()


def test_new_sessions_are_offered_by_a_link_that_keeps_the_filters(signed_in, scout):
    newest = make_session(scout)
    page = signed_in.get("/sessions?agent=scout").content.decode()
    poll_url = re.search(r'data-poll="([^"]+)"', page)[1].replace("&amp;", "&")
    assert poll_url == f"/sessions/new?agent=scout&newest={newest.pk}"
    assert " new<" not in signed_in.get(poll_url).content.decode()

    for _ in range(3):
        make_session(scout)
    make_session(make_agent("drifter"))

    assert '<a href="/sessions?agent=scout">3 new</a>' in signed_in.get(poll_url).content.decode()


def test_before_the_first_session_the_page_waits_for_it(signed_in, scout):
    page = signed_in.get("/sessions").content.decode()
    assert "Waiting for the first session" in page
    poll_url = re.search(r'data-poll="([^"]+)"\s+data-poll-state="running"', page)[1]
    assert "Waiting" in signed_in.get(poll_url).content.decode()

    make_session(scout)
    assert ">1 new</a>" in signed_in.get(poll_url).content.decode()


def test_untrusted_text_is_escaped(signed_in, recorded):
    source = signed_in.get(f"/sessions/{recorded.session_id}").content.decode()

    assert "<script>alert" not in source
    assert "<b>" not in source
    assert "Call search_tools first. &lt;script&gt;" in source


def test_pruned_payloads_are_reported_as_no_longer_stored(signed_in, recorded):
    Call.objects.update(arguments="", result_copy="")

    text = text_of(signed_in.get(f"/sessions/{recorded.session_id}"))

    assert "Arguments and result are not stored" in text
    assert "Arguments and results are kept for 30 days, each truncated to 8 KB" in text


def test_a_range_ends_now_and_is_kept_in_links_exports_and_saved_views(signed_in, scout):
    now = timezone.now()
    recent = make_session(scout)
    old = make_session(scout)
    AgentSession.objects.filter(pk=old.pk).update(
        created_at=now - timedelta(days=3), last_used_at=now - timedelta(days=3)
    )

    def listed(query):
        page = signed_in.get(f"/sessions?{query}").content.decode()
        return [row for row in (recent, old) if f"/sessions/{row.session_id}" in page], page

    assert listed("range=24h")[0] == [recent]
    assert listed("range=7d")[0] == [recent, old]
    assert listed("range=nonsense")[0] == [recent, old]
    page = listed("range=24h&errors=")[1]
    assert 'name="range" value="24h"' in page  # other filters keep it
    assert re.search(r'href="\?range=7d[^"]*"[^>]*>7 days', page)
    filtered = signed_in.get("/sessions?q=&range=24h&agent=scout&tool=", HTTP_HX_REQUEST="true")
    assert re.search(r'href="\?range=7d&amp;agent=scout"', filtered.content.decode())
    exported = signed_in.get("/sessions/export.jsonl?range=24h")
    lines = b"".join(exported.streaming_content).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [recent.session_id]
    signed_in.post("/sessions/views", {"name": "Today", "address": "range=24h"})
    assert SavedView.objects.get().query == "range=24h"


def test_every_session_of_a_fork_tree_shows_the_whole_tree(signed_in, recorded, scout):
    child, other = make_session(scout, parent=recorded), make_session(scout, parent=recorded)
    grandchild = make_session(scout, parent=child)
    family = [recorded, child, other, grandchild]

    for here in family:
        page = signed_in.get(f"/sessions/{here.session_id}").content.decode()
        tree = page[page.index('class="tree') : page.index("Model context")]
        for one in family:
            assert (reverse("session", args=[one.session_id]) in tree) == (one != here)
        assert f"{here.session_id[:12]}…</span> this session" in tree
        assert tree.count("<ul") == 2  # below the first
    without_forks = signed_in.get(f"/sessions/{make_session(scout).session_id}").content.decode()
    assert 'class="tree' not in without_forks


def test_a_session_without_events_has_a_page(signed_in, scout):
    page = text_of(signed_in.get(f"/sessions/{make_session(scout, state='expired').session_id}"))

    assert "No events were recorded for this session." in page
    assert "Expired" in page


def test_a_long_session_has_pages_of_a_hundred_steps(signed_in, scout):
    session = make_session(scout)
    for _ in range(230):
        make_event(session, "catalog", format="text", tokens=1)

    def steps(query=""):
        page = signed_in.get(f"/sessions/{session.session_id}{query}").content.decode()
        return re.findall(r'id="step-(\d+)"', page), page

    assert steps()[0] == [str(at) for at in range(1, 101)]
    numbers, page = steps("?after=200")
    assert numbers == [str(at) for at in range(201, 231)]
    assert "201 to 230 of 230 steps" in page
    assert "≈230<span" in page


def test_a_session_costs_the_same_for_few_steps_and_for_many(
    signed_in, scout, forecast, django_assert_max_num_queries
):
    def cost(number):
        session = make_session(scout)
        for _ in range(number):
            make_event(session, "called", call=make_call(session, forecast))
            make_event(session, "searched", query="x", total=1, hits=[forecast.public_name])
        path = f"/sessions/{session.session_id}"
        signed_in.get(path)
        with django_assert_max_num_queries(24) as captured:
            signed_in.get(path)
        return len(captured)

    assert cost(2) == cost(45)


def test_the_export_is_a_json_file(signed_in, recorded):
    response = signed_in.get(f"/sessions/{recorded.session_id}.json")

    assert response["Content-Disposition"] == f'attachment; filename="{recorded.session_id}.json"'
    assert response.json()["events"][4]["sentence"] == "called weather__get_forecast · 420 ms · ok"


# --- Usage of a tool ----------------------------------------------------------------------------


def test_a_tools_page_loads_its_usage_and_offers_a_trial_to_admins(
    client, recorded, forecast, admin, operator
):
    client.force_login(operator, backend=BACKEND)
    assert "Try tool" not in text_of(client.get("/tools/weather__get_forecast"))
    client.force_login(admin, backend=BACKEND)
    page = client.get("/tools/weather__get_forecast").content.decode()

    assert 'hx-get="/tools/weather__get_forecast/use"' in page
    assert 'href="/tools/weather__get_forecast/try"' in page


def test_the_usage_of_a_tool_is_a_fragment(signed_in, recorded, ticket):
    used = signed_in.get("/tools/weather__get_forecast/use")

    assert "<html" not in used.content.decode()
    figures = re.search(
        r"Calls 2, 1 with errors Loads 1 Duration p50 (\d+) ms, p95 (\d+) ms", text_of(used)
    )
    assert [int(ms) for ms in figures.groups()] == pytest.approx([420, 420], rel=0.2)
    assert "?tool=weather__get_forecast" in used.content.decode()
    unused = text_of(signed_in.get("/tools/open_ticket/use"))
    assert "Not loaded or called by any agent in the last 30 days." in unused


# --- Trials -------------------------------------------------------------------------------------


def submit(client, tool, arguments, **fields):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return client.post(f"/tools/{tool}/try", {"arguments": text, **fields})


def test_the_form_starts_with_the_required_arguments_beside_the_schema(as_admin, ticket):
    page = as_admin.get("/tools/open_ticket/try")

    assert "{\n  &quot;title&quot;: &quot;&quot;\n}" in page.content.decode()
    assert "&quot;tool_name&quot;: &quot;open_ticket&quot;" in page.content.decode()  # as curl
    sent = submit(as_admin, "open_ticket", {"title": "It's broken"}).content.decode()
    assert "&quot;title&quot;: &quot;It&#x27;&quot;&#x27;&quot;&#x27;s broken&quot;" in sent
    assert "View as curl" not in text_of(submit(as_admin, "open_ticket", "{"))
    assert "Input schema title string required One line." in text_of(page)


def test_names_from_a_server_are_escaped_on_the_trial_page(as_admin, db):
    odd = "\u202e</textarea><script>alert(1)</script>"
    schema = {"type": "object", "required": [odd], "properties": {odd: {"description": odd}}}
    tool = make_tool(make_server(slug="evil", name=odd), "odd", inputSchema=schema)

    source = as_admin.get(f"/tools/{tool.public_name}/try").content.decode()

    assert "<script>alert" not in source
    assert "\u202e" not in source
    assert "\\u202e&lt;/textarea&gt;" in source


def test_a_custom_tool_is_validated_and_left_to_the_agent(as_admin, admin, ticket):
    page = submit(as_admin, "open_ticket", {"title": "Broken <b>lamp</b>"})

    assert page.status_code == 200
    assert "Arguments are valid. Agents run this tool themselves." in text_of(page)
    assert "&lt;b&gt;lamp&lt;/b&gt;" in page.content.decode()
    call = Call.objects.get()
    assert (call.path, call.state, call.actor) == ("try", "client", admin.username)
    assert call.call_id in page.content.decode()


def test_invalid_arguments_are_rejected_with_the_reason(as_admin, ticket):
    page = text_of(submit(as_admin, "open_ticket", {"title": ""}))

    assert "Result rejected" in page
    assert "do not match its schema" in page
    assert "invalid_arguments" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Line 1, column 2"),
        ("[1]", "Arguments must be a JSON object"),
        ('{"a": NaN}', "not a valid JSON number"),
        ('{"a": "\\ud800"}', "a lone surrogate"),
        ('{"a": "\\u0000"}', "NUL"),
        ("[" * 100_000, "nested too deep"),
        ("", "This field is required."),
    ],
)
def test_text_that_is_not_a_json_object_is_not_sent(text, message, as_admin, ticket):
    page = submit(as_admin, "open_ticket", text)

    assert page.status_code == 422
    assert message in text_of(page)
    assert not Call.objects.exists()


def test_a_tool_that_may_change_data_is_called_after_confirmation_only(as_admin, db):
    make_tool(make_server(slug="files"), "purge", annotations={"destructiveHint": True})

    first = submit(as_admin, "files__purge", {"path": "notes/a"})
    assert "The server reports that this tool may delete or overwrite data." in text_of(first)
    assert "Confirm to call the tool with exactly these arguments" in text_of(first)
    assert not Call.objects.exists()

    seen = re.search(r'name="seen" value="(\w+)"', first.content.decode())[1]
    other = submit(as_admin, "files__purge", {"path": "notes/b"}, seen=seen)
    assert "Confirm to call" in text_of(other)
    assert not Call.objects.exists()

    last = submit(as_admin, "files__purge", {"path": "notes/a"}, seen=seen)
    assert "Confirm to call" not in text_of(last)
    assert Call.objects.get().tool_name == "files__purge"


def test_a_call_that_cannot_be_sent_shows_the_error_and_keeps_the_arguments(as_admin, forecast):
    page = submit(as_admin, "weather__get_forecast", {"city": "Oslo"})

    assert page.status_code == 503
    assert "Try again." in text_of(page)
    assert "&quot;Oslo&quot;" in page.content.decode()


def test_a_trial_requires_a_csrf_token(admin, ticket):
    client = Client(enforce_csrf_checks=True)
    client.force_login(admin, backend=BACKEND)

    assert submit(client, "open_ticket", {"title": "x"}).status_code == 403
    assert not Call.objects.exists()


def test_a_session_links_to_its_traces_where_an_operator_set_an_address(
    signed_in, recorded, settings
):
    address = reverse("session", args=[recorded.session_id])
    assert "Open traces" not in signed_in.get(address).content.decode()
    settings.TRACE_URL = "https://traces.example.org/?q={session_id}"
    page = signed_in.get(address).content.decode()
    assert f'href="https://traces.example.org/?q={recorded.session_id}"' in page


# --- Search, views and exports of the list ------------------------------------------------------


@pytest.fixture
def two_sessions(scout, forecast):
    first = make_session(scout, metadata='{"task": "weekly report"}', calls=3, tokens_catalog=10)
    second = make_session(scout, calls=1, tokens_catalog=900, errors=1)
    make_event(second, "searched", query="umbrella")
    make_call(
        second,
        forecast,
        state="failed",
        is_error=True,
        error_code="tool_error",
        error_message="No such town.",
        arguments='{"town": "atlantis"}',
    )
    return first, second


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("weekly", [0]),
        ("umbrella", [1]),
        ("no such TOWN", [1]),
        ("tool_error", [1]),
        ("get_forecast", [1]),
        ("atlantis", []),
    ],
)
def test_sessions_are_found_by_text_but_not_by_payloads(signed_in, two_sessions, query, found):
    page = signed_in.get("/sessions", {"q": query}).content.decode()
    shown = [index for index, row in enumerate(two_sessions) if row.session_id[:12] in page]
    assert shown == found


def test_the_list_says_what_sessions_are_about_and_is_sorted(signed_in, two_sessions):
    first, second = (row.session_id[:12] for row in two_sessions)
    page = signed_in.get("/sessions?sort=-calls").content.decode()
    assert page.index(first) < page.index(second)
    assert "task: weekly report" in page
    assert "tool_error: No such town." in page
    page = signed_in.get("/sessions?sort=-tokens").content.decode()
    assert page.index(second) < page.index(first)


def test_filters_are_saved_as_views_of_one_person(signed_in, two_sessions, admin):
    signed_in.post("/sessions/views", {"name": "Rain", "address": "q=umbrella&after=5"})
    assert 'href="/sessions?q=umbrella"' in signed_in.get("/sessions").content.decode()
    other = Client()
    other.force_login(admin, backend=BACKEND)
    assert "Rain" not in other.get("/sessions").content.decode()
    signed_in.post("/sessions/views", {"remove_view": "Rain"})
    assert "Rain" not in signed_in.get("/sessions").content.decode()
    assert (
        "nothing to save"
        in signed_in.post(
            "/sessions/views", {"name": "All", "address": ""}, follow=True
        ).content.decode()
    )


def test_filtered_sessions_are_exported_as_json_lines(signed_in, two_sessions):
    response = signed_in.get("/sessions/export.jsonl?q=umbrella")
    lines = [json.loads(line) for line in b"".join(response.streaming_content).splitlines()]
    assert [line["id"] for line in lines] == [two_sessions[1].session_id]
    assert lines[0]["events"][0]["kind"] == "searched"
    assert AuditEntry.objects.get(verb="sessions.export").after["sessions"] == 1
