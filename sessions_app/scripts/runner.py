"""Runs scripts: starts them, drives their engine, pauses and continues them, in this process.

A run is a task of its own: it goes on when the request that started it was answered. While a
person has to decide about a call, nothing is kept in memory; the script is continued from its
sealed snapshot by whichever process notices the decision first.
"""

import asyncio
import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import DatabaseError, InterfaceError

from servers.connections.calls import wait_for_pool
from servers.connections.coordination import Changes
from sessions_app.agents import api_keys, rate_limits
from sessions_app.dispatch import authorization as authorizations
from sessions_app.dispatch import key_revocation
from sessions_app.dispatch.authorization import Authorization, Caller
from sessions_app.held_calls.waiting import EndWatch
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CallResponse, check_idempotency_key
from sessions_app.models import ENDED_RUNS, Agent, AgentSession, RunState, ScriptRun
from sessions_app.models.encryption import UNREADABLE
from sessions_app.scripts import engines, runs, signatures
from sessions_app.scripts.broker import Broker, held_of, read_journal, write_journal
from sessions_app.scripts.engines import (
    MAX_SECONDS,
    MAX_SOURCE_BYTES,
    Engine,
    Execution,
    Finished,
    Program,
    ScriptFailed,
    Waiting,
)
from sessions_app.scripts.output import returned_json
from sessions_app.scripts.runs import NewRun, Outcome
from sessions_app.sessions.scope import SessionScope, scope_of_session
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.payloads import check_value

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0  # after which a request is answered while its script runs
MAX_SNAPSHOT = 8_000_000  # characters of a paused script with its answers
MAX_CONTINUED = 8  # scripts that one process continues at once
EMBEDDED_INTERVAL, POLL_INTERVAL, IDLE_INTERVAL = 0.05, 0.5, 10.0  # seconds between two checks


def _stopped(run_ids: list[str]) -> list[str]:
    rows = ScriptRun.objects.filter(run_id__in=run_ids).exclude(state=RunState.RUNNING)
    return list(rows.values_list("run_id", flat=True))


def _ended(run_ids: list[str]) -> list[str]:
    rows = ScriptRun.objects.filter(run_id__in=run_ids, state__in=ENDED_RUNS)
    return list(rows.values_list("run_id", flat=True))


watch = EndWatch(_stopped)  # of running scripts: ended, or paused
ended = EndWatch(_ended)  # of paused ones


@dataclass(frozen=True)
class ScriptRequest:
    code: str
    language: str = "python"
    timeout: float | None = None
    input: object = None
    idempotency_key: str | None = None

    def check(self) -> None:
        """Raise Invalid for what cannot be run."""
        check_idempotency_key(self.idempotency_key)
        check_value(self.input, "/input")
        check_value(self.code, "/code")
        if len(self.code.encode()) > MAX_SOURCE_BYTES:
            raise Invalid(
                f"The script is longer than {MAX_SOURCE_BYTES:,} bytes.",
                hint="Give data as input, not in the script.",
            )


# --- Requests of agents ---------------------------------------------------------------------------


async def run_script(
    caller: Caller, request: ScriptRequest, wait: float = ANSWER_SECONDS
) -> dict[str, Any]:
    """Start a script; return how it stands when it ended, was paused, or after `wait` seconds."""
    agent: Agent | None = None

    async def attempt(authorization: Authorization) -> tuple[ScriptRun, bool, Authorization]:
        nonlocal agent
        if agent is None:
            await rate_limits.check_request(authorization.agent)
            agent = authorization.agent
        runs.check_permitted(authorization.agent)
        request.check()
        new = NewRun(
            request.code,
            request.language,
            request.timeout or MAX_SECONDS,
            request.input,
            engines.find_engine(request.language).version,
            request.idempotency_key,
        )
        run, is_new = await ledger_writer.run_off_loop(runs.start, authorization, new)
        return run, is_new, authorization

    run, is_new, authorization = await authorizations.run_authorized(caller, attempt)
    session_id = await caller.find_session(renew=False)
    assert agent is not None  # noqa: S101 - set by the attempt
    if is_new:
        given = _Given(authorization.scope, authorization.shown_definition)
        _spawn(run, _run_new(run, Caller(caller.digest, session_id), given, agent))
    try:
        await watch.wait(run.run_id, wait)
    except asyncio.CancelledError:
        if request.idempotency_key is None:  # with one, the caller asks again
            _end_here(run, Disconnected())
        raise
    return await _answer(agent, run.run_id)


class Disconnected(ToolcribError):
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled before this script ended.")


async def check_run(digest: str, run_id: str, wait: float) -> dict[str, Any]:
    """Return how a run of this key's agent stands, after at most `wait` seconds."""
    agent = await _agent_of(digest)
    await rate_limits.check_request(agent)
    run = await ledger_writer.run_off_loop(runs.find_own_run, agent, run_id)
    if wait and run.state not in ENDED_RUNS:
        await (watch if run.state == RunState.RUNNING else ended).wait(run_id, wait)
        agent = await _agent_of(digest)  # the key may have been revoked while this waited
    return await _answer(agent, run_id)


