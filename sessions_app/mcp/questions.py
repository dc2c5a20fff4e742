"""Questions of servers to the user of a client (elicitation), through both eras both ways.

A server of 2026 asks by a result, an older one by a request during the call. A client of 2026 is
asked by a result, and repeats its request with the answer; an older one by a request on the stream
of the response. What a client carries between two requests is sealed: the server's own state, or
which call waits for the answer (conversations.py).
"""

import asyncio
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from servers.connections.asking import AskingClient, OnAsk
from servers.registration import credentials
from servers.secret import Secret
from sessions_app.dispatch.planner import ASKING_SECONDS
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CallResponse
from sessions_app.mcp import conversations
from sessions_app.mcp.conversations import CANCEL, Conversation
from sessions_app.mcp.elicitation import METHOD
from sessions_app.mcp.sessions import take_answers
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical, digest

MAX_ROUNDS = 10  # as clients of 2026 have it
STATE_SECONDS = 3600.0
QUESTION = "question"  # name of a question that an older server asks
REQUEST_PREFIX = "toolcrib-ask-"

Subject = tuple[str, str, Any]  # of a request: method, name, arguments
Send = Callable[[AskingClient], Awaitable[CallResponse]]


@dataclass(frozen=True)
class InputRequired:
    """The members of a result that asks for input, as canonical JSON."""

    members: Mapping[str, str]


@dataclass(frozen=True)
class ClientRequest:
    """A request of a client that can ask its user."""

    key_digest: str
    subject: Subject
    is_modern: bool
    modes: Mapping[str, Any]
    request_state: str | None
    input_responses: Mapping[str, Any] | None


async def run(request: ClientRequest, send: Send, ask: OnAsk) -> CallResponse | InputRequired:
    """Send a request, and ask the user what its server wants to know."""
    if not request.is_modern:
        return await _ask_on_stream(request, send, ask)
    state = unseal(request.key_digest, request.subject, request.request_state)
    if token := state.get("running"):
        outcome = await conversations.answer(token, (request.input_responses or {}).get(QUESTION))
    else:
        conversation = Conversation()
        token = conversation.token
        client = AskingClient(
            request.modes,
            conversation.on_ask,
            request.input_responses or None,
            state.get("server"),
            state.get("call", ""),
        )
        conversation.task = asyncio.ensure_future(send(client))
        outcome = await conversations.follow(conversation)
    if not isinstance(outcome, CallResponse):
        asked = {QUESTION: {"method": METHOD, "params": outcome}}
        return _input_required(request, asked, {"running": token})
    if outcome.input_requests is None:
        return outcome
    carried = {"server": outcome.request_state, "call": outcome.call_id}
    return _input_required(request, outcome.input_requests, carried)


async def _ask_on_stream(request: ClientRequest, send: Send, ask: OnAsk) -> CallResponse:
    """Ask while the response of the request is open."""
    answers: dict[str, Any] | None = None
    server_state: str | None = None
    call_id = ""
    for _ in range(MAX_ROUNDS):
        response = await send(AskingClient(request.modes, ask, answers, server_state, call_id))
        if response.input_requests is None:
            return response
        answers = {
            name: await ask(dict(asked["params"]))
            for name, asked in response.input_requests.items()
        }
        server_state, call_id = response.request_state, response.call_id
    raise ToolcribError(
        f"The server asked the user {MAX_ROUNDS} times without an answer of its own.",
        code="input_required",
    )


# --- Clients of 2026 ------------------------------------------------------------------------------


def _input_required(
    request: ClientRequest, asked: Mapping[str, Any], carried: Mapping[str, Any]
) -> InputRequired:
    """Ask, and seal what is carried to the answer: the server's state, or the running call."""
    return InputRequired(asking_members(asked, seal(request.key_digest, request.subject, carried)))


def asking_members(asked: Mapping[str, Any], sealed: str) -> dict[str, str]:
    """Return the members of a result that asks the user of the client."""
    members = {"inputRequests": canonical(asked), "requestState": canonical(sealed)}
    return {**members, "resultType": '"input_required"'}


def seal(key_digest: str, subject: Subject, carried: Mapping[str, Any]) -> str:
    """Seal what a client carries to its answer: for its key, the same request, and an hour."""
    state = {"key": key_digest, "subject": digest(canonical(subject))}
    body = {**state, "until": time.time() + STATE_SECONDS, **carried}
    return credentials.encrypt(Secret(canonical(body)))


class InvalidState(Invalid):
    code = "invalid_request_state"


def unseal(key_digest: str, subject: Subject, sealed: str | None) -> dict[str, Any]:
    """Return what a sealed state contains; empty if there is none. Raises InvalidState."""
    if sealed is None:
        return {}
    try:
        # The decoder of the encryption ignores what follows the padding.
        if urlsafe_b64encode(urlsafe_b64decode(sealed)).decode() != sealed:
            raise ValueError
        state: dict[str, Any] = json.loads(credentials.decrypt(sealed).reveal())
    except (ToolcribError, ValueError):
        raise InvalidState("The requestState is not one that Toolcrib gave.") from None
    is_same = (
        state["key"] == key_digest
        and state["subject"] == digest(canonical(subject))
        and state["until"] > time.time()
    )
    if not is_same:
        raise InvalidState("The requestState belongs to another request, or has expired.")
    return state


# --- Older clients --------------------------------------------------------------------------------

# By request id: the connection, and the answer that is awaited.
_waiting: dict[str, tuple[str, asyncio.Future[dict[str, Any]]]] = {}


def asking(connection_id: str, send_request: Callable[[str, Mapping[str, Any]], None]) -> OnAsk:
    """Return a function that asks on the stream of a response."""
    return partial(_ask, connection_id, send_request)


async def _ask(
    connection_id: str,
    send_request: Callable[[str, Mapping[str, Any]], None],
    params: dict[str, Any],
) -> dict[str, Any]:
    request_id = REQUEST_PREFIX + secrets.token_hex(16)
    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    _waiting[request_id] = connection_id, answer
    try:
        send_request(request_id, params)
        return await asyncio.wait_for(answer, ASKING_SECONDS)
    except TimeoutError:
        return CANCEL
    finally:
        del _waiting[request_id]


def is_answer(message: Mapping[str, Any]) -> bool:
    request_id = message.get("id")
    return isinstance(request_id, str) and request_id.startswith(REQUEST_PREFIX)


def take_answer(connection_id: str, request_id: str, result: object) -> bool:
    """Give an answer to the request that waits for it in this process; False if none does."""
    asked_on, answer = _waiting.get(request_id, ("", None))
    if answer is None or asked_on != connection_id:
        return False
    if not answer.done():
        answer.set_result(dict(result) if isinstance(result, Mapping) else CANCEL)
    return True


async def take_stored_answers() -> None:
    """Take answers that another process received."""
    if connections := {connection_id for connection_id, _ in _waiting.values()}:
        for answer in await ledger_writer.run_off_loop(take_answers, connections):
            take_answer(*answer)
