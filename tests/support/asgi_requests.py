"""Requests to ASGI applications in this process, as uvicorn would send them."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from asgiref.sync import async_to_sync
from django.core.handlers.wsgi import WSGIHandler
from django.test import Client
from django.utils.datastructures import CaseInsensitiveMapping

from sessions_app.agents import rate_limits
from sessions_app.sessions import endpoint as session_endpoint
from toolcrib.api import api
from toolcrib.lib.protocols.asgi import Receive, Scope, Send

OF_ANY_REQUEST = {405, 408, 421, 500}  # a wrong method or host, a slow body, a bug


class AsgiResponse:
    """Status, headers by lower-case name, and body. Status 0: no response was sent."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        start: dict[str, Any] = messages[0] if messages else {"status": 0, "headers": []}
        self.status: int = start["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


def make_scope(method: str, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "type": "http",
        "method": method,
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
    }


def bearer_headers(key: str, body: bytes, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of a JSON request with a key."""
    headers = {
        "host": "localhost",
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    return headers | {name.replace("_", "-").lower(): text for name, text in (more or {}).items()}


async def exchange(
    app: Any, scope: dict[str, Any], body: bytes, left: asyncio.Event | None = None
) -> AsgiResponse:
    """Send one request; the client disconnects when `left` is set."""
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    messages: list[dict[str, Any]] = []

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)
    return AsgiResponse(messages)


@dataclass(frozen=True)
class ApiResponse:
    """A response of the REST API, with the names of Django's test client."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


def send_api(
    method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> ApiResponse:
    """Send a request to the REST API in the test's own thread, routed as in toolcrib.asgi.

    Fails if the OpenAPI document does not list the status of the response.
    """
    response = _send_api(method, url, body, headers)
    statuses = documented_statuses(method, urlsplit(url).path)
    assert response.status_code in statuses or not statuses, (method, url, response)
    return response


@lru_cache
def _operations() -> list[tuple[re.Pattern[str], dict[str, set[int]]]]:
    """Return a pattern for each path, and the statuses by method; fixed paths come first."""
    found = [
        (
            re.compile(re.sub(r"\{\w+\}", "[^/]+", path)),
            {name.upper(): {*operation["responses"]} for name, operation in methods.items()},
        )
        for path, methods in api.get_openapi_schema()["paths"].items()
    ]
    return sorted(found, key=lambda each: each[0].pattern.count("[^/]+"))


def documented_statuses(method: str, path: str) -> set[int]:
    """Return the statuses of an operation, and those of any request; empty if there is none."""
    for pattern, methods in _operations():
        if pattern.fullmatch(path.rstrip("/")):
            own = methods.get("GET" if method == "HEAD" else method)
            return own | OF_ANY_REQUEST if own else set()
    return set()


def _send_api(method: str, url: str, body: bytes, headers: Mapping[str, str] | None) -> ApiResponse:
    sent = {"content-type": "application/json", "host": "localhost", **(headers or {})}
    scope = make_scope(method, url, {name.lower(): text for name, text in sent.items()})
    found = session_endpoint.find_operation(scope)
    if found is None:
        del sent["host"], sent["content-type"]
        client = Client(enforce_csrf_checks=True)
        response = client.generic(method, url, body, content_type="application/json", headers=sent)
        return ApiResponse(response.status_code, response.headers, response.content)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await session_endpoint.serve(*found, scope, receive, rate_limits.add_headers(send))

    served = async_to_sync(exchange)(app, scope, body)
    titled = {name.title(): text for name, text in served.headers.items()}
    return ApiResponse(served.status, CaseInsensitiveMapping(titled), served.body)


def wsgi_application(environ: dict[str, Any], start_response: Any) -> Any:
    """The REST API as a WSGI application on the test's database connection."""
    path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
    headers = {
        name[5:].replace("_", "-").lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    url = quote(path, encoding="latin-1") + (f"?{query}" if query else "")
    scope = make_scope(environ["REQUEST_METHOD"], url, headers)
    if session_endpoint.find_operation(scope) is None:
        return WSGIHandler()(environ, start_response)
    length = int(environ.get("CONTENT_LENGTH") or 0)
    response = send_api(environ["REQUEST_METHOD"], url, environ["wsgi.input"].read(length), headers)
    start_response(f"{response.status_code} -", list(response.headers.items()))
    return [response.content]
