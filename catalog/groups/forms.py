"""Forms of the group pages. They parse input; the rules are in `catalog.groups.actions`."""

from typing import Any, cast

from django import forms

from catalog.groups.board import list_followable_servers
from catalog.models import Group

# Form value of a member's preload setting: the stored value.
PRELOADS = {"default": None, "always": True, "demand": False}
CODE_ATTRS = {
    "class": "mono",
    "autocomplete": "off",
    "autocapitalize": "off",
    "spellcheck": "false",
}


class NewGroupForm(forms.Form):
    display_name = forms.CharField(
        label="Display name",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="Shown to agents next to the id.",
    )
    group_id = forms.CharField(
        label="Id",
        widget=forms.TextInput(attrs=CODE_ATTRS | {"data-slug-of": "new_display_name"}),
        help_text="Agents load the group by this id, for example research or mcp:github.",
    )
    description = forms.CharField(
        label="Description",
        required=False,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="The purpose of these tools in one line. Agents choose groups by it.",
    )
    follows = forms.ChoiceField(
        label="Mirror server",
        required=False,
        help_text="The group contains all tools of this server, including future ones.",
    )

    def __init__(self, *args: Any, group: Group | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        follows = cast(forms.ChoiceField, self.fields["follows"])
        follows.choices = [("", "None"), *((slug, slug) for slug in list_followable_servers(group))]


class SettingsForm(NewGroupForm):
    preload_default = forms.BooleanField(
        label="Preload tools by default",
        required=False,
        help_text="Sessions start with the full definitions, except of tools set to on demand.",
    )
    deferred = forms.BooleanField(
        label="Allow deferral",
        required=False,
        help_text="If off, all tools of the group are preloaded, whatever their setting.",
    )
