"""Import of an mcp.json: check it against the registered servers, save the valid ones.

Used by the pages, the API and the management command.
"""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from django.conf import settings

from catalog.audit import Actor
from servers.mcp_json.parser import parse_mcp_json
from servers.models import CredentialKind, Server
from servers.registration import actions as server_actions
from servers.registration.confirmation import draft_program
from servers.registration.drafts import ImportCheck, Problem, ServerDraft, target_string
from toolcrib.lib.errors import Invalid, ToolcribError

# Toolcrib's own environment variables, never available to a file.
PRIVATE_VARIABLES = ("TOOLCRIB_", "DATABASE_URL", "REDIS_URL")


def environment_variables() -> dict[str, str]:
    """Return the environment that the references of a file may use."""
    items = os.environ.items()
    return {name: value for name, value in items if not name.startswith(PRIVATE_VARIABLES)}


def read_text(name: str) -> str:
    """Return the text of a file, or of standard input for `-`."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise Invalid(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"{name} is not UTF-8 text.") from error


@dataclass(frozen=True)
class ImportResult(Problem):
    """The outcome of importing one server: saved, already registered, or a problem."""

    server: Server | None = None  # saved by this import
    known: Server | None = None  # already registered


def check_import(text: str, variables: Mapping[str, str]) -> ImportCheck:
    """Parse the text. Saves and starts nothing."""
    rows = Server.objects.values_list("slug", "transport", "url", "command", "args")
    return parse_mcp_json(
        text,
        variables=variables,
        allow_http=settings.ALLOW_PLAIN_HTTP,
        taken_slugs={row[0] for row in rows},
        existing={target_string(*row[1:]): row[0] for row in rows},
    )


def parse_connection(
    text: str, *, variables: Mapping[str, str], known: Server | None = None
) -> ServerDraft:
    """Parse one server like an import. Variables stored for the `known` one are not missing."""
    check = parse_mcp_json(text, variables=variables, allow_http=settings.ALLOW_PLAIN_HTTP)
    for problem in check.problems:
        raise Invalid(problem.message, hint=problem.hint, code=problem.code)
    [draft] = check.drafts
    if known is not None and draft.missing:
        stored = known.credentials.filter(kind=CredentialKind.VARIABLE)
        stored_names = set(stored.values_list("name", flat=True))
        missing = tuple(name for name in draft.missing if name not in stored_names)
        draft = replace(draft, missing=missing)
    return draft


def save_drafts(
    check: ImportCheck,
    *,
    actor: Actor,
    confirmed: Collection[str] = (),
    allow_programs: bool = False,
    only: Collection[str] | None = None,
    allow_duplicates: bool = False,
) -> list[ImportResult]:
    """Save each valid server. An invalid one is reported and does not affect the others.

    A registered server is skipped unless `allow_duplicates`. `confirmed` contains the digests of
    confirmed commands. `allow_programs` confirms all of them: for the management command, whose
    user can run them anyway.
    """
    results = [ImportResult(**vars(problem)) for problem in check.problems]
    registered = {} if allow_duplicates else servers_by_target()
    for draft in check.drafts:
        if only is not None and draft.slug not in only:
            continue
        known = registered.get(draft.target)
        if known is not None:
            message = f"Already registered as {known.slug}."
            results.append(ImportResult(draft.name, known=known, message=message))
            continue
        digest = draft_program(draft).digest if draft.argv else ""
        allowed = digest if allow_programs or digest in confirmed else ""
        try:
            server = server_actions.add_server(draft, actor=actor, confirmed=allowed)
            results.append(ImportResult(draft.name, server=server))
        except ToolcribError as error:
            results.append(ImportResult(draft.name, error.code, error.message, error.hint))
    return results


def servers_by_target() -> dict[str, Server]:
    return {
        target_string(row.transport, row.url, row.command, row.args): row
        for row in Server.objects.order_by("-pk")
    }
