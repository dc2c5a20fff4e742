"""Export of servers as mcp.json, with references instead of credential values.

In the format of Claude (`${NAME}`), VS Code (`servers`, `inputs`, `${input:NAME}`) or Cursor
(`${env:NAME}`), sorted by slug, so that the output is deterministic.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, get_args

from servers.mcp_json.placeholders import format_reference, make_unique, to_variable_name
from servers.models import CredentialKind, Server
from servers.registration.validation import PLACEHOLDER

Shape = Literal["claude", "vscode", "cursor"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
CONNECTION_FIELDS = ("type", "command", "args", "cwd", "url", "env", "headers")


class ExportRow(NamedTuple):
    server: Server
    env_names: Collection[str] = ()
    header_names: Collection[str] = ()

    @property
    def references(self) -> set[str]:
        texts = (*self.server.args, self.server.url)
        return {name for text in texts for name in PLACEHOLDER.findall(text)}


def export_servers(shape: Shape = "claude") -> str:
    """Return all servers as mcp.json, with a reference for each secret."""
    return export_mcp_json(_rows(), shape)


def export_connections() -> dict[str, dict[str, object]]:
    """Return how to connect to each server, by slug, with ${NAME} for each secret."""
    entries = _entries(_rows())
    return {slug: _connection(entry) for slug, entry in entries.items()}


def _rows() -> list[ExportRow]:
    rows = []
    for server in Server.objects.prefetch_related("credentials"):
        names: dict[str, list[str]] = {kind: [] for kind in CredentialKind.values}
        for credential in server.credentials.all():
            names[credential.kind].append(credential.name)
        rows.append(ExportRow(server, names[CredentialKind.ENV], names[CredentialKind.HEADER]))
    return rows


def export_mcp_json(rows: Iterable[ExportRow], shape: Shape = "claude") -> str:
    """Return the text of the file. Each credential becomes a unique reference."""
    document = _document(_entries(rows), shape)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _document(entries: dict[str, dict[str, object]], shape: Shape) -> dict[str, object]:
    match shape:
        case "claude":
            return {"mcpServers": entries}
        case "cursor":
            return {"mcpServers": {slug: _for_cursor(entry) for slug, entry in entries.items()}}
        case "vscode":
            servers = {slug: _with_references(entry, "input") for slug, entry in entries.items()}
            names = {
                name
                for entry in entries.values()
                for name in PLACEHOLDER.findall(json.dumps(_connection(entry)))
            }
            inputs = [
                {"type": "promptString", "id": name, "description": name, "password": True}
                for name in sorted(names)
            ]
            return {"servers": servers} | ({"inputs": inputs} if inputs else {})


def _for_cursor(entry: dict[str, object]) -> dict[str, object]:
    """Return an entry for Cursor, which takes a url without a type for streamable HTTP."""
    written = _with_references(entry, "env")
    return {name: value for name, value in written.items() if (name, value) != ("type", "http")}


def _with_references(entry: dict[str, object], kind: str) -> dict[str, object]:
    """Write each ${NAME} of the connection as ${kind:NAME}."""
    return entry | {name: _rewrite(value, kind) for name, value in _connection(entry).items()}


def _connection(entry: dict[str, object]) -> dict[str, object]:
    return {name: entry[name] for name in CONNECTION_FIELDS if name in entry}


def _rewrite(value: object, kind: str) -> object:
    if isinstance(value, str):
        return PLACEHOLDER.sub(rf"${{{kind}:\1}}", value)
    if isinstance(value, list):
        return [_rewrite(item, kind) for item in value]
    if isinstance(value, dict):
        return {name: _rewrite(item, kind) for name, item in value.items()}
    return value


def _entries(rows: Iterable[ExportRow]) -> dict[str, dict[str, object]]:
    rows = sorted(rows, key=lambda row: row.server.slug)
    uses = Counter(name for row in rows for name in {*row.env_names, *row.references})
    taken = {name for row in rows for name in row.references}
    return {row.server.slug: _entry(row, uses, taken) for row in rows}


def _entry(row: ExportRow, uses: Counter[str], taken: set[str]) -> dict[str, object]:
    server = row.server
    entry: dict[str, object] = {"type": server.transport}
    if server.transport == "stdio":
        entry |= {"command": server.command, "args": server.args}
        if server.cwd:
            entry["cwd"] = server.cwd
    else:
        entry["url"] = server.url
    env = {}
    for name in sorted(row.env_names):
        variable = name if uses[name] == 1 else _prefix_name(server.slug, name)
        env[name] = _make_reference(variable, taken)
    headers = {
        name: _make_reference(_prefix_name(server.slug, name), taken)
        for name in sorted(row.header_names)
    }
    entry |= {name: values for name, values in (("env", env), ("headers", headers)) if values}
    return entry | {
        name: server.unknown_fields[name] for name in sorted(server.unknown_fields.keys() - entry)
    }


def _prefix_name(slug: str, name: str) -> str:
    return to_variable_name(re.sub(r"[^A-Z0-9]+", "_", f"{slug}_{name}".upper()))


def _make_reference(name: str, taken: set[str]) -> str:
    name = make_unique(name, taken)
    taken.add(name)
    return format_reference(name)
