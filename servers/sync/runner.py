"""Sync runner: fetch a server's definitions and apply them to the catalog, under a lease.

Acquiring the lease clears the due time (scheduling.py), so that requests during a sync cause
exactly one more run and none is lost. Only the holder of the newest fence may commit.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db import connection as database
from django.db.models import Case, F, Q, When
from django.db.models.functions import Now
from django.utils import timezone

from catalog import audit
from catalog.definitions import features, ingest, storage
from catalog.definitions.parsing import read_tools
from catalog.groups import server_descriptions
from catalog.models import ASKS, Revision
from servers.connections import pool
from servers.connections.connection import Connection, connect
from servers.errors import ListingError, UpstreamError, format_bytes
from servers.models import (
    ConnectionPolicy,
    Isolation,
    Server,
    ServerState,
    SyncRun,
    Transport,
    Trigger,
    Trust,
)
from servers.registration import state_history
from servers.registration.actions import build_spec, report_state
from servers.spec import Listing, ServerSpec, name_of
from servers.sync import scheduling
from toolcrib.lib import process_identity
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.telemetry import metrics, tracing
from toolcrib.lib.text import escape_hidden

logger = logging.getLogger(__name__)

LEASE = timedelta(seconds=30)  # renewed while the sync runs
RENEW_INTERVAL = 8.0
CONFIRM_REMOVALS_AFTER = timedelta(seconds=60)
ELICITATION = "elicitation"  # the capability that servers list more tools for
PARKED_INTERVAL = timedelta(minutes=35)
REMOVALS_HELD = (
    "More than half of the tools are missing. They stay in the catalog until a second sync "
    "confirms it."
)
MAX_RUNS_KEPT = 200
MAX_NAMES_KEPT = 200

Fetched = tuple[Listing, Connection]  # a closed connection, for what the server says about itself


@dataclass(frozen=True)
class Lease:
    server: Server
    fence: int
    trigger: str
    started_at: datetime


class Superseded(Exception):
    """Another process syncs this server, or it was edited: write nothing."""


def sync_if_due(server_id: int) -> SyncRun | None:
    """Run a queued sync, unless it was run already or another process is running it."""
    lease = _acquire_lease(Q(pk=server_id, sync_due_at__lte=Now()))
    return run(lease) if lease else None


def sync_now(server_id: int, trigger: str, *, patience: float = 120.0) -> SyncRun:
    """Sync in this process, after waiting for a running sync. Return the finished run."""
    deadline = time.monotonic() + patience
    while True:
        Server.objects.filter(pk=server_id).update(sync_due_at=timezone.now(), sync_trigger=trigger)
        lease = _acquire_lease(Q(pk=server_id))
        if lease:
            return run(lease)
        if time.monotonic() > deadline:
            raise ToolcribError(
                "Another sync of this server is still running.", hint="Try again.", code="busy"
            )
        time.sleep(0.1)


def _acquire_lease(condition: Q) -> Lease | None:
    with transaction.atomic():
        free = Q(sync_lease_until=None) | Q(sync_lease_until__lt=Now())
        rows = Server.objects.select_for_update().filter(condition, enabled=True)
        server = rows.annotate(free=Case(When(free, then=True), default=False)).first()
        if server is None:
            return None
        is_free: bool = server.free  # type: ignore[attr-defined]  # annotated above
        if not (is_free or process_identity.is_dead(server.sync_holder)):
            return None
        now = timezone.now()
        trigger = server.sync_trigger
        Server.objects.filter(pk=server.pk).update(
            sync_fence=F("sync_fence") + 1,
            sync_lease_until=Now() + LEASE,
            sync_holder=process_identity.this_process(),
            sync_due_at=None,
            sync_sent_at=None,
            sync_trigger=Trigger.SCHEDULE,
            last_sync_started_at=now,
        )
        server.sync_runs.filter(outcome=SyncRun.Outcome.RUNNING).update(
            outcome=SyncRun.Outcome.FAILED,
            code="interrupted",
            error="The process exited during this sync; nothing was saved.",
            finished_at=now,
        )
        server.refresh_from_db()
        return Lease(server, server.sync_fence, trigger, now)


def renew(lease: Lease) -> bool:
    rows = Server.objects.filter(pk=lease.server.pk, sync_fence=lease.fence)
    return bool(rows.update(sync_lease_until=Now() + LEASE))


def run(lease: Lease) -> SyncRun:
    """Fetch and apply under a lease. Upstream failures are outcomes, not exceptions."""
    if not tracing.enabled:
        return _run(lease)
    slug = lease.server.slug
    attributes = {
        "mcp.method.name": "tools/list",
        "toolcrib.server": slug,
        "toolcrib.sync.trigger": str(lease.trigger),
    }
    with tracing.client_span(f"tools/list {slug}", attributes) as span:
        record = _run(lease)
        span.set_attribute("toolcrib.outcome", str(record.outcome))
        if record.outcome == SyncRun.Outcome.FAILED:
            tracing.set_error(span, record.code or "failed")
        return record


def _run(lease: Lease) -> SyncRun:
    server = lease.server
    record = SyncRun.objects.create(
        server=server, trigger=lease.trigger, fence=lease.fence, started_at=lease.started_at
    )
    # The pool has persistent connections to these servers only; others get a temporary one.
    persistent = server.connection_policy == ConnectionPolicy.ALWAYS
    shared = pool.process_pool() if persistent and server.isolation == Isolation.SHARED else None
    try:
        probed = lease.trigger in (Trigger.ADDED, Trigger.MANUAL)
        fetched = asyncio.run(_fetch_renewing(lease, record, build_spec(server), shared, probed))
        _set_phase(record, "saving")
        try:
            _apply(lease, record, *fetched)
        except IntegrityError:  # a definition that was in use before was pruned meanwhile
            _apply(lease, record, *fetched)
    except ToolcribError as error:
        if error.code == "closed" and shared is not None and pool.process_pool() is not shared:
            # A shutdown during the sync: the server has not failed, and is due again.
            message = "Toolcrib was stopped during this sync; nothing was saved."
            _finish(record, SyncRun.Outcome.FAILED, message, code="interrupted")
            _release(lease, timedelta(0))
        else:
            _record_failure(lease, record, error)
    except Superseded:
        message = "Superseded by another sync or an edit of the server; nothing was saved."
        _finish(record, SyncRun.Outcome.SUPERSEDED, message)
        _release(lease, timedelta(0))
    except BaseException:
        # Not the server's failure: release the lease for the next attempt, and re-raise.
        _release(lease, timedelta(seconds=settings.SYNC_GAP))
        message = "Internal error during the sync. See the log for details."
        _finish(record, SyncRun.Outcome.FAILED, message, code="internal")
        raise
    old = server.sync_runs.values_list("pk", flat=True)[MAX_RUNS_KEPT:]
    SyncRun.objects.filter(pk__in=list(old)).delete()
    return record


async def _fetch_renewing(
    lease: Lease, record: SyncRun, spec: ServerSpec, shared: pool.Pool | None, probed: bool
) -> Fetched:
    renewing = asyncio.create_task(_renew_lease(lease))
    try:
        if shared is not None:
            listing, used = await shared.run_on_loop(_fetch_shared(shared, spec, record))
        else:
            listing, used = await fetch_tools(spec, record)
        return await _add_needing_tools(listing, spec, used, probed), used
    finally:
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing


async def _add_needing_tools(
    listing: Listing, spec: ServerSpec, used: Connection, probed: bool
) -> Listing:
    """Add the tools that the server lists only to clients that can ask their user.

    An older server has to be asked on a second connection: only when a person starts the sync.
    """
    if used.is_modern or not probed:
        more = listing.tools_for_askers
    else:
        try:
            async with connect(spec, elicits=True) as connection:
                more = (await connection.list_tools()).tools
        except UpstreamError:  # it accepts one connection, for example
            more = None
    if more is None:
        return listing
    names = frozenset(filter(None, map(name_of, more))) - listing.names
    added = [tool for tool in more if name_of(tool) in names]
    return replace(listing, tools=(*listing.tools, *added), needing_user=names)


async def _renew_lease(lease: Lease) -> None:
    while True:
        await asyncio.sleep(RENEW_INTERVAL)
        await run_in_db_thread(renew, lease)


async def _fetch_shared(shared: pool.Pool, spec: ServerSpec, record: SyncRun) -> Fetched:
    return await _list_tools(await shared.connection(spec.server_id, spec.generation), record)


async def fetch_tools(spec: ServerSpec, record: SyncRun | None = None) -> Fetched:
    async with connect(spec) as connection:
        return await _list_tools(connection, record)


async def _list_tools(connection: Connection, record: SyncRun | None) -> Fetched:
    if record is not None:
        await run_in_db_thread(_set_phase, record, "listing")
    return await connection.list_tools(), connection


def _set_phase(record: SyncRun, phase: str) -> None:
    SyncRun.objects.filter(pk=record.pk).update(phase=phase)
    record.phase = phase


def _apply(lease: Lease, record: SyncRun, listing: Listing, connection: Connection) -> None:
    known = ingest.known_digests(lease.server)
    if listing.needing_user is None:  # not asked this time: they stay as they are
        needing = ingest.needing_tools(lease.server, ELICITATION)
        names = frozenset(needing.keys() - listing.names)
        kept = tuple(needing[name] for name in sorted(names))
        listing = replace(listing, tools=(*listing.tools, *kept), needing_user=names)
    tools, rejections = read_tools(
        listing.tools,
        max_bytes=settings.MAX_DEFINITION_BYTES,
        max_description=settings.MAX_DESCRIPTION_BYTES,
        known=known,
    )
    ids = storage.store_definitions(tools, charge=partial(_charge_definitions, lease.server))
    findings = ingest.collect_findings(lease.server, tools, known)
    offered, invalid = features.read_features(listing.features, settings.MAX_DEFINITION_BYTES)
    with transaction.atomic():
        server = _lock_server(lease)
        result = ingest.apply_listing(
            server,
            tools,
            rejections,
            ids,
            findings=findings,
            allow_removals=server.removals_held,
            needs=dict.fromkeys(listing.needing_user or (), ELICITATION),
        )
        if server.last_synced_at is None and server.trust != Trust.STRICT:
            _describe_group(server, connection)
        features_changed = features.apply_features(server, offered, listing.features)
        _update_protocol(server, connection, asks=bool(listing.needing_user))
        has_changes = result.has_changes or features_changed
        notified = lease.trigger == Trigger.LIST_CHANGED
        server.quiet_syncs = server.quiet_syncs + 1 if notified and not has_changes else 0
        server.removals_held = result.removals_held
        server.last_synced_at = timezone.now()
        if server.state != ServerState.CONNECTED:
            state_history.record(server.pk, ServerState.CONNECTED, server.last_synced_at)
        server.state = ServerState.CONNECTED
        server.state_code = server.state_reason = server.state_detail = ""
        server.failures = 0
        server.save(
            update_fields=[
                *("quiet_syncs", "removals_held", "last_synced_at", "failures"),
                *("state", "state_code", "state_reason", "state_detail"),
                *("protocol_version", "server_info", "instructions", "capabilities"),
            ]
        )
        record.added, record.changed = len(result.added), len(result.changed)
        record.removed, record.unchanged = len(result.removed), result.unchanged
        record.rejected, record.pages = len(rejections), listing.pages
        record.warnings = [*listing.warnings, *_flap_warning(server)]
        if invalid:
            record.warnings.append(f"{invalid} of its prompts or resources are invalid; left out.")
        changed_names: dict[str, list[Any]] = {
            "added": result.added,
            "changed": result.changed,
            "removed": result.removed,
            "rejected": [{"name": each.name, "reason": each.reason} for each in rejections],
        }
        record.names = {kind: items[:MAX_NAMES_KEPT] for kind, items in changed_names.items()}
        if result.removals_held:
            _finish(record, SyncRun.Outcome.HELD, REMOVALS_HELD)
            wait = CONFIRM_REMOVALS_AFTER
        else:
            _finish(record, SyncRun.Outcome.OK)
            wait = scheduling.next_poll(server, listing.ttl_ms)
    _release(lease, wait)


def _describe_group(server: Server, connection: Connection) -> None:
    title = connection.server_info.get("title", "")
    instructions = connection.instructions.replace("\0", " ")
    server_descriptions.describe(server.pk, title=title, instructions=instructions)


def _charge_definitions(server: Server, size: int) -> None:
    """Count new definition bytes of a server; raise past the day's limit, so the old list stays.

    The sync lease is held, so nobody else counts. Without the limit a server that changes its
    definitions on every sync would fill the disk.
    """
    today = timezone.now().astimezone(UTC).date()
    row = Server.objects.filter(pk=server.pk).values("definition_day", "definition_bytes").first()
    if row is None:
        raise Superseded
    total = size + (row["definition_bytes"] if row["definition_day"] == today else 0)
    if total > settings.DEFINITION_BYTES:
        logger.warning(
            "Server %s sent %s of new definitions today; keeping its previous tools until tomorrow",
            *(server.slug, format_bytes(total)),
        )
        raise ListingError(
            f"The server sent {format_bytes(total)} of new definitions today; the limit is "
            f"{format_bytes(settings.DEFINITION_BYTES)}. Its previous tools stay until tomorrow.",
            code="definition_budget",
            hint="Find out why its definitions keep changing. TOOLCRIB_DEFINITION_BYTES sets the "
            "limit.",
        )
    Server.objects.filter(pk=server.pk).update(definition_day=today, definition_bytes=total)


def _flap_warning(server: Server) -> list[str]:
    names = scheduling.flapping_tools(server)
    if not names:
        return []
    return [
        f"Changed more than {scheduling.MAX_CHANGES} times in an hour: {', '.join(names[:5])}. "
        "Notifications from this server are ignored until nothing has changed for an hour; "
        "scheduled syncs continue."
    ]


def _lock_server(lease: Lease) -> Server:
    """Lock the row, or raise Superseded if the lease was lost or the server edited."""
    server = (
        Server.objects.select_for_update()
        .filter(pk=lease.server.pk, sync_fence=lease.fence, generation=lease.server.generation)
        .first()
    )
    if server is None:
        raise Superseded
    return server


def _update_protocol(server: Server, connection: Connection, *, asks: bool) -> None:
    if server.protocol_version and server.protocol_version != connection.protocol_version:
        audit.record(
            audit.SYSTEM,
            "server.protocol",
            server,
            before={"version": server.protocol_version},
            after={"version": connection.protocol_version},
        )
    server.protocol_version = connection.protocol_version[:20]
    # PostgreSQL accepts neither NUL nor lone surrogates.
    info = {key: escape_hidden(text, keep="\n\t") for key, text in connection.server_info.items()}
    asks = asks or (ASKS in server.capabilities and server.server_info == info)  # asked in a call
    server.server_info = info
    server.instructions = connection.instructions.replace("\0", " ")
    declared = list(connection.capabilities)
    if not connection.is_modern and (asks or server.transport != Transport.STDIO):
        declared.append(ASKS)  # its questions need a connection of the asked client's session
    if server.capabilities != declared:
        server.capabilities = declared
        Revision.bump()


def _record_failure(lease: Lease, record: SyncRun, error: ToolcribError) -> None:
    record.detail = getattr(error, "detail", "")
    _finish(record, SyncRun.Outcome.FAILED, error.sentence, code=error.code[:40])
    server = lease.server
    report_state(server.pk, server.generation, ServerState.FAILING, error)
    parked = not isinstance(error, UpstreamError) or error.parked
    backoff = timedelta(seconds=min(30.0 * 2 ** min(server.failures, 6), server.poll_seconds))
    _release(lease, PARKED_INTERVAL if parked else backoff * random.uniform(0.8, 1.2))  # noqa: S311


def _release(lease: Lease, wait: timedelta) -> None:
    """Release the lease, and schedule the next sync: soon if requested meanwhile, else later."""
    rows = Server.objects.select_for_update().filter(pk=lease.server.pk, sync_fence=lease.fence)
    with transaction.atomic():
        server = rows.first()
        if server is None:
            return
        requested = server.sync_due_at
        due = timezone.now() + wait
        if requested is not None:
            # The result of this sync may have increased the minimum gap since the request.
            due = max(requested, scheduling.earliest_sync(server, server.sync_trigger))
        Server.objects.filter(pk=server.pk).update(sync_due_at=due, sync_lease_until=None)
    if requested is not None:
        scheduling.queue_sync(server.pk, due)


def _finish(record: SyncRun, outcome: str, error: str = "", *, code: str = "") -> None:
    record.outcome, record.error, record.code = outcome, error, code
    record.finished_at = timezone.now()
    if metrics.enabled:
        changes = (
            metrics.counted("toolcrib_syncs", record.server.slug, outcome),
            *metrics.observed("toolcrib_sync_duration_seconds", record.seconds or 0.0),
        )
        transaction.on_commit(partial(metrics.record, changes))
    with transaction.atomic():
        if Server.objects.filter(pk=record.server_id).exists():
            record.save()


def sync_many(servers: Sequence[Server], trigger: str) -> dict[int, SyncRun | ToolcribError]:
    """Sync servers in parallel and wait, so that a slow one does not delay the others."""

    def sync(server: Server) -> SyncRun | ToolcribError:
        try:
            return sync_now(server.pk, trigger)
        except ToolcribError as error:
            return error
        finally:
            database.close()

    with ThreadPoolExecutor(max_workers=8) as threads:
        return dict(zip((server.pk for server in servers), threads.map(sync, servers), strict=True))
