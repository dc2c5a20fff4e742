"""Argument conditions: paths, operators, absent values, wrong types; globs; annotations."""

import pytest

from sessions_app.rules.evaluation import (
    CompiledRule,
    ConditionError,
    Subject,
    compile_condition,
    compile_globs,
    effective_annotations,
    match_rules,
)

ARGUMENTS = {
    "n": 5,
    "f": 5.0,
    "yes": True,
    "nothing": None,
    "text": "delete everything",
    "to": ["ann@example.org", "bob@example.com"],
    "files": [{"path": "/etc/passwd", "size": 9}, {"path": "/tmp/x"}],  # noqa: S108
    "odd/name~": {"": "empty"},
}


def holds(path, op, *value):
    return compile_condition(path, op, *value).holds(ARGUMENTS)


@pytest.mark.parametrize(
    ("path", "op", "value", "expected"),
    [
        ("/n", "eq", 5, True),
        ("/n", "eq", 5.0, True),
        ("/f", "eq", 5, True),
        ("/n", "eq", "5", False),
        ("/yes", "eq", 1, False),
        ("/yes", "eq", True, True),
        ("/nothing", "eq", None, True),
        ("/n", "ne", 5, False),
        ("/n", "ne", "5", True),
        ("/to", "eq", ["ann@example.org", "bob@example.com"], True),
        ("/files/1", "eq", {"path": "/tmp/x"}, True),  # noqa: S108
        ("/n", "in", [4, 5], True),
        ("/yes", "in", [0, 1], False),
        ("/text", "in", ["a", "b"], False),
        ("/n", "in", ["5"], False),
        ("/n", "not_in", ["5"], True),
        ("/n", "not_in", [5], False),
        ("/n", "lt", 6, True),
        ("/n", "lt", 5, False),
        ("/n", "le", 5, True),
        ("/n", "gt", 4.5, True),
        ("/n", "gt", 5, False),
        ("/n", "ge", 5, True),
        ("/text", "ge", "d", True),
        ("/text", "contains", "every", True),
        ("/text", "contains", "nobody", False),
        ("/to", "contains", "ann@example.org", True),
        ("/to", "contains", "ann", False),
        ("/text", "starts_with", "delete", True),
        ("/text", "starts_with", "every", False),
        ("/text", "matches", "every.*g$", True),
        ("/text", "matches", "^every", False),
        ("/n", "exists", None, True),
        ("/nothing", "exists", None, True),
        ("/n", "missing", None, False),
        ("/odd~1name~0/", "eq", "empty", True),
        ("/to/1", "eq", "bob@example.com", True),
        ("/to/01", "exists", None, False),
        ("/to/-", "exists", None, False),
        ("/to/2", "exists", None, False),
        ("/n/deeper", "exists", None, False),
        ("", "exists", None, True),
    ],
)
def test_operators(path, op, value, expected):
    assert holds(path, op, value) is expected


VALUES = {"in": [1], "not_in": [1], "exists": None, "missing": None, "lt": 1, "le": 1, "gt": 1,
          "ge": 1}  # fmt: skip
ALL = (*VALUES, "eq", "ne", "contains", "starts_with", "matches")


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("path", ["/absent", "/text/absent", "/to/9", "/absent/*", "/n/*"])
def test_a_condition_on_an_absent_path_is_false_but_true_for_negations(op, path):
    assert holds(path, op, VALUES.get(op, "x")) is (op in ("missing", "ne", "not_in"))


@pytest.mark.parametrize(
    ("path", "op", "value"),
    [
        ("/text", "lt", 3),
        ("/yes", "gt", 0),
        ("/nothing", "ge", 0),
        ("/n", "gt", "3"),
        ("/n", "contains", "5"),
        ("/text", "contains", 5),
        ("/files/0", "contains", "path"),
        ("/n", "starts_with", "5"),
        ("/to", "matches", "ann"),
    ],
)
def test_another_type_than_the_operator_needs_is_an_error(path, op, value):
    with pytest.raises(ConditionError, match=op):
        holds(path, op, value)


@pytest.mark.parametrize(
    ("path", "op", "value", "expected"),
    [
        ("/to/*", "matches", "@example[.]com$", True),
        ("/to/*", "matches", "@evil[.]com$", False),
        ("/to/*", "not_in", ["ann@example.org"], True),  # one of them is not
        ("/to/*", "not_in", ["ann@example.org", "bob@example.com"], False),
        ("/files/*/path", "starts_with", "/etc/", True),
        ("/files/*/path", "starts_with", "/home/", False),
        ("/files/*/size", "missing", None, True),
        ("/files/*/path", "missing", None, False),
        ("/files/*/size", "gt", 8, True),
        ("/odd~1name~0/*", "eq", "empty", True),
        ("/*", "eq", 5, True),
    ],
)
def test_a_path_with_wildcards_holds_if_it_holds_at_one_place(path, op, value, expected):
    assert holds(path, op, value) is expected


