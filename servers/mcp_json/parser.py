"""Parser for mcp.json files in the formats of Claude, VS Code and Cursor.

Pure: no Django, no network, no files; saves and starts nothing. An invalid server never affects
the others. No message repeats a value of the text, because any value may be a secret.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from servers.mcp_json.entry import EntryError, parse_entry
from servers.mcp_json.jsonc import JsonMap, NotJson, parse
from servers.mcp_json.placeholders import References
from servers.registration.drafts import ImportCheck, Problem, ServerDraft, make_slug
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_ambiguous

MAX_BYTES = 1024 * 1024
MAX_SERVERS = 200

_EMPTY: Mapping[str, str] = MappingProxyType({})
_EXAMPLE = 'Example: {"mcpServers": {"github": {"url": "https://…"}}}.'
_SERVER_FIELDS = ("command", "url", "serverUrl", "httpUrl")


def parse_mcp_json(
    text: str,
    *,
    variables: Mapping[str, str],
    allow_http: bool,
    taken_slugs: Collection[str] = (),
    existing: Mapping[str, str] = _EMPTY,
) -> ImportCheck:
    """Parse all servers; errors are `Problem`s. `existing` maps each `target_string` to a slug."""
    try:
        document = _parse_document(text)
    except NotJson as error:
        hint = "Correct the text at this position and check again." if text.strip() else _EXAMPLE
        return ImportCheck("", problems=(Problem("", "not_json", str(error), hint),))
    except EntryError as error:
        return ImportCheck("", problems=(Problem("", error.code, error.message, error.hint),))
    shape, entries, problems = _find_entries(document)
    if not entries and not problems:
        problems.append(Problem("", "no_servers", "The text contains no servers.", _EXAMPLE))
    if len(entries) > MAX_SERVERS:
        message = f"Only the first {MAX_SERVERS} of {len(entries):,} servers were parsed."
        problems.append(Problem("", "too_many", message, "Import the others separately."))
    inputs, input_defaults = _parse_inputs(document)
    references = References(variables, input_defaults)
    named_inputs = tuple(
        MappingProxyType({**item, "name": references.assign_name("input", str(item["id"]))})
        for item in inputs
    )
    taken, targets = set(taken_slugs), dict(existing)
    drafts: list[ServerDraft] = []
    for name, entry in entries[:MAX_SERVERS]:
        slug = make_slug(name, taken)
        try:
            draft = parse_entry(
                *(name, slug, entry), references=references, targets=targets, allow_http=allow_http
            )
        except Invalid as error:
            display_name = escape_ambiguous(name)[:120]
            problems.append(Problem(display_name, error.code, error.message, error.hint))
        else:
            drafts.append(draft)
            taken.add(slug)
            targets.setdefault(draft.target, slug)
    return ImportCheck(shape, tuple(drafts), tuple(problems), named_inputs)


def _parse_document(text: str) -> JsonMap:
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise EntryError(
            "The text is larger than 1 MiB.", "Split it into several imports.", "too_large"
        )
    try:
        document = parse(text)
    except NotJson:
        # Many READMEs show only `"name": {…}`, without the surrounding braces.
        if not text.lstrip("\ufeff \t\r\n").startswith('"'):
            raise
        try:
            document = parse("{" + text.removeprefix("\ufeff") + "}")
        except NotJson:
            document = parse(text)  # report the error of the original text
    if not isinstance(document, JsonMap):
        raise EntryError("The document is not a JSON object.", _EXAMPLE, "not_servers")
    return document


def _find_entries(document: JsonMap) -> tuple[str, list[tuple[str, object]], list[Problem]]:
    if any(isinstance(document.get(field), str) for field in _SERVER_FIELDS):
        name = document.get("name")
        return "single", [(name if isinstance(name, str) else "server", document)], []
    nested = document.get("mcp")
    holders = [document, *([nested] if isinstance(nested, JsonMap) else [])]
    shape = ""
    entries: list[tuple[str, object]] = []
    problems: list[Problem] = []
    for holder in holders:
        problems += [_duplicate_name(key, line) for key, line in holder.repeated]
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
            problems += [_duplicate_name(key, line) for key, line in servers.repeated]
    if not shape and not problems and _is_bare_map(document):
        return "map", [(n, s) for n, s in document.items() if isinstance(s, JsonMap)], []
    if not shape and not problems and document:
        message = "The document contains no servers."
        problems.append(Problem("", "not_servers", message, _EXAMPLE))
    return shape, entries, problems


def _duplicate_name(key: str, line: int) -> Problem:
    message = f"Duplicate name: the second one, on line {line}, was skipped."
    hint = "Give each server a unique name."
    return Problem(escape_ambiguous(key)[:120], "duplicate_key", message, hint)


def _dialect(servers: JsonMap) -> str:
    """Distinguish Cursor files, with a url without a type or ${env:…}, from Claude files."""
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


def _parse_inputs(document: JsonMap) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Parse VS Code's `inputs`: values to prompt for, and their defaults by id."""
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
