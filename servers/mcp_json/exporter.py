"""Export of servers as mcp.json, with `${NAME}` references instead of credential values.

Pure. Uses the Claude format, sorted by slug, so that the output is deterministic.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from servers.mcp_json.placeholders import format_reference, make_unique, to_variable_name
from servers.registration.validation import PLACEHOLDER


@dataclass(frozen=True)
class ExportRow:
    """The fields of a server that an export contains."""

    slug: str
    transport: str
    command: str = ""
    args: tuple[str, ...] = ()
    cwd: str = ""
    url: str = ""
    env_names: tuple[str, ...] = ()
    header_names: tuple[str, ...] = ()
    unknown: Mapping[str, object] = field(default_factory=dict)


def export_mcp_json(servers: Sequence[ExportRow]) -> str:
    """Return the text of the file. Each credential becomes a unique `${NAME}`."""
    rows = sorted(servers, key=lambda row: row.slug)
    uses = Counter(name for row in rows for name in {*row.env_names, *_referenced(row)})
    taken = {name for row in rows for name in _referenced(row)}
    document = {row.slug: _entry(row, uses, taken) for row in rows}
    return json.dumps({"mcpServers": document}, indent=2, ensure_ascii=False) + "\n"


def _referenced(row: ExportRow) -> set[str]:
    return {name for text in (*row.args, row.url) for name in PLACEHOLDER.findall(text)}


def _entry(row: ExportRow, uses: Counter[str], taken: set[str]) -> dict[str, object]:
    entry: dict[str, object] = {"type": row.transport}
    if row.transport == "stdio":
        entry |= {"command": row.command, "args": list(row.args)}
        if row.cwd:
            entry["cwd"] = row.cwd
    else:
        entry["url"] = row.url
    references = {}
    for name in sorted(row.env_names):
        variable = name if uses[name] == 1 else _prefix_name(row.slug, name)
        references[name] = _make_reference(variable, taken)
    if references:
        entry["env"] = references
    headers = {
        name: _make_reference(_prefix_name(row.slug, name), taken)
        for name in sorted(row.header_names)
    }
    if headers:
        entry["headers"] = headers
    for name in sorted(row.unknown):
        entry.setdefault(name, row.unknown[name])
    return entry


def _prefix_name(slug: str, name: str) -> str:
    return to_variable_name(re.sub(r"[^A-Z0-9]+", "_", f"{slug}_{name}".upper()))


def _make_reference(name: str, taken: set[str]) -> str:
    name = make_unique(name, taken)
    taken.add(name)
    return format_reference(name)
