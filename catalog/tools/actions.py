"""Changes to tools by admins: description overrides, hiding, call policy, custom tools."""

import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from catalog import audit
from catalog.definitions import effective, public_names, storage
from catalog.definitions.findings import KnownNames, definition_findings
from catalog.definitions.parsing import Rejected, read_tool
from catalog.definitions.validation import MAX_EXAMPLES, Validator
from catalog.models import (
    CallPolicy,
    DefinitionChange,
    FormerName,
    PayloadStorage,
    ReadOnly,
    Revision,
    Tool,
)
from catalog.rendering import described_with_examples
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.roles import Actor

CUSTOM_TOOL_FIELDS = frozenset(
    {"name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta", "icons"}
    | {"execution", "input_examples"}
)
# Of a provider's format; they say nothing about the tool itself.
PROVIDER_FIELDS = frozenset(
    {"type", "strict", "input_schema", "parameters", "defer_loading", "cache_control"}
)
MAX_EXAMPLE_BYTES = 16 * 1024
UNSTORABLE_CHARACTERS = re.compile(r"[\x00\ud800-\udfff]")


@transaction.atomic
def override_description(tool: Tool, text: str, *, actor: Actor) -> Tool:
    """Replace the server's description for agents; an empty text resets it."""
    tool = lock_tool(tool)
    text = check_storable(text)
    if len(text.encode()) > settings.MAX_DESCRIPTION_BYTES:
        raise Invalid(
            f"The description is over the limit of {settings.MAX_DESCRIPTION_BYTES // 1024} KB.",
            hint="Shorten it.",
        )
    before, tool.description_override = tool.description_override, text
    if before != text:
        effective.refresh(tool)
        tool.save(update_fields=["description_override", *effective.EFFECTIVE_FIELDS])
        states = {"before": {"description": before}, "after": {"description": text}}
        audit.record(actor, "tool.override", tool, **states)
        Revision.bump()
    return tool


@transaction.atomic
def hold(tool: Tool, reason: str, *, actor: Actor) -> Tool:
    """Hide a tool from agents (state `held`) and reject calls to it until it is released."""
    tool = lock_tool(tool)
    if not tool.held_at:
        tool.held_at, tool.held_reason = timezone.now(), check_storable(reason)[:500]
        tool.state = tool.derive_state()
        tool.save(update_fields=["held_at", "held_reason", "state"])
        audit.record(actor, "tool.hold", tool, after={"reason": tool.held_reason})
        Revision.bump()
    return tool


@transaction.atomic
def release(tool: Tool, *, actor: Actor) -> Tool:
    tool = lock_tool(tool)
    if tool.held_at:
        reason, tool.held_at, tool.held_reason = tool.held_reason, None, ""
        tool.state = tool.derive_state()
        tool.save(update_fields=["held_at", "held_reason", "state"])
        audit.record(actor, "tool.release", tool, before={"reason": reason})
        Revision.bump()
    return tool


class Access(StrEnum):
    """Whether agents find and call a tool: one control for the call policy and for hiding."""

    AVAILABLE = "available"
    BLOCKED = "blocked"  # visible, but calls are refused: call_policy deny
    HIDDEN = "hidden"  # neither found nor called: state held


def access_of(tool: Tool) -> Access:
    if tool.held_at:
        return Access.HIDDEN
    return Access.BLOCKED if tool.call_policy == CallPolicy.DENY else Access.AVAILABLE


@transaction.atomic
def set_access(tool: Tool, access: Access, reason: str, *, actor: Actor) -> Tool:
    if access == Access.HIDDEN:
        return hold(tool, reason, actor=actor)
    policy = CallPolicy.DENY if access == Access.BLOCKED else CallPolicy.ALLOW
    return set_call_policy(release(tool, actor=actor), policy, actor=actor)


@transaction.atomic
def set_call_policy(tool: Tool, policy: str, *, actor: Actor) -> Tool:
    tool = lock_tool(tool)
    if policy not in CallPolicy.values:
        raise Invalid("The call policy must be allow or deny.")
    if tool.call_policy != policy:
        states = {"before": {"policy": tool.call_policy}, "after": {"policy": policy}}
        tool.call_policy = policy
        tool.save(update_fields=["call_policy"])
        audit.record(actor, "tool.policy", tool, **states)
        Revision.bump()
    return tool


