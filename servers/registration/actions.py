"""Create, edit and delete servers and their credentials; authorize stdio commands.

A stdio server runs a command on this machine. Adding, editing, importing, testing and syncing one
all call `check_program` and compare the confirmation, and `build_spec`, which every connection
needs, does both again.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from catalog import audit, preferences
from catalog.audit import Actor
from catalog.definitions import ingest
from catalog.models import Group, Revision
from servers.models import (
    ConnectionPolicy,
    Credential,
    CredentialKind,
    Isolation,
    Server,
    ServerState,
    Transport,
    Trust,
)
from servers.registration import confirmation, state_history, validation
from servers.registration.confirmation import Program
from servers.registration.credentials import decrypt, encrypt, origin_digest
from servers.registration.drafts import RESERVED_SLUGS, ServerDraft
from servers.registration.variable_positions import find_misplaced_variables, misplaced_variable
from servers.secret import Secret
from servers.spec import ServerSpec
from toolcrib.lib.errors import Conflict, Forbidden, Invalid, ToolcribError

SLUG_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
SETTING_RULES: dict[str, Any] = {
    "name": str,
    "description": str,
    "connection_policy": ConnectionPolicy,
    "isolation": Isolation,
    "trust": Trust,
    "call_timeout": range(1, 901),
    "concurrency": range(1, 257),
    "poll_seconds": range(5, 86_401),
}


bad_variable = partial(Invalid, code="bad_variable")


class StdioDisabled(Forbidden):
    code = "stdio_off"

    def __init__(self) -> None:
        super().__init__(
            "Stdio servers are disabled on this installation.",
            hint="Set TOOLCRIB_ALLOW_STDIO=1 where Toolcrib is started, or connect to the server "
            "over HTTP.",
        )


class CommandNotConfirmed(Conflict):
    code = "confirm_argv"

    def __init__(self, program: Program) -> None:
        super().__init__(
            f"This server runs a command on this machine: {validation.format_argv(program.argv)}",
            hint="Confirm this exact command with its values. In the API, repeat its arguments "
            "with the variables filled in as confirm_argv, or the digest as confirm.",
            details={
                "argv": list(program.argv),
                "cwd": program.cwd,
                "variables": sorted(program.variables),
                "env": sorted(program.env),
                "digest": program.digest,
            },
        )


class CredentialsMissing(Conflict):
    code = "credentials_missing"


def check_program(argv: Sequence[str], cwd: str) -> None:
    """Raise unless stdio is allowed and every variable stands where a value stands."""
    if not settings.ALLOW_STDIO:
        raise StdioDisabled
    validation.check_argv(argv, cwd)
    if validation.PLACEHOLDER.search(argv[0]) or validation.PLACEHOLDER.search(cwd):
        raise validation.bad_argv(
            "The command and the working directory must not contain variables.",
            hint="Write both out in full; arguments may contain variables.",
        )
    if misplaced := find_misplaced_variables(argv):
        raise misplaced_variable(argv[misplaced[0]])


def check_draft(draft: ServerDraft, *, confirmed: str, server: Server | None = None) -> None:
    """Validate a draft from any source against the rules of its transport.

    A program needs a confirmation, unless it is exactly what `server`, the edited one, runs.
    """
    if not SLUG_PATTERN.fullmatch(draft.slug):
        raise Invalid(
            "A slug has 1 to 32 lowercase letters, digits and inner hyphens.", code="bad_slug"
        )
    if draft.slug in RESERVED_SLUGS:
        raise Invalid(f"The slug {draft.slug} is reserved.", code="bad_slug")
    if draft.transport == Transport.STDIO:
        check_program(draft.argv, draft.cwd)
        for name, value in draft.env.items():
            validation.check_env(name, value.reveal())
    elif draft.transport in (Transport.HTTP, Transport.SSE):
        validation.check_url(draft.url, allow_http=settings.ALLOW_PLAIN_HTTP)
        for name, value in draft.headers.items():
            validation.check_header(name, value.reveal())
    else:
        raise Invalid("transport must be stdio, http or sse.", code="bad_transport")
    for name, value in draft.variables.items():
        check_variable(name, value, [draft.command, *draft.args])
    if draft.missing:
        names = ", ".join(draft.missing)
        raise Invalid(
            f"Missing values for variables: {names}.",
            hint="Provide the values, or replace the references with literal values.",
            code="variables_missing",
            details={"missing": list(draft.missing)},
        )
    if draft.transport == Transport.STDIO:
        check_confirmation(confirmation.draft_program(draft, server), confirmed, server)


def check_confirmation(program: Program, confirmed: str, server: Server | None = None) -> None:
    """Raise unless `confirmed` is the program's digest, or the server runs this program already."""
    if server is not None and server.transport == Transport.STDIO:
        current = confirmation.stored_program(server)
        if current == program and confirmation.is_confirmed(server, current):
            return
    if not program.matches(confirmed):
        raise CommandNotConfirmed(program)


