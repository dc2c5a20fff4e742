"""Server-sent events that tell open pages what changed, so that they fetch themselves again.

One task per process reads what was committed while any page or event stream listens; without a
listener nothing runs. Events of pages carry topics, never data: a page shows what its reader may
see.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError
from django.db.models import Count, Max, Q
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils import timezone
from django.views.decorators.http import require_safe

from catalog.models import AuditEntry, Revision, Tool, ToolState
from servers.models import Server
from sessions_app.models import Call, Event
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.roles import Role, role_of
from toolcrib.runtime.lifespan import runtime

logger = logging.getLogger(__name__)

INTERVAL = 0.4  # seconds between two looks at the database
IDLE_INTERVAL = 15.0  # a comment keeps proxies from closing the stream
MAX_EVENTS = 1_000  # read at once; more of them count as a change of every session
MAX_STREAMS = 200  # of one process, of pages
GAP_SECONDS = 20.0  # how long an event with a lower number may be committed after a higher one
MAX_GAPS = 500  # numbers of missing events that are read again
STREAM_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
MAX_TOPICS = 20  # of one page
MAX_AGE = 600.0  # seconds; an older page is fetched again
MAX_RECENT = 200  # events read when a page connects; more count as a change of everything
COMMIT_SECONDS = 0.2  # between the time of an event and its commit
EVERYTHING = "all"


class LiveUpdates:
    """Compares the database with what was last seen, and wakes the streams of changed topics."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._task: asyncio.Task[None] | None = None
        self._last_event: int | None = None
        self._gaps: dict[int, float] = {}  # missing numbers of events, until when
        self._servers: dict[str, Any] = {}
        self._revision = 0
        self._pending: tuple[object, ...] = ()

    def count_pages(self) -> int:
        return sum(isinstance(stream, PageStream) for stream in self._streams)

    async def add(self, stream: "Stream") -> None:
        self._streams.add(stream)
        if self._task is None or self._task.done():
            await run_in_db_thread(self._read)  # what is there now is no change
            self._task = asyncio.create_task(self._run(), name="live updates")

    def remove(self, stream: "Stream") -> None:
        self._streams.discard(stream)

    def close(self) -> None:
        """End all streams, so that shutdown does not wait for them."""
        for stream in self._streams:
            stream.close()

    async def _run(self) -> None:
        while self._streams:
            seen = runtime.database.changes
            try:
                changed = await run_in_db_thread(self._read)
            except (DatabaseError, InterfaceError) as error:
                logger.warning("Live updates could not read the database: %s", error)
                changed = set()
            if changed:
                for stream in self._streams:
                    stream.notify(changed)
            await runtime.database.wait(seen, INTERVAL, IDLE_INTERVAL)

    def _read(self) -> set[str]:
        """Return the topics that changed since the last look."""
        changed: set[str] = set()
        if self._last_event is None:
            self._last_event = Event.objects.aggregate(last=Max("pk"))["last"] or 0
        unseen = Q(pk__gt=self._last_event)
        if self._gaps:
            unseen |= Q(pk__in=list(self._gaps))
        events = Event.objects.filter(unseen).order_by("pk")
        rows = list(
            events.values_list("pk", "session__session_id", "call__server_slug")[:MAX_EVENTS]
        )
        if rows:
            self._note_gaps([row[0] for row in rows])
            self._last_event = max(self._last_event, rows[-1][0])
            changed.add("sessions")
        changed |= {f"session:{session}" for _, session, _ in rows}
        changed |= {f"server:{server}" for _, _, server in rows if server}
        if len(rows) == MAX_EVENTS:
            changed.add(EVERYTHING)
        columns = (
            "slug",
            "state",
            "state_since",
            "last_synced_at",
            "last_sync_started_at",
            "enabled",
        )
        servers = {slug: tuple(state) for slug, *state in Server.objects.values_list(*columns)}
        differing = {slug for slug, _ in self._servers.items() ^ servers.items()}
        if differing:
            changed |= {"servers", *(f"server:{slug}" for slug in differing)}
        revision = Revision.objects.values_list("number", flat=True).first() or 0
        if revision != self._revision:
            changed.add("catalog")
        pending = _pending_approvals()
        if pending != self._pending:
            changed.add("approvals")
        self._servers, self._revision, self._pending = servers, revision, pending
        return changed

    def _note_gaps(self, numbers: Iterable[int]) -> None:
        """Note which numbers are missing: PostgreSQL commits transactions in another order."""
        now = time.monotonic()
        seen, last = set(numbers), self._last_event or 0
        gaps = {gap: until for gap, until in self._gaps.items() if gap not in seen and until > now}
        for number in sorted(seen):
            if number > last:
                missing = range(max(last + 1, number - MAX_GAPS), number)
                gaps |= dict.fromkeys(missing, now + GAP_SECONDS)
                last = number
        self._gaps = dict(list(gaps.items())[-MAX_GAPS:])


