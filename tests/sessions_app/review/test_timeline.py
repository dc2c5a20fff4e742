"""Session timeline: sentences, idle gaps, tokens in context; description of results."""

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from sessions_app.agents.snippets import sample_arguments
from sessions_app.playground import try_tool
from sessions_app.review import content, timeline
from sessions_app.review.timeline import Gap, Step, TimelineEvent

START = datetime(2026, 3, 1, 9, 0, tzinfo=UTC)


def make_event(kind="catalog", *, second=0, took=0, number=1, **fields):
    at = START + timedelta(seconds=second)
    until = at + timedelta(seconds=took)
    return TimelineEvent(id=number, kind=kind, at=at, until=until, **fields)


def call_facts(state, *, is_error=False, duration_ms=None, error_message=""):
    """Return the fields of a call that a sentence uses."""
    return SimpleNamespace(
        state=state, is_error=is_error, duration_ms=duration_ms, error_message=error_message
    )


def sentence(kind, **fields):
    names = ("tool_name", "group_id", "tokens", "call")
    columns = {name: fields.pop(name) for name in names if name in fields}
    event = make_event(kind, **columns, details=fields)
    return Step(1, event, timeline.describe_event(event), 0).sentence


# --- Sentences ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "kind", "facts"),
    [
        (
            "opened in deferred mode with 47 tools from 2 groups",
            "opened",
            {"mode": "deferred", "tools": 47, "groups": ["mcp:a", "mcp:b"]},
        ),
        (
            "opened in full mode with 1 tool from 1 group, forked from ses_1",
            "opened",
            {"mode": "full", "tools": 1, "groups": ["a"], "forked_from": "ses_1"},
        ),
        (
            "opened in deferred mode, forked from ses_1",
            "opened",
            {"mode": "deferred", "forked_from": "ses_1"},
        ),
        (
            "call to mail__send held by the rule “Ask first”",
            "held",
            {"tool_name": "mail__send", "rule": "Ask first"},
        ),
        (
            "otto denied the call to mail__send: Not today.",
            "decided",
            {"tool_name": "mail__send", "decision": "deny", "by": "otto", "comment": "Not today."},
        ),
        ("fetched the catalog in anthropic format", "catalog", {"format": "anthropic"}),
        (
            "searched “create issue”: 4 of 12 results",
            "searched",
            {"query": "create issue", "hits": list("abcd"), "total": 12, "newly_loaded": 0},
        ),
        (
            "searched “x”: 1 result, 1 loaded",
            "searched",
            {"query": "x", "hits": ["a"], "total": 1, "newly_loaded": 1},
        ),
        ("searched “x”: no results", "searched", {"query": "x", "hits": [], "total": 0}),
        (
            "searched by pattern “^get_”: 2 results",
            "searched",
            {"pattern": "^get_", "hits": ["a", "b"], "total": 2},
        ),
        (
            "searched by name “a__b”: 1 result",
            "searched",
            {"name": "a__b", "query": "left aside", "hits": ["a__b"], "total": 1},
        ),
        ("requested details of a__b", "details", {"tool_name": "a__b", "found": True}),
        (
            "requested details of a__b: not found",
            "details",
            {"tool_name": "a__b", "found": False},
        ),
        (
            "loaded github__create_issue (≈310)",
            "loaded",
            {"names": ["github__create_issue"], "how": "load", "tokens": 310},
        ),
        (
            "loaded by search a, b, c and 2 more (≈1,310)",
            "loaded",
            {"names": list("abcde"), "how": "search", "tokens": 1310},
        ),
        (
            "loaded all tools of mcp:github (≈9)",
            "loaded",
            {"names": ["a"], "all": True, "group_id": "mcp:github", "tokens": 9},
        ),
        (
            "preloaded a; 2 unknown names",
            "loaded",
            {"names": ["a"], "how": "preload", "unknown": ["x", "y"]},
        ),
        ("loaded no tools; 1 unknown name", "loaded", {"names": [], "unknown": ["x"]}),
        ("called a__b directly", "implicit_load", {"tool_name": "a__b"}),
        ("forked to ses_2", "forked", {"to": "ses_2"}),
        ("resumed with mcp:a, mcp:b", "resumed", {"groups": ["mcp:a", "mcp:b"]}),
        ("resumed with no groups loaded", "resumed", {"groups": []}),
        ("closed", "closed", {}),
        ("expired after inactivity", "expired", {}),
        ("something new", "something new", {}),
    ],
)
def test_each_kind_of_event_has_a_sentence(expected, kind, facts):
    assert sentence(kind, **facts) == expected


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        (call_facts("succeeded", duration_ms=420), "· 420 ms · ok"),
        (
            call_facts("succeeded", is_error=True, duration_ms=12),
            "· 12 ms · tool returned an error",
        ),
        (call_facts("timed_out", is_error=True, duration_ms=60_000), "· 60.0 s · timed out"),
        (call_facts("failed", is_error=True, duration_ms=3), "· 3 ms · failed"),
        (call_facts("unknown"), "· outcome unknown"),
        (call_facts("sent"), "· sent"),
        (call_facts("client"), "· run by the agent"),
    ],
)
def test_the_sentence_of_a_call_has_its_duration_and_outcome(facts, end):
    assert sentence("called", tool_name="a__b", call=facts) == f"called a__b {end}"


def test_the_sentence_of_a_rejection_has_the_first_paragraph_of_its_reason_or_its_code():
    reason = "The arguments do not fit:\n- `city` is required.\n\nInput schema: {}"
    rejected = call_facts("refused", error_message=reason)

    assert sentence("refused", tool_name="a__b", call=rejected) == (
        "call to a__b rejected: The arguments do not fit: `city` is required."
    )
    assert sentence("refused", code="rate_limited") == "request rejected: rate limited"
    assert len(sentence("refused", call=call_facts("refused", error_message="x" * 900))) < 200


