"""Read an mcp.json, as Claude, VS Code or Cursor keep it, into drafts of servers.

Pure: no Django, no network, no file; nothing is saved or started. One bad server never affects
the others. No message repeats a value of the text, since any value may be a secret.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from servers.mcp_json.entry import Drafting, Refused
from servers.mcp_json.exporter import ExportRow, export_mcp_json
from servers.mcp_json.jsonc import JsonMap, NotJson, read
from servers.mcp_json.placeholders import References
from servers.registration.drafts import (
    ImportCheck,
    Problem,
    ServerDraft,
    slug_of,
    target_of,
    target_string,
)
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_ambiguous

__all__ = [
    "ExportRow",
    "ImportCheck",
    "Problem",
    "ServerDraft",
    "export_mcp_json",
    "parse_mcp_json",
    "slug_of",
    "target_of",
    "target_string",
]

MAX_BYTES = 1024 * 1024
MAX_SERVERS = 200

_NONE: Mapping[str, str] = MappingProxyType({})
_EXAMPLE = 'Paste a text like {"mcpServers": {"github": {"url": "https://…"}}}.'
_SERVER_FIELDS = ("command", "url", "serverUrl", "httpUrl")


def parse_mcp_json(
    text: str,
    *,
    variables: Mapping[str, str],
    allow_http: bool,
    taken_slugs: Collection[str] = (),
    existing: Mapping[str, str] = _NONE,
) -> ImportCheck:
    """Read every server of the text. Never raises: what is wrong comes back as a `Problem`.

    `existing` maps the `target_string` of each server already here to its slug.
    """
    try:
        document = _document(text)
    except NotJson as error:
        return ImportCheck("", problems=(Problem("", "not_json", str(error), _hint(text)),))
    except Refused as refused:
        return ImportCheck("", problems=(Problem("", refused.code, str(refused), refused.hint),))
    shape, entries, problems = _entries(document)
    if not entries and not problems:
        problems.append(Problem("", "no_servers", "The text names no server.", _EXAMPLE))
    if len(entries) > MAX_SERVERS:
        message = f"The text names {len(entries):,} servers; only the first {MAX_SERVERS} are read."
        problems.append(Problem("", "too_many", message, "Import the others on their own."))
    inputs, input_defaults = _inputs(document)
    references = References(variables, input_defaults)
    named = tuple(
        MappingProxyType({**item, "name": references.name_of("input", str(item["id"]))})
        for item in inputs
    )
    drafting = Drafting(references, allow_http=allow_http)
    drafts, refusals = _drafts(entries[:MAX_SERVERS], drafting, set(taken_slugs), dict(existing))
    return ImportCheck(shape, tuple(drafts), (*problems, *refusals), named)


def _document(text: str) -> JsonMap:
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise Refused("The text is larger than 1 MiB.", "Import its servers in parts.", "too_large")
    try:
        document = read(text)
    except NotJson:
        # Many a README shows only `"name": {…}`, the lines to put into a file.
        if not text.lstrip("\ufeff \t\r\n").startswith('"'):
            raise
        try:
            document = read("{" + text.removeprefix("\ufeff") + "}")
        except NotJson:
            document = read(text)  # the error as the text stands
    if not isinstance(document, JsonMap):
        raise Refused("The text is JSON, but not an object in braces.", _EXAMPLE, "not_servers")
    return document


def _hint(text: str) -> str:
    return "Correct the text there and check again." if text.strip() else _EXAMPLE


def _entries(document: JsonMap) -> tuple[str, list[tuple[str, object]], list[Problem]]:
    """Find the servers in whatever shape the document has."""
    if any(isinstance(document.get(field), str) for field in _SERVER_FIELDS):
        name = document.get("name")
        return "single", [(name if isinstance(name, str) else "server", document)], []
    nested = document.get("mcp")
    holders = [document, *([nested] if isinstance(nested, JsonMap) else [])]
    shape = ""
    entries: list[tuple[str, object]] = []
    problems: list[Problem] = []
    for holder in holders:
        problems += [_twice(key, line) for key, line in holder.repeated]
        for field in ("mcpServers", "servers"):
            if field not in holder:
                continue
            servers = holder[field]
            if not isinstance(servers, JsonMap):
                message = f"{field} must be an object that maps names to servers."
                problems.append(Problem("", "not_servers", message, _EXAMPLE))
                continue
            shape = shape or ("vscode" if field == "servers" else _dialect(servers))
            entries += servers.items()
            problems += [_twice(key, line) for key, line in servers.repeated]
    if not shape and not problems and _is_bare_map(document):
        return "map", [(n, s) for n, s in document.items() if isinstance(s, JsonMap)], []
    if not shape and not problems and document:
        message = "The text is JSON, but no servers were found in it."
        problems.append(Problem("", "not_servers", message, _EXAMPLE))
    return shape, entries, problems


def _twice(key: str, line: int) -> Problem:
    message = f"The name stands twice; the second, on line {line}, was not read."
    hint = "Give each server a name of its own."
    return Problem(escape_ambiguous(key)[:120], "duplicate_key", message, hint)


def _dialect(servers: JsonMap) -> str:
    """Tell Cursor's files from Claude's: an address without a type, and ${env:…}."""
    for server in servers.values():
        if isinstance(server, JsonMap):
            untyped = "url" in server and "type" not in server and "transport" not in server
            if untyped or "${env:" in repr(server) or "envFile" in server:
                return "cursor"
    return "claude"


def _is_bare_map(document: JsonMap) -> bool:
    return any(
        isinstance(server, JsonMap) and any(field in server for field in _SERVER_FIELDS)
        for server in document.values()
    )


def _inputs(document: JsonMap) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Read VS Code's `inputs`: what a person is asked for, and defaults where it has them."""
    nested = document.get("mcp")
    raw = document.get("inputs", nested.get("inputs") if isinstance(nested, JsonMap) else None)
    inputs: dict[str, dict[str, object]] = {}
    defaults: dict[str, str] = {}
    for item in raw if isinstance(raw, list) else []:
        if not isinstance(item, JsonMap):
            continue
        key = item.get("id")
        if not isinstance(key, str) or not key or key in inputs or len(inputs) >= MAX_SERVERS:
            continue
        description, default = item.get("description"), item.get("default")
        inputs[key] = {
            "id": key,
            "description": description[:500] if isinstance(description, str) else "",
            "password": item.get("password") is True,
        }
        if isinstance(default, str) and default:
            defaults[key] = default
    return list(inputs.values()), defaults


def _drafts(
    entries: list[tuple[str, object]],
    drafting: Drafting,
    taken: set[str],
    targets: dict[str, str],
) -> tuple[list[ServerDraft], list[Problem]]:
    drafts: list[ServerDraft] = []
    problems: list[Problem] = []
    for name, entry in entries:
        slug = slug_of(name, taken)
        shown = escape_ambiguous(name)[:120]
        try:
            draft = drafting.draft(name, slug, entry, targets)
        except Refused as refused:
            problems.append(Problem(shown, refused.code, str(refused), refused.hint))
        except Invalid as invalid:
            problems.append(Problem(shown, invalid.code, invalid.message, invalid.hint))
        else:
            drafts.append(draft)
            taken.add(slug)
            targets.setdefault(target_of(draft), slug)
    return drafts, problems
