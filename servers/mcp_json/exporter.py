"""Write servers as an mcp.json that anyone may see: names of credentials, never values.

Pure. The Claude shape, in the order given by the slugs, so that equal servers give equal text.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from servers.mcp_json.placeholders import unique, valid_name, written
from servers.registration.validation import PLACEHOLDER


@dataclass(frozen=True)
class ExportRow:
    """What an export needs of a server."""

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
    """Return the file's text. Every credential stands as a `${NAME}` of its own."""
    rows = sorted(servers, key=lambda row: row.slug)
    shared = Counter(name for row in rows for name in {*row.env_names, *_referenced(row)})
    taken = {name for row in rows for name in _referenced(row)}
    document = {row.slug: _entry(row, shared, taken) for row in rows}
    return json.dumps({"mcpServers": document}, indent=2, ensure_ascii=False) + "\n"


def _referenced(row: ExportRow) -> set[str]:
    return {name for text in (*row.args, row.url) for name in PLACEHOLDER.findall(text)}


def _entry(row: ExportRow, shared: Counter[str], taken: set[str]) -> dict[str, object]:
    entry: dict[str, object] = {"type": row.transport}
    if row.transport == "stdio":
        entry |= {"command": row.command, "args": list(row.args)}
        if row.cwd:
            entry["cwd"] = row.cwd
    else:
        entry["url"] = row.url
    references = {}
    for name in sorted(row.env_names):
        own = name if shared[name] == 1 else _own_name(row.slug, name)
        references[name] = _reference(own, taken)
    if references:
        entry["env"] = references
    headers = {n: _reference(_own_name(row.slug, n), taken) for n in sorted(row.header_names)}
    if headers:
        entry["headers"] = headers
    for name in sorted(row.unknown):
        entry.setdefault(name, row.unknown[name])
    return entry


def _own_name(slug: str, name: str) -> str:
    return valid_name(re.sub(r"[^A-Z0-9]+", "_", f"{slug}_{name}".upper()))


def _reference(name: str, taken: set[str]) -> str:
    name = unique(name, taken)
    taken.add(name)
    return written(name)
