"""The pages of sessions and the trial of a tool: who may, what they show, what they cost."""

import json
import re
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse

from catalog.audit import Actor
from catalog.tools import actions as tool_actions
from sessions_app.models import Call, Expansion
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
ADMINS_ONLY = {"tool-try"}
NAMES = [str(pattern.name) for pattern in session_pages]


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
def told(scout, forecast):
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
    if name in ("sessions", "sessions-new"):
        return reverse(name)
    return reverse(name, args=[tool.public_name if name.startswith("tool") else session.session_id])


# --- Who may ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_nobody_gets_in_without_signing_in(name, client, told, forecast):
    response = client.get(address_of(name, told, forecast))

    assert response.status_code == 302
    assert response["Location"].startswith("/sign-in")


@pytest.mark.parametrize("who", ["outsider", "operator", "admin"])
@pytest.mark.parametrize("name", NAMES)
def test_each_role_gets_what_it_needs_and_no_more(name, who, client, request, told, forecast):
    client.force_login(request.getfixturevalue(who), backend=BACKEND)

    response = client.get(address_of(name, told, forecast))

    may = who == "admin" or (who == "operator" and name not in ADMINS_ONLY)
    assert response.status_code == (200 if may else 403)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADMINS_ONLY])
def test_reading_pages_take_no_post(name, as_admin, told, forecast):
    assert as_admin.post(address_of(name, told, forecast)).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/sessions/ses_nowhere", "/sessions/ses_nowhere.json", "/tools/nowhere/try", "/tools/no/use"],
)
def test_what_is_not_there_is_not_found(path, as_admin):
    assert as_admin.get(path).status_code == 404


# --- The list -----------------------------------------------------------------------------------


def test_without_sessions_the_page_says_how_to_get_one(signed_in):
    page = text_of(signed_in.get("/sessions"))

    assert "No session yet" in page
    assert "create_agent scout --all-groups" in page
    assert "/api/v1/sessions" in page


def test_the_list_says_who_ran_how_long_and_what_it_cost(signed_in, told):
    Expansion.objects.create(session=told, group_id="mcp:weather", names=["a", "b"], sequence=1)

    page = text_of(signed_in.get("/sessions"))

    assert "1 session, 1 open, 1 with errors." in page
    assert re.search(r"scout Open 2 h 3 2 2 ≈830 of 10,000", page)


def test_the_list_is_narrowed_by_its_address_and_says_so(signed_in, told):
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


def test_htmx_gets_the_rows_alone(signed_in, told):
    part = signed_in.get("/sessions?agent=scout&tool=", headers={"HX-Request": "true"})

    assert "<html" not in part.content.decode()
    assert "≈830" in part.content.decode()
    assert part["HX-Push-Url"] == "/sessions?agent=scout"
    assert json.loads(part["HX-Trigger"]) == {"announce": "1 session"}


def test_pages_of_the_list_hold_every_session_once(signed_in, scout):
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


def test_a_session_tells_its_story_in_sentences(signed_in, told):
    page = signed_in.get(f"/sessions/{told.session_id}")
    text = text_of(page)

    assert "Session of scout Open" in text
    assert "Saved 92 % of what all schemas would have cost." in text
    assert "deferred, because of how many tools are in scope" in text
    for said in (
        "opened in deferred mode with 1 tool of 1 group",
        "searched “rain &lt;i&gt;”: 1 of 12 found",
        "loaded weather__get_forecast (≈310); 1 name unknown",
        "used weather__get_forecast without loading it first",
        "called weather__get_forecast · 420 ms · ok ≈855",
        "called weather__get_forecast · 420 ms · failed error",
        "refused no/such tool : There is no such tool here. refused",
        "Idle for 1 h 59 min",
    ):
        assert said in text, said
    assert "≈855 tokens in context" in text


def shown_step(client, session, number):
    page = client.get(
        f"/sessions/{session.session_id}?step={number}", headers={"HX-Target": "step"}
    )
    return text_of(page), page.content.decode()


def test_the_chosen_step_shows_what_was_sent_and_what_came_back(signed_in, told, forecast):
    text, source = shown_step(signed_in, told, 5)
    assert "<html" not in source
    assert "Step 5 of 7" in text
    assert "Arguments of step 5" in text
    assert "&quot;city&quot;: &quot;Oslo&quot;" in source
    assert "From the server, step 5, part 1: text" in text
    assert "&lt;b&gt;Sunny&lt;/b&gt;⟨U+202E⟩" in source
    assert "without loading it first" in text
    assert forecast.approved.sha256[:12] in text
    assert "The answer came late." in text

    text, source = shown_step(signed_in, told, 6)
    assert "It failed tool_error" in text
    assert "From the server: image, image/png, 3 B" in text
    assert "QUJD" not in source

    text, _ = shown_step(signed_in, told, 7)
    assert "Toolcrib refused it unknown_tool" in text
    assert "Told to the agent, step 7, part 1: text" in text
    text, _ = shown_step(signed_in, told, 2)
    assert "Ranked by bm25. 12 in scope matched." in text


