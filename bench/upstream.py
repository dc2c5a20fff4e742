"""CPU of Toolcrib alone per call with its own HTTP/1.1 client, and with httpcore2 in its place.

    python bench/upstream.py [--rounds 7] [--calls 400] [--at 1 8] [--size 100] [--json]

Two installations call one echo server (bench/echo.py) in interleaved rounds, over REST and over
MCP. In the second, `HttpConnectionPool` is replaced by a class with the same five functions over
httpcore2's pool, with the same network backend. docs/decisions quotes the result.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CLIENTS = ("http1", "httpcore2")


def serve() -> None:
    """Run `manage.py serve` with httpcore2 in place of http1.py."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    import django

    django.setup()
    from servers.connections import connection

    connection.HttpConnectionPool = httpcore_pool()
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage.py", "serve"])


def httpcore_pool() -> Any:
    """Return a class with the interface of HttpConnectionPool, over httpcore2."""
    import httpcore2
    import httpx2
    from django.conf import settings

    from servers.transports import http1
    from servers.transports.http import GuardedBackend
    from servers.transports.response_body import connection_error
    from servers.transports.ssrf import allowed_networks

    errors = (
        httpcore2.TimeoutException,
        httpcore2.NetworkError,
        httpcore2.ProtocolError,
        OSError,
    )
    tasks = set()

    class Response:
        def __init__(self, inner: Any) -> None:
            self.inner, self.complete = inner, False
            self.chunks = aiter(inner.stream)
            self.status = inner.status
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in inner.headers
            }

        content_type = http1.Response.content_type

    class HttpcorePool:
        def __init__(self, upstream: Any, url: Any) -> None:
            self.url = url
            self._url = httpcore2.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            )
            self._headers = [
                *{b"host": url.netloc, **http1.FIXED_HEADERS, **upstream.headers}.items()
            ]
            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=upstream.tls,
                max_connections=1000,
                keepalive_expiry=http1.MAX_IDLE,
                network_backend=GuardedBackend(upstream.resolver, allowed_networks()),
            )

        async def post(self, body: bytes, headers: Mapping[str, str], trace: Any) -> Response:
            async def mark_sent(event: str, _: object) -> None:
                if event.endswith("send_request_headers.started"):
                    trace.sent = True

            extensions: dict[str, Any] = {"timeout": {"connect": float(settings.CONNECT_TIMEOUT)}}
            if trace is not None:
                extensions["trace"] = mark_sent
            own = [
                (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
            ]
            request = httpcore2.Request(
                b"POST",
                self._url,
                headers=[*self._headers, *own, (b"content-length", b"%d" % len(body))],
                content=body,
                extensions=extensions,
            )
            try:
                return Response(await self._pool.handle_async_request(request))
            except errors as error:
                raise self._mapped(error) from None

        async def read_chunk(self, response: Response) -> bytes:
            try:
                async for chunk in response.chunks:
                    if chunk:
                        return bytes(chunk)
            except errors as error:
                raise self._mapped(error) from None
            response.complete = True
            await response.inner.aclose()
            return b""

        def release(self, response: Response) -> None:
            self.drop(response)

        def drop(self, response: Response) -> None:
            if not response.complete:
                self._start(response.inner.aclose())

        def close(self) -> None:
            self._start(self._pool.aclose())

        def _start(self, work: Any) -> None:
            task = asyncio.ensure_future(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        @staticmethod
        def _mapped(error: BaseException) -> Exception:
            mapped: Any = getattr(httpx2, type(error).__name__, None)
            return connection_error(mapped(str(error)) if mapped else error)

    return HttpcorePool


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond."""
    used = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            used += int((thread / "schedstat").read_text().split()[0])
        except OSError:  # the thread has ended
            continue
    return used / 1e9


async def measure(installations: Mapping[str, Any], options: argparse.Namespace) -> list[Any]:
    """Return a row per round, form of the call, concurrency and client."""
    import dispatch
    import load

    callers, rows = {}, []
    for client, crib in installations.items():
        rest = partial(load.rest_caller, crib.url, crib.key, crib.session, "http__echo")
        mcp = partial(load.sdk_caller, f"{crib.url}/mcp", "http__echo", crib.key)
        callers[client] = {
            "REST": load.PersistentCaller(rest),
            "MCP": load.PersistentCaller(mcp),
        }
    text = dispatch.make_text(options.size)
    try:
        for number in range(options.rounds):
            turn = number % len(CLIENTS)
            for form in ("REST", "MCP"):
                for at in options.at:
                    for client in CLIENTS[turn:] + CLIENTS[:turn]:
                        pid = installations[client].pid
                        call = await callers[client][form].call()
                        await load.time_calls(call, text, at, 0, least=max(5, 20 // at))
                        before = cpu_seconds(pid)
                        times, _ = await load.time_calls(
                            call, text, at, 0, least=options.calls // at
                        )
                        used = (cpu_seconds(pid) - before) / len(times) * 1e6
                        p50 = statistics.median(times) * 1000
                        rows.append([number, form, at, client, used, p50])
    finally:
        for forms in callers.values():
            for caller in forms.values():
                await caller.close()
    return rows


def run(options: argparse.Namespace) -> list[Any]:
    import dispatch

    from tests.support.installation import free_port

    class WithHttpcore(dispatch.Toolcrib):
        def _argv(self, *args: str) -> list[str]:
            if args[0] == "serve":
                return [sys.executable, __file__, "--serve"]
            return list(super()._argv(*args))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        port = free_port()
        dispatch.start_program(stack, [*dispatch.ECHO, "--http", str(port)], port)
        installations = {}
        for client, kind in zip(CLIENTS, (dispatch.Toolcrib, WithHttpcore), strict=True):
            installations[client] = stack.enter_context(kind(folder / client))
            installations[client].create_rows(f"http://127.0.0.1:{port}/mcp")
        return asyncio.run(measure(installations, options))


def print_report(rows: list[Any], options: argparse.Namespace) -> None:
    from dispatch_report import spread

    print(
        f"{options.rounds} interleaved rounds of {options.calls} calls of {options.size} bytes; "
        "median (min–max). CPU of the Toolcrib process; ratios are within a round."
    )
    print(f"{'call':>6}{'callers':>9}{'client':>11}{'CPU µs':>22}{'÷ http1':>20}{'p50 ms':>20}")
    for form in ("REST", "MCP"):
        for at in options.at:
            cells = {
                client: [row[4:] for row in rows if row[1:4] == [form, at, client]]
                for client in CLIENTS
            }
            for client, figures in cells.items():
                ratios = [
                    mine[0] / base[0] for mine, base in zip(figures, cells["http1"], strict=True)
                ]
                print(
                    f"{form:>6}{at:>9}{client:>11}{spread([each[0] for each in figures]):>22}"
                    f"{spread(ratios):>20}{spread([each[1] for each in figures]):>20}"
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=400, help="of each cell in each round")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8], metavar="CALLERS")
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    rows = run(options)
    if options.json:
        names = ("round", "call", "callers", "client", "cpu_us", "p50_ms")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
    else:
        print_report(rows, options)


if __name__ == "__main__":
    main()
