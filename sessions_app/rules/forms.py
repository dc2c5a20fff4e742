"""Form of a rule. Conditions are rows of three fields; empty rows are left out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django import forms
from django.http import QueryDict
from pydantic import ValidationError

from catalog.models import Group
from servers.models import Server
from sessions_app.models import Agent, Approver, RuleEffect
from sessions_app.rules.evaluation import ANNOTATION_DEFAULTS, OPERATORS
from sessions_app.rules.schemas import MAX_CONDITIONS, RuleIn
from sessions_app.rules.validation import MAX_REASON_LENGTH, InvalidRule
from toolcrib.lib.errors import ToolcribError

EFFECTS = {
    RuleEffect.HOLD.value: "Hold: ask a person first",
    RuleEffect.DENY.value: "Deny: refuse the call",
    RuleEffect.ALLOW.value: "Allow: later rules are not asked",
}
APPROVERS = {
    Approver.OPERATOR.value: "Operators and admins",
    Approver.CALLER.value: "The user of the calling client",
}
ANNOTATION_LABELS = {
    "readOnlyHint": "Read-only",
    "destructiveHint": "Destructive",
    "idempotentHint": "Idempotent",
    "openWorldHint": "Open world",
}
ORIGINS = {"any": "Any", "direct": "Called directly", "script": "Called by a script"}
SCOPES = {"session": "This session", "agent": "Any session of the agent, within 24 hours"}
OPERATOR_LABELS = {
    "eq": "equals",
    "ne": "does not equal",
    "in": "is one of",
    "not_in": "is none of",
    "lt": "is less than",
    "le": "is at most",
    "gt": "is greater than",
    "ge": "is at least",
    "contains": "contains",
    "starts_with": "starts with",
    "matches": "matches (RE2)",
    "exists": "is present",
    "missing": "is missing",
}
TEXT_OPERATORS = ("starts_with", "matches")  # their value is text as it is typed
EMPTY_ROWS = 2
PARTS = ("agents", "tools", "servers", "groups", "after", "not_servers", "not_tools")


@dataclass(frozen=True)
class ConditionRow:
    path: str = ""
    op: str = "eq"
    value: str = ""
    error: str = ""


def show_value(op: str, value: Any) -> str:
    """Return a value as it is typed: text without quotes unless it would be read as JSON."""
    if value is None:
        return "" if op in ("exists", "missing") else "null"
    if isinstance(value, str) and (op in TEXT_OPERATORS or read_value("eq", value) == value):
        return value
    return json.dumps(value, ensure_ascii=False)


def read_value(op: str, typed: str) -> Any:
    if op in ("exists", "missing") and not typed:
        return None
    if op in TEXT_OPERATORS:
        return typed
    try:
        return json.loads(typed)
    except (ValueError, RecursionError):
        return typed


class Names(forms.MultipleChoiceField):
    """Checkboxes. Names that do not exist are accepted here; `rules.validation` reports them."""

    widget = forms.CheckboxSelectMultiple

    def validate(self, value: Any) -> None:
        pass


class Lines(forms.CharField):
    """Text with one value on each line."""

    widget = forms.Textarea

    def to_python(self, value: Any) -> Any:
        return [line.strip() for line in (value or "").splitlines() if line.strip()]

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(value) if isinstance(value, list) else value

    def run_validators(self, value: Any) -> None:
        pass


def _globs(label: str, help_text: str) -> Lines:
    attrs = {"rows": 2, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
    widget = forms.Textarea(attrs=attrs)
    return Lines(label=label, required=False, help_text=help_text, widget=widget)


class RuleForm(forms.Form):
    name = forms.CharField(max_length=80, widget=forms.TextInput(attrs={"autocomplete": "off"}))
    effect = forms.ChoiceField(choices=list(EFFECTS.items()))
    reason = forms.CharField(
        required=False,
        max_length=MAX_REASON_LENGTH,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text="Told to the agent and to the person who decides.",
    )
    approver = forms.ChoiceField(
        label="Who may allow a held call", choices=list(APPROVERS.items()), required=False
    )
    enabled = forms.BooleanField(label="Enabled", required=False, initial=True)
    tools = _globs("Tools", "One glob per line, for example *__delete_*. Empty: every tool.")
    not_tools = _globs("Except tools", "One glob per line.")
    agents = Names(label="Agents", required=False, help_text="None selected: every agent.")
    servers = Names(label="Servers", required=False, help_text="None selected: every server.")
    not_servers = Names(label="Except servers", required=False)
    groups = Names(label="Groups", required=False, help_text="Groups that contain the tool.")
    origin = forms.ChoiceField(choices=list(ORIGINS.items()), required=False)
    first_use = forms.BooleanField(label="First use of the tool by the agent", required=False)
    after = Names(
        label="After results from",
        required=False,
        help_text="Results of one of these servers were returned before, errors included.",
    )
    after_scope = forms.ChoiceField(
        label="Returned to", choices=list(SCOPES.items()), required=False
    )

    SECTIONS = {"name": "Rule", "tools": "Calls that it matches", "after": "After reading"}

    def __init__(self, data: QueryDict | None = None, **kwargs: Any) -> None:
        initial = dict(kwargs.pop("initial", {}))
        match = initial.pop("match", {})
        super().__init__(data, initial={**match, **initial, **_flat_annotations(match)}, **kwargs)
        choices: dict[str, list[str]] = {
            "agents": list(Agent.objects.values_list("name", flat=True)),
            "groups": list(Group.objects.values_list("group_id", flat=True)),
        }
        slugs = list(Server.objects.order_by("slug").values_list("slug", flat=True))
        choices |= dict.fromkeys(("servers", "not_servers", "after"), slugs)
        for name, values in choices.items():
            sent = data.getlist(self.add_prefix(name)) if data is not None else ()
            chosen = [*match.get(name, ()), *sent]
            field: Any = self.fields[name]
            field.choices = [(value, value) for value in dict.fromkeys([*values, *chosen])]
        for hint in ANNOTATION_DEFAULTS:
            self.fields[hint] = forms.ChoiceField(
                label=ANNOTATION_LABELS[hint],
                choices=[("", "Any"), ("true", "Yes"), ("false", "No")],
                required=False,
            )
        self.rows = _rows_of(data) if data is not None else _rows_from(match.get("arguments", ()))
        self.operators = [(op, OPERATOR_LABELS[op]) for op in OPERATORS]
        self.rule: RuleIn | None = None

    def add_prefix(self, field_name: str) -> str:
        """Return the name of a control: one called `after` would hide a method of the form."""
        return "read_from" if field_name == "after" else str(super().add_prefix(field_name))

    @property
    def annotations(self) -> list[forms.BoundField]:
        return [self[hint] for hint in ANNOTATION_DEFAULTS]

    @property
    def shown_rows(self) -> list[ConditionRow]:
        empty = [ConditionRow()] * EMPTY_ROWS
        return [*self.rows, *empty][:MAX_CONDITIONS]

    def clean(self) -> None:
        values = self.cleaned_data
        match: dict[str, Any] = {part: values.get(part, []) for part in PARTS}
        match |= {
            "annotations": {
                hint: values[hint] == "true" for hint in ANNOTATION_DEFAULTS if values.get(hint)
            },
            "origin": values.get("origin") or "any",
            "first_use": values.get("first_use", False),
            "after_scope": values.get("after_scope") or "session",
            "arguments": [
                {"path": row.path, "op": row.op, "value": read_value(row.op, row.value)}
                for row in self.rows
            ],
        }
        try:
            self.rule = RuleIn.model_validate(
                {
                    "name": values.get("name", ""),
                    "effect": values.get("effect"),
                    "reason": values.get("reason", ""),
                    "enabled": values.get("enabled", False),
                    "approver": values.get("approver") or "operator",
                    "match": match,
                }
            )
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_input=False)[:5]:
                self._add_problem(".".join(map(str, problem["loc"])), problem["msg"])

    def add_tool_error(self, error: ToolcribError) -> None:
        """Show an error of `rules.actions` at the fields that it names."""
        if not isinstance(error, InvalidRule):
            self.add_error("name" if error.code == "name_taken" else None, error.sentence)
            return
        problems: Any = error.details["problems"]
        for problem in problems:
            self._add_problem(problem["at"], problem["problem"])

    def _add_problem(self, at: str, problem: str) -> None:
        sentence = f"{problem[:1].upper()}{problem[1:]}."
        name, _, rest = at.removeprefix("match.").partition(".")
        if name == "arguments":
            number = int(rest.partition(".")[0]) if rest.partition(".")[0].isdecimal() else 0
            self.rows = [
                ConditionRow(
                    row.path, row.op, row.value, sentence if at_row == number else row.error
                )
                for at_row, row in enumerate(self.rows)
            ]
            self.add_error(None, f"Condition {number + 1}: {sentence}")
        elif name not in self.errors:
            self.add_error(name if name in self.fields else None, sentence)


def _flat_annotations(match: Mapping[str, Any]) -> dict[str, str]:
    return {hint: str(value).lower() for hint, value in match.get("annotations", {}).items()}


def _rows_from(conditions: Sequence[Mapping[str, Any]]) -> list[ConditionRow]:
    return [
        ConditionRow(row["path"], row["op"], show_value(row["op"], row.get("value")))
        for row in conditions
    ]


def _rows_of(data: QueryDict) -> list[ConditionRow]:
    columns = (data.getlist(f"condition_{name}") for name in ("path", "op", "value"))
    rows = [
        ConditionRow(path.strip(), op, value) for path, op, value in zip(*columns, strict=False)
    ]
    return [row for row in rows if row.path or row.value][:MAX_CONDITIONS]
