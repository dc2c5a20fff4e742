"""Effective definitions: what agents get of a tool whose texts or parameters an admin overrides.

An effective definition is stored like any other, so that sessions pin it, calls refer to it and
its tokens and search text are its own.
"""

from collections.abc import Mapping
from typing import Any

from django.utils import timezone

from catalog import audit
from catalog.definitions.parsing import RemoteTool
from catalog.definitions.storage import store_definitions
from catalog.definitions.validation import Validator
from catalog.models import Definition, Tool
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.roles import SYSTEM

MAX_DROPPED = 20
# Conditions over several parameters. Those that name an overridden one are left out for agents;
# the approved definition, by which the complete arguments are validated, has them.
CONDITIONS = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
    | {"dependentRequired", "dependentSchemas", "dependencies"}
)
Overrides = Mapping[str, Mapping[str, Any]]  # by parameter: description, hidden, fixed


def derive(tool: Mapping[str, Any], description: str, parameters: Overrides) -> dict[str, Any]:
    """Return the tool object as agents get it. Pure."""
    effective = dict(tool)
    if description:
        effective["description"] = description
    if parameters:
        effective["inputSchema"] = _override_schema(tool["inputSchema"], parameters)
    return effective


def _override_schema(schema: Mapping[str, Any], parameters: Overrides) -> dict[str, Any]:
    hidden = {name for name, override in parameters.items() if override.get("hidden")}
    given = hidden | {name for name, override in parameters.items() if "fixed" in override}
    changed = {
        key: value
        for key, value in schema.items()
        if key not in CONDITIONS or not any(canonical(name) in canonical(value) for name in given)
    }
    if changed.keys() & {"then", "else"} and "if" not in changed:
        changed = {key: value for key, value in changed.items() if key not in ("then", "else")}
    changed["properties"] = {
        name: _override_property(sub, parameters[name]) if name in parameters else sub
        for name, sub in properties_of(schema).items()
        if name not in hidden
    }
    changed["required"] = [name for name in required_of(schema) if name not in given]
    if not changed["required"]:
        del changed["required"]
    return changed


def _override_property(sub: object, override: Mapping[str, Any]) -> object:
    changed = dict(sub) if isinstance(sub, dict) else {}
    if text := override.get("description"):
        changed["description"] = text
    if "fixed" in override:
        changed["const"] = override["fixed"]
    return changed


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a tool that can be overridden: the properties of its schema."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def fixed_value_fits(schema: Mapping[str, Any], name: str, value: object) -> bool:
    """Return whether a parameter may have a value, as far as its own schema says."""
    definitions = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    only = Validator({**definitions, "properties": {name: properties_of(schema)[name]}})
    return only.can_check({name: value}) and not only.problems({name: value})


def refresh(tool: Tool) -> None:
    """Derive the effective definition again, after its origin or the overrides changed.

    Overrides of parameters that the approved definition no longer has are dropped and recorded.
    Saves nothing of the tool: `EFFECTIVE_FIELDS` are to be saved.
    """
    approved = Definition.objects.get(pk=tool.approved_id) if tool.approved_id else None
    if approved is None:
        tool.effective_id = None
        return
    _drop_unfit(tool, approved)
    effective = derive(approved.tool, tool.description_override, tool.parameter_overrides)
    body = canonical(effective)
    sha256 = digest(body)
    if sha256 == approved.sha256:
        tool.effective_id = None
        return
    stored = store_definitions([RemoteTool(approved.name, body, sha256, effective)])
    tool.effective_id = stored[sha256]


EFFECTIVE_FIELDS = ("effective", "parameter_overrides", "dropped_overrides")


def restore_dropped(tool: Tool, definition: Definition) -> None:
    """Take back the overrides that the approval of a definition dropped, unless set since.

    Saves nothing, as `refresh`, which is to follow.
    """
    rows = [row for row in tool.dropped_overrides if row.get("definition") == definition.sha256]
    dropped = {row["parameter"]: row["override"] for row in rows}
    tool.parameter_overrides = dict(sorted({**dropped, **tool.parameter_overrides}.items()))
    tool.dropped_overrides = [row for row in tool.dropped_overrides if row not in rows]


def unfit_values(tool: Tool) -> list[str]:
    """Return the parameters whose fixed value the approved definition does not allow."""
    if tool.approved is None:
        return []
    schema = tool.approved.input_schema
    return [
        name
        for name, override in tool.parameter_overrides.items()
        if "fixed" in override
        and name in properties_of(schema)
        and not fixed_value_fits(schema, name, override["fixed"])
    ]


def _drop_unfit(tool: Tool, approved: Definition) -> None:
    dropped = {
        name: reason
        for name, override in tool.parameter_overrides.items()
        if (reason := _misfit(approved.input_schema, name, override))
    }
    if not dropped:
        return
    before = dict(tool.parameter_overrides)
    tool.parameter_overrides = {name: before[name] for name in before if name not in dropped}
    at = timezone.now().isoformat()
    by = {"at": at, "definition": approved.sha256}
    rows = [
        {"parameter": name, "override": before[name], "reason": reason, **by}
        for name, reason in dropped.items()
    ]
    tool.dropped_overrides = [*rows, *tool.dropped_overrides][:MAX_DROPPED]
    states = {
        "before": {"parameters": {name: before[name] for name in dropped}},
        "after": {"dropped": dropped},
    }
    audit.record(SYSTEM, "tool.override.drop", tool, **states)


def _misfit(schema: Mapping[str, Any], name: str, override: Mapping[str, Any]) -> str:
    if name not in properties_of(schema):
        return "The approved definition no longer has this parameter."
    if override.get("hidden") and "fixed" not in override and name in required_of(schema):
        return "The parameter is required now, and the override hid it without a fixed value."
    return ""
