"""Changes of servers: how to connect, credentials and settings.

A credential is a text with `${NAME}`. A reference that has no value in the environment keeps what
is stored; plans show the names of credentials, never a value.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from catalog.audit import Actor
from servers.mcp_json import importer
from servers.models import CredentialKind, Server, Transport, Trigger
from servers.registration import actions, confirmation
from servers.registration.confirmation import Program
from servers.registration.credentials import UnreadableCredential, decrypt, origin_digest
from servers.registration.drafts import MASK, ServerDraft
from servers.registration.validation import format_argv
from servers.secret import Secret
from servers.sync import scheduling
from toolcrib.configuration.changes import ABSENT, Change, FieldChange, Plan
from toolcrib.configuration.document import ServerConfig, object_fields
from toolcrib.lib.errors import Invalid

CONNECTION = ("type", "command", "args", "cwd", "url", "env", "headers")
TARGET = ("transport", "command", "args", "cwd", "url")
REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*\}")


@dataclass
class ServerChanges:
    """Compares the servers of a file with the registered ones, and adds to a plan."""

    plan: Plan
    variables: Mapping[str, str]
    confirmed: Collection[str]
    confirm_all: bool  # in a plan, which is rolled back

    def add(self, row: ServerConfig) -> None:
        server = Server.objects.filter(slug=row.slug).first() if row.slug.isascii() else None
        wanted = object_fields("servers", row)
        connection = _Connection(row.slug, wanted, server, self.variables)
        settings = {
            name: value
            for name, value in wanted.items()
            if name in actions.SETTING_RULES
            and not (server is None and name in ("name", "description"))
        }
        fields = connection.fields()
        if server is None:
            fields += [FieldChange(name, ABSENT, value) for name, value in settings.items()]
        else:
            settings = {
                name: value for name, value in settings.items() if getattr(server, name) != value
            }
            fields += [
                FieldChange(name, getattr(server, name), value) for name, value in settings.items()
            ]
        enabled = wanted.get("enabled", server.enabled if server else True)
        if enabled != (server.enabled if server else True):
            fields.append(FieldChange("enabled", not enabled, enabled))
        if server is not None and not fields:
            return
        if connection.draft.missing:
            self.plan.missing.append((row.slug, connection.draft.missing))
        digest = self._confirm(connection)

        def write(actor: Actor) -> None:
            saved = connection.save(digest, actor)
            if settings:
                actions.change_settings(saved, settings, actor=actor)
            actions.set_enabled(saved, enabled, actor=actor)
            if enabled and (server is None or connection.is_changed):
                scheduling.request_sync(
                    saved.pk, Trigger.ADDED if server is None else Trigger.MANUAL
                )

        self.plan.changes.append(Change("~" if server else "+", "server", row.slug, write, fields))

    def remove(self, server: Server) -> None:
        def write(actor: Actor) -> None:
            actions.delete_server(server, actor=actor)

        self.plan.changes.append(Change("-", "server", server.slug, write))

    def _confirm(self, connection: "_Connection") -> str:
        """Return the program's digest, if it is confirmed or runs already; else plan it."""
        program = connection.program()
        if program is None or connection.draft.missing or not connection.is_changed:
            return ""
        server = connection.server
        if server is not None and server.transport == Transport.STDIO:
            current = confirmation.stored_program(server)
            if current == program and confirmation.is_confirmed(server, current):
                return program.digest
        if program.digest in self.confirmed:
            return program.digest
        self.plan.programs.append((connection.slug, format_argv(program.argv), program.digest))
        return program.digest if self.confirm_all else ""