def check_variable(name: str, value: Secret, argv: Sequence[str]) -> None:
    """Validate a variable. Its value must not become an option of a confirmed command."""
    if not validation.PLACEHOLDER.fullmatch(f"${{{name}}}") or len(name) > 200:
        raise bad_variable("A variable name has at most 200 letters, digits and underscores.")
    text = value.reveal()
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise bad_variable(f"The value of {name} contains control characters.")
    if text.startswith("-") and any(arg.startswith(f"${{{name}}}") for arg in argv):
        raise bad_variable(
            f"The value of {name} starts with -, which would make it a command option.",
            hint="Write options directly in the arguments, so that they can be confirmed.",
        )


def add_server(draft: ServerDraft, *, actor: Actor, confirmed: str = "") -> Server:
    """Register a server with its credentials and its group. Opens no connection."""
    check_draft(draft, confirmed=confirmed)
    server = Server(
        slug=draft.slug,
        name=draft.name[:120] or draft.slug,
        description=draft.description,
        **draft.connection_fields(),
        enabled=not draft.disabled,
        state=ServerState.DISABLED if draft.disabled else ServerState.NEW,
        unknown_fields=dict(draft.unknown),
        poll_seconds=preferences.value("sync_poll_seconds"),
        call_timeout=settings.CALL_TIMEOUT,
    )
    if draft.transport == Transport.STDIO:
        confirmation.set_confirmed(server, confirmation.draft_program(draft))
    try:
        with transaction.atomic():
            server.save()
            _store_draft_credentials(server, draft)
            group, _ = Group.objects.get_or_create(
                group_id=f"mcp:{server.slug}",
                defaults={
                    "display_name": server.name,
                    "description": server.description,
                    "position": Group.objects.count(),
                },
            )
            group.follows = server
            group.save(update_fields=["follows"])
            audit.record(actor, "server.add", server, after=_audit_values(server))
            Revision.bump()
    except IntegrityError as error:
        raise Conflict(
            f"A server with the slug {draft.slug} already exists.",
            hint="Choose another slug, or edit the existing server.",
            code="slug_taken",
        ) from error
    return server


@transaction.atomic
def edit_connection(
    server: Server, draft: ServerDraft, *, actor: Actor, confirmed: str = ""
) -> Server:
    """Change how to connect. A new origin or command removes all stored credential values.

    A changed program, also one with other values in its environment, must be confirmed.
    """
    server = Server.objects.select_for_update().get(pk=server.pk)
    before, old_origin = _audit_values(server), server.origin
    check_draft(draft, confirmed=confirmed, server=server)
    program = confirmation.draft_program(draft, server) if draft.argv else Program(())
    for name, value in draft.connection_fields().items():
        setattr(server, name, value)
    if server.origin != old_origin:
        server.credentials.update(ciphertext="", origin_sha256=origin_digest(server.origin))
    if draft.argv:
        confirmation.set_confirmed(server, program)
    else:
        server.confirmed_argv, server.confirmed_values = "", ""
    server.generation += 1
    server.save()
    _store_draft_credentials(server, draft)
    if _audit_values(server) != before:
        audit.record(actor, "server.edit", server, before=before, after=_audit_values(server))
    return server


