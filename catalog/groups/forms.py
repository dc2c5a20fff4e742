"""Forms of the pages of groups. They read what was sent; the rules are in `catalog.groups`."""

from typing import Any, cast

from django import forms

from catalog.groups.state import followable
from catalog.models import Group

# What is said of a member, and what it means.
PRELOADS = {"default": None, "always": True, "demand": False}


class NewGroupForm(forms.Form):
    display_name = forms.CharField(
        label="Display name",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="Agents read it beside the id.",
    )
    group_id = forms.CharField(
        label="Id",
        widget=forms.TextInput(
            attrs={
                "class": "mono",
                "autocomplete": "off",
                "autocapitalize": "off",
                "spellcheck": "false",
            }
        ),
        help_text="What agents load it by, such as research or mcp:github.",
    )
    description = forms.CharField(
        label="Description",
        required=False,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="One line: what these tools are for. Agents choose by it.",
    )
    follows = forms.ChoiceField(
        label="Follow a server",
        required=False,
        help_text="It then has every tool of that server, those to come included.",
    )

    def __init__(self, *args: Any, group: Group | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        follows = cast(forms.ChoiceField, self.fields["follows"])
        follows.choices = [("", "no server"), *((slug, slug) for slug in followable(group))]


class SettingsForm(NewGroupForm):
    preload_default = forms.BooleanField(
        label="Preload its tools",
        required=False,
        help_text="Sessions start with their full definitions, save for tools set otherwise.",
    )
    deferred = forms.BooleanField(
        label="May be deferred",
        required=False,
        help_text="Off: sessions start with all its tools, whatever else is set.",
    )
