"""How a session reads: sentences, breaks, tokens in context; and how an answer is shown."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from sessions_app.playground import try_tool
from sessions_app.review import content, timeline
from sessions_app.review.timeline import CallFacts, Gap, Step, TimelineEvent

START = datetime(2026, 3, 1, 9, 0, tzinfo=UTC)


def happening(kind="catalog", *, second=0, took=0, number=1, **fields):
    at = START + timedelta(seconds=second)
    until = at + timedelta(seconds=took)
    return TimelineEvent(id=number, kind=kind, at=at, until=until, **fields)


def sentence(kind, **fields):
    names = ("tool_name", "group_id", "tokens", "call")
    given = {name: fields.pop(name) for name in names if name in fields}
    return Step(
        1, happening(), timeline.spans(happening(kind, **given, details=fields)), 0
    ).sentence


# --- Sentences ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind", "facts"),
    [
        (
            "opened in deferred mode with 47 tools of 2 groups",
            "opened",
            {"mode": "deferred", "tools": 47, "groups": ["mcp:a", "mcp:b"]},
        ),
        (
            "opened in full mode with 1 tool of 1 group, forked from ses_1",
            "opened",
            {"mode": "full", "tools": 1, "groups": ["a"], "forked_from": "ses_1"},
        ),
        ("fetched the catalog as anthropic", "catalog", {"format": "anthropic"}),
        (
            "searched “create issue”: 4 of 12 found",
            "searched",
            {"query": "create issue", "hits": list("abcd"), "total": 12, "newly_loaded": 0},
        ),
        (
            "searched “x”: 1 found, 1 loaded",
            "searched",
            {"query": "x", "hits": ["a"], "total": 1, "newly_loaded": 1},
        ),
        ("searched “x”: nothing found", "searched", {"query": "x", "hits": [], "total": 0}),
        (
            "searched by the pattern “^get_”: 2 found",
            "searched",
            {"pattern": "^get_", "hits": ["a", "b"], "total": 2},
        ),
        (
            "searched for the name “a__b”: 1 found",
            "searched",
            {"name": "a__b", "query": "left aside", "hits": ["a__b"], "total": 1},
        ),
        ("asked for the details of a__b", "details", {"tool_name": "a__b", "found": True}),
        (
            "asked for the details of a__b: not found",
            "details",
            {"tool_name": "a__b", "found": False},
        ),
        (
            "loaded github__create_issue (≈310)",
            "loaded",
            {"names": ["github__create_issue"], "how": "load", "tokens": 310},
        ),
        (
            "loaded by searching a, b, c and 2 more (≈1,310)",
            "loaded",
            {"names": list("abcde"), "how": "search", "tokens": 1310},
        ),
        (
            "loaded all tools of mcp:github (≈9)",
            "loaded",
            {"names": ["a"], "all": True, "group_id": "mcp:github", "tokens": 9},
        ),
        (
            "preloaded a; 2 names unknown",
            "loaded",
            {"names": ["a"], "how": "preload", "unknown": ["x", "y"]},
        ),
        ("loaded nothing; 1 name unknown", "loaded", {"names": [], "unknown": ["x"]}),
        ("used a__b without loading it first", "implicit_load", {"tool_name": "a__b"}),
        ("forked to ses_2", "forked", {"to": "ses_2"}),
        ("resumed with mcp:a, mcp:b", "resumed", {"groups": ["mcp:a", "mcp:b"]}),
        ("resumed with nothing loaded", "resumed", {"groups": []}),
        ("closed", "closed", {}),
        ("expired after a long silence", "expired", {}),
        ("something new", "something new", {}),
    ],
)
def test_each_kind_of_event_is_a_sentence(said, kind, facts):
    assert sentence(kind, **facts) == said


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        (CallFacts("succeeded", duration_ms=420), "· 420 ms · ok"),
        (
            CallFacts("succeeded", is_error=True, duration_ms=12),
            "· 12 ms · the tool answered with an error",
        ),
        (CallFacts("timed_out", is_error=True, duration_ms=60_000), "· 60.0 s · timed out"),
        (CallFacts("failed", is_error=True, duration_ms=3), "· 3 ms · failed"),
        (CallFacts("unknown"), "· outcome unknown"),
        (CallFacts("sent"), "· sent"),
        (CallFacts("client"), "· left to the agent"),
    ],
)
def test_a_call_says_how_long_it_took_and_how_it_ended(facts, end):
    assert sentence("called", tool_name="a__b", call=facts) == f"called a__b {end}"


def test_a_refusal_gives_the_first_paragraph_of_its_reason_or_its_code():
    reason = "The arguments do not fit:\n- `city` is required.\n\nInput schema: {}"
    refused = CallFacts("refused", error_message=reason)

    assert sentence("refused", tool_name="a__b", call=refused) == (
        "refused a__b: The arguments do not fit: `city` is required."
    )
    assert sentence("refused", code="rate_limited") == "refused: rate limited"
    assert len(sentence("refused", call=CallFacts("refused", error_message="x" * 900))) < 200


def test_details_that_are_not_as_expected_still_read():
    assert sentence("searched", query=None, hits="abc", total="12") == "searched “”: nothing found"
    assert sentence("loaded", names=None, unknown=3) == "loaded nothing"
    assert sentence("opened") == "opened with 0 tools of 0 groups"


def test_names_are_set_apart_from_words():
    assert timeline.spans(happening("called", tool_name="a__b")) == [
        ("text", "called "),
        ("name", "a__b"),
    ]


@pytest.mark.parametrize(
    ("one", "pill"),
    [
        (happening("called", call=CallFacts("succeeded")), ""),
        (happening("called", call=CallFacts("unknown")), "changed"),
        (happening("called", call=CallFacts("succeeded", is_error=True)), "error"),
        (happening("called"), ""),
        (happening("refused"), "rejected"),
        (happening("searched"), ""),
    ],
)
def test_only_what_did_not_go_well_has_a_pill(one, pill):
    assert timeline.pill(one) == pill


# --- Layout -------------------------------------------------------------------------------------


def test_tokens_add_up_to_what_is_in_context_after_each_step():
    rows = timeline.lay_out(
        [happening(tokens=100), happening(tokens=0), happening(tokens=25)], run=timedelta(hours=1)
    )

    assert [(row.number, row.context) for row in rows] == [(1, 100), (2, 100), (3, 125)]


def test_a_later_page_goes_on_where_the_one_before_ended():
    rows = timeline.lay_out(
        [happening(second=400, tokens=5)],
        run=timedelta(hours=9),
        first=101,
        context=1_000,
        last_end=START,
    )

    assert rows[0] == Gap(START, START + timedelta(seconds=400))
    assert (rows[1].number, rows[1].context) == (101, 1_005)


@pytest.mark.parametrize(
    ("pause", "run", "idle"),
    [
        (300, 3_600 * 9, False),
        (301, 3_600 * 9, True),
        (100, 1_000, True),  # 10 % of the run
        (40, 1_000, False),
        (9, 20, False),  # nobody waits nine seconds
        (11, 20, True),
    ],
)
def test_a_long_pause_is_over_five_minutes_or_a_twentieth_of_the_run(pause, run, idle):
    assert timeline.is_idle(timedelta(seconds=pause), timedelta(seconds=run)) is idle


def test_a_break_carries_its_true_times():
    rows = timeline.lay_out([happening(), happening(second=1_000)], run=timedelta(seconds=1_000))

    assert rows[1] == Gap(START, START + timedelta(seconds=1_000))
    assert rows[1].seconds == 1_000


def test_a_long_call_is_not_idleness_even_where_a_shorter_one_ended_after_it_began():
    rows = timeline.lay_out(
        [
            happening("called", took=900),
            happening("called", second=1, took=1),
            happening(second=901),
        ],
        run=timedelta(seconds=901),
    )

    assert not any(isinstance(row, Gap) for row in rows)


# --- Answers and arguments ----------------------------------------------------------------------


def test_data_of_images_is_named_and_never_shown():
    shown = content.parts_of(
        [
            {"type": "text", "text": "Sunny."},
            {"type": "image", "mimeType": "image/png", "data": "QUJD" * 1000 + "QQ=="},
            {"type": "audio", "mimeType": "audio/wav", "data": None},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
            {"type": "resource", "resource": {"uri": "file:///b", "text": "b"}},
            {"type": "resource", "resource": {"uri": "file:///c", "blob": "QUJD"}},
            {"type": "odd", "value": 1},
            "bare",
        ]
    )

    assert [(one.label, one.text) for one in shown] == [
        ("text", "Sunny."),
        ("image, image/png, 3 KB", ""),
        ("audio, audio/wav, of unknown size", ""),
        ("link to a resource, a", "file:///a"),
        ("resource file:///b", "b"),
        ("resource file:///c, of unknown type, 3 B", ""),
        ("part of the type odd", '{\n  "type": "odd",\n  "value": 1\n}'),
        ("unknown part", '"bare"'),
    ]


def test_what_the_ledger_kept_is_shown_also_where_it_was_cut():
    whole = content.kept_parts(
        '{"content": [{"type": "text", "text": "a"}], "structured_content": {"b": 1}}'
    )
    cut = content.kept_parts('{"bytes": 20480, "cut": true, "start": "{\\"content\\": [{"}')
    broken = content.kept_parts('{"content": [')
    bare = content.kept_parts('{"answer": 1}')

    assert [one.label for one in whole] == ["text", "structured content"]
    assert (cut[0].label, cut[0].text) == (
        "answer, cut to the first 14 B of 20 KB",
        '{"content": [{',
    )
    assert broken[0].text == '{"content": ['
    assert bare[0].text == '{\n  "answer": 1\n}'
    assert content.payload('{"bytes": 9, "cut": true, "start": "{"}').text == "{"
    assert content.payload("{").text == "{"
    assert content.payload('{"a":1}').text == '{\n  "a": 1\n}'


def test_json_for_people_escapes_what_hides_or_reorders_and_nothing_else():
    odd = {"a\u202eb": ["städte", "\u200b", "\n"]}

    text = content.pretty_json(odd)

    assert "\\u202e" in text
    assert "\u202e" not in text
    assert "städte" in text
    assert json.loads(text) == odd


def test_a_skeleton_has_the_required_arguments_with_the_plainest_values():
    schema = {
        "type": "object",
        "required": ["city", "days", "unit", "exact", "tags", "where", "either", "odd", "maybe"],
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "default": 3},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"},
            "tags": {"type": "array"},
            "where": {"type": "object", "required": ["x"], "properties": {"x": {"type": "number"}}},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "maybe": {"type": ["null", "integer"]},
            "left_out": {"type": "string"},
        },
    }

    assert try_tool.skeleton(schema) == {
        "city": "",
        "days": 3,
        "unit": "C",
        "exact": False,
        "tags": [],
        "where": {"x": 0},
        "either": 0,
        "odd": "",
        "maybe": 0,
    }
    assert try_tool.skeleton({"type": "object"}) == {}
    assert try_tool.skeleton({"required": "city", "properties": []}) == {}


def test_a_schema_that_nests_itself_has_a_finite_skeleton():
    deep: dict = {"type": "object", "required": ["a"], "properties": {}}
    deep["properties"]["a"] = deep

    assert try_tool.skeleton(deep) == {"a": {"a": {"a": {"a": {}}}}}


@pytest.mark.parametrize(
    ("claims", "asks"),
    [
        ({}, True),
        ({"readOnlyHint": True}, False),
        ({"readOnlyHint": "true"}, True),
        ({"readOnlyHint": True, "destructiveHint": True}, True),
        ({"readOnlyHint": True, "destructiveHint": False}, False),
    ],
)
def test_only_a_tool_that_claims_to_change_nothing_is_called_at_the_first_press(claims, asks):
    assert bool(try_tool.why_ask_twice(claims)) is asks
