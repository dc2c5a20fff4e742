"""Fast path for `tools/call` at `/mcp`, for protocol version 2026-07-28: no SDK session, no ORM.

Handles only plain calls of a tool by its own name, on the rolling session of a key in the
authorization cache. All other requests go to the endpoint unchanged. The cached authorization is
revalidated against the database in the transaction that accepts the call.
"""

import hashlib
import logging
from typing import Any

from django.conf import settings
from django.db import DatabaseError

from sessions_app.dispatch import authorization_cache, dispatcher
from sessions_app.dispatch.key_revocation import KeyRevoked
from sessions_app.dispatch.planner import CallRequest
from sessions_app.fast_path.http import (
    RATE_LIMIT_CHECKED,
    ClientDisconnected,
    cancel_on_disconnect,
    is_allowed_host,
    replay_body,
    run_off_loop_if_large,
)
from sessions_app.ledger import batch_writer
from sessions_app.ledger.calls import CallResponse
from sessions_app.mcp import meta_tools as mcp_tools
from sessions_app.mcp.errors import send_error
from sessions_app.models import ApiKey, CallPath, SessionState
from toolcrib.lib.asgi import (
    Application,
    Receive,
    Scope,
    Send,
    read_body,
    send_response,
    single_headers,
)
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError
from toolcrib.lib.json_codec import canonical, join_members, parse_strict

logger = logging.getLogger(__name__)

VERSION = "2026-07-28"
META = "io.modelcontextprotocol/"
MUST, MAY = {"protocolVersion", "clientCapabilities"}, {"clientInfo"}
UNUSUAL = {
    *(b"origin", b"transfer-encoding", b"content-encoding", b"mcp-session-id", b"idempotency-key")
}
SERVER_INFO = {"name": "toolcrib", "title": "Toolcrib", "version": settings.VERSION}
MAX_ROLLING_SESSIONS = 10_000
_rolling: dict[str, str] = {}  # the session of a key, by the key's digest


def is_call(scope_: Scope) -> bool:
    return bool(scope_["path"] == "/mcp" and scope_["method"] == "POST")


async def call(scope_: Scope, receive: Receive, send: Send, ordinary: Application) -> None:
    """Answer a call on the fast path, or pass it to the endpoint."""
    digest = _match_key_digest(scope_)
    if digest is None:
        await ordinary(scope_, receive, send)
        return
    body, complete = await read_body(receive)
    message = await run_off_loop_if_large(_parse_message, body, scope_) if complete else None
    if message is not None:
        try:
            response = await _try_call(digest, message, len(body), receive)
        except ClientDisconnected:
            return
        except KeyRevoked as revoked:  # in the endpoint's format
            await send_error(send, revoked)
            return
        if isinstance(response, CallResponse):
            await _send_result(send, message["id"], response)
            return
        scope_[RATE_LIMIT_CHECKED] = response
    await ordinary(scope_, replay_body(body, complete, receive), send)
    if message is not None and batch_writer.is_running():
        try:
            await run_in_db_thread(_load_authorization, digest, message["params"]["name"])
        except DatabaseError as error:
            logger.warning("Loading the authorization cache failed: %s", error)


def _match_key_digest(scope_: Scope) -> str | None:
    """Return the digest of the key if the headers are those of a plain call."""
    found = single_headers(scope_)
    if found is None:
        return None
    length = found.get(b"content-length", b"")
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    accepted = found.get(b"accept", b"")
    plain = (
        scheme == b"Bearer"
        and found.get(b"mcp-method") == b"tools/call"
        and found.get(b"mcp-protocol-version") == VERSION.encode()
        and length.isdigit()
        and int(length) <= settings.MAX_BODY_BYTES
        and found.get(b"content-type", b"").lower() == b"application/json"
        and b"application/json" in accepted
        and b"text/event-stream" in accepted
        and b"mcp-name" in found
        and not UNUSUAL & found.keys()
        and not any(name.startswith(b"mcp-param-") for name in found)
        and not scope_["query_string"]
        and is_allowed_host(found.get(b"host", b""))
    )
    return hashlib.sha256(token.strip()).hexdigest() if plain else None


