"""Forms of the tool pages. Business rules are in `catalog.tools.actions`."""

from typing import Any

from django import forms

from catalog.models import CallPolicy, Tool
from catalog.tools import actions as tool_actions
from toolcrib.lib.errors import ToolcribError


class OverrideForm(forms.Form):
    description = forms.CharField(
        label="Description override",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 6, "spellcheck": "true"}),
        help_text="Replaces the original description for agents. Leave empty to use the original.",
    )


class HoldForm(forms.Form):
    reason = forms.CharField(
        label="Reason",
        required=False,
        max_length=500,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text="Shown on this page.",
    )


class BulkHoldForm(HoldForm):
    tool = forms.ModelMultipleChoiceField(
        Tool.objects.all(),
        to_field_name="public_name",
        error_messages={"required": "Select at least one tool."},
    )


class PolicyForm(forms.Form):
    policy = forms.ChoiceField(
        label="Calls to this tool",
        choices=[
            (CallPolicy.ALLOW, "Allow"),
            (CallPolicy.DENY, "Deny: agents can find it, but calls fail"),
        ],
        widget=forms.RadioSelect,
    )


class CustomToolForm(forms.Form):
    definition = forms.CharField(
        label="Tool as JSON",
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 20, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
        ),
        help_text="In MCP (inputSchema), OpenAI (parameters) or Anthropic (input_schema) format.",
    )

    def clean_definition(self) -> object:
        try:
            return tool_actions.parse_tool_text(self.cleaned_data["definition"])
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error


class DeleteForm(forms.Form):
    """Confirmation of a deletion by typing the name."""

    typed_name = forms.CharField()

    def __init__(self, *args: Any, name: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name

    def clean_typed_name(self) -> str:
        typed = str(self.cleaned_data["typed_name"])
        if typed != self.name:
            raise forms.ValidationError(f"The name does not match: {typed[:80]}")
        return typed