def test_an_error_at_one_place_counts_unless_the_condition_holds_at_another():
    mixed = {"a": [1, "x"]}
    assert compile_condition("/a/*", "gt", 0).holds(mixed) is True
    with pytest.raises(ConditionError):
        compile_condition("/a/*", "gt", 1).holds(mixed)


@pytest.mark.parametrize(
    ("path", "op", "value"),
    [
        ("n", "eq", 1),
        ("/a~2", "eq", 1),
        ("/a", "like", 1),
        ("/a", "in", "x"),
        ("/a", "gt", None),
        ("/a", "gt", True),
        ("/a", "starts_with", 1),
        ("/a", "matches", "(?=look)"),
        ("/a", "matches", "("),
        ("/a", "matches", "(abc|def){400}"),
        ("/a", "matches", 5),
        ("/a", "exists", 5),
    ],
)
def test_an_invalid_condition_does_not_compile(path, op, value):
    with pytest.raises(ValueError, match=r"."):
        compile_condition(path, op, value)


def rule(effect="deny", **fields):
    return CompiledRule(1, "rule", effect, "because", "operator", **fields)


def test_a_rule_with_a_condition_that_cannot_be_evaluated_holds_the_call():
    condition = compile_condition("/text", "gt", 3)
    for effect in ("allow", "deny", "hold"):
        (found,) = match_rules([rule(effect, conditions=(condition,))], ARGUMENTS, "direct")
        assert found.decision.effect == "hold"
        assert found.decision.approver == "operator"
        assert "/text is a text, and gt needs a number" in found.decision.reason


def test_a_condition_that_fails_first_keeps_the_rule_from_matching():
    guard, broken = compile_condition("/n", "eq", 6), compile_condition("/text", "gt", 3)
    assert match_rules([rule(conditions=(guard, broken))], ARGUMENTS, "direct") == []


def test_matching_ends_at_the_first_rule_that_decides_alone():
    after, hold, allow = rule(after=("a",)), rule("hold"), rule("allow")
    never = rule()
    found = match_rules([after, hold, allow, never], ARGUMENTS, "direct")
    assert [match.rule for match in found] == [after, hold, allow]


def test_origin():
    assert match_rules([rule(origin="script")], {}, "direct") == []
    assert len(match_rules([rule(origin="script")], {}, "script")) == 1
    assert len(match_rules([rule()], {}, "script")) == 1


def subject(**fields):
    defaults = {
        "names": frozenset({"files__delete_file", "delete-file"}),
        "server": "files",
        "groups": frozenset({7}),
        "annotations": effective_annotations(None),
    }
    return Subject(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"tools": compile_globs(["*__delete_*"])}, True),
        ({"tools": compile_globs(["delete-*"])}, True),  # the server's own name
        ({"tools": compile_globs(["files__delete"])}, False),
        ({"tools": compile_globs(["nope", "files__*"])}, True),
        ({"not_tools": compile_globs(["files__*"])}, False),
        ({"not_tools": compile_globs(["delete-file"])}, False),
        ({"not_tools": compile_globs(["mail__*"])}, True),
        ({"servers": frozenset({"files"})}, True),
        ({"servers": frozenset({"mail"})}, False),
        ({"not_servers": frozenset({"files"})}, False),
        ({"not_servers": frozenset({"mail"})}, True),
        ({"groups": frozenset({7, 8})}, True),
        ({"groups": frozenset({8})}, False),
        ({"annotations": {"destructiveHint": True}}, True),
        ({"annotations": {"readOnlyHint": True}}, False),
        ({"annotations": {"readOnlyHint": False, "idempotentHint": False}}, True),
    ],
)
def test_parts_that_concern_the_tool(fields, expected):
    assert rule(**fields).concerns_tool(subject()) is expected


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (None, (False, True, False, True)),
        ({"readOnlyHint": True}, (True, False, False, True)),
        ({"readOnlyHint": True, "destructiveHint": True}, (True, True, False, True)),
        ({"destructiveHint": False, "openWorldHint": False}, (False, False, False, False)),
        ({"readOnlyHint": "yes", "idempotentHint": 1}, (False, True, False, True)),
        (["readOnlyHint"], (False, True, False, True)),
    ],
)
def test_annotations_have_the_defaults_of_mcp(sent, expected):
    assert tuple(effective_annotations(sent).values()) == expected
