"""`prompts/get`, `resources/read` and `completion/complete` at `/mcp`, answered as calls are.

The lists are the SDK's server's (server.py). Errors are JSON-RPC errors: these requests have no
result that could carry one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import mcp_types as types

from servers.connections.asking import AskingClient
from servers.spec import COMPLETE, PROMPTS_GET, RESOURCES_READ, OnProgress
from sessions_app.dispatch import features
from sessions_app.dispatch.authorization import Caller
from sessions_app.dispatch.features import FeatureRequest
from sessions_app.ledger.calls import CallResponse
from sessions_app.mcp import questions
from sessions_app.mcp.errors import SERVER_ERROR, ProtocolError
from sessions_app.mcp.sessions import elicitation_of
from sessions_app.mcp.tool_calls import HTTP_ERRORS, Result, SendRequest, ToolCall, ask_user
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical

METHODS = (PROMPTS_GET, RESOURCES_READ, COMPLETE)
LISTS = {PROMPTS_GET: "messages", RESOURCES_READ: "contents"}
RESOURCE_NOT_FOUND = -32002  # before 2026; then it is an invalid parameter
NOT_FOUND_CODES = frozenset({RESOURCE_NOT_FOUND, types.INVALID_PARAMS})


async def run(
    caller: Caller, call: ToolCall, on_progress: OnProgress | None, send_request: SendRequest
) -> Result:
    """Answer a request. Raises ProtocolError for every error except HTTP errors."""
    try:
        if call.method == COMPLETE:
            return await _complete(caller, call)
        is_prompt = call.method == PROMPTS_GET
        arguments = dict(call.arguments) if is_prompt else {"uri": call.name}
        request = FeatureRequest(call.method, call.name, arguments)
        response = await _fetch(caller, call, request, on_progress, send_request)
    except ToolcribError as error:
        if error.code in HTTP_ERRORS or isinstance(error, questions.InvalidState):
            raise
        code = SERVER_ERROR
        if isinstance(error, features.UnknownFeature | Invalid):
            code = types.INVALID_PARAMS
        raise ProtocolError(200, code, error.sentence, error.as_json()["error"]) from None
    if isinstance(response, questions.InputRequired):
        return Result(response.members)
    if response.error is not None and response.is_error:
        _fail(call, response.error, response.rpc_code)
    return _result(call, response)


async def _fetch(
    caller: Caller,
    call: ToolCall,
    request: FeatureRequest,
    on_progress: OnProgress | None,
    send_request: SendRequest,
) -> CallResponse | questions.InputRequired:
    if (modes := elicitation_of(call.capabilities)) is None:
        return await features.fetch(caller, request, on_progress)

    async def send(client: AskingClient) -> CallResponse:
        return await features.fetch(caller, replace(request, client=client), on_progress)

    return await ask_user(caller, call, modes, send, send_request)


def _result(call: ToolCall, response: CallResponse) -> Result:
    members = {LISTS[call.method]: response.content}
    if response.meta != "null":
        members["_meta"] = response.meta
    if call.method == PROMPTS_GET and response.structured != "null":
        members["description"] = response.structured.removeprefix('{"description":')[:-1]
    if call.is_modern and call.method == RESOURCES_READ:
        members |= {"ttlMs": "0", "cacheScope": '"private"'}
    return Result(members)


def _fail(call: ToolCall, error: Mapping[str, str], rpc_code: int) -> NoReturn:
    """Raise the error of a request that its server, or Toolcrib, rejects."""
    code = SERVER_ERROR
    if error["code"] == features.UnknownFeature.code or rpc_code in NOT_FOUND_CODES:
        is_older_read = call.method == RESOURCES_READ and not call.is_modern
        code = RESOURCE_NOT_FOUND if is_older_read else types.INVALID_PARAMS
    data = {"uri": call.name} if call.method == RESOURCES_READ else dict(error)
    raise ProtocolError(200, code, error["message"], data)


async def _complete(caller: Caller, call: ToolCall) -> Result:
    outcome = await features.complete(caller, dict(call.params))
    if outcome.state != "succeeded":
        error = {"code": outcome.code, "message": outcome.message, "hint": outcome.hint}
        _fail(call, error, outcome.rpc_code)
    return Result({"completion": canonical((outcome.content or [{}])[0])})
