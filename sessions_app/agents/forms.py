"""Forms of the agents' pages. They read what was sent; the rules are in `sessions_app.agents`."""

from datetime import timedelta
from typing import Any

from django import forms
from django.utils import timezone

from catalog.models import Group
from sessions_app.agents.actions import SETTINGS, TEXTS
from sessions_app.models import Agent, Mode, Strategy

STRATEGY_WORDS = {
    Strategy.DISPATCH.value: "Dispatch: schemas come as results, the tools never change",
    Strategy.INJECT.value: "Inject: loaded tools join the tools array",
}
MODE_WORDS = {
    Mode.AUTO.value: "Auto: defer when there are many tools",
    Mode.DEFERRED.value: "Deferred: always the short catalog",
    Mode.FULL.value: "Full: always every schema",
}
LIFETIMES = {"": "Never", "30": "In 30 days", "90": "In 90 days", "365": "In a year"}


class NameField(forms.CharField):
    def __init__(self) -> None:
        super().__init__(
            label="Name",
            max_length=80,
            help_text="Such as scout. People and logs know it by this.",
            widget=forms.TextInput(attrs={"autocomplete": "off", "autofocus": True}),
        )


class GroupsField(forms.MultipleChoiceField):
    """Groups to tick. Ids are read as sent: the rules say which are unknown, in words."""

    def __init__(self) -> None:
        super().__init__(
            label="Groups",
            required=False,
            widget=forms.CheckboxSelectMultiple,
            help_text="It sees the tools of these groups and no others.",
        )

    def validate(self, value: Any) -> None:
        pass


class AgentForm(forms.Form):
    name = NameField()
    all_groups = forms.BooleanField(
        label="All groups, and those to come",
        required=False,
        help_text="Everything this installation hands out.",
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
            self.add_error("groups", "Tick groups here, or all of them above, not both.")
        return cleaned

    @property
    def wanted(self) -> dict[str, Any]:
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
        max_length=TEXTS[key],
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=help_text,
    )


class SettingsForm(forms.Form):
    """Every setting, with what it means. `PARTS` is how the page groups them."""

    PARTS = {
        "Who it is": ("name", "description"),
        "What it is given": (
            "strategy",
            "mode",
            "tool_threshold",
            "threshold_tokens",
            "threshold_percent",
            "catalog_budget",
            "catalog_header",
            "budget",
        ),
        "How much it may do": (
            "calls_in_flight",
            "calls_per_minute",
            "searches_per_minute",
            "max_sessions",
        ),
    }

    name = NameField()
    description = _text("Description", "description", "For people. Agents do not read it.")
    strategy = forms.ChoiceField(
        label="Strategy",
        choices=list(STRATEGY_WORDS.items()),
        help_text="Dispatch keeps prompt caches warm. A session may ask for the other.",
    )
    mode = forms.ChoiceField(
        label="Mode",
        choices=list(MODE_WORDS.items()),
        help_text="Decided once, when a session opens. The three thresholds are for Auto.",
    )
    tool_threshold = _number(
        "Defer from this many tools", "tool_threshold", "With fewer, every schema is given."
    )
    threshold_tokens = _number(
        "Defer over this many tokens", "threshold_tokens", "All the definitions together."
    )
    threshold_percent = forms.FloatField(
        label="Defer over this % of the context",
        min_value=0.01,
        max_value=100,
        help_text="Counts when the session says how large its model's context window is.",
    )
    catalog_budget = _number(
        "Catalog budget",
        "catalog_budget",
        "Tokens of the catalog's text. Over it, names of the largest groups are left out first.",
    )
    catalog_header = _text(
        "Catalog header", "catalog_header", "Stands over the catalog instead of Toolcrib's words."
    )
    budget = _number(
        "Budget of loaded tokens",
        "budget",
        "Definitions one session may load. Left empty, as many as it likes.",
        required=False,
    )
    calls_in_flight = _number(
        "Calls in flight", "calls_in_flight", "At once, over all its sessions. More are refused."
    )
    calls_per_minute = _number("Calls a minute", "calls_per_minute", "More are told to wait.")
    searches_per_minute = _number(
        "Searches a minute", "searches_per_minute", "More are told to wait."
    )
    max_sessions = _number(
        "Open sessions",
        "max_sessions",
        "At the limit, the one idle longest ends if it was idle for 30 minutes.",
    )

    @classmethod
    def of(cls, agent: Agent) -> "SettingsForm":
        return cls(initial={key: getattr(agent, key) for key in cls.base_fields})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.fields["name"].widget.attrs["autofocus"]

    @property
    def parts(self) -> list[tuple[str, list[forms.BoundField]]]:
        return [(title, [self[name] for name in names]) for title, names in self.PARTS.items()]


class KeyForm(forms.Form):
    name = forms.CharField(
        label="Name",
        required=False,
        max_length=120,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="Where it is used, such as laptop. Left empty, the agent's name.",
    )
    days = forms.ChoiceField(label="Expires", choices=list(LIFETIMES.items()), required=False)

    @property
    def expires_at(self) -> Any:
        days = self.cleaned_data["days"]
        return timezone.now() + timedelta(days=int(days)) if days else None