async def _agent_of(digest: str) -> Agent:
    key = await ledger_writer.run_off_loop(api_keys.require_agent_key, digest)
    assert key.agent is not None  # noqa: S101 - ensured by require_agent_key
    return key.agent


async def _answer(agent: Agent, run_id: str) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        return runs.run_body(runs.find_own_run(agent, run_id))

    body = await ledger_writer.run_off_loop(read)
    await rate_limits.add_bytes(agent, len(str(body["result"])) + len(body["logs"]))
    return body


# --- Tasks ----------------------------------------------------------------------------------------


class _RunTask:
    """A running script. It is ended when its key is revoked, its request is cancelled, or Toolcrib
    stops.
    """

    def __init__(self, run: ScriptRun, task: "asyncio.Task[None]") -> None:
        self.run, self.task = run, task
        self.key = run.key_id
        self.reason = ScriptFailed("interrupted", runs.INTERRUPTED)

    def end(self, reason: ToolcribError) -> None:
        self.reason = ScriptFailed(reason.code, reason.sentence)
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def on_done(self, task: "asyncio.Task[None]") -> None:
        _tasks.discard(self)
        key_revocation.running.discard(self)
        watch.notify(self.run.run_id)  # `ended` checks: the script may be paused again
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Running a script failed", exc_info=error)


_tasks: set[_RunTask] = set()


def _spawn(run: ScriptRun, work: Coroutine[Any, Any, None]) -> None:
    own = _RunTask(run, asyncio.ensure_future(_supervise(run, work)))
    _tasks.add(own)
    key_revocation.running.add(own)
    own.task.add_done_callback(own.on_done)


async def _supervise(run: ScriptRun, work: Coroutine[Any, Any, None]) -> None:
    """Do the work of a run. What ends it before the script is driven ends the run, too."""
    try:
        await work
        return
    except asyncio.CancelledError:
        error = _reason(run)
    except Exception:
        logger.exception("Script %s failed", run.run_id)
        error = _internal_error()
    outcome = Outcome("", 0.0, run.tokens_spared, error=error)
    await ledger_writer.run_off_loop(runs.finish, run, outcome)


def _reason(run: ScriptRun) -> ScriptFailed:
    """Return why a script of this process was cancelled."""
    return next(own.reason for own in _tasks if own.run.pk == run.pk)


def _internal_error() -> ScriptFailed:
    return ScriptFailed("InternalError", "Toolcrib failed to run this script.")


def _end_here(run: ScriptRun, reason: ToolcribError) -> None:
    """End a script if this process runs it."""
    for own in [own for own in _tasks if own.run.pk == run.pk]:
        own.end(reason)


