"""Result types of an mcp.json import: server drafts and problems.

Pure. No secret can be printed: values are `Secret`s, and `masked()` returns their names only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from servers.registration.validation import PLACEHOLDER, format_argv
from servers.secret import Secret
from toolcrib.lib.text import escape_ambiguous

MASK = "•••"
RESERVED_SLUGS = frozenset({"add", "bulk", "export", "import", "test"})  # URL paths of Toolcrib


@dataclass(frozen=True)
class Problem:
    name: str  # of the server; empty when it concerns the whole file
    code: str = ""
    message: str = ""
    hint: str = ""


@dataclass(frozen=True)
class ServerDraft:
    """One parsed server. Save it only when it is `ready`.

    While variables are `missing`, values in `env` and `headers` may still contain ${NAME}: parse
    the text again with the missing values instead of saving.
    """

    name: str
    slug: str
    transport: str  # stdio, http, sse
    command: str = ""
    args: tuple[str, ...] = ()  # may contain ${NAME}
    cwd: str = ""
    url: str = ""  # may contain ${NAME}
    env: Mapping[str, Secret] = field(default_factory=dict)
    headers: Mapping[str, Secret] = field(default_factory=dict)
    variables: Mapping[str, Secret] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    description: str = ""
    disabled: bool = False
    unknown: Mapping[str, object] = field(default_factory=dict)
    secrets_found: int = 0

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def argv(self) -> tuple[str, ...]:
        return (self.command, *self.args) if self.transport == "stdio" else ()

    @property
    def target(self) -> str:
        return target_string(self.transport, self.url, self.command, self.args)

    def connection_fields(self) -> dict[str, Any]:
        """Return the fields of a `models.Server` that say how to connect."""
        fields = {name: getattr(self, name) for name in ("transport", "command", "cwd", "url")}
        return fields | {"args": list(self.args)}

    def masked(self) -> dict[str, object]:
        """Return everything except secret values, as plain JSON values."""
        return {
            "name": escape_ambiguous(self.name),
            "slug": self.slug,
            "transport": self.transport,
            "command": escape_ambiguous(self.command),
            "args": [escape_ambiguous(arg) for arg in self.args],
            "argv": format_argv(self.argv),
            "cwd": escape_ambiguous(self.cwd),
            "url": self.url,
            "env": dict.fromkeys(self.env, MASK),
            "headers": dict.fromkeys(self.headers, MASK),
            "variables": dict.fromkeys(self.variables, MASK),
            "missing": list(self.missing),
            "warnings": list(self.warnings),
            "description": escape_ambiguous(self.description),
            "disabled": self.disabled,
            "unknown": [escape_ambiguous(name) for name in self.unknown],
            "secrets_found": self.secrets_found,
            "ready": self.ready,
        }


@dataclass(frozen=True)
class ImportCheck:
    """The parsed text. Nothing has been saved or started."""

    shape: str  # claude, cursor, vscode, map, single; empty if it could not be parsed
    drafts: tuple[ServerDraft, ...] = ()
    problems: tuple[Problem, ...] = ()
    inputs: tuple[Mapping[str, object], ...] = ()  # VS Code: id, name, description, password


def target_string(transport: str, url: str, command: str, args: Sequence[str]) -> str:
    """Return a key for what a server connects to, whatever its variables are called."""
    parts = [command, *args] if transport == "stdio" else [url]
    return f"{transport} " + json.dumps([PLACEHOLDER.sub("${}", part) for part in parts])


def make_slug(name: str, taken: set[str]) -> str:
    """Derive a slug from a name, with a number appended if it is taken."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].strip("-") or "server"
    candidate, number = slug, 2
    while candidate in taken or candidate in RESERVED_SLUGS:
        suffix = f"-{number}"
        candidate = slug[: 32 - len(suffix)].rstrip("-") + suffix
        number += 1
    return candidate
