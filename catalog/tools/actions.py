"""Writes to a tool that are an admin's own: overrides, holds, custom tools."""

import json
import re
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.definitions import ingest, public_names
from catalog.definitions.findings import Neighbours, findings_of
from catalog.definitions.parsing import Rejected, RemoteTool, read_tool
from catalog.models import CallPolicy, DefinitionChange, Revision, Tool
from toolcrib.lib.errors import Conflict, Invalid

UNKEEPABLE = re.compile(r"[\x00\ud800-\udfff]")


@transaction.atomic
def override_description(tool: Tool, text: str, *, actor: Actor) -> Tool:
    """Give agents this text instead of the server's; empty gives the server's again."""
    tool = lock_tool(tool)
    text = _sound(text)
    if len(text.encode()) > settings.MAX_DESCRIPTION_BYTES:
        raise Invalid(f"A description may have {settings.MAX_DESCRIPTION_BYTES // 1024} KB.")
    before, tool.description_override = tool.description_override, text
    if before != text:
        tool.save(update_fields=["description_override"])
        audit.record(
            actor,
            "tool.override",
            tool,
            before={"description": before},
            after={"description": text},
        )
        Revision.bump()
    return tool


@transaction.atomic
def hold(tool: Tool, reason: str, *, actor: Actor) -> Tool:
    """Stop every call to a tool until it is released."""
    tool = lock_tool(tool)
    if not tool.held_at:
        tool.held_at, tool.held_reason = timezone.now(), _sound(reason)[:500]
        tool.state = tool.settled_state()
        tool.save(update_fields=["held_at", "held_reason", "state"])
        audit.record(actor, "tool.hold", tool, after={"reason": tool.held_reason})
        Revision.bump()
    return tool


@transaction.atomic
def release(tool: Tool, *, actor: Actor) -> Tool:
    tool = lock_tool(tool)
    if tool.held_at:
        reason, tool.held_at, tool.held_reason = tool.held_reason, None, ""
        tool.state = tool.settled_state()
        tool.save(update_fields=["held_at", "held_reason", "state"])
        audit.record(actor, "tool.release", tool, before={"reason": reason})
        Revision.bump()
    return tool


@transaction.atomic
def set_call_policy(tool: Tool, policy: str, *, actor: Actor) -> Tool:
    tool = lock_tool(tool)
    if policy not in CallPolicy.values:
        raise Invalid("A call policy is allow or deny.")
    if tool.call_policy != policy:
        before, tool.call_policy = tool.call_policy, policy
        tool.save(update_fields=["call_policy"])
        audit.record(
            actor, "tool.policy", tool, before={"policy": before}, after={"policy": policy}
        )
        Revision.bump()
    return tool


def _sound(text: str) -> str:
    """Return the text without space around it, if a database can keep it."""
    if UNKEEPABLE.search(text):
        raise Invalid("A text cannot hold NUL or broken Unicode characters.", hint="Remove them.")
    return text.strip()


def from_any_shape(raw: object) -> dict[str, Any]:
    """Turn an MCP, OpenAI or Anthropic tool object into MCP's shape."""
    if not isinstance(raw, dict):
        raise Invalid("A tool is a JSON object.", hint="MCP, OpenAI and Anthropic shapes work.")
    given: dict[str, Any] = raw
    if given.get("type") == "function" and isinstance(given.get("function"), dict):
        given = given["function"]  # OpenAI chat completions
    schema_key = next(
        (key for key in ("inputSchema", "input_schema", "parameters") if key in given), None
    )
    if schema_key is None:
        raise Invalid(
            "The tool has no input schema.",
            hint="Put it under inputSchema (MCP), parameters (OpenAI) or input_schema (Anthropic).",
        )
    dropped = {"type", "strict", "input_schema", "parameters", "defer_loading", "cache_control"}
    tool = {key: value for key, value in given.items() if key not in dropped}
    schema = given[schema_key]
    if isinstance(schema, dict) and "type" not in schema:
        schema = {"type": "object", **schema}
    return tool | {"inputSchema": schema}