def test_the_address_chooses_the_step_and_else_the_first_that_went_wrong(signed_in, told):
    def chosen(query):
        page = signed_in.get(f"/sessions/{told.session_id}{query}").content.decode()
        number = re.search(r'data-shown="(\d*)"', page)[1]
        assert re.search(rf'data-step="{number}" aria-current="true"', page)
        return number

    assert chosen("?step=3") == "3"
    assert chosen("") == "6"
    assert chosen("?step=nonsense") == "6"
    assert chosen("?step=99") == "6"


def test_the_next_error_is_found_also_on_a_later_page(signed_in, scout, forecast):
    session = make_session(scout)
    for _ in range(150):
        make_event(session, "catalog", format="text")
    wrong = make_call(session, forecast, state="timed_out")
    make_event(session, "called", call=wrong)

    _, source = shown_step(signed_in, session, 1)
    assert 'href="?step=151#step" data-hotkey="e"' in source
    _, source = shown_step(signed_in, session, 151)
    assert 'data-hotkey="e"' not in source


def test_the_meter_says_what_the_context_grew_to_and_has_a_table(signed_in, told, scout):
    scout.budget = 200
    scout.save()
    told.tokens_loaded = 310
    told.save()

    text = text_of(signed_in.get(f"/sessions/{told.session_id}"))

    assert "≈855 tokens in context at the end; step 1 added the most, ≈400." in text
    assert "Loaded definitions take ≈310, over the budget of ≈200." in text
    assert "3 loaded weather__get_forecast (≈310); 1 name unknown 310 830" in text


def test_earlier_and_later_sessions_are_one_key_away(signed_in, scout):
    first, second, third = (make_session(scout) for _ in range(3))

    page = signed_in.get(f"/sessions/{second.session_id}").content.decode()

    assert f'href="/sessions/{first.session_id}" data-hotkey="["' in page
    assert f'href="/sessions/{third.session_id}" data-hotkey="]"' in page
    assert 'data-hotkey="["' not in signed_in.get(f"/sessions/{first.session_id}").content.decode()


def test_new_sessions_wait_behind_a_link_that_keeps_the_filters(signed_in, scout):
    shown = make_session(scout)
    page = signed_in.get("/sessions?agent=scout").content.decode()
    asks = re.search(r'data-poll="([^"]+)"', page)[1].replace("&amp;", "&")
    assert asks == f"/sessions/new?agent=scout&since={shown.pk}"
    assert " new<" not in signed_in.get(asks).content.decode()

    for _ in range(3):
        make_session(scout)
    make_session(make_agent("drifter"))

    assert '<a href="/sessions?agent=scout">3 new</a>' in signed_in.get(asks).content.decode()


def test_before_the_first_session_the_page_waits_for_it(signed_in, scout):
    page = signed_in.get("/sessions").content.decode()
    assert "Waiting for the first session" in page
    asks = re.search(r'data-poll="([^"]+)" data-poll-state="running"', page)[1]
    assert "Waiting" in signed_in.get(asks).content.decode()

    make_session(scout)
    assert ">1 new</a>" in signed_in.get(asks).content.decode()


def test_nothing_that_strangers_wrote_becomes_markup(signed_in, told):
    source = signed_in.get(f"/sessions/{told.session_id}").content.decode()

    assert "<script>alert" not in source
    assert "<b>" not in source
    assert "Call search_tools first. &lt;script&gt;" in source


def test_payloads_that_were_forgotten_are_said_to_be(signed_in, told):
    Call.objects.update(arguments="", result_copy="")

    text = text_of(signed_in.get(f"/sessions/{told.session_id}"))

    assert "Its arguments and result are no longer kept." in text
    assert "Arguments and results are kept for 30 days, each cut at 8 KB" in text


def test_forks_are_a_tree_seen_from_every_branch(signed_in, told, scout):
    child, other = make_session(scout, parent=told), make_session(scout, parent=told)
    grandchild = make_session(scout, parent=child)
    family = [told, child, other, grandchild]

    for here in family:
        page = signed_in.get(f"/sessions/{here.session_id}").content.decode()
        tree = page[page.index('class="tree') : page.index("What the model was given")]
        for one in family:
            assert (reverse("session", args=[one.session_id]) in tree) == (one != here)
        assert f"{here.session_id[:12]}…</span> this session" in tree
        assert tree.count("<ul") == 2  # below the first
    lonely = signed_in.get(f"/sessions/{make_session(scout).session_id}").content.decode()
    assert 'class="tree' not in lonely


def test_a_session_without_events_or_tokens_is_still_a_page(signed_in, scout):
    page = text_of(signed_in.get(f"/sessions/{make_session(scout, state='expired').session_id}"))

    assert "Nothing is recorded of this session." in page
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
        with django_assert_max_num_queries(20) as captured:
            signed_in.get(path)
        return len(captured)

    assert cost(2) == cost(45)


def test_the_export_is_a_file_of_json(signed_in, told):
    answer = signed_in.get(f"/sessions/{told.session_id}.json")

    assert answer["Content-Disposition"] == f'attachment; filename="{told.session_id}.json"'
    assert answer.json()["events"][4]["sentence"] == "called weather__get_forecast · 420 ms · ok"


