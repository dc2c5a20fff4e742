"""Confirmation of stdio programs: what an admin confirms, and its digest.

Confirmed are the arguments with their variables filled in, the working directory and the
environment. Values stay secret: pages and responses show `${NAME}` at their position, and the
digest contains an HMAC of each under the installation's key, so that it does not help to guess one.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from django.conf import settings

from servers.models import CredentialKind, Server
from servers.registration.credentials import UnreadableCredential, decrypt, origin_digest
from servers.registration.drafts import ServerDraft
from servers.registration.validation import PLACEHOLDER, argv_digest
from servers.secret import Secret


@dataclass(frozen=True)
class Program:
    """A program as it would start. `variables` are those that the arguments contain."""

    argv: tuple[str, ...]  # with ${NAME}
    cwd: str = ""
    env: Mapping[str, Secret] = field(default_factory=dict)
    variables: Mapping[str, Secret] = field(default_factory=dict)

    @property
    def filled_argv(self) -> list[str]:
        """The exact argument list of the process. Contains secrets."""
        return [fill_variables(arg, self.variables).reveal() for arg in self.argv]

    @property
    def digest(self) -> str:
        """The digest that a confirmation repeats."""
        return self._digest(values_digest(self, settings.ENCRYPTION_KEYS[0]))

    def matches(self, digest: str) -> bool:
        return bool(digest) and hmac.compare_digest(self.digest.encode(), digest.encode())

    def _digest(self, values: str) -> str:
        command = argv_digest(self.argv, self.cwd)
        return hashlib.sha256(f"{command} {values}".encode()).hexdigest() if values else command


def values_digest(program: Program, key: str) -> str:
    """Return an HMAC of all values; empty for a program without any."""
    values = [
        [kind, name, value.reveal()]
        for kind, items in (("env", program.env), ("variable", program.variables))
        for name, value in sorted(items.items())
    ]
    if not values:
        return ""
    derived = hashlib.sha256(b"toolcrib confirmation:" + key.encode()).digest()
    return hmac.new(derived, json.dumps(values).encode("ascii"), hashlib.sha256).hexdigest()


def draft_program(draft: ServerDraft, server: Server | None = None) -> Program:
    """Return the program of a draft, with the values that an edited server keeps."""
    kept = Program(())
    if server is not None and _origin(draft) == server.origin:
        kept = stored_program(server)
    names = _variable_names(draft.argv)
    variables = {**kept.variables, **draft.variables}
    return Program(
        argv=draft.argv,
        cwd=draft.cwd,
        env={**kept.env, **draft.env},
        variables={name: value for name, value in variables.items() if name in names},
    )


def stored_program(
    server: Server, kind: str = "", changes: Mapping[str, Secret | None] | None = None
) -> Program:
    """Return a server's program, with changed values of one kind; None deletes one.

    A value that was removed or cannot be decrypted is left out: it must be entered again, and
    confirmed, before the program can start.
    """
    values: dict[str, dict[str, Secret]] = {kind: {} for kind in CredentialKind.values}
    origin = origin_digest(server.origin)
    for credential in server.credentials.all():
        if not credential.voided and credential.origin_sha256 == origin:
            try:
                values[credential.kind][credential.name] = decrypt(credential.ciphertext)
            except UnreadableCredential:
                continue
    for name, value in (changes or {}).items():
        if value is None:
            values[kind].pop(name, None)
        else:
            values[kind][name] = value
    names = _variable_names(server.argv)
    variables = values[CredentialKind.VARIABLE]
    return Program(
        argv=tuple(server.argv),
        cwd=server.cwd,
        env=values[CredentialKind.ENV],
        variables={name: value for name, value in variables.items() if name in names},
    )


def is_confirmed(server: Server, program: Program) -> bool:
    """Return whether the stored confirmation is one of this exact program.

    A null `confirmed_values` is a confirmation by a version that did not record values: it holds
    until a value changes.
    """
    if server.confirmed_argv != argv_digest(program.argv, program.cwd):
        return False
    if server.confirmed_values is None:
        return True
    digests = (values_digest(program, key) for key in settings.ENCRYPTION_KEYS)
    return any(hmac.compare_digest(server.confirmed_values, digest) for digest in digests)


def set_confirmed(server: Server, program: Program) -> None:
    """Record the confirmation in the fields of the server, without saving it."""
    server.confirmed_argv = argv_digest(program.argv, program.cwd)
    server.confirmed_values = values_digest(program, settings.ENCRYPTION_KEYS[0])


def fill_variables(text: str, variables: Mapping[str, Secret]) -> Secret:
    """Replace each ${NAME} that has a value, once: values are not searched again."""

    def replacement(match: re.Match[str]) -> str:
        value = variables.get(match[1])
        return value.reveal() if value else match[0]

    return Secret(PLACEHOLDER.sub(replacement, text))


def _variable_names(argv: tuple[str, ...] | list[str]) -> set[str]:
    return {name for arg in argv for name in PLACEHOLDER.findall(arg)}


def _origin(draft: ServerDraft) -> str:
    return Server(**draft.connection_fields()).origin
