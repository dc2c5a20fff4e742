"""Forms of the catalog's pages. They read what was sent; the rules are in `catalog.tools`."""

from typing import Any

from django import forms

from catalog.models import CallPolicy, Tool
from catalog.tools import actions as tool_actions
from toolcrib.lib.errors import ToolcribError


class OverrideForm(forms.Form):
    description = forms.CharField(
        label="Your description",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 6, "spellcheck": "true"}),
        help_text="Agents read this instead. Leave it empty to give them the original text.",
    )


class HoldForm(forms.Form):
    reason = forms.CharField(
        label="Reason",
        required=False,
        max_length=500,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="Others read it here.",
    )


class BulkHoldForm(HoldForm):
    """Tools picked in the list, by name."""

    tool = forms.ModelMultipleChoiceField(
        Tool.objects.all(),
        to_field_name="public_name",
        error_messages={"required": "Select at least one tool."},
    )


class PolicyForm(forms.Form):
    policy = forms.ChoiceField(
        label="Calls to this tool",
        choices=[(CallPolicy.ALLOW, "Allow"), (CallPolicy.DENY, "Deny: agents see it, calls fail")],
        widget=forms.RadioSelect,
    )


class CustomToolForm(forms.Form):
    definition = forms.CharField(
        label="Tool as JSON",
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 20, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
        ),
        help_text="In the shape of MCP (inputSchema), OpenAI (parameters) or Anthropic "
        "(input_schema).",
    )

    def clean_definition(self) -> object:
        try:
            return tool_actions.parse_tool_text(self.cleaned_data["definition"])
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error


class DeleteForm(forms.Form):
    """The name must be typed, so that a slip of the hand deletes nothing."""

    typed_name = forms.CharField()

    def __init__(self, *args: Any, name: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name

    def clean_typed_name(self) -> str:
        typed = str(self.cleaned_data["typed_name"])
        if typed != self.name:
            raise forms.ValidationError(f"This is not the name: {typed[:80]}")
        return typed
