"""Calls that go on while the client of 2026 is asked, and answers that reach another process.

Such a call waits in the process that sent it. Where there are several processes, its row in the
database takes an answer there, and what follows back: the next question, or the response.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from servers.connections.asking import OnAsk
from sessions_app.dispatch.planner import ASKING_SECONDS
from sessions_app.held_calls.waiting import EndWatch
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import THIS_PROCESS, CallResponse
from sessions_app.models import WaitingConversation
from toolcrib.lib.errors import Conflict, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.process_identity import is_dead

logger = logging.getLogger(__name__)

CANCEL: dict[str, Any] = {"action": "cancel"}
TAKE_SECONDS = 10.0  # in which a live process takes an answer
RETENTION = timedelta(hours=1)  # as long as a client may answer
Outcome = CallResponse | dict[str, Any]  # the response, or the next question


class Conversation:
    """A request to a server that goes on while its client is asked."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.task: asyncio.Future[CallResponse] | None = None
        self._question: dict[str, Any] | None = None
        self._asked = asyncio.Event()
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    @property
    def on_ask(self) -> OnAsk:
        return self._ask

    async def _ask(self, params: dict[str, Any]) -> dict[str, Any]:
        """Wait for the client's next request, which has the answer."""
        self._question, self._answer = params, asyncio.get_running_loop().create_future()
        self._asked.set()
        try:
            return await asyncio.wait_for(self._answer, ASKING_SECONDS)
        except TimeoutError:
            return CANCEL
        finally:
            self._question = None
            self._asked.clear()

    def take_answer(self, answer: object) -> None:
        if isinstance(answer, Mapping) and self._answer is not None and not self._answer.done():
            self._answer.set_result(dict(answer))
            self._asked.clear()

    async def wait(self) -> Outcome:
        """Return the response, or the next question."""
        assert self.task is not None  # noqa: S101 - set by who made it
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            either: set[asyncio.Future[Any]] = {self.task, asked}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        finally:
            asked.cancel()
        return self.task.result() if self.task.done() else self._question or {}


_running: dict[str, Conversation] = {}  # of this process, by token
_reports: set[asyncio.Task[None]] = set()


async def follow(conversation: Conversation) -> Outcome:
    """Wait for what follows, in the process of the call; register a call that asks."""
    token = conversation.token
    try:
        outcome = await conversation.wait()
    except BaseException:
        _running.pop(token, None)
        raise
    if isinstance(outcome, CallResponse):
        if _running.pop(token, None) is not None and not settings.EMBEDDED:
            await ledger_writer.run_off_loop(_delete, token)
    elif token not in _running:
        _running[token] = conversation
        loop = asyncio.get_running_loop()
        loop.call_later(RETENTION.total_seconds(), _running.pop, token, None)
        if not settings.EMBEDDED:
            await ledger_writer.run_off_loop(_create, token)
    return outcome


async def answer(token: str, given: object) -> Outcome:
    """Give an answer to the call that asked, in whichever process it runs; return what follows.

    Raises Conflict if the call no longer runs.
    """
    if (conversation := _running.get(token)) is not None:
        conversation.take_answer(given)
        return await follow(conversation)
    if settings.EMBEDDED:  # there is no other process
        raise _expired()
    return await _answer_elsewhere(token, given)


def _expired() -> Conflict:
    return Conflict(
        "The call that asked this is no longer running.",
        hint="Make the call again.",
        code="question_expired",
    )


# --- The process that received the answer ---------------------------------------------------------


async def _answer_elsewhere(token: str, given: object) -> Outcome:
    run = ledger_writer.run_off_loop
    await run(_leave, token, {"answer": given})
    try:
        while True:
            await outcomes.wait(token, TAKE_SECONDS)
            if (text := await run(_take_outcome, token)) is not None:
                return _parse_outcome(text)
    except asyncio.CancelledError:  # the client has disconnected: its call ends
        await asyncio.shield(run(_leave, token, {"cancelled": True}))
        raise


def _leave(token: str, message: Mapping[str, Any]) -> None:
    """Leave an answer for the process of the call. Raises Conflict if there is none."""
    rows = WaitingConversation.objects.filter(token=token)
    row = rows.first()
    if row is None or is_dead(row.holder):
        raise _expired()
    rows.update(answer=canonical(message), outcome="")


def _take_outcome(token: str) -> str | None:
    """Return and remove what followed the answer; None while the call runs. Raises Conflict."""
    with transaction.atomic():
        row = WaitingConversation.objects.select_for_update().filter(token=token).first()
        if row is not None and row.outcome:
            text: str = row.outcome
            row.outcome = ""
            row.save(update_fields=["outcome"])
            return text
    if row is None or row.answer or is_dead(row.holder):  # nobody takes the answer
        raise _expired()
    return None


def _with_outcome(tokens: list[str]) -> list[str]:
    rows = WaitingConversation.objects.filter(token__in=tokens).exclude(outcome="")
    return list(rows.values_list("token", flat=True))


outcomes = EndWatch(_with_outcome)


# --- The process of the call ----------------------------------------------------------------------


async def take_left_answers() -> None:
    """Take answers that other processes received, and report there what follows."""
    if tokens := list(_running):
        for token, message in await ledger_writer.run_off_loop(_take, tokens):
            conversation = _running.get(token)
            if conversation is None:
                continue
            if "cancelled" in message and conversation.task is not None:
                conversation.task.cancel()
                _running.pop(token)
            else:
                conversation.take_answer(message.get("answer"))
                task = asyncio.ensure_future(_report(conversation))
                _reports.add(task)
                task.add_done_callback(_reports.discard)


async def _report(conversation: Conversation) -> None:
    token = conversation.token
    try:
        outcome = await conversation.wait()
    except ToolcribError as error:
        body: dict[str, Any] = {**error.as_json(), "status": error.status}
    else:
        if isinstance(outcome, CallResponse):
            body = {"response": asdict(outcome)}
        else:
            body = {"question": outcome}
    if "question" not in body:
        _running.pop(token, None)
    await ledger_writer.run_off_loop(_store_outcome, token, canonical(body))


@transaction.atomic
def _take(tokens: Collection[str]) -> list[tuple[str, Mapping[str, Any]]]:
    taken = []
    rows = WaitingConversation.objects.select_for_update().filter(token__in=tokens)
    for row in rows.exclude(answer="").order_by("pk"):
        taken.append((row.token, json.loads(row.answer)))
        row.answer = ""
        row.save(update_fields=["answer"])
    return taken


def _create(token: str) -> None:
    WaitingConversation.objects.create(token=token, holder=THIS_PROCESS)


def _delete(token: str) -> None:
    WaitingConversation.objects.filter(token=token).delete()


def _store_outcome(token: str, body: str) -> None:
    WaitingConversation.objects.filter(token=token).update(outcome=body)


def _parse_outcome(text: str) -> Outcome:
    """Return what another process reports. Raises the error of the call."""
    body = json.loads(text)
    if "response" in body:
        return CallResponse(**body["response"])
    if "question" in body:
        question: dict[str, Any] = body["question"]
        return question
    error = body["error"]
    names = ("hint", "code", "details")
    fields = {name: error[name] for name in names if name in error}
    raise ToolcribError(error["message"], status=body["status"], **fields)


def prune() -> None:
    """Delete rows of calls that can no longer be answered."""
    WaitingConversation.objects.filter(created_at__lt=timezone.now() - RETENTION).delete()
