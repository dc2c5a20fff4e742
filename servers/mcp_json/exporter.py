"""Export of servers as mcp.json, with `${NAME}` references instead of credential values.

Uses the Claude format, sorted by slug, so that the output is deterministic.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from servers.mcp_json.placeholders import format_reference, make_unique, to_variable_name
from servers.models import CredentialKind, Server
from servers.registration.validation import PLACEHOLDER


class ExportRow(NamedTuple):
    server: Server
    env_names: Collection[str] = ()
    header_names: Collection[str] = ()

    @property
    def references(self) -> set[str]:
        texts = (*self.server.args, self.server.url)
        return {name for text in texts for name in PLACEHOLDER.findall(text)}


def export_servers() -> str:
    """Return all servers as mcp.json, with ${NAME} for each secret."""
    rows = []
    for server in Server.objects.prefetch_related("credentials"):
        names: dict[str, list[str]] = {kind: [] for kind in CredentialKind.values}
        for credential in server.credentials.all():
            names[credential.kind].append(credential.name)
        rows.append(ExportRow(server, names[CredentialKind.ENV], names[CredentialKind.HEADER]))
    return export_mcp_json(rows)


def export_mcp_json(rows: Iterable[ExportRow]) -> str:
    """Return the text of the file. Each credential becomes a unique `${NAME}`."""
    rows = sorted(rows, key=lambda row: row.server.slug)
    uses = Counter(name for row in rows for name in {*row.env_names, *row.references})
    taken = {name for row in rows for name in row.references}
    document = {row.server.slug: _entry(row, uses, taken) for row in rows}
    return json.dumps({"mcpServers": document}, indent=2, ensure_ascii=False) + "\n"


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
