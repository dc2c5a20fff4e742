"""Forms of the tool pages. Business rules are in `catalog.tools.actions`."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from django import forms
from django.http import QueryDict

from catalog.definitions.effective import properties_of, required_of
from catalog.models import CallPolicy, PayloadStorage, ReadOnly, Tool
from catalog.tools import actions as tool_actions
from catalog.tools.actions import Access
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.request import number as request_number
from toolcrib.lib.text import escape_hidden


class OverrideForm(forms.Form):
    description = forms.CharField(
        label="Description override",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 6, "spellcheck": "true"}),
        help_text="Replaces the original description for agents. Leave empty to use the original.",
    )


class ParametersForm(forms.Form):
    """The alias of a tool, and one row of fields for each of its parameters."""

    alias = forms.CharField(
        label="Alias",
        required=False,
        max_length=64,
        widget=forms.TextInput(attrs={"class": "mono", "autocomplete": "off"}),
        help_text="Replaces the public name for agents. Earlier names stay accepted. "
        "Leave empty to use the original.",
    )
    seen = forms.CharField(required=False, widget=forms.HiddenInput)  # the parameters shown

    def __init__(self, data: QueryDict | None = None, *, tool: Tool) -> None:
        schema = tool.definition.input_schema if tool.definition else {}
        self.properties = properties_of(schema)
        self.required_names = set(required_of(schema))
        self.overrides = tool.parameter_overrides
        self.names = sorted(self.properties)
        self.digest = digest(ascii(self.names))
        super().__init__(data, initial={"alias": tool.alias, "seen": self.digest})
        for number, name in enumerate(self.names):
            override = self.overrides.get(name, {})
            for kind, one in self._fields(name).items():
                self.fields[f"{kind}_{number}"] = one
            self.initial[f"description_{number}"] = override.get("description", "")
            self.initial[f"hidden_{number}"] = override.get("hidden", False)
            if "fixed" in override:
                self.initial[f"fixed_{number}"] = self._show(name, override["fixed"])

    def _fields(self, name: str) -> dict[str, forms.Field]:
        name = escape_hidden(name)
        return {
            "description": forms.CharField(
                label=f"Description of {name}", required=False, widget=forms.TextInput
            ),
            "hidden": forms.BooleanField(label=f"Hide {name}", required=False),
            "fixed": forms.CharField(
                label=f"Fixed value of {name}",
                required=False,
                widget=forms.TextInput(attrs={"class": "mono", "autocomplete": "off"}),
            ),
        }

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        for number, name in enumerate(self.names):
            sub = self.properties[name] if isinstance(self.properties[name], dict) else {}
            fields = {kind: self[f"{kind}_{number}"] for kind in ("description", "hidden", "fixed")}
            description = str(sub.get("description") or "")
            is_required = name in self.required_names
            yield {"name": name, "text": description, "is_required": is_required, **fields}

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        if values.get("seen") != self.digest:
            raise forms.ValidationError("The parameters have changed. Check them, and save again.")
        values["parameters"] = {
            name: row for number, name in enumerate(self.names) if (row := self._read(number, name))
        }
        return values

    def _read(self, number: int, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if text := self.cleaned_data.get(f"description_{number}"):
            row["description"] = text
        if self.cleaned_data.get(f"hidden_{number}"):
            row["hidden"] = True
        if fixed := self.cleaned_data.get(f"fixed_{number}"):
            row["fixed"] = self._parse(number, name, fixed)
        return row

    def _takes_text(self, name: str) -> bool:
        sub = self.properties[name]
        return isinstance(sub, dict) and sub.get("type") == "string"

    def _parse(self, number: int, name: str, text: str) -> object:
        """Return the value: text as it is for a text parameter, otherwise JSON."""
        if self._takes_text(name) and not text.startswith('"'):
            return text
        try:
            return tool_actions.parse_tool_text(text)
        except ToolcribError as error:
            self.add_error(f"fixed_{number}", f"Enter a JSON value. {error.message}")
            return None

    def _show(self, name: str, value: object) -> str:
        is_plain = isinstance(value, str) and value and not value.startswith('"')
        return str(value) if is_plain and self._takes_text(name) else canonical(value)


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


ACCESS_LABELS = {
    Access.AVAILABLE: "Available: agents can find and call it",
    Access.BLOCKED: "Visible but blocked: agents can find it, but calls are refused",
    Access.HIDDEN: "Hidden: agents can neither find nor call it",
}


class AccessForm(HoldForm):
    access = forms.ChoiceField(
        label="Access", choices=list(ACCESS_LABELS.items()), widget=forms.RadioSelect
    )
    field_order = ["access", "reason"]

    def __init__(self, *args: Any, tool: Tool, may_change_policy: bool, **kwargs: Any) -> None:
        """Offer operators what does not change the call policy, which admins set."""
        super().__init__(*args, **kwargs)
        self.fields["reason"].label = "Reason for hiding it"
        if not may_change_policy:
            other = Access.AVAILABLE if tool.call_policy == CallPolicy.DENY else Access.BLOCKED
            offered = [(one, label) for one, label in ACCESS_LABELS.items() if one != other]
            cast(forms.ChoiceField, self.fields["access"]).choices = offered


class PolicyForm(forms.Form):
    policy = forms.ChoiceField(
        label="Calls to this tool",
        choices=[
            (CallPolicy.ALLOW, "Allow"),
            (CallPolicy.DENY, "Deny: agents can find it, but calls fail"),
        ],
        widget=forms.RadioSelect,
    )


class StorageForm(forms.Form):
    storage = forms.ChoiceField(
        label="Arguments and results",
        choices=PayloadStorage.choices,
        help_text="Of future calls. If the agent has a stricter setting, that one counts.",
    )


class ReadOnlyForm(forms.Form):
    read_only = forms.ChoiceField(
        label="Effect of a call",
        choices=ReadOnly.choices,
        help_text="call_read_only_tool runs only tools that only read. Clients may allow it "
        "without asking.",
    )


class ExamplesForm(forms.Form):
    examples = forms.CharField(
        label="Example arguments",
        required=False,
        strip=True,
        widget=forms.Textarea(
            attrs={"rows": 6, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
        ),
        help_text="A JSON list of objects, each the arguments of a call. Agents get them with the "
        "definition. Empty: those of the definition, if it has any.",
    )

    def clean_examples(self) -> object:
        try:
            return tool_actions.parse_tool_text(self.cleaned_data["examples"] or "[]")
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error


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


PARAMETER_TYPES = {
    "string": "Text",
    "integer": "Whole number",
    "number": "Number",
    "boolean": "Yes or no",
    "array": "List of texts",
}
NEW_ROWS = 3  # empty rows for parameters; a button adds as many
MAX_ROWS = 50
MAX_PARAMETER_NAME = 200


def _schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("inputSchema")
    return schema if isinstance(schema, dict) else {}


class CustomToolFields(forms.Form):
    """A custom tool as fields: name, description and one row for each parameter."""

    name = forms.CharField(
        max_length=64,
        widget=forms.TextInput(attrs={"class": "mono", "autocomplete": "off"}),
        help_text="Letters, digits, _ and -.",
    )
    description = forms.CharField(
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="What the tool does and when to use it. Agents search by it.",
    )
    rows = forms.IntegerField(
        min_value=0, max_value=MAX_ROWS, required=False, widget=forms.HiddenInput
    )

    def __init__(
        self, data: QueryDict | None = None, *, tool: Mapping[str, Any], more: bool = False
    ) -> None:
        """With `more`, show what was entered with more rows, and check nothing yet."""
        initial = data.dict() if data and more else self._initial(tool)
        given = request_number(data, "rows") if data else len(properties_of(_schema_of(tool)))
        self.count = min(given + (0 if data and not more else NEW_ROWS), MAX_ROWS)
        super().__init__(None if more else data, initial={**initial, "rows": self.count})
        for at in range(self.count):
            self.fields |= self._row(at)

    def _initial(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        schema = _schema_of(tool)
        values = {name: tool.get(name, "") for name in ("name", "description")}
        for at, (name, field) in enumerate(properties_of(schema).items()):
            values |= {
                f"name_{at}": name,
                f"type_{at}": field["type"],
                f"required_{at}": name in required_of(schema),
                f"description_{at}": field.get("description", ""),
            }
        return values

    def _row(self, at: int) -> dict[str, forms.Field]:
        nth = at + 1
        mono = forms.TextInput(attrs={"class": "mono", "autocomplete": "off"})
        return {
            f"name_{at}": forms.CharField(
                label=f"Name of parameter {nth}",
                required=False,
                max_length=MAX_PARAMETER_NAME,
                widget=mono,
            ),
            f"type_{at}": forms.ChoiceField(
                label=f"Type of parameter {nth}", required=False, choices=PARAMETER_TYPES.items()
            ),
            f"required_{at}": forms.BooleanField(label=f"Require parameter {nth}", required=False),
            f"description_{at}": forms.CharField(
                label=f"Description of parameter {nth}", required=False, widget=forms.TextInput
            ),
        }

    @property
    def parameters(self) -> Iterator[dict[str, forms.BoundField]]:
        for at in range(self.count):
            yield {
                kind: self[f"{kind}_{at}"] for kind in ("name", "type", "required", "description")
            }

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        properties: dict[str, dict[str, object]] = {}
        required = []
        for at in range(self.count):
            name, description = values.get(f"name_{at}"), values.get(f"description_{at}")
            if not name:
                if description:
                    self.add_error(f"name_{at}", "Name this parameter, or clear its description.")
                continue
            if name in properties:
                self.add_error(f"name_{at}", f"There are two parameters {name}.")
            kind = values.get(f"type_{at}") or "string"
            properties[name] = {"type": kind}
            if kind == "array":
                properties[name]["items"] = {"type": "string"}
            if description:
                properties[name]["description"] = description
            if values.get(f"required_{at}"):
                required.append(name)
        schema = {"type": "object", "properties": properties}
        values["definition"] = {
            "name": values.get("name"),
            "description": values.get("description"),
            "inputSchema": {**schema, "required": required} if required else schema,
        }
        return values

    @staticmethod
    def represents(tool: Mapping[str, Any]) -> bool:
        """Return whether the fields can show all of a definition."""
        schema = _schema_of(tool)
        if not tool.keys() <= {"name", "description", "inputSchema"}:
            return False
        if not schema.keys() <= {"type", "properties", "required"}:
            return False
        return len(properties_of(schema)) <= MAX_ROWS - NEW_ROWS and all(
            isinstance(field, dict)
            and field.keys() <= {"type", "description", "items"}
            and field.get("type") in list(PARAMETER_TYPES)
            and isinstance(field.get("description", ""), str)
            and (name == name.strip() and 0 < len(name) <= MAX_PARAMETER_NAME)
            and ("items" in field) == (field["type"] == "array")
            and field.get("items", {"type": "string"}) == {"type": "string"}
            for name, field in properties_of(schema).items()
        )


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
