"""Settings of a tool as one mapping: what `PATCH /tools/{name}` and configuration files contain.

`read` returns every setting, `change` writes those that are given, each by its own action.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction

from catalog.models import PayloadStorage, ReadOnly, Tool
from catalog.tools import actions, overrides
from toolcrib.lib.errors import Invalid
from toolcrib.lib.roles import Actor

DEFAULTS: dict[str, Any] = {
    "alias": "",
    "description": "",
    "parameters": {},  # overrides: description, hidden and fixed of each
    "access": "available",
    "reason": "",  # why it is hidden
    "payload_storage": PayloadStorage.DEFAULT.value,
    "read_only": ReadOnly.CLAIMED.value,
    "input_examples": [],
}


def find_by_name(names: Sequence[str]) -> dict[str, Tool]:
    """Return the tools that exist, by the name that was given."""
    return Tool.objects.with_definitions().by_name(names)


def read(tool: Tool) -> dict[str, Any]:
    return {
        "alias": tool.alias,
        "description": tool.description_override,
        "parameters": tool.parameter_overrides,
        "access": actions.access_of(tool).value,
        "reason": tool.held_reason if tool.held_at else "",
        "payload_storage": tool.payload_storage,
        "read_only": tool.read_only,
        "input_examples": tool.input_examples,
    }


def read_changed(tool: Tool) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    return {name: value for name, value in read(tool).items() if value != DEFAULTS[name]}


@transaction.atomic
def change(tool: Tool, values: Mapping[str, Any], *, actor: Actor) -> Tool:
    """Change the settings that are given."""
    if unknown := sorted(values.keys() - DEFAULTS.keys()):
        raise Invalid(f"Unknown tool setting: {unknown[0][:40]}.")
    if "alias" in values:
        overrides.set_alias(tool, values["alias"], actor=actor)
    if "parameters" in values:
        overrides.override_parameters(tool, values["parameters"], actor=actor)
    if "description" in values:
        actions.override_description(tool, values["description"], actor=actor)
    if "access" in values or "reason" in values:
        current = read(actions.lock_tool(tool))
        try:
            access = actions.Access(values.get("access", current["access"]))
        except ValueError as error:
            raise Invalid(f"access must be one of {', '.join(actions.Access)}.") from error
        reason = values.get("reason", current["reason"])
        if (access, reason) != (current["access"], current["reason"]):
            if access == actions.Access.HIDDEN:
                actions.release(tool, actor=actor)
            actions.set_access(tool, access, reason, actor=actor)
    if "payload_storage" in values:
        actions.set_payload_storage(tool, values["payload_storage"], actor=actor)
    if "read_only" in values:
        actions.set_read_only(tool, values["read_only"], actor=actor)
    if "input_examples" in values:
        actions.set_input_examples(tool, values["input_examples"], actor=actor)
    return actions.lock_tool(tool)
