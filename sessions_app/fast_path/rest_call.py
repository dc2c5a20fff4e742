"""Fast path for `POST /api/v1/sessions/{id}/call`: no Django request, no ORM.

Handles only a valid key, an open session, a callable tool and a plain JSON body. All other
requests, and every rejection, go to the ordinary route (sessions/api.py) with the buffered body.
So errors are reported in one place, and responses have the same bytes on both paths.
"""

import logging
import secrets

from django.db import DatabaseError

from sessions_app.dispatch import dispatcher
from sessions_app.dispatch.planner import CallRequest
from sessions_app.fast_path.http import (
    RATE_LIMIT_CHECKED,
    START,
    ClientDisconnected,
    cancel_on_disconnect,
    match_fast_path,
    replay_body,
    run_off_loop_if_large,
    send_error,
    send_json,
)
from sessions_app.ledger.calls import CallResponse
from toolcrib.lib.asgi import Application, Receive, Scope, Send, read_body
from toolcrib.lib.errors import DatabaseUnavailable, InternalError, ToolcribError
from toolcrib.lib.json_codec import parse_strict

logger = logging.getLogger(__name__)

END = "/call"
FIELDS = frozenset({"tool_name", "arguments", "timeout"})


def is_call(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.endswith(END) and path.startswith(START) and scope["method"] == "POST"


async def call(scope: Scope, receive: Receive, send: Send, ordinary: Application) -> None:
    """Answer a call on the fast path, or pass it to the ordinary route."""
    session_id = scope["path"][len(START) : -len(END)]
    found = match_fast_path(scope)
    if found is None:
        await ordinary(scope, receive, send)
        return
    token, headers = found
    body, complete = await read_body(receive)
    key = headers.get(b"idempotency-key")
    request = await run_off_loop_if_large(_request, body, key) if complete else None
    answer: CallResponse | int = 0
    if request is not None:
        try:
            working = dispatcher.dispatch_fast(token, session_id, request, len(body))
            answer = await cancel_on_disconnect(working, receive)
        except ClientDisconnected:
            return
        except ToolcribError as error:
            await send_error(send, error)
            return
        except DatabaseError as error:
            logger.error("Database unavailable: %s", error)  # noqa: TRY400 - no traceback needed
            await send_error(send, DatabaseUnavailable())
            return
        except Exception:
            mark = secrets.token_hex(6)
            logger.exception("Request %s failed", mark)
            await send_error(send, InternalError(mark))
            return
    if isinstance(answer, CallResponse):
        await send_json(send, answer.body)
        return
    scope[RATE_LIMIT_CHECKED] = answer
    await ordinary(scope, replay_body(body, complete, receive), send)


def _request(body: bytes, key: bytes | None) -> CallRequest | None:
    """Parse a plain body; None if sessions/api.py has to report an error."""
    try:
        given = parse_strict(body)
    except (ValueError, RecursionError, ToolcribError):
        return None
    if not isinstance(given, dict) or not given.keys() <= FIELDS:
        return None
    name, timeout = given.get("tool_name"), given.get("timeout")
    if not isinstance(name, str) or not 0 < len(name) <= 500:
        return None
    if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout <= 900):
        return None
    return CallRequest(
        name, given.get("arguments"), timeout, None if key is None else key.decode("latin-1")
    )
