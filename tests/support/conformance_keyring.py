"""Forwarding proxy that adds an API key to every request, for clients that cannot send one."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


@contextmanager
def keyring(url: str, key: str) -> Iterator[str]:
    """Forward a free local port to `url` with a key; yield the address of the proxy."""
    target = urlsplit(url)

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                data = self.request.recv(65536)
                if not data:
                    return
                head += data
            head, _, rest = head.partition(b"\r\n\r\n")
            lines = [
                line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
            ]
            # One request per connection, so that every request head passes here.
            lines += [b"Authorization: Bearer " + key.encode(), b"Connection: close"]
            with socket.create_connection((target.hostname or "", target.port or 80)) as upstream:
                upstream.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + rest)
                back = threading.Thread(
                    target=copy_bytes, args=(upstream, self.request), daemon=True
                )
                back.start()
                copy_bytes(self.request, upstream)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def copy_bytes(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes in one direction until either side closes."""
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
