"""Start and stop the servers of this package."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.secret import Secret
from servers.spec import ServerSpec
from tests.support.waiting import scaled

ROOT = Path(__file__).resolve().parents[3]
ENDPOINTS = dict.fromkeys(
    (
        *(
            "clinic",
            "conformance",
            "counting",
            "echoing",
            "healthy",
            "many",
            "noisy",
            "rich",
            "rug_pull",
        ),
        *("versions", "workshop", "zoo"),
    ),
    "/mcp",
)


def stdio_argv(module: str, *args: str) -> list[str]:
    """Return the command of a server, to be run in ROOT."""
    return [sys.executable, "-m", f"tests.support.upstreams.{module}", *args]


@contextmanager
def running_http(module: str, *args: str) -> Iterator[str]:
    """Run a server and yield the URL of its endpoint; for `raw_http`, the base URL."""
    if module in ENDPOINTS and "--http" not in args and "--sse" not in args:
        args = ("--http", "0", *args)
    process = subprocess.Popen(
        stdio_argv(module, *args), cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("listening on "), f"{module} did not start: {line!r}"
        path = "/sse" if "--sse" in args else ENDPOINTS.get(module, "")
        scheme = "https" if "--tls" in args else "http"
        yield f"{scheme}://{line.split()[-1]}{path}"
    finally:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def stdio_spec(module: str, *args: str, env: Mapping[str, str] | None = None) -> ServerSpec:
    """Return the spec of a server over stdio."""
    return ServerSpec(
        server_id=1,
        slug=module.replace("_", "-"),
        generation=1,
        transport="stdio",
        argv=tuple(Secret(text) for text in stdio_argv(module, *args)),
        cwd=str(ROOT),
        env={name: Secret(value) for name, value in (env or {}).items()},
    )


def http_spec(
    url: str, *, transport: str = "http", headers: Mapping[str, str] | None = None
) -> ServerSpec:
    """Return the spec of a server at a URL."""
    return ServerSpec(
        server_id=1,
        slug="upstream",
        generation=1,
        transport=transport,
        url=Secret(url),
        headers={name: Secret(value) for name, value in (headers or {}).items()},
    )


def received_by(url: str) -> dict[str, Any]:
    """Return what a `raw_http` server received: connections, and requests with headers."""
    with urllib.request.urlopen(f"{url}/_seen", timeout=scaled(10)) as response:  # noqa: S310 - our own
        received: dict[str, Any] = json.load(response)
    return received
