"""State of the import wizard and of connection edits, encrypted in the user's session.

Pasted text and entered values may contain secrets. They are stored encrypted, are decrypted only
to be parsed, and no page shows them again.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings
from django.contrib.sessions.backends.base import SessionBase
from django.http import QueryDict

from catalog.audit import Actor
from servers.mcp_json import importer
from servers.models import Server, Trigger
from servers.registration import confirmation, validation
from servers.registration.credentials import UnreadableCredential, decrypt, encrypt
from servers.registration.drafts import ImportCheck, Problem, ServerDraft
from servers.secret import Secret
from servers.sync import scheduling
from toolcrib.lib.errors import Conflict, Invalid

IMPORT_KEY = "add-servers"
EDIT_KEY = "edit-server"
CREDENTIAL_KEY = "edit-credential"
MAX_VALUE_LENGTH = 32 * 1024
EMPTY = Secret("")
# Hints for the wizard, by error code: its check step can resolve these errors.
WIZARD_HINTS = {
    "variables_missing": "Go back to the check and enter them.",
    "confirm_argv": "Go back to the check and select Allow this command.",
}


@dataclass(frozen=True)
class WizardState:
    text: Secret
    variables: Mapping[str, Secret] = field(default_factory=dict)
    saved: tuple[int, ...] = ()  # primary keys of the servers
    saved_names: tuple[str, ...] = ()  # their names in the text
    rejected: tuple[Mapping[str, str], ...] = ()  # name, message, hint


# Keys in the session keep their names: sessions outlive an upgrade.
def save(session: SessionBase, state: WizardState) -> None:
    values = {name: value.reveal() for name, value in state.variables.items()}
    plaintext = json.dumps({"text": state.text.reveal(), "variables": values})
    session[IMPORT_KEY] = {
        "sealed": encrypt(Secret(plaintext)),
        "saved": list(state.saved),
        "taken": list(state.saved_names),
        "refused": [dict(row) for row in state.rejected],
    }


def load(session: SessionBase) -> WizardState | None:
    """Return the current import, or None if there is none that can be decrypted."""
    stored = session.get(IMPORT_KEY)
    if not isinstance(stored, dict):
        return None
    try:
        secrets = json.loads(decrypt(stored["sealed"]).reveal())
    except UnreadableCredential:
        return None
    return WizardState(
        text=Secret(secrets["text"]),
        variables={name: Secret(value) for name, value in secrets["variables"].items()},
        saved=tuple(stored["saved"]),
        saved_names=tuple(stored["taken"]),
        rejected=tuple(stored["refused"]),
    )


def with_values(state: WizardState, post: QueryDict) -> WizardState:
    """Return the state with the entered variable values; empty fields change nothing."""
    entered = {
        name.removeprefix("variable:"): value
        for name in post
        if name.startswith("variable:") and (value := str(post[name]))
    }
    other = str(post.get("other_name", "")).strip()
    if other and post.get("other_value"):
        entered[other] = str(post["other_value"])
    new = {
        name: Secret(value[:MAX_VALUE_LENGTH])
        for name, value in entered.items()
        if len(name) <= 200
    }
    return replace(state, variables={**state.variables, **new})


@dataclass(frozen=True)
class CheckedRow:
    """One parsed server in the check step. Contains no printable secret."""

    draft: ServerDraft
    duplicate: bool
    stdio_off: bool

    @property
    def program(self) -> str:
        return validation.format_argv(self.draft.argv) if self.draft.argv else ""

    @property
    def digest(self) -> str:
        """The digest to confirm before the command may run."""
        return confirmation.draft_program(self.draft).digest

    @property
    def credential_names(self) -> list[tuple[str, list[str]]]:
        kinds = [
            ("Headers", self.draft.headers),
            ("Environment", self.draft.env),
            ("Variables", self.draft.variables),
        ]
        return [(label, sorted(values)) for label, values in kinds if values]

    @property
    def selected(self) -> bool:
        return not (self.duplicate or self.stdio_off)


@dataclass(frozen=True)
class Checked:
    """The checked text, without the servers that are already saved from it."""

    check: ImportCheck
    rows: tuple[CheckedRow, ...]
    variables: tuple[Mapping[str, Any], ...]  # name, description, entered, servers

    @property
    def is_invalid(self) -> bool:
        return not self.check.drafts and not any(p.name for p in self.check.problems)

    @property
    def secrets(self) -> int:
        return sum(row.draft.secrets_found for row in self.rows)

    @property
    def programs(self) -> int:
        return sum(1 for row in self.rows if row.program)


def check(state: WizardState) -> Checked:
    result = importer.check_import(
        state.text.reveal(), {name: value.reveal() for name, value in state.variables.items()}
    )
    seen = set(importer.servers_by_target())
    rows = []
    for draft in result.drafts:
        if draft.name not in state.saved_names:
            stdio_off = bool(draft.argv) and not settings.ALLOW_STDIO
            rows.append(CheckedRow(draft, draft.target in seen, stdio_off))
        seen.add(draft.target)
    return Checked(result, tuple(rows), tuple(_variable_fields(result, rows, state)))


def _variable_fields(
    result: ImportCheck, rows: Collection[CheckedRow], state: WizardState
) -> list[Mapping[str, Any]]:
    """Return the variables to prompt for: missing ones, and entered ones that can be replaced."""
    descriptions = {str(item["name"]): str(item["description"]) for item in result.inputs}
    servers_by_name: dict[str, list[str]] = {name: [] for name in state.variables}
    for row in rows:
        for name in row.draft.missing:
            servers_by_name.setdefault(name, []).append(row.draft.name)
    return [
        {
            "name": name,
            "description": descriptions.get(name, ""),
            "entered": name in state.variables,
            "servers": servers,
        }
        for name, servers in servers_by_name.items()
    ]


def connect(state: WizardState, post: QueryDict, *, actor: Actor) -> WizardState:
    """Save the selected servers and queue their syncs. Raises Conflict if the list has changed."""
    checked = check(state)
    # A program is selected by allowing its command.
    allowed = set(post.getlist("confirm"))
    selected = set(post.getlist("pick"))
    selected |= {row.draft.slug for row in checked.rows if row.program and row.digest in allowed}
    if not selected:
        raise Conflict("No server is selected.", hint="Select at least one.", code="none_picked")
    if selected - {row.draft.slug for row in checked.rows}:
        raise Conflict(
            "The list has changed since it was displayed.", hint="Check it again.", code="changed"
        )
    results = importer.save_drafts(
        replace(checked.check, problems=()),
        actor=actor,
        confirmed=list(allowed),
        only=selected,
        allow_duplicates=True,  # the page marks duplicates, and the user selected this one anyway
    )
    for result in results:
        if result.server:
            scheduling.request_sync(result.server.pk, Trigger.ADDED)
    problems: list[Problem] = [*checked.check.problems]
    problems += [result for result in results if not result.server]
    if not problems and len(results) == len(checked.rows):
        state = replace(state, text=EMPTY, variables={})  # the secrets are no longer needed
    return replace(
        state,
        saved=(*state.saved, *(result.server.pk for result in results if result.server)),
        saved_names=(*state.saved_names, *(result.name for result in results if result.server)),
        rejected=tuple(
            {
                "name": problem.name or "The text",
                "message": problem.message,
                "hint": WIZARD_HINTS.get(problem.code, problem.hint),
            }
            for problem in problems
        ),
    )


def save_edit(session: SessionBase, server: Server, text: Secret) -> None:
    session[EDIT_KEY] = {"server": server.pk, "sealed": encrypt(text)}


def load_edit(session: SessionBase, server: Server) -> Secret | None:
    """Return the edited connection whose command needs confirmation."""
    return _load_sealed(session, EDIT_KEY, server)


def save_credential(
    session: SessionBase, server: Server, kind: str, name: str, value: Secret | None
) -> None:
    text = json.dumps([kind, name, value.reveal() if value else None])
    session[CREDENTIAL_KEY] = {"server": server.pk, "sealed": encrypt(Secret(text))}


def load_credential(session: SessionBase, server: Server) -> tuple[str, str, Secret | None] | None:
    """Return the kind, name and value of a credential whose program needs confirmation."""
    text = _load_sealed(session, CREDENTIAL_KEY, server)
    if text is None:
        return None
    kind, name, value = json.loads(text.reveal())
    return kind, name, None if value is None else Secret(value)


def _load_sealed(session: SessionBase, key: str, server: Server) -> Secret | None:
    stored = session.get(key)
    if not isinstance(stored, dict) or stored.get("server") != server.pk:
        return None
    try:
        return decrypt(stored["sealed"])
    except UnreadableCredential:
        return None


def parse_edit(server: Server, text: Secret) -> ServerDraft:
    draft = importer.parse_connection(text.reveal(), variables={}, known=server)
    if draft.missing:
        raise Invalid(
            f"Missing values for variables: {', '.join(draft.missing)}.",
            hint="Add them under Credentials as variables first.",
            code="variables_missing",
        )
    return replace(draft, name=server.name, slug=server.slug)
