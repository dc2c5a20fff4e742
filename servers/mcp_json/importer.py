"""Import of an mcp.json: check it against the registered servers, save the valid ones.

Used by the pages, the API and the management command.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from django.conf import settings

from catalog.audit import Actor
from servers.mcp_json.parser import (
    ExportRow,
    ImportCheck,
    ServerDraft,
    draft_target,
    export_mcp_json,
    parse_mcp_json,
    target_string,
)
from servers.models import CredentialKind, Server
from servers.registration import actions as server_actions
from servers.registration import validation
from toolcrib.lib.errors import Invalid, ToolcribError


@dataclass(frozen=True)
class ImportResult:
    """The outcome of importing one server."""

    name: str
    server: Server | None = None  # saved by this import
    known: Server | None = None  # already registered
    code: str = ""
    message: str = ""
    hint: str = ""


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


def parse_single_entry(
    entry: Mapping[str, object], *, name: str, slug: str, variables: Mapping[str, str]
) -> ServerDraft:
    """Parse one server like an import, so that plaintext secrets are extracted."""
    check = parse_mcp_json(
        json.dumps({"mcpServers": {name: entry}}),
        variables=variables,
        allow_http=settings.ALLOW_PLAIN_HTTP,
    )
    for problem in check.problems:
        raise Invalid(problem.message, hint=problem.hint, code=problem.code)
    return replace(check.drafts[0], name=name, slug=slug)


def draft_digest(draft: ServerDraft) -> str:
    """Return the digest to confirm before the command may run; empty if it runs none."""
    return validation.argv_digest(draft.argv, draft.cwd) if draft.argv else ""


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
    results = [
        ImportResult(problem.name, code=problem.code, message=problem.message, hint=problem.hint)
        for problem in check.problems
    ]
    registered = {} if allow_duplicates else _servers_by_target()
    for draft in check.drafts:
        if only is not None and draft.slug not in only:
            continue
        known = registered.get(draft_target(draft))
        if known is not None:
            message = f"Already registered as {known.slug}."
            results.append(ImportResult(draft.name, known=known, message=message))
            continue
        digest = draft_digest(draft)
        allowed = digest if allow_programs or digest in confirmed else ""
        try:
            server = server_actions.add_server(draft, actor=actor, confirmed=allowed)
            results.append(ImportResult(draft.name, server=server))
        except ToolcribError as error:
            results.append(
                ImportResult(draft.name, code=error.code, message=error.message, hint=error.hint)
            )
    return results


def _servers_by_target() -> dict[str, Server]:
    return {
        target_string(row.transport, row.url, row.command, row.args): row
        for row in Server.objects.order_by("-pk")
    }


def export_text() -> str:
    """Return all servers as mcp.json, with ${NAME} for each secret."""
    rows = []
    for server in Server.objects.prefetch_related("credentials"):
        names: dict[str, list[str]] = {kind: [] for kind in CredentialKind.values}
        for credential in server.credentials.all():
            names[credential.kind].append(credential.name)
        rows.append(
            ExportRow(
                slug=server.slug,
                transport=server.transport,
                command=server.command,
                args=tuple(server.args),
                cwd=server.cwd,
                url=server.url,
                env_names=tuple(names[CredentialKind.ENV]),
                header_names=tuple(names[CredentialKind.HEADER]),
                unknown=server.unknown_fields,
            )
        )
    return export_mcp_json(rows)