# --- Use of a tool ------------------------------------------------------------------------------


def test_a_tools_page_asks_for_its_use_and_offers_a_trial_to_admins(
    client, told, forecast, admin, operator
):
    client.force_login(operator, backend=BACKEND)
    assert "Try it" not in text_of(client.get("/tools/weather__get_forecast"))
    client.force_login(admin, backend=BACKEND)
    page = client.get("/tools/weather__get_forecast").content.decode()

    assert 'hx-get="/tools/weather__get_forecast/use"' in page
    assert 'href="/tools/weather__get_forecast/try"' in page


def test_the_use_of_a_tool_is_a_fragment_with_figures(signed_in, told, ticket):
    used = signed_in.get("/tools/weather__get_forecast/use")

    assert "<html" not in used.content.decode()
    assert "Calls 2, 1 with errors Loads 1 Duration half within 420 ms" in text_of(used)
    assert "?tool=weather__get_forecast" in used.content.decode()
    unused = text_of(signed_in.get("/tools/open_ticket/use"))
    assert "No agent loaded or called it in the last 30 days." in unused


# --- Try it -------------------------------------------------------------------------------------


def press(client, tool, arguments, **fields):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return client.post(f"/tools/{tool}/try", {"arguments": text, **fields})


def test_the_form_starts_with_the_required_arguments_beside_what_the_tool_takes(as_admin, ticket):
    page = as_admin.get("/tools/open_ticket/try")

    assert "{\n  &quot;title&quot;: &quot;&quot;\n}" in page.content.decode()
    assert "What it takes title string required One line." in text_of(page)


def test_what_a_server_names_is_text_on_the_page_of_a_trial(as_admin, db):
    odd = "\u202e</textarea><script>alert(1)</script>"
    schema = {"type": "object", "required": [odd], "properties": {odd: {"description": odd}}}
    tool = make_tool(make_server(slug="evil", name=odd), "odd", inputSchema=schema)

    source = as_admin.get(f"/tools/{tool.public_name}/try").content.decode()

    assert "<script>alert" not in source
    assert "\u202e" not in source
    assert "\\u202e&lt;/textarea&gt;" in source


def test_a_custom_tool_is_checked_and_left_to_the_agent(as_admin, admin, ticket):
    page = press(as_admin, "open_ticket", {"title": "Broken <b>lamp</b>"})

    assert page.status_code == 200
    assert "An agent would now run the tool itself." in text_of(page)
    assert "&lt;b&gt;lamp&lt;/b&gt;" in page.content.decode()
    call = Call.objects.get()
    assert (call.path, call.state, call.actor) == ("try", "client", admin.username)
    assert call.call_id in page.content.decode()


def test_bad_arguments_come_back_with_the_reason(as_admin, ticket):
    page = text_of(press(as_admin, "open_ticket", {"title": ""}))

    assert "Answer refused" in page
    assert "do not match its schema" in page
    assert "invalid_arguments" in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Line 1, column 2"),
        ("[1]", "Arguments are a JSON object."),
        ('{"a": NaN}', "number that JSON does not have"),
        ('{"a": "\\ud800"}', "a lone surrogate"),
        ('{"a": "\\u0000"}', "NUL"),
        ("[" * 100_000, "nested too deep"),
        ("", "This field is required."),
    ],
)
def test_what_is_no_object_of_json_reaches_nobody(text, words, as_admin, ticket):
    page = press(as_admin, "open_ticket", text)

    assert page.status_code == 422
    assert words in text_of(page)
    assert not Call.objects.exists()


def test_a_tool_that_may_change_things_is_called_at_the_second_press_only(as_admin, db):
    make_tool(make_server(slug="files"), "purge", annotations={"destructiveHint": True})

    first = press(as_admin, "files__purge", {"path": "notes/a"})
    assert "The server says that this tool may delete or overwrite." in text_of(first)
    assert "Press again to call it with exactly these arguments" in text_of(first)
    assert not Call.objects.exists()

    seen = re.search(r'name="seen" value="(\w+)"', first.content.decode())[1]
    other = press(as_admin, "files__purge", {"path": "notes/b"}, seen=seen)
    assert "Press again" in text_of(other)
    assert not Call.objects.exists()

    last = press(as_admin, "files__purge", {"path": "notes/a"}, seen=seen)
    assert "Press again" not in text_of(last)
    assert Call.objects.get().tool_name == "files__purge"


def test_where_nothing_could_be_sent_the_page_says_so_and_keeps_the_arguments(as_admin, forecast):
    page = press(as_admin, "weather__get_forecast", {"city": "Oslo"})

    assert page.status_code == 503
    assert "Try again." in text_of(page)
    assert "&quot;Oslo&quot;" in page.content.decode()


def test_no_call_passes_without_its_csrf_token(admin, ticket):
    careless = Client(enforce_csrf_checks=True)
    careless.force_login(admin, backend=BACKEND)

    assert press(careless, "open_ticket", {"title": "x"}).status_code == 403
    assert not Call.objects.exists()
