"""Connection test for a server or a draft. Does not change the catalog."""

import asyncio
import time
from dataclasses import dataclass

from catalog import audit
from catalog.audit import Actor
from servers.models import Server, ServerState
from servers.registration import actions as server_actions
from servers.registration.actions import report_state
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
    audit.record(actor, "server.test", server)
    try:
        spec = server_actions.build_spec(server)
    except ToolcribError as error:
        return _failure(error, 0)
    return _connect_and_list(spec)


def test_draft(draft: ServerDraft, *, confirmed: str, actor: Actor) -> ConnectionTestResult:
    """Test a draft before saving it. Needs the same confirmation: a test runs the program."""
    server_actions.check_draft(draft, confirmed=confirmed)
    server = Server(slug=draft.slug, **draft.connection_fields())
    audit.record(actor, "server.test", server, after={"address": server.address, "saved": False})
    return _connect_and_list(
        server_actions.fill_spec(
            server, header=draft.headers, env=draft.env, variable=draft.variables
        )
    )


def _connect_and_list(spec: ServerSpec) -> ConnectionTestResult:
    """Connect, list the tools, and record the state of a saved server."""
    started = time.monotonic()
    try:
        listing, connection = asyncio.run(runner.fetch_tools(spec))
    except ToolcribError as error:
        report_state(spec.server_id, spec.generation, ServerState.FAILING, error)
        return _failure(error, time.monotonic() - started)
    report_state(spec.server_id, spec.generation, ServerState.CONNECTED)
    count = len(listing.tools)
    return ConnectionTestResult(
        ok=True,
        code="",
        message=f"Connected. {plural(count, 'tool')} found.",
        hint="",
        detail="",
        tools=count,
        protocol_version=connection.protocol_version,
        server_info=connection.server_info,
        milliseconds=round((time.monotonic() - started) * 1000),
    )


def _failure(error: ToolcribError, seconds: float) -> ConnectionTestResult:
    return ConnectionTestResult(
        ok=False,
        code=error.code,
        message=error.message,
        hint=error.hint,
        detail=getattr(error, "detail", ""),
        tools=0,
        protocol_version="",
        server_info={},
        milliseconds=round(seconds * 1000),
    )
