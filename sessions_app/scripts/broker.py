"""Calls of scripts: each is dispatched as any other call, and its outcome answered to the script.

The broker gives a script no ability of its own: scope, rules, grants, limits and the ledger are
those of the dispatcher. It counts calls, limits those in parallel, and keeps the answers of a run
that is paused.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from sessions_app.agents.api_keys import Unauthorized
from sessions_app.dispatch import dispatcher
from sessions_app.dispatch.authorization import Caller
from sessions_app.dispatch.key_revocation import KeyRevoked
from sessions_app.dispatch.planner import ON_LOOP_BYTES, CallRequest
from sessions_app.held_calls import checking
from sessions_app.ledger.calls import CallResponse
from sessions_app.models import NOT_RUN, UNFINISHED, CallPath, CallState
from sessions_app.scripts.engines import (
    EXTRACT,
    MAX_CALLS,
    MAX_PARALLEL,
    Answer,
    Failure,
    ScriptFailed,
    ToolCall,
    Value,
    Waiting,
)
from sessions_app.scripts.extraction import extract
from sessions_app.scripts.output import TooLarge, as_json
from sessions_app.sessions.loading import SessionEnded
from toolcrib.lib.errors import Forbidden, ToolcribError
from toolcrib.lib.figures import CODES_WITH_SCHEMA
from toolcrib.lib.json_codec import canonical

MAX_MESSAGE = 4_000
TOO_MANY = 429  # refused at a limit of the agent
# Errors after which no other call of the run can be made.
FATAL = (SessionEnded, Unauthorized, KeyRevoked, Forbidden)


@dataclass
class Broker:
    """Makes the calls of one run."""

    caller: Caller
    run: int  # primary key
    names: Mapping[str, str]  # public names of tools by their names in scripts
    parallel: int = MAX_PARALLEL
    made: int = 0  # calls so far
    tokens: int = 0  # of their results
    answered: dict[int, Answer] = field(default_factory=dict)
    held: dict[int, str] = field(default_factory=dict)  # ids of held calls

    async def answer(self, waiting: Waiting) -> Mapping[int, Answer] | None:
        """Make the calls that a script waits for; None if a person has to decide about one.

        Once a call is held, those that were not started are left for the time after the decision.
        """
        slots = asyncio.Semaphore(max(1, min(self.parallel, MAX_PARALLEL)))

        async def make(call: ToolCall) -> None:
            async with slots:
                if not self.held:
                    await self._make(call)

        new = [call for call in waiting.calls if not self._is_known(call)]
        if self.made + len(new) > MAX_CALLS:
            raise ScriptFailed("LimitExceeded", f"A script may make {MAX_CALLS} calls.")
        try:
            async with asyncio.TaskGroup() as group:
                for call in new:
                    group.create_task(make(call))
        except BaseExceptionGroup as errors:  # the other calls were cancelled, and recorded
            raise errors.exceptions[0] from None
        if self.held:
            return None
        return {call.number: self.answered.pop(call.number) for call in waiting.calls}

    def _is_known(self, call: ToolCall) -> bool:
        return call.number in self.answered or call.number in self.held

    async def _make(self, call: ToolCall) -> None:
        self.made += 1
        if call.name == EXTRACT:
            self.answered[call.number] = await extract(call.arguments)
            return
        if (problem := self._check(call)) is not None:
            self.answered[call.number] = problem
            return
        try:
            arguments = await asyncio.to_thread(_read_arguments, call)
        except TooLarge as error:
            self.answered[call.number] = Failure("RuntimeError", f"{call.name}: {error}")
            return
        request = CallRequest(
            self.names[call.name],
            arguments,
            path=CallPath.SCRIPT,
            size=ON_LOOP_BYTES + 1,  # planned off the event loop: a script sends any size
            run=self.run,
        )
        try:
            response = await dispatcher.call(self.caller, request)
        except FATAL as error:
            raise ScriptFailed("PermissionError", error.sentence) from None
        except ToolcribError as error:
            kind = "PermissionError" if error.status == TOO_MANY else "RuntimeError"
            self.answered[call.number] = Failure(kind, f"{call.name}: {error.sentence}")
            return
        if response.state in UNFINISHED:
            self.held[call.number] = response.call_id
        else:
            await self.take(call.number, call.name, response)
            if response.held_call is not None:  # the same call was held earlier, and is answered
                await checking.confirm_arrival(response.held_call)

    def _check(self, call: ToolCall) -> Failure | None:
        if call.name not in self.names:
            return Failure("PermissionError", f"{call.name} is not a tool of this session.")
        if call.positional:
            return Failure("RuntimeError", f"{call.name} takes its arguments by name.")
        return None

    async def take(self, number: int, name: str, response: CallResponse) -> None:
        """Note the outcome of a call as the answer to the script."""
        self.tokens += response.tokens
        is_large = len(response.content) + len(response.structured) > ON_LOOP_BYTES
        read = asyncio.to_thread(read_answer, name, response) if is_large else None
        self.answered[number] = read_answer(name, response) if read is None else await read


def _read_arguments(call: ToolCall) -> Any:
    """Return the arguments of a call as JSON. Raises TooLarge, as a request of that size is."""
    arguments = as_json(dict(call.arguments))
    if len(canonical(arguments).encode("utf-8", "replace")) > settings.MAX_BODY_BYTES:
        raise TooLarge(f"The arguments are larger than {settings.MAX_BODY_BYTES:,} bytes.")
    return arguments


def read_answer(name: str, response: CallResponse) -> Answer:
    """Return what a script gets for a response: a value, or an exception."""
    content: list[Any] = json.loads(response.content)
    texts = [
        str(block.get("text", ""))
        for block in content
        if isinstance(block, dict) and block.get("type") == "text"
    ]
    text = "\n".join(texts)
    if response.is_error:
        code = response.error["code"] if response.error else ""
        message = f"{name}: {text[:MAX_MESSAGE]}"
        if response.state == CallState.TIMED_OUT:
            return Failure("TimeoutError", message)
        is_refused = response.state in NOT_RUN and code not in CODES_WITH_SCHEMA
        return Failure("PermissionError" if is_refused else "RuntimeError", message)
    structured = json.loads(response.structured)
    if structured is not None:
        return Value(structured)
    return Value(text if texts or not content else content)


# --- Journal of a paused run ----------------------------------------------------------------------


def write_journal(broker: Broker, waiting: Waiting) -> dict[str, Any]:
    """Return everything that a paused run needs beside the snapshot of its engine."""
    calls = [_pack_call(broker, call) for call in waiting.calls]  # before the answers
    return {
        "names": dict(broker.names),
        "made": broker.made,
        "tokens": broker.tokens,
        "held": {str(number): call_id for number, call_id in broker.held.items()},
        "answered": {str(number): _pack(answer) for number, answer in broker.answered.items()},
        "calls": calls,
    }


def _pack_call(broker: Broker, call: ToolCall) -> list[object]:
    arguments: object = {}
    try:
        arguments = as_json(dict(call.arguments))
    except TooLarge as error:  # it must not be made without its arguments after the decision
        broker.answered.setdefault(call.number, Failure("RuntimeError", f"{call.name}: {error}"))
    return [call.number, call.name, arguments, call.positional]


def _pack(answer: Answer) -> list[object]:
    if isinstance(answer, Failure):
        return [answer.kind, answer.message]
    return ["", answer.value]


def read_journal(
    journal: Mapping[str, Any], caller: Caller, run: int, parallel: int
) -> tuple[Broker, Waiting]:
    """Return the broker of a paused run, without the outcomes of its held calls."""
    broker = Broker(caller, run, journal["names"], parallel, journal["made"], journal["tokens"])
    for number, (kind, value) in journal["answered"].items():
        broker.answered[int(number)] = Failure(kind, value) if kind else Value(value)
    return broker, Waiting([ToolCall(*call) for call in journal["calls"]])


def held_of(journal: Mapping[str, Any]) -> dict[int, str]:
    return {int(number): call_id for number, call_id in journal["held"].items()}
