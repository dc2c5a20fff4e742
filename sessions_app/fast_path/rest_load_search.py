"""Fast path for `POST /api/v1/sessions/{id}/load` and `/search`: no Django request.

As rest_call.py for calls: requests that are not plain, invalid keys and invalid bodies go to the
ordinary route (sessions/api.py), which runs the same operations and reports the errors.
"""

import logging

from django.db import DatabaseError, InterfaceError, OperationalError
from pydantic import ValidationError

from sessions_app.agents import api_keys
from sessions_app.dispatch import concurrency, operations
from sessions_app.fast_path.http import (
    START,
    ClientDisconnected,
    cancel_on_disconnect,
    match_fast_path,
    replay_body,
    send_error,
    send_json,
)
from sessions_app.sessions.schemas import FoundIn, LoadIn, SearchIn
from toolcrib.lib.asgi import Application, Receive, Scope, Send, read_body
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError
from toolcrib.lib.json_codec import canonical, parse_strict

logger = logging.getLogger(__name__)

PLAIN = FoundIn(format="json", call_id="")


def is_load_or_search(scope: Scope) -> bool:
    path: str = scope["path"]
    ours = path.endswith(("/load", "/search")) and path.startswith(START)
    return ours and scope["method"] == "POST"


async def load_or_search(scope: Scope, receive: Receive, send: Send, ordinary: Application) -> None:
    """Load or search on the fast path, or pass the request to the ordinary route."""
    found = match_fast_path(scope)
    session_id, _, what = scope["path"][len(START) :].rpartition("/")
    if found is None or not session_id or "/" in session_id:
        await ordinary(scope, receive, send)
        return
    body, complete = await read_body(receive)
    answer = None
    if complete:
        try:
            working = concurrency.run_shielded_with_limit(_run, found[0], session_id, what, body)
            answer = await cancel_on_disconnect(working, receive)
        except ClientDisconnected:
            return
        except ToolcribError as error:
            await send_error(send, error)
            return
        except (OperationalError, InterfaceError) as error:
            logger.error("Database unavailable: %s", error)  # noqa: TRY400 - no traceback needed
            await send_error(send, DatabaseUnavailable())
            return
        except DatabaseError as error:  # the ordinary route reports the invalid value
            logger.warning("Database rejected a value: %s", error)
    if answer is None:
        await ordinary(scope, replay_body(body, complete, receive), send)
    else:
        await send_json(send, answer)


def _run(digest: str, session_id: str, what: str, body: bytes) -> str | None:
    """Run the operation and return its JSON; None if the ordinary route has to report an error."""
    try:
        given = parse_strict(body)
        request = LoadIn.model_validate(given) if what == "load" else SearchIn.model_validate(given)
    except (ValueError, RecursionError, ToolcribError, ValidationError):
        return None
    key = api_keys.find_key_by_digest(digest)
    if key is None or key.agent is None:
        return None
    if isinstance(request, LoadIn):
        return canonical(operations.load(key.agent, session_id, request))
    return canonical(operations.search(key.agent, session_id, request, PLAIN))