@dataclass
class _Connection:
    """How a file says to connect to a server, against what is stored."""

    slug: str
    wanted: Mapping[str, Any]
    server: Server | None
    variables: Mapping[str, str]
    draft: ServerDraft = field(init=False)
    stored: dict[str, dict[str, Secret]] = field(init=False)
    removed: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.stored = self._stored_values()
        entry: dict[str, Any] = {}
        if self.server is not None:
            entry = {"type": self.server.transport}
            if self.server.transport == Transport.STDIO:
                entry |= {"command": self.server.command, "args": self.server.args}
                entry |= {"cwd": self.server.cwd} if self.server.cwd else {}
            else:
                entry |= {"url": self.server.url}
            if "command" in self.wanted or "url" in self.wanted:
                entry = {} if self._changes_kind() else entry
        entry |= {name: self.wanted[name] for name in CONNECTION if name in self.wanted}
        if not entry:
            raise Invalid(
                f"The server {self.slug[:40]!r} is not registered and has neither command nor url.",
                hint="Name how to connect to it.",
            )
        self.removed = {kind: [] for kind in CredentialKind.values}
        is_program = bool(entry.get("command"))
        is_same_origin = self._is_same_target(entry)
        for section, kind in (("env", CredentialKind.ENV), ("headers", CredentialKind.HEADER)):
            if section not in self.wanted:
                continue
            kept = self.stored[kind] if is_same_origin else {}
            entry[section] = {
                name: text
                for name, text in self.wanted[section].items()
                if not (name in kept and self._lacks_value(text))
            }
            self.removed[kind] = sorted(self.stored[kind].keys() - self.wanted[section].keys())
        entry.pop("headers" if is_program else "env", None)
        text = json.dumps({"mcpServers": {self.slug: entry}})
        known = self.server if is_same_origin else None
        draft = importer.parse_connection(text, variables=self.variables, known=known)
        name = self.wanted.get("name") or (self.server.name if self.server else self.slug)
        self.draft = replace(
            draft, slug=self.slug, name=name, description=self.wanted.get("description", "")
        )

    def _changes_kind(self) -> bool:
        assert self.server is not None  # noqa: S101 - the only caller checks it
        return ("command" in self.wanted) != (self.server.transport == Transport.STDIO)

    def _is_same_target(self, entry: Mapping[str, Any]) -> bool:
        server = self.server
        if server is None:
            return False
        if server.transport == Transport.STDIO:
            return (entry.get("command"), list(entry.get("args", [])), entry.get("cwd", "")) == (
                server.command,
                server.args,
                server.cwd,
            )
        return bool(entry.get("url")) and (
            Server(transport=Transport.HTTP, url=entry["url"]).origin == server.origin
        )

    def _stored_values(self) -> dict[str, dict[str, Secret]]:
        values: dict[str, dict[str, Secret]] = {kind: {} for kind in CredentialKind.values}
        if self.server is None:
            return values
        origin = origin_digest(self.server.origin)
        for row in self.server.credentials.all():
            if not row.voided and row.origin_sha256 == origin:
                try:
                    values[row.kind][row.name] = decrypt(row.ciphertext)
                except UnreadableCredential:
                    continue
        return values

    def _lacks_value(self, text: str) -> bool:
        names = [name[2:-1] for name in REFERENCE.findall(text)]
        return any(name not in self.variables for name in names)

    def _changed_values(self) -> dict[str, dict[str, Secret]]:
        sent = {
            CredentialKind.ENV: self.draft.env,
            CredentialKind.HEADER: self.draft.headers,
            CredentialKind.VARIABLE: self.draft.variables,
        }
        return {
            str(kind): {
                name: value
                for name, value in values.items()
                if name not in self.stored[kind]
                or self.stored[kind][name].reveal() != value.reveal()
            }
            for kind, values in sent.items()
        }

    def _changed_target(self) -> dict[str, Any]:
        fields = self.draft.connection_fields()
        if self.server is None:
            return fields
        return {name: fields[name] for name in TARGET if fields[name] != getattr(self.server, name)}

    @property
    def is_changed(self) -> bool:
        return bool(
            self.server is None
            or self._changed_target()
            or any(self._changed_values().values())
            or any(self.removed.values())
        )

    def fields(self) -> list[FieldChange]:
        changes = []
        target = self._changed_target()
        for name in TARGET:
            if name in target and (self.server is not None or target[name]):
                before = ABSENT if self.server is None else getattr(self.server, name)
                label = "type" if name == "transport" else name
                changes.append(FieldChange(label, before, target[name]))
        sections = {CredentialKind.ENV: "env", CredentialKind.HEADER: "headers"}
        for kind, values in self._changed_values().items():
            section = sections.get(CredentialKind(kind), "variables")
            texts = self.wanted.get(section, {})
            for name in sorted(values):
                text = texts.get(name, f"${{{name}}}")
                shown = text if REFERENCE.fullmatch(text) else MASK
                before = "another value" if name in self.stored[kind] else ABSENT
                changes.append(FieldChange(f"{section}.{name}", before, shown))
        for kind, names in self.removed.items():
            section = sections.get(CredentialKind(kind), "variables")
            changes += [FieldChange(f"{section}.{name}", MASK, ABSENT) for name in names]
        if self.server is None:
            for name in ("name", "description"):
                if value := self.wanted.get(name):
                    changes.append(FieldChange(name, ABSENT, value))
        return changes

    def program(self) -> Program | None:
        """Return the program that will run; None without one."""
        if not self.draft.argv:
            return None
        program = confirmation.draft_program(self.draft, self.server)
        removed = self.removed[CredentialKind.ENV]
        env = {name: value for name, value in program.env.items() if name not in removed}
        return replace(program, env=env)

    def save(self, digest: str, actor: Actor) -> Server:
        program = self.program()
        if program is not None and self.is_changed and digest != program.digest:
            raise actions.CommandNotConfirmed(program)
        if self.server is None:
            return actions.add_server(self.draft, actor=actor, confirmed=digest)
        server = self.server
        if self._changed_target():
            whole = confirmation.draft_program(self.draft, server).digest if program else ""
            server = actions.edit_connection(server, self.draft, actor=actor, confirmed=whole)
            changed: dict[str, dict[str, Secret | None]] = {}
        else:
            changed = {kind: {**values} for kind, values in self._changed_values().items()}
        for kind, names in self.removed.items():
            if names and server.credentials.filter(kind=kind, name__in=names).exists():
                changed.setdefault(kind, {}).update(dict.fromkeys(names))
        for kind, values in changed.items():
            if values:
                step = confirmation.stored_program(server, kind, values).digest if program else ""
                actions.set_credentials(server, kind, values, actor=actor, confirmed=step)
                server.refresh_from_db()
        return server
