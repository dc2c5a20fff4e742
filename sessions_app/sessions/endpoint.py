"""ASGI endpoint of calls, search, load, details and scripts, without Django's handlers.

These are nearly all requests of agents. sessions/api.py declares them for the API's schema, and
serves the other operations of sessions.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from django.conf import settings
from django.db import DatabaseError, DataError, InterfaceError
from pydantic import BaseModel, ValidationError

from catalog.search.engine import MAX_HITS
from sessions_app.agents import api_keys
from sessions_app.dispatch import dispatcher, operations
from sessions_app.dispatch.authorization import Caller
from sessions_app.dispatch.planner import ON_LOOP_BYTES, CallRequest
from sessions_app.formats import catalog
from sessions_app.formats.native import MAX_REFERENCES
from sessions_app.held_calls import checking
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CallResponse
from sessions_app.scripts import runner
from sessions_app.scripts.runner import ScriptRequest
from sessions_app.scripts.schemas import ScriptIn
from sessions_app.sessions import search as session_search
from sessions_app.sessions.schemas import (
    CallIn,
    DetailIn,
    FoundIn,
    LoadIn,
    SearchIn,
    WaitIn,
)
from toolcrib.lib.api_schemas import Strict, check_parameters
from toolcrib.lib.errors import (
    DatabaseUnavailable,
    InternalError,
    Invalid,
    InvalidRequest,
    MalformedBody,
    ToolcribError,
    UnstorableValue,
)
from toolcrib.lib.json_codec import canonical, parse_strict
from toolcrib.lib.payloads import check_value
from toolcrib.lib.protocols.asgi import (
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    bearer_digest,
    cancel_on_disconnect,
    error_headers,
    read_body,
    read_headers,
    send_response,
    without_body,
)
from toolcrib.lib.telemetry import tracing

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
PREFIX = "/api/v1/sessions/"
CALLS = "/api/v1/calls/"
SCRIPTS = "/api/v1/scripts/"
TOOLS = "tools/"


class Request:
    def __init__(self, scope: Scope, session_id: str, body: bytes) -> None:
        self.headers = read_headers(scope)
        self.caller = Caller(bearer_digest(self.headers), session_id)
        if not self.caller.digest:
            raise api_keys.Unauthorized
        self.query: bytes = scope["query_string"]
        if "traceparent" in self.headers:
            tracing.accept(self.headers)
        self.body = body

    async def parse_body(self, model: type[M]) -> M:
        """Return the body. Errors are reported to callers with a valid key only."""
        try:
            if len(self.body) > ON_LOOP_BYTES:
                return await asyncio.to_thread(_parse_body, model, self.body)
            return _parse_body(model, self.body)
        except ToolcribError:
            await self._check_key()
            raise

    async def parse_query(self, model: type[M]) -> M:
        """Return the query parameters, as `parse_body` does."""
        values = dict(parse_qsl(self.query.decode("latin-1"), keep_blank_values=True))
        try:
            check_parameters(values, model.model_fields)
            return _validate(model, values, ("query",))
        except ToolcribError:
            await self._check_key()
            raise

    async def reject_query(self) -> None:
        """Reject query parameters, for an operation that has none."""
        if self.query:
            await self.parse_query(Strict)

    async def _check_key(self) -> None:
        await ledger_writer.run_off_loop(api_keys.require_agent_key, self.caller.digest)


def _parse_body(model: type[M], body: bytes) -> M:
    try:
        value = parse_strict(body)
    except RecursionError:
        raise Invalid("The body is nested too deeply.", hint="Send flatter values.") from None
    except ValueError:
        raise MalformedBody from None
    return _validate(model, value, ("body", "body"))


def _validate(model: type[M], value: object, where: tuple[str, ...]) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems: Iterable[Mapping[str, Any]] = error.errors(include_url=False, include_input=False)
        raise InvalidRequest(
            {"loc": (*where, *problem["loc"]), "msg": problem["msg"]} for problem in problems
        ) from None


# --- Operations -----------------------------------------------------------------------------------

Operation = Callable[[Request], Coroutine[Any, Any, str | CallResponse]]


async def _call(request: Request) -> CallResponse:
    await request.reject_query()
    body = await request.parse_body(CallIn)
    call = CallRequest(
        body.tool_name,
        body.arguments,
        body.timeout,
        request.headers.get("idempotency-key"),
        size=len(request.body),
        read_only=bool(body.read_only),
    )
    return await dispatcher.call(request.caller, call)


async def _load(request: Request) -> str:
    await request.reject_query()
    body = await request.parse_body(LoadIn)
    loaded = await operations.load(
        request.caller,
        body.group_id,
        body.tool_names,
        confirmed=body.confirm,
        as_signatures=body.signature_language,
    )
    return loaded.as_json()


async def _search(request: Request) -> str:
    body = await request.parse_body(SearchIn)
    output = await request.parse_query(FoundIn)
    is_json = output.format == "json"
    if output.compat and not is_json:
        raise Invalid("compat and format cannot be combined.", hint="Send one of them.")
    max_limit = MAX_REFERENCES if output.format == "anthropic" else MAX_HITS
    query = session_search.parse_body(
        body, max_limit=max_limit, full=not is_json, compat=output.compat or ""
    )
    found = await operations.search(request.caller, query)
    if is_json:
        return found.text
    check_value(output.call_id, "/call_id")
    surface = found.context.surface
    return canonical(
        catalog.search_response(surface, found.response, output.format, output.call_id)
    )


async def _run_script(request: Request) -> str:
    await request.reject_query()
    body = await request.parse_body(ScriptIn)
    key = request.headers.get("idempotency-key")
    script = ScriptRequest(**dict(body), idempotency_key=key)
    return canonical(await runner.run_script(request.caller, script))


OPERATIONS: Mapping[str, Operation] = {
    "call": _call,
    "load": _load,
    "scripts": _run_script,
    "search": _search,
}


def _details(name: str) -> Operation:
    async def details(request: Request) -> str:
        options = await request.parse_query(DetailIn)
        return (await operations.details(request.caller, name, options.detail)).text

    return details


def _check_call(call_id: str) -> Operation:
    async def check(request: Request) -> CallResponse:
        options = await request.parse_query(WaitIn)
        return await checking.check_call(request.caller.digest, call_id, options.wait)

    return check


def _check_script(run_id: str) -> Operation:
    async def check(request: Request) -> str:
        options = await request.parse_query(WaitIn)
        return canonical(await runner.check_run(request.caller.digest, run_id, options.wait))

    return check


def find_operation(scope: Scope) -> tuple[str, Operation] | None:
    """Return the session id and the operation of a request; None if it is not served here."""
    path: str = scope["path"]
    if not path.startswith(PREFIX):
        return _find_one(path, scope)
    session_id, _, rest = path[len(PREFIX) :].partition("/")
    operation = None
    if scope["method"] == "POST":
        operation = OPERATIONS.get(rest)
    elif (
        scope["method"] in ("GET", "HEAD")
        and rest.startswith(TOOLS)
        and "/" not in rest[len(TOOLS) :]
    ):
        operation = _details(rest[len(TOOLS) :]) if rest != TOOLS else None
    return (session_id, operation) if operation is not None and session_id else None


def _find_one(path: str, scope: Scope) -> tuple[str, Operation] | None:
    """Return the operation that gives one call or one script, by its id alone."""
    for prefix, check in ((CALLS, _check_call), (SCRIPTS, _check_script)):
        one = path.removeprefix(prefix)
        if one and one != path and "/" not in one and scope["method"] == "GET":
            return "", check(one)
    return None


# --- Serving --------------------------------------------------------------------------------------


async def serve(
    session_id: str, operation: Operation, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request that `find_operation` recognized."""
    request_id = secrets.token_hex(6)
    if scope["method"] == "HEAD":
        send = without_body(send)
    try:
        body = await read_body(receive, settings.MAX_BODY_BYTES)
        working = operation(Request(scope, session_id, body))
        result = await cancel_on_disconnect(working, receive)
        text = result if isinstance(result, str) else result.as_json()
    except ClientDisconnected:
        return
    except ToolcribError as error:
        await _send_error(send, error, request_id)
    except DataError:
        await _send_error(send, UnstorableValue(), request_id)
    except (DatabaseError, InterfaceError) as error:
        logger.error("Database unavailable: %s", error)  # noqa: TRY400 - no traceback needed
        await _send_error(send, DatabaseUnavailable(error), request_id)
    except Exception:
        logger.exception("Request %s failed", request_id)
        await _send_error(send, InternalError(request_id), request_id)
    else:
        headers = {"x-request-id": request_id}
        await send_response(send, 200, "application/json", text.encode(), headers)
        if isinstance(result, CallResponse) and result.held_call is not None:
            await checking.confirm_arrival(result.held_call)


async def _send_error(send: Send, error: ToolcribError, request_id: str) -> None:
    headers = {"x-request-id": request_id, **error_headers(error)}
    body = json.dumps(error.as_json()).encode()
    await send_response(send, error.status, "application/json; charset=utf-8", body, headers)
