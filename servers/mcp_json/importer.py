"""Check an mcp.json against what is registered, and save its good servers.

Page, API and command all come through here.
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
    export_mcp_json,
    parse_mcp_json,
    target_of,
    target_string,
)
from servers.models import CredentialKind, Server
from servers.registration import actions as server_actions
from servers.registration import validation
from toolcrib.lib.errors import Invalid, ToolcribError


@dataclass(frozen=True)
class Imported:
    """What became of one server of the text."""

    name: str
    server: Server | None = None  # saved now
    known: Server | None = None  # registered before
    code: str = ""
    message: str = ""
    hint: str = ""


def check_import(text: str, variables: Mapping[str, str]) -> ImportCheck:
    """Parse only: nothing is saved, nothing is started."""
    rows = Server.objects.values_list("slug", "transport", "url", "command", "args")
    return parse_mcp_json(
        text,
        variables=variables,
        allow_http=settings.ALLOW_PLAIN_HTTP,
        taken_slugs={row[0] for row in rows},
        existing={target_string(*row[1:]): row[0] for row in rows},
    )


def read_single_entry(
    entry: Mapping[str, object], *, name: str, slug: str, variables: Mapping[str, str]
) -> ServerDraft:
    """Read one server the way a text is read, so that secrets in its address are moved out."""
    found = parse_mcp_json(
        json.dumps({"mcpServers": {name: entry}}),
        variables=variables,
        allow_http=settings.ALLOW_PLAIN_HTTP,
    )
    for problem in found.problems:
        raise Invalid(problem.message, hint=problem.hint, code=problem.code)
    return replace(found.drafts[0], name=name, slug=slug)


def draft_digest(draft: ServerDraft) -> str:
    """What a person confirms before this draft's program may run; empty where it runs none."""
    return validation.argv_digest(draft.argv, draft.cwd) if draft.argv else ""


def save_drafts(
    check: ImportCheck,
    *,
    actor: Actor,
    confirmed: Collection[str] = (),
    allow_programs: bool = False,
    only: Collection[str] | None = None,
    again: bool = False,
) -> list[Imported]:
    """Save each good server; each bad one keeps its reason and touches no other.

    One that is registered already is left as it is, unless it is wanted `again`.

    `confirmed` holds digests of programs a person confirmed; `allow_programs` stands for all of
    them (the command line, where whoever runs it could run them anyway).
    """
    done = [
        Imported(problem.name, code=problem.code, message=problem.message, hint=problem.hint)
        for problem in check.problems
    ]
    before = {} if again else _registered()
    for draft in check.drafts:
        if only is not None and draft.slug not in only:
            continue
        twin = before.get(target_of(draft))
        if twin is not None:
            done.append(
                Imported(draft.name, known=twin, message=f"Registered already as {twin.slug}.")
            )
            continue
        digest = draft_digest(draft)
        allowed = digest if allow_programs or digest in confirmed else ""
        try:
            server = server_actions.add_server(draft, actor=actor, confirmed=allowed)
            done.append(Imported(draft.name, server=server))
        except ToolcribError as error:
            done.append(
                Imported(draft.name, code=error.code, message=error.message, hint=error.hint)
            )
    return done


def _registered() -> dict[str, Server]:
    """Servers by what they connect to, as they stand before an import."""
    return {
        target_string(row.transport, row.url, row.command, row.args): row
        for row in Server.objects.order_by("-pk")
    }


def export_text() -> str:
    """Write every server as mcp.json, with ${NAME} where a secret stands."""
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
