"""Connection test for a server or a draft. Does not change the catalog."""

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
from toolcrib.lib.text import plural


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
    """Test a registered server and record its state."""
    audit.record(actor, "server.test", server)
    try:
        spec = server_actions.build_spec(server)
    except ToolcribError as error:
        return _failure(error, 0)
    result = _connect_and_list(spec)
    server_actions.report_state(
        server.pk,
        server.generation,
        ServerState.CONNECTED if result.ok else ServerState.FAILING,
        code=result.code,
        reason=f"{result.message} {result.hint}".strip() if not result.ok else "",
        detail=result.detail,
    )
    return result


def test_draft(draft: ServerDraft, *, confirmed: str, actor: Actor) -> ConnectionTestResult:
    """Test a draft before saving it. Needs the same confirmation: a test runs the program."""
    server_actions.check_draft(draft, confirmed=confirmed)
    server = Server(
        slug=draft.slug,
        transport=draft.transport,
        command=draft.command,
        args=list(draft.args),
        cwd=draft.cwd,
        url=draft.url,
    )
    audit.record(actor, "server.test", server, after={"address": server.address, "saved": False})
    argv = [server_actions.fill_variables(part, draft.variables) for part in server.argv]
    return _connect_and_list(
        ServerSpec(
            server_id=0,
            slug=draft.slug,
            generation=0,
            transport=draft.transport,
            argv=tuple(argv) if draft.transport == Transport.STDIO else (),
            cwd=draft.cwd,
            env=draft.env,
            url=server_actions.fill_variables(draft.url, draft.variables),
            headers=draft.headers,
            hidden=(*draft.variables.values(), *draft.env.values()),
        )
    )


def _connect_and_list(spec: ServerSpec) -> ConnectionTestResult:
    started = time.monotonic()
    try:
        fetched = asyncio.run(runner.fetch_tools(spec))
    except ToolcribError as error:
        return _failure(error, _milliseconds_since(started))
    count = len(fetched.listing.tools)
    return ConnectionTestResult(
        ok=True,
        code="",
        message=f"Connected. {plural(count, 'tool')} found.",
        hint="",
        detail="",
        tools=count,
        protocol_version=fetched.protocol_version,
        server_info=fetched.server_info,
        milliseconds=_milliseconds_since(started),
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


def _milliseconds_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
