"""Forms of the agent pages. The validation rules are in `sessions_app.agents.actions`."""

from datetime import timedelta
from typing import Any

from django import forms
from django.utils import timezone

from catalog.models import Group
from sessions_app.agents.actions import MAX_TEXT_LENGTHS, SETTINGS
from sessions_app.models import Agent, Mode, Strategy

STRATEGY_LABELS = {
    Strategy.DISPATCH.value: "Dispatch: schemas are returned as results; the tools array is fixed",
    Strategy.INJECT.value: "Inject: loaded tools are added to the tools array",
}
MODE_LABELS = {
    Mode.AUTO.value: "Auto: defer above the thresholds below",
    Mode.DEFERRED.value: "Deferred: always the short catalog",
    Mode.FULL.value: "Full: always all schemas",
}
LIFETIMES = {"": "Never", "30": "In 30 days", "90": "In 90 days", "365": "In one year"}


class NameField(forms.CharField):
    def __init__(self) -> None:
        super().__init__(
            label="Name",
            max_length=80,
            help_text="Shown on pages, in logs and in the API. Example: scout.",
            widget=forms.TextInput(attrs={"autocomplete": "off", "autofocus": True}),
        )


class GroupsField(forms.MultipleChoiceField):
    """Group checkboxes. Unknown ids are accepted here; `agents.actions` reports them."""

    def __init__(self) -> None:
        super().__init__(
            label="Groups",
            required=False,
            widget=forms.CheckboxSelectMultiple,
            help_text="The agent can use only the tools of these groups.",
        )

    def validate(self, value: Any) -> None:
        pass


class AgentForm(forms.Form):
    name = NameField()
    all_groups = forms.BooleanField(
        label="All groups, including future ones",
        required=False,
        help_text="Grants every tool of this installation.",
    )
    groups = GroupsField()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["groups"]
        field.choices = [
            (group.group_id, f"{group.group_id} · {group.display_name}")
            for group in Group.objects.all()
        ]
        if not field.choices:
            del self.fields["groups"]

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if cleaned.get("all_groups") and cleaned.get("groups"):
            self.add_error("groups", "Select groups here or all groups above, not both.")
        return cleaned

    @property
    def group_choice(self) -> dict[str, Any]:
        cleaned = self.cleaned_data
        return {"groups": cleaned.get("groups") or [], "all_groups": cleaned["all_groups"]}


def _number(label: str, key: str, help_text: str, *, required: bool = True) -> forms.IntegerField:
    allowed = SETTINGS[key]
    return forms.IntegerField(
        label=label,
        required=required,
        min_value=allowed.start,
        max_value=allowed.stop - 1,
        help_text=help_text,
    )


def _text(label: str, key: str, help_text: str) -> forms.CharField:
    return forms.CharField(
        label=label,
        required=False,
        max_length=MAX_TEXT_LENGTHS[key],
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=help_text,
    )


class SettingsForm(forms.Form):
    """All settings of an agent. `SECTIONS` groups the fields on the page."""

    SECTIONS = {
        "Identity": ("name", "description"),
        "Context": (
            "strategy",
            "mode",
            "tool_threshold",
            "threshold_tokens",
            "threshold_percent",
            "catalog_budget",
            "catalog_header",
            "budget",
        ),
        "Limits": (
            "calls_in_flight",
            "calls_per_minute",
            "searches_per_minute",
            "cost_per_minute",
            "max_sessions",
        ),
    }

    name = NameField()
    description = _text("Description", "description", "For people. Not sent to the agent.")
    strategy = forms.ChoiceField(
        label="Strategy",
        choices=list(STRATEGY_LABELS.items()),
        help_text="Dispatch keeps the prompt cache valid. A session can request the other one.",
    )
    mode = forms.ChoiceField(
        label="Mode",
        choices=list(MODE_LABELS.items()),
        help_text="Decided once, when a session opens. The three thresholds apply to Auto.",
    )
    tool_threshold = _number(
        "Deferral threshold (tools)",
        "tool_threshold",
        "With fewer tools, all schemas are sent.",
    )
    threshold_tokens = _number(
        "Deferral threshold (tokens)", "threshold_tokens", "Total size of all definitions."
    )
    threshold_percent = forms.FloatField(
        label="Deferral threshold (% of context window)",
        min_value=0.01,
        max_value=100,
        help_text="Applies if the session reports its model's context window.",
    )
    catalog_budget = _number(
        "Catalog budget",
        "catalog_budget",
        "Maximum tokens of the catalog text. Above it, tool names of the largest groups are "
        "omitted first.",
    )
    catalog_header = _text(
        "Catalog header", "catalog_header", "Replaces the default catalog header."
    )
    budget = _number(
        "Budget (loaded tokens)",
        "budget",
        "Maximum tokens of definitions a session can load. Empty: no limit.",
        required=False,
    )
    calls_in_flight = _number(
        "Concurrent calls", "calls_in_flight", "Across all sessions. Excess gets 429."
    )
    calls_per_minute = _number("Calls per minute", "calls_per_minute", "Excess gets 429.")
    searches_per_minute = _number("Searches per minute", "searches_per_minute", "Excess gets 429.")
    cost_per_minute = _number(
        "Request cost per minute",
        "cost_per_minute",
        "A call or search costs 1; a load 1, a catalog 2, and 1 more per 64 KB of the response. "
        "Excess gets 429.",
    )
    max_sessions = _number(
        "Open sessions",
        "max_sessions",
        "At the limit, the longest idle session expires if it was idle for 30 minutes.",
    )

    @classmethod
    def from_agent(cls, agent: Agent) -> "SettingsForm":
        return cls(initial={key: getattr(agent, key) for key in cls.base_fields})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.fields["name"].widget.attrs["autofocus"]

    @property
    def sections(self) -> list[tuple[str, list[forms.BoundField]]]:
        return [(title, [self[name] for name in names]) for title, names in self.SECTIONS.items()]


class KeyForm(forms.Form):
    name = forms.CharField(
        label="Name",
        required=False,
        max_length=120,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="Where the key is used, for example laptop. Default: the agent's name.",
    )
    days = forms.ChoiceField(label="Expires", choices=list(LIFETIMES.items()), required=False)

    @property
    def expires_at(self) -> Any:
        days = self.cleaned_data["days"]
        return timezone.now() + timedelta(days=int(days)) if days else None
