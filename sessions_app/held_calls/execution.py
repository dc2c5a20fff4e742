"""Execution of approved calls, exactly once, by whichever web process claims them.

A claim is a lease with a fencing token. Everything is asked again: key, session, scope, state of
the tool, validation, deny rules. Before the first byte is sent, `sent` is committed under the
token. So a call whose process died before that is executed by another process, and one whose
process died after it ends as `unknown` and is never sent again.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db import DatabaseError, InterfaceError, transaction
from django.db.models import Case, F, Q, When
from django.db.models.functions import Now
from django.utils import timezone

from servers.connections.calls import CallOutcome, wait_for_pool
from servers.connections.coordination import Changes
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization as authorizations
from sessions_app.dispatch import dispatcher, planner
from sessions_app.dispatch.authorization import Authorization, Caller, Outdated
from sessions_app.dispatch.planner import CallFinishedLocally, CallPlan, CallRequest
from sessions_app.held_calls.ending import end_call
from sessions_app.held_calls.waiting import watch
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import THIS_PROCESS, CallResponse, CallResult
from sessions_app.ledger.writer import CALL, CallRow, LedgerCursor, WriteJob
from sessions_app.models import Call, CallState, HeldCall
from sessions_app.models.encryption import decrypt_text, encrypt_text
from sessions_app.rules import agent_rules
from sessions_app.rules.evaluation import Decision
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.process_identity import is_dead

logger = logging.getLogger(__name__)

LEASE = timedelta(seconds=30)  # for everything before the call is accepted
RETRY_AFTER = timedelta(seconds=2)  # if the server or the agent has too many calls
MAX_RUNNING = 32  # approved calls that one process executes at once
MAX_EXAMINED = 200  # approved calls that are examined at a time
# Seconds between two checks: after a commit, by polling, at rest, and while others have leases.
EMBEDDED_INTERVAL, POLL_INTERVAL, IDLE_INTERVAL, LEASED_INTERVAL = 0.05, 0.5, 10.0, 1.0
BUSY = ("busy", "stopping")
OUTDATED, SUPERSEDED = -1, -2  # instead of a number of calls in flight

HOLD = HeldCall._meta.db_table
# Only table names are formatted into these statements.
READ_FENCE = f"SELECT fence FROM {HOLD} WHERE call_id = %s"  # noqa: S608
ACCEPT = (
    f"UPDATE {CALL} SET state = 'accepted', accepted_at = %s, deadline = %s, holder = %s, "  # noqa: S608
    "definition_id = %s WHERE id = %s AND state = 'approved'"
)
SEND = f"UPDATE {CALL} SET state = 'sent', sent_at = %s WHERE id = %s AND state = 'accepted'"  # noqa: S608
RELEASE = (
    f"UPDATE {CALL} SET state = 'approved', sent_at = NULL, holder = '' "  # noqa: S608
    "WHERE id = %s AND state IN ('accepted', 'sent')"
)
DELAY = f"UPDATE {HOLD} SET holder = '', lease_until = %s WHERE call_id = %s"  # noqa: S608
STORE = f"UPDATE {HOLD} SET answer = %s, request = '' WHERE call_id = %s"  # noqa: S608


class Superseded(ToolcribError):
    """Another process has claimed the call: send nothing, write nothing."""

    code = "superseded"

    def __init__(self) -> None:
        super().__init__("Another process executes this call.")


def _is_allowed(cursor: LedgerCursor, entry: CallRow, rule: int) -> bool:
    """A person has allowed this call: no rule holds it any more, only a denial counts."""
    return True


@dataclass(frozen=True)
class Claim:
    """An approved call that this process may execute."""

    call: Call
    fence: int
    session_id: str
    key_digest: str
    request: str  # encrypted

    def write(self, cursor: LedgerCursor, sql: str, *values: object) -> bool:
        """Execute a statement on the call if this claim is the newest; return if it changed it.

        Claims lock the same row, so that none is made between the two statements.
        """
        lock = "" if cursor.is_sqlite else " FOR UPDATE"  # SQLite has a single writer
        if cursor.fetch_one(READ_FENCE + lock, (self.call.pk,)) != (self.fence,):
            return False
        return bool(cursor.execute(sql, (*values, self.call.pk)).rowcount)

    async def commit(self, *statements: tuple[object, ...]) -> bool:
        """Commit statements on the call; return whether the last one changed it."""

        def work(cursor: LedgerCursor) -> bool:
            return [self.write(cursor, str(sql), *values) for sql, *values in statements][-1]

        order = self.call.session_id or 0
        return await ledger_writer.commit(WriteJob(work, order=order, must_commit=True))


# --- Claim ----------------------------------------------------------------------------------------


def claim_calls(limit: int) -> tuple[list[Claim], bool]:
    """Claim approved calls that no live process has claimed, and return whether there are more."""
    approved = HeldCall.objects.filter(call__state=CallState.APPROVED).order_by("call_id")
    rows = list(approved.values_list("pk", "holder")[:MAX_EXAMINED])
    claims: list[Claim] = []
    for pk, holder in rows:
        if len(claims) < limit and (claim := _claim(pk, holder)) is not None:
            claims.append(claim)
    return claims, len(claims) < len(rows)


@transaction.atomic
def _claim(pk: int, holder: str) -> Claim | None:
    is_free = Q(lease_until=None) | Q(lease_until__lt=Now())
    rows = HeldCall.objects.select_for_update(of=("self",)).filter(pk=pk, holder=holder)
    hold = rows.annotate(is_free=Case(When(is_free, then=True), default=False)).first()
    if hold is None or not (hold.is_free or is_dead(holder)):
        return None
    # Read after the lock: the process of an earlier claim may have accepted the call.
    if not Call.objects.filter(pk=hold.call_id, state=CallState.APPROVED).exists():
        return None
    HeldCall.objects.filter(pk=pk).update(
        fence=F("fence") + 1, holder=THIS_PROCESS, lease_until=Now() + LEASE
    )
    own = HeldCall.objects.select_related("call", "session", "key").get(pk=pk)
    digest = own.key.sha256 if own.key else ""
    return Claim(own.call, own.fence, own.session.session_id, digest, own.request)


# --- Execute --------------------------------------------------------------------------------------


async def execute(claim: Claim) -> None:
    """Execute a claimed call; its result is stored for the agent."""
    try:
        await _execute(claim)
    except Superseded:
        logger.info("Call %s is executed by another process", claim.call.call_id)
    except ToolcribError as error:
        if error.code in BUSY or error.status == 429:
            await _release(claim)
        else:
            await ledger_writer.run_off_loop(_refuse, claim, error)
    finally:
        watch.notify(claim.call.call_id)


async def _execute(claim: Claim) -> None:
    request = _read_request(claim)

    async def plan_and_accept(authorization: Authorization) -> CallPlan | None:
        plan = await dispatcher.plan_request(authorization, request)
        _check_tool(plan.entry, claim.call)
        if isinstance(plan, CallFinishedLocally):
            await _finish_locally(claim, authorization, plan)
            return None
        entry = plan.entry
        _use_row(entry, claim.call)

        def work(cursor: LedgerCursor) -> int | Decision | None:
            """Return None if the call is accepted, otherwise why not."""
            at, server = entry.accepted_at, entry.server_id
            in_flight = authorization.revalidate(cursor, at, server, plan.server_row)
            if in_flight is None:
                return OUTDATED
            if denial := agent_rules.decide(cursor, plan.matches, entry, _is_allowed):
                return denial
            if in_flight >= agent.calls_in_flight:
                return in_flight
            values = at, entry.deadline, THIS_PROCESS, entry.definition_id
            return None if claim.write(cursor, ACCEPT, *values) else SUPERSEDED

        agent = authorization.agent
        job = WriteJob(work, order=entry.session_id or 0, agent=agent.pk)
        obstacle = await ledger_writer.commit(job)
        if isinstance(obstacle, Decision):
            raise planner.denial(entry.tool_name, obstacle)
        if obstacle == OUTDATED:
            raise Outdated
        if obstacle == SUPERSEDED:
            raise Superseded
        if obstacle is not None:
            rate_limits.reject_concurrent_call(agent, obstacle)
        return plan

    caller = Caller(claim.key_digest, claim.session_id)
    plan = await authorizations.run_authorized(caller, plan_and_accept)
    if plan is None:
        return

    async def commit_sent() -> None:
        if not await claim.commit((SEND, timezone.now())):
            raise Superseded

    async def record(result: CallResult, outcome: CallOutcome) -> CallResponse:
        if outcome.state == "not_sent" and outcome.code in BUSY:
            raise ToolcribError(outcome.message, code="busy", status=503)
        return await _finish(claim, plan.entry, result)

    plan.before_send, plan.record = commit_sent, record
    await dispatcher.execute(plan)


def _check_tool(entry: CallRow, call: Call) -> None:
    """Raise CallRejected if the name is another tool's now, which nobody has allowed."""
    if entry.tool_id is not None and entry.tool_id != call.tool_id:
        raise planner.CallRejected(
            f"{call.tool_name} is another tool now: its server was replaced since this call was "
            "held.",
            code="unknown_tool",
            status=404,
            hint="Call it again: a person can then decide about the new tool.",
        )