@transaction.atomic
def set_credentials(
    server: Server,
    kind: str,
    values: Mapping[str, Secret | None],
    *,
    actor: Actor,
    confirmed: str = "",
) -> None:
    """Set credentials of one kind; None deletes one. The audit entry has names, never values.

    A variable or environment variable of a program changes what runs, so it must be confirmed.
    """
    if kind not in CredentialKind.values:
        raise Invalid("kind must be header, env or variable.")
    server = Server.objects.select_for_update().get(pk=server.pk)
    removed = [name for name, value in values.items() if value is None]
    new_values = {name: value for name, value in values.items() if value is not None}
    for name, value in new_values.items():
        if kind == CredentialKind.HEADER:
            validation.check_header(name, value.reveal())
        elif kind == CredentialKind.ENV:
            validation.check_env(name, value.reveal())
        else:
            check_variable(name, value, server.argv)
    if server.transport == Transport.STDIO:
        program = confirmation.stored_program(server, kind, values)
        check_program(program.argv, program.cwd)
        if program != confirmation.stored_program(server):
            check_confirmation(program, confirmed)
            confirmation.set_confirmed(server, program)
    server.credentials.filter(kind=kind, name__in=removed).delete()
    _store_credentials(server, kind, new_values)
    server.generation += 1
    server.save(update_fields=["generation", "confirmed_argv", "confirmed_values"])
    audit.record(
        actor,
        "server.credentials",
        server,
        after={"kind": str(kind), "set": sorted(new_values), "removed": sorted(removed)},
    )


def _store_draft_credentials(server: Server, draft: ServerDraft) -> None:
    _store_credentials(server, CredentialKind.HEADER, draft.headers)
    _store_credentials(server, CredentialKind.ENV, draft.env)
    _store_credentials(server, CredentialKind.VARIABLE, draft.variables)


def _store_credentials(server: Server, kind: str, values: Mapping[str, Secret]) -> None:
    digest = origin_digest(server.origin)
    for name, value in values.items():
        stored = {"ciphertext": encrypt(value), "origin_sha256": digest}
        Credential.objects.update_or_create(server=server, kind=kind, name=name, defaults=stored)


@transaction.atomic
def change_settings(server: Server, changes: Mapping[str, Any], *, actor: Actor) -> Server:
    """Change settings that do not affect how to connect: names, trust, timeouts, policy."""
    server = Server.objects.select_for_update().get(pk=server.pk)
    before, after = {}, {}
    for key, value in changes.items():
        value = _validate_setting(key, value)
        if getattr(server, key) != value:
            before[key], after[key] = getattr(server, key), value
            setattr(server, key, value)
    if after:
        server.save(update_fields=list(after))
        audit.record(actor, "server.settings", server, before=before, after=after)
        if "trust" in after:  # cached: it decides whether tools pending review can be called
            Revision.bump()
    return server


def _validate_setting(key: str, value: Any) -> Any:
    rule = SETTING_RULES.get(key)
    if rule is None:
        raise Invalid(
            f"Unknown server setting: {key}.", hint=f"Known settings: {', '.join(SETTING_RULES)}."
        )
    if isinstance(rule, range):
        if not isinstance(value, int) or isinstance(value, bool) or value not in rule:
            raise Invalid(f"{key} must be an integer from {rule.start} to {rule.stop - 1}.")
    elif rule is str:
        if not isinstance(value, str) or "\0" in value or len(value) > 2000:
            raise Invalid(f"{key} must be a string of at most 2,000 characters.")
        if key == "name" and not 0 < len(value) <= 120:
            raise Invalid("name must have 1 to 120 characters.")
    elif value not in rule.values:
        raise Invalid(f"{key} must be one of: {', '.join(rule.values)}.")
    return value


