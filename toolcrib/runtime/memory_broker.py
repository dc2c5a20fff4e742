"""Broker of embedded mode: kombu's in-memory transport, which wakes its consumer by notification.

kombu's own transport polls. At twenty times a second, which keeps syncs prompt, that is most of the
CPU time of an installation that nobody uses.
"""

import threading
from typing import Any

from kombu.transport import memory

_arrived = threading.Condition()


class Channel(memory.Channel):
    def _put(self, *args: Any, **options: Any) -> None:
        with _arrived:
            super()._put(*args, **options)  # type: ignore[no-untyped-call]
            _arrived.notify_all()


class Transport(memory.Transport):
    Channel = Channel

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:  # type: ignore[override]
        """Deliver the next message; raise TimeoutError if none arrives in time."""
        with _arrived:
            try:
                super().drain_events(connection, timeout=0)  # type: ignore[no-untyped-call]
                return
            except TimeoutError:
                if not _arrived.wait(timeout):
                    raise
        super().drain_events(connection, timeout=0)  # type: ignore[no-untyped-call]
