"""Supervisor for several web processes on one port: start, restart after a crash, stop.

Each is a `serve --web-only` process that inherits the listening socket. They share only the port,
PostgreSQL and Redis, so any of them can serve any session.
"""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from django.conf import settings

logger = logging.getLogger(__name__)

KILL_DELAY = 5.0  # seconds after the drain before a process that has not ended is killed
HEALTHY_AFTER = 30.0  # seconds of uptime
MAX_RESTART_DELAY = 30.0
POLL_INTERVAL = 0.2


class Worker:
    """One web process and how often it crashed soon after its start."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._early_exits = 0
        self.start()

    def start(self) -> None:
        descriptor = self._listener.fileno()
        self.ready = threading.Event()
        self.started_at = time.monotonic()
        self.restart_at: float | None = None
        self.process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, sys.argv[0], "serve", "--web-only", "--fd", str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(
            target=self._read_output, args=(self.process, self.ready), daemon=True
        ).start()

    def _read_output(self, process: "subprocess.Popen[str]", ready: threading.Event) -> None:
        assert process.stdout is not None  # noqa: S101 - a pipe
        for _ in process.stdout:  # a line announces that it is ready
            ready.set()

    def restart_if_ended(self) -> None:
        """Restart the process after a crash, with exponential backoff for early crashes."""
        code = self.process.poll()
        if code is None:
            return
        now = time.monotonic()
        if self.restart_at is None:
            is_healthy = now - self.started_at > HEALTHY_AFTER
            self._early_exits = 0 if is_healthy else self._early_exits + 1
            delay = min(MAX_RESTART_DELAY, 2.0**self._early_exits - 1)
            logger.error("Web process exited with status %s; restarting in %g s", code, delay)
            self.restart_at = now + delay
        if now >= self.restart_at:
            self.start()


def serve(count: int, listener: socket.socket, announce: Callable[[], None]) -> int:
    """Run `count` web processes until a stop signal; return the exit status."""
    listener.set_inheritable(True)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    workers = [Worker(listener) for _ in range(count)]
    announced = False
    try:
        while not stopping.wait(POLL_INTERVAL):
            if not announced and any(worker.process.poll() for worker in workers):
                return 1  # it failed to start and wrote the reason to standard error
            for worker in workers:
                worker.restart_if_ended()
            if not announced and all(worker.ready.is_set() for worker in workers):
                announced = True
                announce()
    finally:
        _stop([worker.process for worker in workers])
    return 0


def _stop(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + settings.DRAIN + KILL_DELAY
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
