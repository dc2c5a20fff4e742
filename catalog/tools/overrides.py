"""Aliases of tools and overrides of their parameters, by admins."""

import json
import re
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction

from catalog import audit
from catalog.definitions import effective, public_names
from catalog.models import FormerName, GoldenQuery, Revision, Tool
from catalog.tools.actions import check_storable, lock_tool
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.payloads import check_value
from toolcrib.lib.roles import Actor

ALIAS = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FIELDS = frozenset({"description", "hidden", "fixed"})
MAX_BYTES = 32 * 1024  # of all overrides of a tool as JSON


def set_alias(tool: Tool, alias: str, *, actor: Actor) -> Tool:
    """Give a tool another public name; an empty one resets it. Earlier names stay accepted."""
    alias = alias.strip()
    if alias and not ALIAS.fullmatch(alias):
        raise Invalid(
            "An alias has 1 to 64 letters, digits, underscores and hyphens.",
            hint="Use only a-z, A-Z, 0-9, _ and -.",
        )
    if alias in public_names.META_TOOLS:
        raise Conflict(f"{alias} is the name of a built-in tool.", hint="Choose another name.")
    try:
        with transaction.atomic():
            return _rename(lock_tool(tool), alias, actor)
    except IntegrityError as error:
        raise _taken(alias) from error


def _rename(tool: Tool, alias: str, actor: Actor) -> Tool:
    original = tool.assigned_name or tool.public_name
    before, after = tool.public_name, alias or original
    if before == after:
        return tool
    others = Tool.objects.exclude(pk=tool.pk).filter(public_name=after)
    former = FormerName.objects.exclude(tool=tool).filter(name=after)
    if others.exists() or former.exists():
        raise _taken(after)
    FormerName.objects.filter(name=after).delete()  # of this tool
    FormerName.objects.create(tool=tool, name=before)
    tool.public_name = after
    tool.assigned_name = "" if after == original else original
    tool.save(update_fields=["public_name", "assigned_name"])
    for query in GoldenQuery.objects.select_for_update():
        if before in query.right:
            query.right = [after if name == before else name for name in query.right]
            query.save(update_fields=["right"])
    audit.record(actor, "tool.rename", tool, before={"name": before}, after={"name": after})
    Revision.bump()
    return tool


def _taken(name: str) -> Conflict:
    return Conflict(
        f"{name} is, or was, the name of another tool.",
        hint="Choose another name: agents may still use that one.",
    )


@transaction.atomic
def override_parameters(tool: Tool, overrides: object, *, actor: Actor) -> Tool:
    """Replace the overrides of a tool's parameters: description, hidden and fixed of each."""
    tool = lock_tool(tool)
    checked = _check(tool, overrides)
    if checked == tool.parameter_overrides and not tool.dropped_overrides:
        return tool
    before, tool.parameter_overrides = tool.parameter_overrides, checked
    tool.dropped_overrides = []  # seen and replaced
    effective.refresh(tool)
    tool.save(update_fields=effective.EFFECTIVE_FIELDS)
    if before != checked:
        states = {"before": {"parameters": before}, "after": {"parameters": checked}}
        audit.record(actor, "tool.parameters", tool, **states)
        Revision.bump()
    return tool


def _check(tool: Tool, overrides: object) -> dict[str, dict[str, Any]]:
    if not isinstance(overrides, dict) or not all(
        isinstance(row, dict) for row in overrides.values()
    ):
        raise Invalid(
            "parameters must be an object: by parameter, its description, hidden and fixed."
        )
    if tool.definition is None:
        if overrides:
            raise Invalid(f"{tool.public_name} has no valid definition yet.")
        return {}
    schema = tool.definition.input_schema
    checked = {name: _check_one(schema, name, row) for name, row in sorted(overrides.items())}
    checked = {name: row for name, row in checked.items() if row}
    if len(json.dumps(checked).encode()) > MAX_BYTES:
        raise Invalid(f"The overrides are over the limit of {MAX_BYTES // 1024} KB.")
    check_value(checked, "/parameters")
    return checked


def _check_one(schema: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    if name not in effective.properties_of(schema):
        known = ", ".join(effective.properties_of(schema)) or "none"
        raise Invalid(
            f"The tool has no parameter {name[:80]!r}.", hint=f"Its parameters: {known[:500]}."
        )
    if unknown := sorted(row.keys() - FIELDS):
        raise Invalid(
            f"Unknown override of {name}: {unknown[0][:40]}.",
            hint="A parameter has description, hidden and fixed.",
        )
    description, hidden = row.get("description", ""), row.get("hidden", False)
    if not isinstance(description, str) or not isinstance(hidden, bool):
        raise Invalid(f"{name}: description must be a text, hidden true or false.")
    if len(description.encode()) > settings.MAX_DESCRIPTION_BYTES:
        limit = settings.MAX_DESCRIPTION_BYTES // 1024
        raise Invalid(f"The description of {name} is over the limit of {limit} KB.")
    if hidden and "fixed" not in row and name in effective.required_of(schema):
        raise Invalid(
            f"{name} is required: hidden, it needs a fixed value.",
            hint="Set the value that Toolcrib puts in, or do not hide it.",
        )
    if "fixed" in row and not effective.fixed_value_fits(schema, name, row["fixed"]):
        raise Invalid(f"The fixed value of {name} does not match its schema.", hint="Correct it.")
    checked: dict[str, Any] = {}
    if text := check_storable(description):
        checked["description"] = text
    if hidden:
        checked["hidden"] = True
    if "fixed" in row:
        checked["fixed"] = row["fixed"]
    return checked