async def stop() -> None:
    """End all scripts of this process, since Toolcrib stops; then the engines' processes."""
    tasks = [own.task for own in _tasks if own.task.get_loop() is asyncio.get_running_loop()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engines.close_engines()


async def drain() -> None:
    """Wait until no script runs in this process."""
    while _tasks:
        await asyncio.wait({own.task for own in _tasks})


@dataclass(frozen=True)
class _Given:
    """The tools of a session, and which definition of each it was shown, if any."""

    scope: SessionScope
    shown: Callable[[str], int | None] = lambda _: None


async def _run_new(run: ScriptRun, caller: Caller, given: _Given, agent: Agent) -> None:
    names = signatures.names_of(given.scope)
    sent = runs.payload_of(run)
    # Reads the database for earlier definitions.
    modules = await ledger_writer.run_off_loop(
        signatures.named_in, sent["code"], names, given.shown
    )
    public = {tool.name: tool.public_name for tools in modules.values() for tool in tools}
    program = Program(sent["code"], modules, json.loads(sent["input"]))
    broker = Broker(caller, run.pk, public, agent.calls_in_flight)
    engine = engines.find_engine(run.language)
    await _drive(run, engine.run(program), broker)


async def _drive(
    run: ScriptRun, opening: AbstractAsyncContextManager[Execution], broker: Broker
) -> None:
    """Run a script until it ends or a call of it is held, and store that."""
    started = time.monotonic()
    logs = sealed = ""
    result, is_cut = "null", False
    error: ScriptFailed | None = None
    try:
        async with asyncio.timeout(max(0.1, run.timeout - run.used_seconds)), opening as execution:
            try:
                step = await execution.start()
                while isinstance(step, Waiting):
                    given = await broker.answer(step)
                    if given is None:
                        sealed = await _seal(run, execution, broker, step)
                        break
                    step = await execution.resume(given)
                if isinstance(step, Finished):
                    result, is_cut = await asyncio.to_thread(
                        returned_json, step.value, step.cut_bytes
                    )
            finally:
                logs = execution.logs
    except ScriptFailed as failed:
        error = failed
    except TimeoutError:
        error = ScriptFailed("TimeoutError", f"The script ran longer than {run.timeout:g} s.")
    except asyncio.CancelledError:
        error = _reason(run)
    except Exception:
        logger.exception("Script %s failed", run.run_id)
        error = _internal_error()
    outcome = Outcome(logs, time.monotonic() - started, broker.tokens, result, is_cut, error)
    if sealed and error is None:
        held = list(broker.held.values())
        await ledger_writer.run_off_loop(runs.pause, run, sealed, held, outcome)
    else:
        await ledger_writer.run_off_loop(runs.finish, run, outcome)


async def _seal(run: ScriptRun, execution: Execution, broker: Broker, waiting: Waiting) -> str:
    """Return a stopped script with everything it needs. The column it is stored in is encrypted."""
    snapshot = b64encode(await execution.dump()).decode("ascii")

    def seal() -> str:
        journal = write_journal(broker, waiting)
        return canonical({"run": run.run_id, "journal": journal, "snapshot": snapshot})

    sealed = await asyncio.to_thread(seal)
    if len(sealed) > MAX_SNAPSHOT:
        text = "A call was held, but the script holds too much data to be paused."
        raise ScriptFailed("LimitExceeded", text)
    return sealed


# --- Continue -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Paused:
    """A paused script as it was read from the database."""

    caller: Caller
    program: Program
    broker: Broker
    waiting: Waiting
    snapshot: bytes
    responses: Mapping[int, CallResponse]


async def continue_run(run: ScriptRun) -> None:
    """Continue a claimed run with the outcomes of the calls it waited for, or start it."""
    try:
        engine = engines.find_engine(run.language)
        if runs.is_queued(run):
            await _run_new(run, *await ledger_writer.run_off_loop(_read_queued, run))
            return
        paused = await ledger_writer.run_off_loop(_read_paused, run, engine)
    except (ScriptFailed, ToolcribError) as error:
        failed = error if isinstance(error, ScriptFailed) else ScriptFailed(error.code, str(error))
        outcome = Outcome("", 0.0, run.tokens_spared, error=failed)
        await ledger_writer.run_off_loop(runs.finish, run, outcome)
        return
    names = {call.number: call.name for call in paused.waiting.calls}
    for number, response in paused.responses.items():
        await paused.broker.take(number, names[number], response)
    opening = engine.restore(paused.program, paused.snapshot, paused.waiting)
    await _drive(run, opening, paused.broker)


def _read_paused(run: ScriptRun, engine: Engine) -> _Paused:
    if runs.has_expired_call(run):
        raise ScriptFailed("expired", runs.EXPIRED)
    if run.engine != engine.version:
        raise ScriptFailed("expired", runs.OTHER_ENGINE)
    if not run.snapshot or run.snapshot == UNREADABLE:
        raise ScriptFailed("expired", "The paused script can no longer be read.")
    sealed = json.loads(run.snapshot)
    if sealed["run"] != run.run_id:
        raise ScriptFailed("expired", "The paused script belongs to another run.")
    session, caller = _read_caller(run)
    broker, waiting = read_journal(sealed["journal"], caller, run.pk, session.agent.calls_in_flight)
    sent = runs.payload_of(run)
    modules = signatures.named_in(sent["code"], signatures.names_of(scope_of_session(session)))
    program = Program(sent["code"], modules, json.loads(sent["input"]))
    taken = runs.take_responses(run, session.agent)
    responses = {number: taken[call_id] for number, call_id in held_of(sealed["journal"]).items()}
    return _Paused(caller, program, broker, waiting, b64decode(sealed["snapshot"]), responses)


def _read_queued(run: ScriptRun) -> tuple[Caller, _Given, Agent]:
    session, caller = _read_caller(run)
    return caller, _Given(scope_of_session(session)), session.agent


def _read_caller(run: ScriptRun) -> tuple[AgentSession, Caller]:
    """Return the session of a run, and its caller. Raises what forbids to go on."""
    row = ScriptRun.objects.select_related("session__agent", "key").get(pk=run.pk)
    if row.key is None:
        raise ScriptFailed("PermissionError", "The key that ran this script was deleted.")
    runs.check_permitted(row.session.agent)  # the setting may have been turned off meanwhile
    return row.session, Caller(row.key.sha256, row.session.session_id)


class Continuer:
    """Starts queued scripts, continues those whose held calls were decided, and wakes those that
    wait for a script.
    """

    def __init__(self, database: Changes) -> None:
        self._database = database

    async def run(self) -> None:
        """Run until cancelled."""
        await wait_for_pool()
        least = EMBEDDED_INTERVAL if settings.EMBEDDED else POLL_INTERVAL
        try:
            while True:
                seen = self._database.changes
                try:
                    await self.run_once()
                except (DatabaseError, InterfaceError) as error:
                    logger.warning("Checking scripts failed; retrying: %s", error)
                except Exception:
                    logger.exception("Checking scripts failed; retrying")
                await self._database.wait(seen, least, IDLE_INTERVAL)
        finally:
            await stop()

    async def run_once(self) -> None:
        for run in await ledger_writer.run_off_loop(runs.claim_decided, MAX_CONTINUED):
            _spawn(run, continue_run(run))
        await watch.check()
        await ended.check()
