"""Forms of the agent pages. The validation rules are in `sessions_app.agents.actions`."""

from datetime import timedelta
from typing import Any

from django import forms
from django.utils import timezone

from catalog.models import Group, PayloadStorage
from sessions_app.agents.actions import MAX_TEXT_LENGTHS, POSITIVE_INTEGER
from sessions_app.models import Mode, Strategy

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


def _name(**attrs: Any) -> forms.CharField:
    return forms.CharField(
        label="Name",
        max_length=80,
        help_text="Shown on pages, in logs and in the API. Example: scout.",
        widget=forms.TextInput(attrs={"autocomplete": "off", **attrs}),
    )


class GroupsField(forms.MultipleChoiceField):
    """Group checkboxes. Unknown ids are accepted here; `agents.actions` reports them."""

    widget = forms.CheckboxSelectMultiple

    def validate(self, value: Any) -> None:
        pass


class AgentForm(forms.Form):
    name = _name(autofocus=True)
    all_groups = forms.BooleanField(
        label="All groups, including future ones",
        required=False,
        help_text="Grants every tool of this installation.",
    )
    groups = GroupsField(
        label="Groups",
        required=False,
        help_text="The agent can use only the tools of these groups.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["groups"]
        field.choices = [
            (group.group_id, f"{group.group_id} · {group.display_name}")
            for group in Group.objects.all()
        ]
        if not field.choices:
            del self.fields["groups"]

    def clean(self) -> None:
        if self.cleaned_data.get("all_groups") and self.cleaned_data.get("groups"):
            self.add_error("groups", "Select groups here or all groups above, not both.")


def _number(label: str, help_text: str, *, required: bool = True) -> forms.IntegerField:
    return forms.IntegerField(
        label=label,
        required=required,
        min_value=POSITIVE_INTEGER.start,
        max_value=POSITIVE_INTEGER.stop - 1,
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
    """All settings of an agent, in the order of the page."""

    SECTIONS = {  # by their first field
        "name": "Identity",
        "strategy": "Context",
        "calls_in_flight": "Limits",
        "payload_storage": "Storage",
        "code_mode": "Scripts and custom tools",
    }

    name = _name()
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
        "Deferral threshold (tools)", "With fewer tools, all schemas are sent."
    )
    threshold_tokens = _number("Deferral threshold (tokens)", "Total size of all definitions.")
    threshold_percent = forms.FloatField(
        label="Deferral threshold (% of context window)",
        min_value=0.01,
        max_value=100,
        help_text="Applies if the session reports its model's context window.",
    )
    catalog_budget = _number(
        "Catalog budget",
        "Maximum tokens of the catalog text. Above it, tool names of the largest groups are "
        "omitted first.",
    )
    catalog_header = _text(
        "Catalog header", "catalog_header", "Replaces the default catalog header."
    )
    budget = _number(
        "Budget (loaded tokens)",
        "Maximum tokens of definitions a session can load. Empty: no limit.",
        required=False,
    )
    calls_in_flight = _number("Concurrent calls", "Across all sessions. Excess gets 429.")
    calls_per_minute = _number("Calls per minute", "Excess gets 429.")
    searches_per_minute = _number("Searches per minute", "Excess gets 429.")
    cost_per_minute = _number(
        "Request cost per minute",
        "A call or search costs 1; a load 1, a catalog 2, and 1 more per 64 KB of the response. "
        "Excess gets 429.",
    )
    max_sessions = _number(
        "Open sessions",
        "At the limit, the longest idle session expires if it was idle for 30 minutes.",
    )
    payload_storage = forms.ChoiceField(
        label="Arguments and results",
        choices=PayloadStorage.choices,
        help_text="Of future calls. If a tool has a stricter setting, that one counts.",
    )
    code_mode = forms.BooleanField(
        label="Run scripts",
        required=False,
        help_text="New sessions can run scripts that call their tools. Every call is decided by "
        "rules, as outside a script.",
    )
    runs_custom_tools = forms.BooleanField(
        label="Run custom tools",
        required=False,
        help_text="New MCP sessions list custom tools, which the agent's own program runs. Over "
        "REST they are always listed.",
    )

    @property
    def sections(self) -> list[tuple[str, list[forms.BoundField]]]:
        sections: list[tuple[str, list[forms.BoundField]]] = []
        for bound in self:
            if bound.name in self.SECTIONS:
                sections.append((self.SECTIONS[bound.name], []))
            sections[-1][1].append(bound)
        return sections


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