@transaction.atomic
def set_enabled(server: Server, enabled: bool, *, actor: Actor) -> Server:
    """Enable or disable a server, and reset its state. Running syncs are superseded."""
    server = Server.objects.select_for_update().get(pk=server.pk)
    if server.enabled != enabled:
        server.enabled = enabled
        server.state = ServerState.NEW if enabled else ServerState.DISABLED
        server.state_code = server.state_reason = server.state_detail = ""
        server.state_since = timezone.now()
        server.generation += 1
        server.failures = 0
        server.save()
        state_history.record(server.pk, server.state, server.state_since)
        audit.record(actor, "server.enable" if enabled else "server.disable", server)
        Revision.bump()
    return server


@transaction.atomic
def remove_tools(server: Server, *, actor: Actor) -> int:
    """Remove a server's tools as an empty list from it would, and return how many.

    They keep their groups and reviews, and the next sync restores those that the server lists.
    """
    locked = Server.objects.select_for_update().get(pk=server.pk)
    result = ingest.apply_listing(locked, (), (), {}, findings={}, allow_removals=True)
    if locked.removals_held:
        locked.removals_held = False
        locked.save(update_fields=["removals_held"])
    audit.record(actor, "server.remove_tools", locked, after={"tools": len(result.removed)})
    return len(result.removed)


@transaction.atomic
def delete_server(server: Server, *, actor: Actor) -> None:
    """Delete a server with its tools, and its own group unless that has other tools."""
    audit.record(actor, "server.delete", server, before=_audit_values(server))
    group = Group.objects.filter(follows=server).first()
    server.delete()
    if group and not group.memberships.exists():
        group.delete()
    Revision.bump()


def build_spec(server: Server) -> ServerSpec:
    """Decrypt what a connection needs. Every connection starts here: commands are checked again."""
    if server.transport == Transport.STDIO:
        check_program(server.argv, server.cwd)
    digest = origin_digest(server.origin)
    values: dict[str, dict[str, Secret]] = {kind: {} for kind in CredentialKind.values}
    for credential in server.credentials.all():
        if credential.voided or credential.origin_sha256 != digest:
            raise CredentialsMissing(
                f"{credential.get_kind_display()} {credential.name} has no value: it was removed "
                "when the connection changed.",
                hint="Enter the value again in the server's settings, or delete the credential.",
            )
        values[credential.kind][credential.name] = decrypt(credential.ciphertext)
    if server.transport == Transport.STDIO:
        program = confirmation.stored_program(server)
        if not confirmation.is_confirmed(server, program):
            raise CommandNotConfirmed(program)
    return fill_spec(server, **values)


def fill_spec(
    server: Server,
    *,
    header: Mapping[str, Secret],
    env: Mapping[str, Secret],
    variable: Mapping[str, Secret],
) -> ServerSpec:
    """Return the connection settings of a server, or of an unsaved one, with its credentials."""
    argv = server.argv if server.transport == Transport.STDIO else []
    return ServerSpec(
        server_id=server.pk or 0,
        slug=server.slug,
        generation=server.generation,
        transport=server.transport,
        argv=tuple(confirmation.fill_variables(arg, variable) for arg in argv),
        cwd=server.cwd,
        env=env,
        url=confirmation.fill_variables(server.url, variable),
        headers=header,
        hidden=tuple(variable.values()),
    )


def _audit_values(server: Server) -> dict[str, object]:
    return {"transport": server.transport, "address": server.address, "cwd": server.cwd}


def report_state(
    server_id: int, generation: int, state: str, error: ToolcribError | None = None
) -> None:
    """Record a server's connection state, unless it was edited meanwhile or is disabled."""
    code, reason = (error.code[:40], error.sentence) if error else ("", "")
    rows = Server.objects.filter(pk=server_id, generation=generation, enabled=True)
    unchanged = rows.filter(state=state, state_code=code, state_reason=reason)
    if state == ServerState.FAILING:
        rows.update(failures=F("failures") + 1)
    if unchanged.exists():
        return
    fields: dict[str, Any] = {"failures": 0} if state == ServerState.CONNECTED else {}
    now = timezone.now()
    updated = rows.update(
        state=state,
        state_code=code,
        state_reason=reason,
        state_detail=getattr(error, "detail", ""),
        state_since=now,
        **fields,
    )
    if updated:
        state_history.record(server_id, state, now)