@transaction.atomic
def set_payload_storage(tool: Tool, storage: str, *, actor: Actor) -> Tool:
    """Set what is stored of the arguments and results of future calls to a tool."""
    tool = lock_tool(tool)
    if storage not in PayloadStorage.values:
        raise Invalid(f"The payload storage must be one of {', '.join(PayloadStorage.values)}.")
    if tool.payload_storage != storage:
        states = {"before": {"storage": tool.payload_storage}, "after": {"storage": storage}}
        tool.payload_storage = storage
        tool.save(update_fields=["payload_storage"])
        audit.record(actor, "tool.storage", tool, **states)
        Revision.bump()
    return tool


@transaction.atomic
def set_read_only(tool: Tool, read_only: str, *, actor: Actor) -> Tool:
    """Overrule the server's claim that a tool only reads, or follow it again."""
    tool = lock_tool(tool)
    if read_only not in ReadOnly.values:
        raise Invalid(f"read_only must be one of {', '.join(ReadOnly.values)}.")
    if tool.read_only != read_only:
        states = {"before": {"read_only": tool.read_only}, "after": {"read_only": read_only}}
        tool.read_only = read_only
        tool.save(update_fields=["read_only"])
        audit.record(actor, "tool.read_only", tool, **states)
        Revision.bump()
    return tool


@transaction.atomic
def set_input_examples(tool: Tool, examples: object, *, actor: Actor) -> Tool:
    """Set example arguments, which agents get with the definition; each must fit its schema."""
    tool = lock_tool(tool)
    checked = _check_examples(tool, examples)
    if tool.input_examples != checked:
        states = {"before": {"examples": tool.input_examples}, "after": {"examples": checked}}
        tool.input_examples = checked
        tool.save(update_fields=["input_examples"])
        audit.record(actor, "tool.examples", tool, **states)
        Revision.bump()
    return tool


def _check_examples(tool: Tool, examples: object) -> list[dict[str, Any]]:
    if not isinstance(examples, list) or not all(isinstance(item, dict) for item in examples):
        raise Invalid("input_examples must be a list of objects, each the arguments of a call.")
    if len(examples) > MAX_EXAMPLES or len(json.dumps(examples)) > MAX_EXAMPLE_BYTES:
        raise Invalid(
            f"A tool has at most {MAX_EXAMPLES} input examples, of "
            f"{MAX_EXAMPLE_BYTES // 1024} KB together.",
            hint="Keep the most telling ones.",
        )
    if UNSTORABLE_CHARACTERS.search(json.dumps(examples, ensure_ascii=False)):
        raise Invalid("An input example contains NUL or invalid Unicode characters.")
    validator = Validator(tool.served.input_schema) if tool.served and examples else None
    for number, example in enumerate(examples, 1):
        if validator and not (validator.can_check(example) and not validator.problems(example)):
            raise Invalid(
                f"Input example {number} does not fit the tool's input schema.",
                hint="Correct it, or remove it.",
            )
    return examples


def check_storable(text: str, noun: str = "Text") -> str:
    """Return the text without surrounding spaces; raise Invalid if PostgreSQL cannot store it."""
    if UNSTORABLE_CHARACTERS.search(text):
        message = f"{noun} cannot contain NUL or invalid Unicode characters."
        raise Invalid(message, hint="Remove them.")
    return text.strip()


def normalize_tool(raw: object) -> dict[str, Any]:
    """Convert a tool object in MCP, OpenAI or Anthropic format to MCP format."""
    if not isinstance(raw, dict):
        raise Invalid(
            "A tool must be a JSON object.", hint="Use the MCP, OpenAI or Anthropic format."
        )
    source: dict[str, Any] = raw
    if source.get("type") == "function" and isinstance(source.get("function"), dict):
        source = source["function"]  # OpenAI chat completions
    schema_key = next(
        (key for key in ("inputSchema", "input_schema", "parameters") if key in source), None
    )
    if schema_key is None:
        raise Invalid(
            "The tool has no input schema.",
            hint="Put it under inputSchema (MCP), parameters (OpenAI) or input_schema (Anthropic).",
        )
    wrapper = set(raw) - {"type", "function"} if source is not raw else set()
    if unknown := sorted(wrapper | (source.keys() - CUSTOM_TOOL_FIELDS - PROVIDER_FIELDS)):
        raise Invalid(
            f"Unknown fields of a tool: {', '.join(name[:40] for name in unknown[:5])}.",
            hint=f"A tool has {', '.join(sorted(CUSTOM_TOOL_FIELDS))}.",
        )
    tool = {key: value for key, value in source.items() if key not in PROVIDER_FIELDS}
    schema = source[schema_key]
    if isinstance(schema, dict) and "type" not in schema:
        schema = {"type": "object", **schema}
    return tool | {"inputSchema": schema}


