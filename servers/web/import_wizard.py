"""What a person has entered so far while adding or editing servers, sealed in the session.

A pasted text and typed values may hold secrets: they are encrypted here, and come out only to be
read by `imports`. No page shows them again.
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
from servers.mcp_json.parser import parse_mcp_json
from servers.models import Server, Transport, Trigger
from servers.registration import validation
from servers.registration.credentials import UnreadableCredential, decrypt, encrypt
from servers.registration.drafts import ImportCheck, Problem, ServerDraft, target_of, target_string
from servers.secret import Secret
from servers.sync import scheduling
from toolcrib.lib.errors import Conflict, Invalid

KEY = "add-servers"
EDIT = "edit-server"
MAX_VALUE = 32 * 1024
NOTHING = Secret("")
# What the step before offers, where the rule itself can only name other ways.
WAYS_OUT = {
    "variables_missing": "Go back to the check and enter them.",
    "confirm_argv": "Go back to the check and tick Run exactly this program.",
}


@dataclass(frozen=True)
class WizardState:
    """One import between its steps."""

    text: Secret
    variables: Mapping[str, Secret] = field(default_factory=dict)
    saved: tuple[int, ...] = ()  # servers
    taken: tuple[str, ...] = ()  # the names these have in the text
    refused: tuple[Mapping[str, str], ...] = ()  # name, message, hint


def remember(session: SessionBase, memory: WizardState) -> None:
    values = {name: value.reveal() for name, value in memory.variables.items()}
    sealed = json.dumps({"text": memory.text.reveal(), "variables": values})
    session[KEY] = {
        "sealed": encrypt(Secret(sealed)),
        "saved": list(memory.saved),
        "taken": list(memory.taken),
        "refused": [dict(row) for row in memory.refused],
    }


def recall(session: SessionBase) -> WizardState | None:
    """Return the import under way, or nothing if there is none that can be read."""
    kept = session.get(KEY)
    if not isinstance(kept, dict):
        return None
    try:
        opened = json.loads(decrypt(kept["sealed"]).reveal())
    except UnreadableCredential:
        return None
    return WizardState(
        text=Secret(opened["text"]),
        variables={name: Secret(value) for name, value in opened["variables"].items()},
        saved=tuple(kept["saved"]),
        taken=tuple(kept["taken"]),
        refused=tuple(kept["refused"]),
    )


def with_values(memory: WizardState, post: QueryDict) -> WizardState:
    """Add the values typed for variables; an empty field changes nothing."""
    typed = {
        name.removeprefix("variable:"): value
        for name in post
        if name.startswith("variable:") and (value := str(post[name]))
    }
    other = str(post.get("other_name", "")).strip()
    if other and post.get("other_value"):
        typed[other] = str(post["other_value"])
    new = {name: Secret(value[:MAX_VALUE]) for name, value in typed.items() if len(name) <= 200}
    return replace(memory, variables={**memory.variables, **new})


# --- Check --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedRow:
    """One server of the text, as the check step shows it. Holds no secret that can be printed."""

    draft: ServerDraft
    digest: str
    duplicate: bool
    stdio_off: bool

    @property
    def program(self) -> str:
        return validation.format_argv(self.draft.argv) if self.draft.argv else ""

    @property
    def masked(self) -> list[tuple[str, list[str]]]:
        """Name what is kept encrypted, by kind."""
        kinds = [
            ("Headers", self.draft.headers),
            ("Environment", self.draft.env),
            ("Variables", self.draft.variables),
        ]
        return [(label, sorted(values)) for label, values in kinds if values]

    @property
    def picked(self) -> bool:
        return not (self.duplicate or self.stdio_off)


@dataclass(frozen=True)
class Checked:
    """The whole text, checked, without the servers that were saved from it already."""

    check: ImportCheck
    rows: tuple[CheckedRow, ...]
    wanted: tuple[Mapping[str, Any], ...]  # name, description, entered, by

    @property
    def unreadable(self) -> bool:
        return not self.check.drafts and not any(p.name for p in self.check.problems)

    @property
    def secrets(self) -> int:
        return sum(row.draft.secrets_found for row in self.rows)

    @property
    def programs(self) -> int:
        return sum(1 for row in self.rows if row.program)


def check(memory: WizardState) -> Checked:
    found = importer.check_import(
        memory.text.reveal(), {name: value.reveal() for name, value in memory.variables.items()}
    )
    fields = ("transport", "url", "command", "args")
    seen = {target_string(*row) for row in Server.objects.values_list(*fields)}
    rows = []
    for draft in found.drafts:
        target = target_of(draft)
        if draft.name not in memory.taken:
            rows.append(
                CheckedRow(
                    draft=draft,
                    digest=importer.draft_digest(draft),
                    duplicate=target in seen,
                    stdio_off=bool(draft.argv) and not settings.ALLOW_STDIO,
                )
            )
        seen.add(target)
    return Checked(found, tuple(rows), tuple(_wanted(found, rows, memory)))


def _wanted(
    found: ImportCheck, rows: Collection[CheckedRow], memory: WizardState
) -> list[Mapping[str, Any]]:
    """List the variables to ask for: what is missing, and what was entered and may be replaced."""
    described = {str(item["name"]): str(item["description"]) for item in found.inputs}
    by: dict[str, list[str]] = {name: [] for name in memory.variables}
    for row in rows:
        for name in row.draft.missing:
            by.setdefault(name, []).append(row.draft.name)
    return [
        {
            "name": name,
            "description": described.get(name, ""),
            "entered": name in memory.variables,
            "by": servers,
        }
        for name, servers in by.items()
    ]


# --- Connect ------------------------------------------------------------------------------------


def connect(memory: WizardState, post: QueryDict, *, actor: Actor) -> WizardState:
    """Save the picked servers that can be saved, ask for their syncs, and note what became of all.

    Raises Conflict when what was picked is no longer what the text gives.
    """
    checked = check(memory)
    picked = set(post.getlist("pick"))
    if not picked:
        raise Conflict("No server is selected.", hint="Select at least one.", code="none_picked")
    if picked - {row.draft.slug for row in checked.rows}:
        raise Conflict(
            "The list has changed since it was shown.", hint="Check it again.", code="changed"
        )
    names = {row.draft.slug: row.draft.name for row in checked.rows}
    only_picked = replace(checked.check, problems=())
    done = importer.save_drafts(
        only_picked,
        actor=actor,
        confirmed=post.getlist("confirm"),
        only=picked & set(names),
        again=True,  # a person ticked it beside the words that it is here already
    )
    for item in done:
        if item.server:
            scheduling.request_sync(item.server.pk, Trigger.ADDED)
    problems: list[Problem | importer.Imported] = [*checked.check.problems]
    problems += [item for item in done if not item.server]
    if not problems and len(done) == len(checked.rows):
        memory = replace(memory, text=NOTHING, variables={})  # keep no secret that is done with
    return replace(
        memory,
        saved=(*memory.saved, *(item.server.pk for item in done if item.server)),
        taken=(*memory.taken, *(item.name for item in done if item.server)),
        refused=tuple(
            {
                "name": item.name or "The text",
                "message": item.message,
                "hint": WAYS_OUT.get(item.code, item.hint),
            }
            for item in problems
        ),
    )


# --- Editing a connection -----------------------------------------------------------------------


def remember_edit(session: SessionBase, server: Server, text: Secret) -> None:
    session[EDIT] = {"server": server.pk, "sealed": encrypt(text)}


def recall_edit(session: SessionBase, server: Server) -> Secret | None:
    """Return the connection that waits for the confirmation of its program."""
    kept = session.get(EDIT)
    if not isinstance(kept, dict) or kept.get("server") != server.pk:
        return None
    try:
        return decrypt(kept["sealed"])
    except UnreadableCredential:
        return None


def forget_edit(session: SessionBase) -> None:
    session.pop(EDIT, None)


def edited_draft(server: Server, text: Secret) -> ServerDraft:
    """Read an edited connection the way an import is read, so that secrets in it are moved out.

    A ${NAME} that the server has a credential for stays: it is filled in when connecting, unless
    the edit voids it.
    """
    found = parse_mcp_json(text.reveal(), variables={}, allow_http=settings.ALLOW_PLAIN_HTTP)
    for problem in found.problems:
        raise Invalid(problem.message, hint=problem.hint, code=problem.code)
    draft = found.drafts[0]
    known = set(server.credentials.filter(kind="variable").values_list("name", flat=True))
    missing = tuple(name for name in draft.missing if name not in known)
    if missing:
        raise Invalid(
            f"There is no value for {', '.join(missing)}.",
            hint="Add it under Credentials as a variable first.",
            code="variables_missing",
        )
    return replace(draft, name=server.name, slug=server.slug, missing=())


def needs_confirmation(server: Server, draft: ServerDraft) -> bool:
    return draft.transport == Transport.STDIO and (
        importer.draft_digest(draft) != server.confirmed_argv
    )