def test_malformed_details_still_give_a_sentence():
    assert sentence("searched", query=None, hits="abc", total="12") == "searched “”: no results"
    assert sentence("loaded", names=None, unknown=3) == "loaded no tools"
    assert sentence("opened") == "opened with 0 tools from 0 groups"


def test_names_are_separate_spans():
    assert timeline.describe_event(make_event("called", tool_name="a__b")) == [
        ("text", "called "),
        ("name", "a__b"),
    ]


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (make_event("called", call=call_facts("succeeded")), ""),
        (make_event("called", call=call_facts("unknown")), "changed"),
        (make_event("called", call=call_facts("succeeded", is_error=True)), "error"),
        (make_event("called"), ""),
        (make_event("refused"), "rejected"),
        (make_event("searched"), ""),
    ],
)
def test_only_steps_that_did_not_succeed_have_a_status(event, status):
    assert timeline.problem_status(event) == status


# --- Layout -------------------------------------------------------------------------------------


def test_tokens_accumulate_to_the_context_after_each_step():
    rows = timeline.lay_out(
        [make_event(tokens=100), make_event(tokens=0), make_event(tokens=25)],
        run=timedelta(hours=1),
    )

    assert [(row.number, row.context) for row in rows] == [(1, 100), (2, 100), (3, 125)]


def test_a_later_page_continues_where_the_previous_one_ended():
    rows = timeline.lay_out(
        [make_event(second=400, tokens=5)],
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
        (100, 1_000, True),  # 10% of the run
        (40, 1_000, False),
        (9, 20, False),  # below ten seconds is never idle
        (11, 20, True),
    ],
)
def test_a_pause_is_idle_over_five_minutes_or_five_percent_of_the_run(pause, run, idle):
    assert timeline.is_idle(timedelta(seconds=pause), timedelta(seconds=run)) is idle


def test_a_gap_has_its_start_and_end():
    rows = timeline.lay_out([make_event(), make_event(second=1_000)], run=timedelta(seconds=1_000))

    assert rows[1] == Gap(START, START + timedelta(seconds=1_000))
    assert rows[1].seconds == 1_000


def test_time_during_a_long_call_is_not_idle_even_if_a_later_call_ended_first():
    rows = timeline.lay_out(
        [
            make_event("called", took=900),
            make_event("called", second=1, took=1),
            make_event(second=901),
        ],
        run=timedelta(seconds=901),
    )

    assert not any(isinstance(row, Gap) for row in rows)


# --- Results and arguments ----------------------------------------------------------------------


def test_image_data_is_described_and_never_displayed():
    parts = content.describe_content(
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

    assert [(part.label, part.text) for part in parts] == [
        ("text", "Sunny."),
        ("image, image/png, 3 KB", ""),
        ("audio, audio/wav, unknown size", ""),
        ("resource link, a", "file:///a"),
        ("resource file:///b", "b"),
        ("resource file:///c, unknown type, 3 B", ""),
        ("content of type odd", '{\n  "type": "odd",\n  "value": 1\n}'),
        ("unknown content", '"bare"'),
    ]


def test_stored_payloads_are_described_even_if_truncated():
    complete = content.describe_stored_result(
        '{"content": [{"type": "text", "text": "a"}], "structured_content": {"b": 1}}'
    )
    truncated = content.describe_stored_result(
        '{"bytes": 20480, "cut": true, "start": "{\\"content\\": [{"}'
    )
    broken = content.describe_stored_result('{"content": [')
    bare = content.describe_stored_result('{"answer": 1}')

    assert [part.label for part in complete] == ["text", "structured content"]
    assert (truncated[0].label, truncated[0].text) == (
        "result, truncated to 14 B of 20 KB",
        '{"content": [{',
    )
    assert broken[0].text == '{"content": ['
    assert bare[0].text == '{\n  "answer": 1\n}'
    assert content.describe_stored_arguments('{"bytes": 9, "cut": true, "start": "{"}').text == "{"
    assert content.describe_stored_arguments("{").text == "{"
    assert content.describe_stored_arguments('{"a":1}').text == '{\n  "a": 1\n}'


def test_pretty_json_escapes_only_characters_that_hide_or_reorder_text():
    odd = {"a\u202eb": ["städte", "\u200b", "\n"]}

    text = content.pretty_json(odd)

    assert "\\u202e" in text
    assert "\u202e" not in text
    assert "städte" in text
    assert json.loads(text) == odd


def test_a_skeleton_has_the_required_arguments_with_default_values():
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

    assert sample_arguments(schema, try_tool.EMPTY_VALUES) == {
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
    assert sample_arguments({"type": "object"}, try_tool.EMPTY_VALUES) == {}
    assert sample_arguments({"required": "city", "properties": []}, try_tool.EMPTY_VALUES) == {}


def test_a_recursive_schema_has_a_finite_skeleton():
    deep: dict = {"type": "object", "required": ["a"], "properties": {}}
    deep["properties"]["a"] = deep

    assert sample_arguments(deep, try_tool.EMPTY_VALUES) == {"a": {"a": {"a": {"a": {}}}}}


@pytest.mark.parametrize(
    ("annotations", "confirms"),
    [
        ({}, True),
        ({"readOnlyHint": True}, False),
        ({"readOnlyHint": "true"}, True),
        ({"readOnlyHint": True, "destructiveHint": True}, True),
        ({"readOnlyHint": True, "destructiveHint": False}, False),
    ],
)
def test_only_a_read_only_tool_is_called_without_confirmation(annotations, confirms):
    assert bool(try_tool.confirmation_reason(annotations)) is confirms