def save_custom_tool(raw: object, *, actor: Actor, tool: Tool | None = None) -> Tool:
    """Create a custom tool, or replace the definition of an existing one."""
    limits = settings.MAX_DEFINITION_BYTES, settings.MAX_DESCRIPTION_BYTES
    try:
        remote = read_tool(normalize_tool(raw), *limits)
    except Rejected as error:
        raise Invalid(
            f"The tool is invalid: {error}.", hint="Correct the definition and retry."
        ) from error
    public = tool.public_name if tool else _new_public_name(remote.name)
    if public in public_names.META_TOOLS:
        raise Conflict(f"{public} is the name of a built-in tool.", hint="Choose another name.")
    if tool is None and FormerName.objects.filter(name=public).exists():
        raise Conflict(f"A tool was called {public} before.", hint="Choose another name.")
    if tool is not None and tool.name != remote.name:
        raise Invalid(
            "A custom tool cannot be renamed.", hint="Create a new tool with the new name."
        )
    definition = storage.store_definitions([remote])[remote.sha256]
    findings = [finding._asdict() for finding in definition_findings(remote.tool, KnownNames())]
    try:
        with transaction.atomic():
            return _set_definition(
                tool or Tool(name=remote.name, public_name=public), definition, findings, actor
            )
    except IntegrityError as error:
        raise Conflict(
            f"A tool called {public} already exists.", hint="Choose another name."
        ) from error


def _new_public_name(name: str) -> str:
    """Return the public name of a custom tool; `é` and `ü` both become `_`, so one gets a hash."""
    public = public_names.public_name("", name)
    is_changed = public != name
    if is_changed and Tool.objects.filter(public_name=public).exclude(name=name).exists():
        return public_names.public_name("", name, hashed=True)
    return public


def _set_definition(
    tool: Tool, definition: int, findings: list[dict[str, str]], actor: Actor
) -> Tool:
    before, verb = tool.latest_id, "tool.custom.edit" if tool.pk else "tool.custom.add"
    if tool.pk and before == definition:
        return tool
    tool.latest_id = tool.approved_id = definition
    tool.findings = findings
    if before:
        tool.changed_at = timezone.now()
    tool.state = tool.derive_state()
    if tool.is_overridden:
        effective.refresh(tool)
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
            hint="Hide it, or remove it from its groups.",
        )
    audit.record(actor, "tool.custom.delete", tool)
    tool.delete()
    Revision.bump()


def to_provider_format(
    tool: Mapping[str, Any], shape: str, examples: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Convert an MCP tool object to the format of a provider: mcp, openai or anthropic."""
    fields = {"name": tool["name"], "description": tool.get("description", "")}
    examples = list(examples or tool.get("input_examples", ()))
    if shape == "openai":
        fields["description"] = described_with_examples({**fields, "input_examples": examples})
        return {"type": "function", "function": fields | {"parameters": tool["inputSchema"]}}
    if shape == "anthropic":
        more = {"input_examples": examples} if examples else {}
        return fields | {"input_schema": tool["inputSchema"]} | more
    return dict(tool)


def parse_tool_text(text: str) -> object:
    """Parse pasted JSON; errors give the line and column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Invalid(
            f"Line {error.lineno}, column {error.colno}: {error.msg}.", hint="Paste valid JSON."
        ) from error
    except RecursionError as error:
        raise Invalid("The JSON is nested too deep.") from error
    except ValueError as error:  # an integer of over 4,300 digits
        raise Invalid("The JSON contains a number that is too long.") from error


def lock_tool(tool: Tool, sha256: str = "") -> Tool:
    """Reload a tool with a row lock; raise Conflict if its latest digest is not `sha256`."""
    tool = Tool.objects.select_for_update(of=("self",)).with_definitions().get(pk=tool.pk)
    if sha256 and (tool.latest is None or tool.latest.sha256 != sha256):
        raise Conflict(
            f"The definition of {tool.public_name} changed again since you viewed it.",
            hint="Reload to see the current definition.",
            code="changed_again",
        )
    return tool