def _parse_message(body: bytes, scope_: Scope) -> dict[str, Any] | None:
    """Parse a plain tools/call; None if the endpoint has to handle it."""
    try:
        message = parse_strict(body)
    except (ValueError, RecursionError, ToolcribError):
        return None
    match message:
        case {"jsonrpc": "2.0", "id": int() | str() as asked, "method": "tools/call",
              "params": {"name": str() as name, "_meta": dict() as meta} as params}:  # fmt: skip
            pass
        case _:
            return None
    names = {key.removeprefix(META) for key in meta}
    plain = (
        not isinstance(asked, bool)
        and len(message) == 4
        and params.keys() <= {"name", "arguments", "_meta"}
        and isinstance(params.get("arguments", {}), dict)
        and names >= MUST
        and names <= MUST | MAY
        and len(names) == len(meta)
        and meta.get(f"{META}protocolVersion") == VERSION
        and isinstance(meta.get(f"{META}clientCapabilities"), dict)
        and _is_client(meta.get(f"{META}clientInfo"))
        and 0 < len(name) <= 200
        and (b"mcp-name", name.encode()) in scope_["headers"]
        and name.isascii()
    )
    return message if plain else None


def _is_client(claimed: object) -> bool:
    if claimed is None:
        return True
    return isinstance(claimed, dict) and all(
        isinstance(claimed.get(name), str) for name in ("name", "version")
    )


async def _try_call(
    digest: str, message: dict[str, Any], size: int, receive: Receive
) -> CallResponse | int:
    """Execute a call, or return the rate limit it was counted against, for the endpoint."""
    session_id, params = _rolling.get(digest, ""), message["params"]
    ready = authorization_cache.get(digest, session_id)
    if ready is None and session_id and batch_writer.is_running():
        try:
            ready = await run_in_db_thread(
                authorization_cache.load, digest, session_id, params["name"]
            )
        except DatabaseError as error:  # the endpoint reports it to the client
            logger.warning("Database unavailable: %s", error)
    item = ready.scope.lookup(params["name"]) if ready is not None else None
    if item is None or item.approved is None or '"x-mcp-header"' in item.approved.body:
        return 0
    request = CallRequest(params["name"], params.get("arguments") or {}, path=CallPath.NATIVE)
    working = dispatcher.dispatch_fast(digest, session_id, request, size)
    try:
        return await cancel_on_disconnect(working, receive)
    except KeyRevoked:
        raise
    except ToolcribError as error:
        return _said(f"{error.message}\n\n{error.hint}".strip())
    except DatabaseError:
        logger.exception("Database unavailable during a call over MCP")
        return _said(DatabaseUnavailable().sentence)


def _said(text: str) -> CallResponse:
    content = mcp_tools.text_result(text)["content"]
    return CallResponse("", canonical(content), "null", is_error=True)


def _load_authorization(digest: str, name: str) -> None:
    """Cache a key's rolling session and its authorization for the called tool."""
    key = ApiKey.objects.select_related("rolling_session__agent").filter(sha256=digest).first()
    session = key.rolling_session if key else None
    if session is None or session.state != SessionState.OPEN:
        return
    if len(_rolling) >= MAX_ROLLING_SESSIONS:
        _rolling.clear()
    _rolling[digest] = session.session_id
    authorization_cache.load(digest, session.session_id, name)


async def _send_result(send: Send, request_id: int | str, response: CallResponse) -> None:
    result = {
        "content": response.content,
        "isError": canonical(response.is_error),
        "resultType": canonical("complete"),
        "_meta": canonical({f"{META}serverInfo": SERVER_INFO}),
    }
    if response.structured != "null":
        result["structuredContent"] = response.structured
    body = join_members(
        {"jsonrpc": canonical("2.0"), "id": canonical(request_id), "result": join_members(result)}
    )
    await send_response(send, 200, "application/json", body.encode())