def _read_request(claim: Claim) -> CallRequest:
    values = json.loads(decrypt_text(claim.request))
    return CallRequest(
        values["tool_name"],
        values["arguments"],
        values["timeout"],
        path=values["path"],
        size=len(claim.request),
        is_complete=True,
    )


def _use_row(entry: CallRow, call: Call) -> None:
    """Let a newly planned row continue the row of the held call."""
    entry.pk, entry.call_id = call.pk, call.call_id
    entry.idempotency_key, entry.request_digest = call.idempotency_key, call.request_digest
    entry.implicit_load, entry.run_id = call.implicit_load, call.run_id


async def _finish_locally(
    claim: Claim, authorization: Authorization, plan: CallFinishedLocally
) -> None:
    """Finish a call that needs no server: a custom tool, or one that is refused now."""
    entry = plan.entry

    def decide(cursor: LedgerCursor) -> Decision | None:
        return agent_rules.decide(cursor, plan.matches, entry, _is_allowed)

    if (denial := await authorization.commit(decide)) is not None:
        raise planner.denial(entry.tool_name, denial)
    await _finish(claim, entry, plan.result)


async def _finish(claim: Claim, entry: CallRow, result: CallResult) -> CallResponse:
    """Commit the result with the whole answer, encrypted, until the agent fetches it."""
    _use_row(entry, claim.call)

    def prepare() -> tuple[CallResponse, str]:
        response = call_ledger.fill_in_result(entry, result)
        return response, encrypt_text(response.as_json())

    response, answer = await asyncio.to_thread(prepare)

    def write(cursor: LedgerCursor) -> None:
        call_ledger.write_result(cursor, entry, result, response, is_accepted=True)
        cursor.execute(STORE, (answer, entry.pk))

    await ledger_writer.commit(WriteJob(write, order=entry.session_id or 0, must_commit=True))
    return response


