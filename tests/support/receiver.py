"""An HTTP server of the tests that keeps what is posted to it, and answers as it is told."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.waiting import scaled


@dataclass(frozen=True)
class Posted:
    path: str
    headers: dict[str, str]  # by lower-case name
    body: bytes


@dataclass
class Receiver:
    url: str = ""
    posted: list[Posted] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the next answers; then 200
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, check: Callable[[list[Posted]], object], seconds: float = 30) -> object:
        """Wait until a function of everything that was posted returns a true value; return it."""
        with self.changed:
            self.changed.wait_for(lambda: check(self.posted), scaled(seconds))
            found = check(self.posted)
        assert found, [(each.path, each.body[:500]) for each in self.posted]
        return found


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with receiver.changed:
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                receiver.posted.append(Posted(self.path, headers, body))
                receiver.changed.notify_all()
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