def _pending_approvals() -> tuple[object, ...]:
    """Return what changes whenever a definition or a call starts or ends to wait for a person."""
    tools = Tool.objects.filter(state=ToolState.WAITING)
    held = Call.objects.held()
    numbers = (
        tools.aggregate(Count("pk"), Max("pk"), Max("latest")),
        held.aggregate(Count("pk"), Max("pk")),
    )
    return tuple(value for row in numbers for value in row.values())


class Stream:
    """A stream that waits for changes of its topics."""

    def __init__(self, topics: set[str]) -> None:
        self.topics = topics
        self._pending: set[str] = set()
        self._changed = asyncio.Event()
        self._closed = False

    def notify(self, changed: set[str]) -> None:
        concerned = self.topics if EVERYTHING in changed else self.topics & changed
        if concerned:
            self._pending |= concerned
            self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def wakeups(self, read: Callable[[set[str]], Awaitable[str]]) -> AsyncIterator[str]:
        """Yield what `read` returns for changed topics, at first for none; comments in between."""
        try:
            await updates.add(self)
            yield "retry: 2000\n\n"
            if text := await read(set()):
                yield text
            while not self._closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_INTERVAL):
                        await self._changed.wait()
                self._changed.clear()
                pending, self._pending = self._pending, set()
                text = await read(pending) if pending else ""
                if text or not self._closed:
                    yield text or ":\n\n"
        finally:
            updates.remove(self)


class PageStream(Stream):
    """The stream of one page: names the topics that changed since the page was asked for."""

    def __init__(self, topics: set[str], age: float = 0.0) -> None:
        super().__init__(topics)
        self.age = age  # seconds since the page was asked for

    async def __aiter__(self) -> AsyncIterator[str]:
        async for text in self.wakeups(self._name_topics):
            yield text

    async def _name_topics(self, topics: set[str]) -> str:
        if topics:
            return f"event: change\ndata: {' '.join(sorted(topics))}\n\n"
        self.notify(await run_in_db_thread(read_recent_changes, self.age))
        return ""


def read_recent_changes(age: float) -> set[str]:
    """Return the topics that changed in the last seconds, while a page was on its way.

    More may be returned: a page that is current is fetched once in vain.
    """
    if age > MAX_AGE:
        return {EVERYTHING}
    start = timezone.now() - timedelta(seconds=age + COMMIT_SECONDS)
    newest = Event.objects.order_by("-pk").values_list("at", "session__session_id")
    sessions = [session for at, session in newest[:MAX_RECENT] if at > start]
    if len(sessions) == MAX_RECENT:
        return {EVERYTHING}
    changed = {f"session:{session}" for session in sessions}
    if sessions:
        changed.add("sessions")
    slugs = Server.objects.filter(Q(state_since__gt=start) | Q(last_synced_at__gt=start))
    servers = {f"server:{slug}" for slug in slugs.values_list("slug", flat=True)}
    if servers:
        changed |= servers | {"servers", "approvals"}
    entry = AuditEntry.objects.order_by("-pk").values_list("at", flat=True).first()
    if entry is not None and entry > start:
        changed |= {"catalog", "approvals"}
    if Call.objects.held().filter(accepted_at__gt=start).exists():
        changed.add("approvals")
    return changed


updates = LiveUpdates()


@require_safe
async def live(request: HttpRequest) -> HttpResponseBase:
    """Stream changes of the topics that a page shows."""
    user = await request.auser()
    if await sync_to_async(role_of)(user) < Role.VIEWER:
        return HttpResponse(status=403)
    if updates.count_pages() >= MAX_STREAMS:
        return HttpResponse(status=503, headers={"Retry-After": "30"})
    topics = set(request.GET.getlist("topic")[:MAX_TOPICS])
    stream = PageStream(topics, _read_age(request.GET.get("age", "")))
    return StreamingHttpResponse(stream, content_type="text/event-stream", headers=STREAM_HEADERS)


def _read_age(text: str) -> float:
    """Return the age of a page in seconds, which its script sends in milliseconds."""
    return int(text) / 1000 if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
