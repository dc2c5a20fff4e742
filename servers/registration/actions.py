"""Every write to servers and their credentials, and the gate in front of programs.

A stdio server is a program on this machine, so adding, editing, importing, testing and syncing
one all pass `check_program`; `spec_of` is the only way to a connection and asks it again.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from catalog import audit, preferences
from catalog.audit import Actor
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
    origin_of,
)
from servers.registration import validation
from servers.registration.argv_warnings import runs_inline_code
from servers.registration.credentials import decrypt, encrypt, origin_digest
from servers.registration.drafts import RESERVED_SLUGS, ServerDraft
from servers.secret import Secret
from servers.spec import ServerSpec
from toolcrib.lib.errors import Conflict, Forbidden, Invalid, ToolcribError

SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
SETTINGS: dict[str, Any] = {
    "name": str,
    "description": str,
    "connection_policy": ConnectionPolicy,
    "isolation": Isolation,
    "trust": Trust,
    "call_timeout": range(1, 901),
    "concurrency": range(1, 257),
    "poll_seconds": range(5, 86_401),
}


class StdioOff(Forbidden):
    code = "stdio_off"

    def __init__(self) -> None:
        super().__init__(
            "This installation does not run programs, so stdio servers are off.",
            hint="Whoever runs the machine can set TOOLCRIB_ALLOW_STDIO=1, or reach the server "
            "over HTTP.",
        )


class NotConfirmed(Conflict):
    code = "confirm_argv"

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__(
            f"This runs a program on this machine: {validation.format_argv(argv)}",
            hint="Confirm exactly this command to go on; over the API, repeat it as confirm_argv.",
            details={"argv": list(argv)},
        )


class CredentialsMissing(ToolcribError):
    code = "credentials_missing"
    status = 409


def check_program(argv: Sequence[str], cwd: str, *, confirmed: str) -> None:
    """Pass only programs that this installation allows and an admin confirmed to the letter."""
    if not settings.ALLOW_STDIO:
        raise StdioOff
    validation.check_argv(argv, cwd)
    if validation.PLACEHOLDER.search(argv[0]) or validation.PLACEHOLDER.search(cwd):
        raise Invalid(
            "The command or its working folder is a variable, so nobody can see what would run.",
            hint="Write the program out; an argument may be a variable.",
            code="bad_argv",
        )
    if runs_inline_code(argv) and any(validation.PLACEHOLDER.search(word) for word in argv):
        raise Invalid(
            "It runs code written in its arguments, and a variable would hide a part of it.",
            hint="Write the code out, and pass values by env.",
            code="bad_argv",
        )
    if confirmed != validation.argv_digest(argv, cwd):
        raise NotConfirmed(argv)


def check_draft(draft: ServerDraft, *, confirmed: str) -> None:
    """Hold a draft to the rules of its transport, whichever way it came."""
    if not SLUG.fullmatch(draft.slug):
        raise Invalid(
            "A slug has 1 to 32 lower-case letters, digits and inner hyphens.", code="bad_slug"
        )
    if draft.slug in RESERVED_SLUGS:
        raise Invalid(f"{draft.slug} is an address of Toolcrib's own.", code="bad_slug")
    if draft.transport == Transport.STDIO:
        check_program([draft.command, *draft.args], draft.cwd, confirmed=confirmed)
        for name, value in draft.env.items():
            validation.check_env(name, value.reveal())
    elif draft.transport in (Transport.HTTP, Transport.SSE):
        validation.check_url(draft.url, allow_http=settings.ALLOW_PLAIN_HTTP)
        for name, value in draft.headers.items():
            validation.check_header(name, value.reveal())
    else:
        raise Invalid("A transport is stdio, http or sse.", code="bad_transport")
    for name, value in draft.variables.items():
        check_variable(name, value, [draft.command, *draft.args])
    if draft.missing:
        names = ", ".join(draft.missing)
        raise Invalid(
            f"Values are missing for: {names}.",
            hint="Set them in the environment, or enter them in place of the reference.",
            code="variables_missing",
            details={"missing": list(draft.missing)},
        )


def check_variable(name: str, value: Secret, argv: Sequence[str]) -> None:
    """Let a variable fill in a value, and never become an option of a confirmed program."""
    if not validation.PLACEHOLDER.fullmatch(f"${{{name}}}") or len(name) > 200:
        raise Invalid(
            "A variable's name has letters, digits and _, at most 200.", code="bad_variable"
        )
    text = value.reveal()
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise Invalid(f"The value of {name} holds control characters.", code="bad_variable")
    if text.startswith("-") and any(word.startswith(f"${{{name}}}") for word in argv):
        raise Invalid(
            f"The value of {name} begins with -, which would make it an option of the program.",
            hint="Write options out, so that they can be confirmed.",
            code="bad_variable",
        )


def add_server(draft: ServerDraft, *, actor: Actor, confirmed: str = "") -> Server:
    """Register a server with its credentials and its group. Nothing is contacted."""
    check_draft(draft, confirmed=confirmed)
    server = Server(
        slug=draft.slug,
        name=draft.name[:120] or draft.slug,
        description=draft.description,
        transport=draft.transport,
        command=draft.command,
        args=list(draft.args),
        cwd=draft.cwd,
        url=draft.url,
        confirmed_argv=confirmed if draft.transport == Transport.STDIO else "",
        enabled=not draft.disabled,
        state=ServerState.DISABLED if draft.disabled else ServerState.NEW,
        unknown_fields=dict(draft.unknown),
        poll_seconds=preferences.value("sync_poll_seconds"),
        call_timeout=settings.CALL_TIMEOUT,
    )
    try:
        with transaction.atomic():
            server.save()
            _store(server, CredentialKind.HEADER, draft.headers)
            _store(server, CredentialKind.ENV, draft.env)
            _store(server, CredentialKind.VARIABLE, draft.variables)
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
            audit.record(actor, "server.add", server, after=_shown(server))
            Revision.bump()
    except IntegrityError as error:
        raise Conflict(
            f"There is a server called {draft.slug} already.",
            hint="Choose another slug, or edit that server.",
            code="slug_taken",
        ) from error
    return server


@transaction.atomic
def edit_connection(
    server: Server, draft: ServerDraft, *, actor: Actor, confirmed: str = ""
) -> Server:
    """Change how a server is reached. A new origin or program voids every credential."""
    server = Server.objects.select_for_update().get(pk=server.pk)
    before = _shown(server)
    new_origin = origin_of(draft.transport, draft.url, draft.command, list(draft.args), draft.cwd)
    check_draft(draft, confirmed=confirmed or server.confirmed_argv)
    if new_origin != server.origin:
        server.credentials.update(ciphertext="", origin_sha256=origin_digest(new_origin))
    server.transport, server.url = draft.transport, draft.url
    server.command, server.args, server.cwd = draft.command, list(draft.args), draft.cwd
    server.confirmed_argv = ""
    if server.transport == Transport.STDIO:
        server.confirmed_argv = validation.argv_digest(server.argv, server.cwd)
    server.generation += 1
    server.save()
    _store(server, CredentialKind.HEADER, draft.headers)
    _store(server, CredentialKind.ENV, draft.env)
    _store(server, CredentialKind.VARIABLE, draft.variables)
    if _shown(server) != before:
        audit.record(actor, "server.edit", server, before=before, after=_shown(server))
    return server


@transaction.atomic
def set_credentials(
    server: Server, kind: str, values: Mapping[str, Secret | None], *, actor: Actor
) -> None:
    """Set the given values of one kind; None removes one. Names are audited, values never."""
    if kind not in CredentialKind.values:
        raise Invalid("A credential is a header, an env value or a variable.")
    server = Server.objects.select_for_update().get(pk=server.pk)
    for name, value in values.items():
        if kind == CredentialKind.HEADER and value is not None:
            validation.check_header(name, value.reveal())
        elif kind == CredentialKind.ENV and value is not None:
            validation.check_env(name, value.reveal())
        elif kind == CredentialKind.VARIABLE and value is not None:
            check_variable(name, value, server.argv)
    gone = [name for name, value in values.items() if value is None]
    kept = {name: value for name, value in values.items() if value is not None}
    server.credentials.filter(kind=kind, name__in=gone).delete()
    _store(server, kind, kept)
    Server.objects.filter(pk=server.pk).update(generation=F("generation") + 1)
    server.generation += 1
    audit.record(
        actor,
        "server.credentials",
        server,
        after={"kind": str(kind), "set": sorted(kept), "removed": sorted(gone)},
    )


def _store(server: Server, kind: str, values: Mapping[str, Secret]) -> None:
    for name, value in values.items():
        Credential.objects.update_or_create(
            server=server,
            kind=kind,
            name=name,
            defaults={
                "ciphertext": encrypt(value),
                "origin_sha256": origin_digest(server.origin),
            },
        )


@transaction.atomic
def change_settings(server: Server, changes: Mapping[str, Any], *, actor: Actor) -> Server:
    """Change what does not touch the connection: names, trust, times, policy."""
    server = Server.objects.select_for_update().get(pk=server.pk)
    before, after = {}, {}
    for key, value in changes.items():
        value = _checked_setting(key, value)
        if getattr(server, key) != value:
            before[key], after[key] = getattr(server, key), value
            setattr(server, key, value)
    if after:
        server.save(update_fields=list(after))
        audit.record(actor, "server.settings", server, before=before, after=after)
        if "trust" in after:  # decides on calls of tools that wait, and is held in memory
            Revision.bump()
    return server


def _checked_setting(key: str, value: Any) -> Any:
    rule = SETTINGS.get(key)
    if rule is None:
        raise Invalid(f"{key} is not a setting of a server.", hint=f"Known: {', '.join(SETTINGS)}.")
    if isinstance(rule, range):
        if not isinstance(value, int) or isinstance(value, bool) or value not in rule:
            raise Invalid(f"{key} is a whole number from {rule.start} to {rule.stop - 1}.")
    elif rule is str:
        if not isinstance(value, str) or "\0" in value or len(value) > 2000:
            raise Invalid(f"{key} is a text of at most 2,000 characters.")
        if key == "name" and not 0 < len(value) <= 120:
            raise Invalid("A name has 1 to 120 characters.")
    elif value not in rule.values:
        raise Invalid(f"{key} is one of: {', '.join(rule.values)}.")
    return value


@transaction.atomic
def set_enabled(server: Server, enabled: bool, *, actor: Actor) -> Server:
    server = Server.objects.select_for_update().get(pk=server.pk)
    if server.enabled != enabled:
        server.enabled = enabled
        server.state = ServerState.NEW if enabled else ServerState.DISABLED
        server.state_code = server.state_reason = server.state_detail = ""
        server.state_since = timezone.now()
        server.generation += 1
        server.failures = 0
        server.save()
        audit.record(actor, "server.enable" if enabled else "server.disable", server)
        Revision.bump()
    return server


@transaction.atomic
def delete_server(server: Server, *, actor: Actor) -> None:
    """Remove a server with its tools; its own group goes too unless it holds other tools."""
    audit.record(actor, "server.delete", server, before=_shown(server))
    group = Group.objects.filter(follows=server).first()
    server.delete()
    if group and not group.memberships.exists():
        group.delete()
    Revision.bump()


def spec_of(server: Server) -> ServerSpec:
    """Decrypt what a connection needs. The one way to one, so the gate stands here too."""
    if server.transport == Transport.STDIO:
        check_program(server.argv, server.cwd, confirmed=server.confirmed_argv)
    bound = origin_digest(server.origin)
    values: dict[str, dict[str, Secret]] = {kind: {} for kind in CredentialKind.values}
    for credential in server.credentials.all():
        if credential.voided or credential.origin_sha256 != bound:
            raise CredentialsMissing(
                f"{credential.get_kind_display()} {credential.name} was voided when the address "
                "changed.",
                hint="Enter it again in the server's settings, or remove it.",
            )
        values[credential.kind][credential.name] = decrypt(credential.ciphertext)
    variables = values[CredentialKind.VARIABLE]
    return ServerSpec(
        server_id=server.pk,
        slug=server.slug,
        generation=server.generation,
        transport=server.transport,
        argv=tuple(fill_variables(part, variables) for part in server.argv)
        if server.transport == Transport.STDIO
        else (),
        cwd=server.cwd,
        env=values[CredentialKind.ENV],
        url=fill_variables(server.url, variables),
        headers=values[CredentialKind.HEADER],
        hidden=(*variables.values(), *values[CredentialKind.ENV].values()),
    )


def fill_variables(text: str, variables: Mapping[str, Secret]) -> Secret:
    """Put variables in place of their ${NAME}s."""

    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1])
        return known.reveal() if known else found[0]

    return Secret(validation.PLACEHOLDER.sub(value, text))


def _shown(server: Server) -> dict[str, object]:
    return {"transport": server.transport, "address": server.address, "cwd": server.cwd}


def report_state(
    server_id: int,
    generation: int,
    state: str,
    *,
    code: str = "",
    reason: str = "",
    detail: str = "",
) -> None:
    """Write down how a server does, unless it was edited meanwhile or is disabled."""
    rows = Server.objects.filter(pk=server_id, generation=generation, enabled=True)
    same = rows.filter(state=state, state_code=code, state_reason=reason)
    if state == ServerState.FAILING:
        rows.update(failures=F("failures") + 1)
    if same.exists():
        return
    fields: dict[str, Any] = {"failures": 0} if state == ServerState.CONNECTED else {}
    rows.update(
        state=state,
        state_code=code,
        state_reason=reason,
        state_detail=detail,
        state_since=timezone.now(),
        **fields,
    )