async def _release(claim: Claim) -> None:
    """Let the call be claimed again in a moment: it was not sent."""
    await claim.commit((RELEASE,), (DELAY, timezone.now() + RETRY_AFTER))


@transaction.atomic
def _refuse(claim: Claim, error: ToolcribError) -> None:
    """End a call that may no longer be executed, with the reason."""
    rows = Call.objects.select_for_update(of=("self",))
    call = rows.filter(pk=claim.call.pk, state=CallState.APPROVED, hold__fence=claim.fence).first()
    if call is not None:
        message = f"The call was allowed, but can no longer be made. {error.message}"
        end_call(call, CallState.REFUSED, message, code=error.code, hint=error.hint)


# --- The loop of a web process --------------------------------------------------------------------


class Executor:
    """Claims and executes approved calls, and wakes those that wait for a result."""

    def __init__(self, database: Changes) -> None:
        self._database = database
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled. Calls that are being executed end as all calls do at shutdown."""
        await wait_for_pool()
        least = EMBEDDED_INTERVAL if settings.EMBEDDED else POLL_INTERVAL
        while True:
            seen, most = self._database.changes, IDLE_INTERVAL
            try:
                most = LEASED_INTERVAL if await self.run_once() else IDLE_INTERVAL
            except (DatabaseError, InterfaceError) as error:
                logger.warning("Checking held calls failed; retrying: %s", error)
            except Exception:
                logger.exception("Checking held calls failed; retrying")
            await self._database.wait(seen, least, most)

    async def run_once(self) -> bool:
        """Start approved calls; return whether some cannot be claimed yet."""
        limit = MAX_RUNNING - len(self._running)
        claims, is_more = await ledger_writer.run_off_loop(claim_calls, limit)
        for claim in claims:
            task = asyncio.create_task(execute(claim))
            self._running.add(task)
            task.add_done_callback(self._on_done)
        await watch.check()
        return is_more

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Executing an approved call failed", exc_info=error)

    async def drain(self) -> None:
        """Wait for the calls that are being executed."""
        while self._running:
            await asyncio.wait(set(self._running))
