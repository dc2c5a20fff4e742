"""Several web processes on one port: start them, start anew those that die, stop them together.

Each is a `serve --web-only` of its own with the listening socket handed down, so nothing is shared
but the port, PostgreSQL and Redis: a session is at home in all of them.
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

SLACK = 5.0  # seconds after the drain, before a process that does not end is killed
HEALTHY_AFTER = 30.0
LONGEST_WAIT = 30.0
LOOK_EVERY = 0.2


class Worker:
    """One web process, and how often it died soon after its start."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._deaths = 0
        self.start()

    def start(self) -> None:
        descriptor = self._listener.fileno()
        self.ready = threading.Event()
        self.began = time.monotonic()
        self.again_at: float | None = None
        self.process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, sys.argv[0], "serve", "--web-only", "--fd", str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process, self.ready), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]", ready: threading.Event) -> None:
        assert process.stdout is not None  # noqa: S101 - a pipe
        for _ in process.stdout:  # its line says that it is ready
            ready.set()

    def look(self) -> None:
        """Start it anew where it died, at once the first time, then ever later."""
        code = self.process.poll()
        if code is None:
            return
        now = time.monotonic()
        if self.again_at is None:
            self._deaths = 0 if now - self.began > HEALTHY_AFTER else self._deaths + 1
            wait = min(LONGEST_WAIT, 2.0**self._deaths - 1)
            logger.error("A web process ended with %s; starting another in %g s", code, wait)
            self.again_at = now + wait
        if now >= self.again_at:
            self.start()


def serve(count: int, listener: socket.socket, announce: Callable[[], None]) -> int:
    """Run so many web processes until told to stop; return the exit status."""
    listener.set_inheritable(True)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    workers = [Worker(listener) for _ in range(count)]
    announced = False
    try:
        while not stopping.wait(LOOK_EVERY):
            if not announced and any(worker.process.poll() for worker in workers):
                return 1  # it could not even start; its own words are on standard error
            for worker in workers:
                worker.look()
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
    ends = time.monotonic() + settings.DRAIN + SLACK
    for process in processes:
        try:
            process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
