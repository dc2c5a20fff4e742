"""The plain values an import gives back: drafts of servers, and what is wrong with the rest.

Pure. Nothing here prints a secret: values are `Secret`s, and `masked()` shows their names only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from servers.registration.validation import PLACEHOLDER, escape_ambiguous, format_argv
from servers.secret import Secret

MASK = "•••"
RESERVED_SLUGS = frozenset({"add", "bulk", "export", "import", "test"})  # addresses of ours


@dataclass(frozen=True)
class Problem:
    """A server, or a whole file, that could not be read, and what to do about it."""

    name: str  # of the server; empty when the whole file is meant
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class ServerDraft:
    """One server as an import understood it. Save it only when it is `ready`.

    While names are `missing`, values in `env` and `headers` may still hold their ${NAME}: read
    the text again with the missing values instead of saving.
    """

    name: str
    slug: str
    transport: str  # stdio, http, sse
    command: str = ""
    args: tuple[str, ...] = ()  # may hold ${NAME}
    cwd: str = ""
    url: str = ""  # may hold ${NAME}
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

    def masked(self) -> dict[str, object]:
        """Return what may be shown, as plain JSON values."""
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
    """What a pasted text holds. Nothing was saved or started."""

    shape: str  # claude, cursor, vscode, map, single; empty when unreadable
    drafts: tuple[ServerDraft, ...] = ()
    problems: tuple[Problem, ...] = ()
    inputs: tuple[Mapping[str, object], ...] = ()  # VS Code: id, name, description, password


def target_string(transport: str, url: str, command: str, args: Sequence[str]) -> str:
    """Name what a server connects to; equal for two servers that are the same one.

    Call it with a `models.Server`'s own fields. Names of variables do not count, since an import
    names them after the slug.
    """
    words = [command, *args] if transport == "stdio" else [url]
    return f"{transport} " + json.dumps([PLACEHOLDER.sub("${}", word) for word in words])


def target_of(draft: ServerDraft) -> str:
    return target_string(draft.transport, draft.url, draft.command, draft.args)


def slug_of(name: str, taken: set[str]) -> str:
    """Make a slug of a name, numbered if it is taken."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].strip("-") or "server"
    candidate, number = slug, 2
    while candidate in taken or candidate in RESERVED_SLUGS:
        suffix = f"-{number}"
        candidate = slug[: 32 - len(suffix)].rstrip("-") + suffix
        number += 1
    return candidate
