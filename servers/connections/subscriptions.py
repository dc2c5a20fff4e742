"""Tool list change subscriptions of the modern protocol, with renewal after a loss."""

import asyncio
import random
from collections.abc import Callable

import mcp_types as types
from django.conf import settings
from mcp.client import Client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError

from servers.connections.connection_state import ConnectionState
from servers.transports.request_trace import RequestTrace, trace_context

MAX_FAILURES = 3  # to open a subscription, before the connection is marked suspect
STABLE_AFTER = 60  # seconds after which the backoff of a lost subscription starts again


class Subscription:
    """The subscription of one connection."""

    def __init__(
        self, client: Client, state: ConnectionState, on_list_changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._state = state
        self._on_list_changed = on_list_changed

    async def run(self) -> None:
        """Keep a subscription open, renewing it after a loss; return if none is possible."""
        losses = failures = 0
        while True:
            trace, established = RequestTrace(), asyncio.Event()
            listen = self._listen(established, is_renewal=losses > 0)
            listening = asyncio.create_task(listen, context=trace_context(trace))
            try:
                done, _ = await asyncio.wait({listening}, timeout=STABLE_AFTER)
                losses = losses + 1 if done else 1
                await asyncio.wait({listening})
            finally:
                listening.cancel()
                await asyncio.wait({listening}, timeout=1)
            if listening.cancelled() or not _is_retryable(listening.exception(), trace):
                return
            failures = 0 if established.is_set() else failures + 1
            if failures >= MAX_FAILURES:
                if trace.error is not None:
                    self._state.mark_suspect(trace.error)
                return
            jitter = random.uniform(0.5, 1)  # noqa: S311 - spreads load, hides nothing
            await asyncio.sleep(jitter * 2 ** min(losses, 7) / 2)

    async def _listen(self, established: asyncio.Event, *, is_renewal: bool) -> None:
        async with asyncio.timeout(settings.HANDSHAKE_TIMEOUT) as acknowledgement:
            async with self._client.listen(tools_list_changed=True) as subscription:
                acknowledgement.reschedule(None)
                established.set()
                if is_renewal:  # a change may have been missed
                    self._on_list_changed()
                if not subscription.honored.tools_list_changed:
                    await self._state.closed.wait()
                async for _ in subscription:
                    self._on_list_changed()


def _is_retryable(error: BaseException | None, trace: RequestTrace) -> bool:
    """Tell a lost subscription from a server that does not support subscriptions."""
    if error is None:  # the server closed it properly
        return True
    if trace.error is not None:
        return not trace.error.parked
    if isinstance(error, MCPError):
        return error.code == types.CONNECTION_CLOSED
    return isinstance(error, SubscriptionLost | TimeoutError)
