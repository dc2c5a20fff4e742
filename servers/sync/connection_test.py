"""Try a connection and say in words what happened. Changes nothing in the catalog."""

import asyncio
import time
from dataclasses import dataclass

from catalog import audit
from catalog.audit import Actor
from servers.models import Server, ServerState, Transport
from servers.registration import actions as server_actions
from servers.registration.drafts import ServerDraft
from servers.spec import ServerSpec
from servers.sync import runner
from toolcrib.lib.errors import ToolcribError


@dataclass(frozen=True)
class ConnectionTestResult:
    ok: bool
    code: str
    message: str
    hint: str
    detail: str
    tools: int
    protocol_version: str
    server_info: dict[str, str]
    milliseconds: int


def test_server(server: Server, *, actor: Actor) -> ConnectionTestResult:
    """Test a registered server, and note its state."""
    audit.record(actor, "server.test", server)
    try:
        spec = server_actions.spec_of(server)
    except ToolcribError as error:
        return _failure(error, 0)
    tested = _try(spec)
    server_actions.report_state(
        server.pk,
        server.generation,
        ServerState.CONNECTED if tested.ok else ServerState.FAILING,
        code=tested.code,
        reason=f"{tested.message} {tested.hint}".strip() if not tested.ok else "",
        detail=tested.detail,
    )
    return tested


def test_draft(draft: ServerDraft, *, confirmed: str, actor: Actor) -> ConnectionTestResult:
    """Test before saving. The same gate stands here: a test runs the program."""
    server_actions.check_draft(draft, confirmed=confirmed)
    known = Server(
        slug=draft.slug,
        transport=draft.transport,
        command=draft.command,
        args=list(draft.args),
        cwd=draft.cwd,
        url=draft.url,
    )
    audit.record(actor, "server.test", known, after={"address": known.address, "saved": False})
    filled = [server_actions.fill_variables(part, draft.variables) for part in known.argv]
    return _try(
        ServerSpec(
            server_id=0,
            slug=draft.slug,
            generation=0,
            transport=draft.transport,
            argv=tuple(filled) if draft.transport == Transport.STDIO else (),
            cwd=draft.cwd,
            env=draft.env,
            url=server_actions.fill_variables(draft.url, draft.variables),
            headers=draft.headers,
            hidden=(*draft.variables.values(), *draft.env.values()),
        )
    )


def _try(spec: ServerSpec) -> ConnectionTestResult:
    began = time.monotonic()
    try:
        fetched = asyncio.run(runner.fetch_tools(spec))
    except ToolcribError as error:
        return _failure(error, _since(began))
    count = len(fetched.listing.tools)
    return ConnectionTestResult(
        ok=True,
        code="",
        message=f"Connected. It offers {count} tool{'' if count == 1 else 's'}.",
        hint="",
        detail="",
        tools=count,
        protocol_version=fetched.protocol_version,
        server_info=fetched.server_info,
        milliseconds=_since(began),
    )


def _failure(error: ToolcribError, milliseconds: int) -> ConnectionTestResult:
    return ConnectionTestResult(
        ok=False,
        code=error.code,
        message=error.message,
        hint=error.hint,
        detail=getattr(error, "detail", ""),
        tools=0,
        protocol_version="",
        server_info={},
        milliseconds=milliseconds,
    )


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
