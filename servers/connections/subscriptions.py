"""Hear of changed tools in the newer era, where that takes a subscription which may be lost."""

import asyncio
import random
from collections.abc import Callable

import mcp_types as types
from django.conf import settings
from mcp.client import Client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError

from servers.connections.connection_state import ConnectionState
from servers.transports.request_trace import RequestTrace, observed_by

LISTEN_TRIES = 3  # to open a subscription, before the connection counts as lost
LISTEN_STEADY = 60  # seconds after which a lost subscription counts as the first loss


class Subscription:
    """The subscription of one connection."""

    def __init__(
        self, client: Client, link: ConnectionState, on_list_changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._link = link
        self._on_list_changed = on_list_changed

    async def keep(self) -> None:
        """Keep a subscription, renewing it when it is lost; return if there is no having one."""
        losses = failures = 0
        while True:
            seen, stood = RequestTrace(), asyncio.Event()
            hear = self._hear(stood, missed=losses > 0)
            hearing = asyncio.create_task(hear, context=observed_by(seen))
            try:
                done, _ = await asyncio.wait({hearing}, timeout=LISTEN_STEADY)
                losses = losses + 1 if done else 1
                await asyncio.wait({hearing})
            finally:
                hearing.cancel()
                await asyncio.wait({hearing}, timeout=1)
            if hearing.cancelled() or not _may_listen_again(hearing.exception(), seen):
                return
            failures = 0 if stood.is_set() else failures + 1
            if failures >= LISTEN_TRIES:
                if seen.fault is not None:
                    self._link.doubt(seen.fault)
                return
            jitter = random.uniform(0.5, 1)  # noqa: S311 - spreads load, hides nothing
            await asyncio.sleep(jitter * 2 ** min(losses, 7) / 2)

    async def _hear(self, stood: asyncio.Event, *, missed: bool) -> None:
        async with asyncio.timeout(settings.HANDSHAKE_TIMEOUT) as acknowledged:
            async with self._client.listen(tools_list_changed=True) as subscription:
                acknowledged.reschedule(None)
                stood.set()
                if missed:
                    self._on_list_changed()
                if not subscription.honored.tools_list_changed:
                    await self._link.closed.wait()
                async for _ in subscription:
                    self._on_list_changed()


def _may_listen_again(problem: BaseException | None, seen: RequestTrace) -> bool:
    """Tell a lost subscription, which is worth another try, from a server that has none."""
    if problem is None:  # the server closed it, in all form
        return True
    if seen.fault is not None:
        return not seen.fault.parked
    if isinstance(problem, MCPError):
        return problem.code == types.CONNECTION_CLOSED
    return isinstance(problem, SubscriptionLost | TimeoutError)