def _read(raw: object) -> RemoteTool:
    try:
        return read_tool(
            from_any_shape(raw),
            max_bytes=settings.MAX_DEFINITION_BYTES,
            max_description=settings.MAX_DESCRIPTION_BYTES,
        )
    except Rejected as error:
        raise Invalid(
            f"This tool cannot be used: {error}.", hint="Mend it and send it again."
        ) from error


def save_custom_tool(raw: object, *, actor: Actor, tool: Tool | None = None) -> Tool:
    """Add a tool that agents run themselves, or give one a new definition."""
    remote = _read(raw)
    public = public_names.public_name("", remote.name)
    if public in public_names.META_TOOLS:
        raise Conflict(f"{public} is the name of one of Toolcrib's own tools.", hint="Rename it.")
    if tool is not None and tool.name != remote.name:
        raise Invalid("A custom tool keeps its name.", hint="Add another one under the new name.")
    definition = ingest.store_definitions([remote])[remote.sha256]
    findings = [found.as_json() for found in findings_of(remote.tool, Neighbours())]
    try:
        with transaction.atomic():
            return _point(
                tool or Tool(name=remote.name, public_name=public), definition, findings, actor
            )
    except IntegrityError as error:
        raise Conflict(
            f"There is a tool called {public} already.", hint="Choose another name."
        ) from error


def _point(tool: Tool, definition: int, findings: list[dict[str, str]], actor: Actor) -> Tool:
    before, verb = tool.latest_id, "tool.custom.edit" if tool.pk else "tool.custom.add"
    if tool.pk and before == definition:
        return tool
    tool.latest_id = tool.approved_id = definition
    tool.findings = findings
    if before:
        tool.changed_at = timezone.now()
    tool.state = tool.settled_state()
    tool.save()
    if before:
        DefinitionChange.objects.create(
            tool=tool,
            before_id=before,
            after_id=definition,
            at=timezone.now(),
            outcome=DefinitionChange.Outcome.APPROVED,
            decided_by=actor.label[:200],
        )
    audit.record(actor, verb, tool)
    Revision.bump()
    return tool


@transaction.atomic
def delete_custom_tool(tool: Tool, *, actor: Actor) -> None:
    if tool.server_id is not None:
        raise Conflict(
            f"{tool.public_name} belongs to a server.",
            hint="Hold it, or remove it from the groups that have it.",
        )
    audit.record(actor, "tool.custom.delete", tool)
    tool.delete()
    Revision.bump()


def in_shape(tool: Mapping[str, Any], shape: str) -> dict[str, Any]:
    """Write an MCP tool object in another provider's shape."""
    if shape == "openai":
        return {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["inputSchema"],
            },
        }
    if shape == "anthropic":
        return {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "input_schema": tool["inputSchema"],
        }
    return dict(tool)


def parse_tool_text(text: str) -> object:
    """Read a pasted tool, with the place of the mistake in the error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Invalid(
            f"Line {error.lineno}, column {error.colno}: {error.msg}.", hint="Paste valid JSON."
        ) from error
    except RecursionError as error:
        raise Invalid("The JSON is nested too deep.") from error
    except ValueError as error:  # over 4,300 digits
        raise Invalid("The JSON holds a number that is far too long.") from error


def lock_tool(tool: Tool, sha256: str = "") -> Tool:
    """Read a tool again under a lock, to write a decision about it.

    With a digest, refuse if its latest definition is not the one that was looked at.
    """
    tool = (
        Tool.objects.select_for_update(of=("self",))
        .select_related("approved", "latest", "server")
        .get(pk=tool.pk)
    )
    if sha256 and (tool.latest is None or tool.latest.sha256 != sha256):
        raise Conflict(
            f"The definition of {tool.public_name} changed again after you looked at it.",
            hint="Reload to see the definition it has now.",
            code="changed_again",
        )
    return tool
