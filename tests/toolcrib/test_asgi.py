"""Error responses of the ASGI application: cancelled, failed, and with a wrong method.

`/api/` returns the API error format, `/mcp` a JSON-RPC error with that format as its data, pages
plain text.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from sessions_app.agents import rate_limits
from toolcrib.api import api
from toolcrib.asgi import Router

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


class AsgiResponse:
    """Collects the ASGI messages of a response."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.messages[0]["headers"]
        return {name.decode().lower(): text.decode() for name, text in pairs}

    @property
    def body(self) -> bytes:
        return b"".join(part.get("body", b"") for part in self.messages[1:])

    def error(self, path: str) -> dict[str, Any]:
        """Return the error in the API format, whatever wraps it at this path."""
        assert self.headers["content-type"].startswith("application/json"), self.body
        body = json.loads(self.body)
        if path.startswith("/mcp"):
            assert (body["jsonrpc"], body["id"], body["error"]["code"]) == ("2.0", None, -32000)
            assert body["error"]["message"]
            body = {"error": body["error"]["data"]}
        assert body.keys() == {"error"}
        assert body["error"].keys() - {"details"} == {"code", "message", "hint"}
        return dict(body["error"])


def scope(method: str, path: str, **headers: str) -> dict[str, Any]:
    all_headers = {"host": "localhost"} | {name.replace("_", "-"): v for name, v in headers.items()}
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
    }


def empty_body() -> Any:
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    return receive


def started_router() -> Router:
    router = Router()
    router.started = True
    return router


async def request(router: Router, method: str, path: str, **headers: str) -> AsgiResponse:
    response = AsgiResponse()
    await router(scope(method, path, **headers), empty_body(), response.send)
    return response


# --- Methods that are not allowed -----------------------------------------------------------------


def test_every_api_path_rejects_a_wrong_method_in_the_error_format(db):
    paths = api.get_openapi_schema()["paths"]
    assert len(paths) > 40

    async def scenario():
        router = started_router()
        for path, operations in paths.items():
            wrong = next(name for name in METHODS if name.lower() not in operations)
            response = await request(router, wrong, re.sub(r"\{\w+\}", "1", path))
            assert response.status == 405, (wrong, path)
            assert response.error(path)["code"] == "method_not_allowed"
            allowed = {name.strip().lower() for name in response.headers["allow"].split(",")}
            assert allowed <= operations.keys(), path

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/mcp", "/mcp/ses_1"])
@pytest.mark.parametrize(
    ("method", "version", "accept", "allow"),
    [
        ("PUT", None, "*/*", "GET, POST, DELETE"),
        ("HEAD", None, "text/event-stream", "GET, POST, DELETE"),
        ("GET", None, "application/json", "POST"),
        ("GET", "2025-11-25", "*/*", "POST"),
        ("GET", "2026-07-28", "text/event-stream", "POST"),
        ("DELETE", "2026-07-28", "*/*", "POST"),
        ("GET", "2031-01-01", "text/event-stream", "POST"),
    ],
)
def test_the_mcp_endpoint_rejects_a_wrong_method_in_json_rpc(method, version, accept, allow, path):
    headers = {"accept": accept} | ({"mcp_protocol_version": version} if version else {})
    response = asyncio.run(request(started_router(), method, path, **headers))
    assert (response.status, response.headers["allow"]) == (405, allow)
    assert response.error(path)["code"] == "method_not_allowed"


def test_an_unknown_host_is_rejected_in_the_format_of_the_path():
    for path in ("/api/v1/tools", "/api/v1/sessions/ses_1/call", "/mcp"):
        for host in ("evil.example", "localhost.evil.example", ""):
            response = asyncio.run(request(started_router(), "POST", path, host=host))
            assert (response.status, response.error(path)["code"]) == (421, "wrong_host")


# --- Requests that are cancelled or fail ----------------------------------------------------------

PATHS = ["/api/v1/tools", "/api/v1/sessions/ses_1/search", "/api/v1/sessions/ses_1/call", "/mcp"]


class Handler:
    """Replaces Django and the SDK: signals that it started, then waits."""

    def __init__(self, first: dict[str, Any] | None = None) -> None:
        self.first = first
        self.started, self.proceed = asyncio.Event(), asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def respond() -> None:
            if self.first:
                await send(self.first)
            self.started.set()
            await self.proceed.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        # Like Django, whose task for the view outlives the request.
        self.task = asyncio.create_task(respond())
        await asyncio.wait({self.task})
        self.task.result()


def replace_handlers(router: Router, handler: Handler) -> None:
    async def serve(session_id: str, operation: Any, *args: Any) -> None:
        await handler(*args)

    router.api = router.pages = router.mcp = handler  # type: ignore[assignment]
    router.session_endpoint = serve  # type: ignore[assignment]


async def start_request(
    router: Router, path: str, handler: Handler
) -> tuple[AsgiResponse, "asyncio.Task[None]"]:
    replace_handlers(router, handler)
    response = AsgiResponse()
    task = asyncio.create_task(router(scope("POST", path), empty_body(), response.send))
    await handler.started.wait()
    return response, task


@pytest.mark.parametrize("path", [*PATHS, "/mcp/ses_1", "/servers"])
def test_a_request_cancelled_at_shutdown_gets_a_503(path):
    async def scenario():
        handler = Handler()
        response, task = await start_request(started_router(), path, handler)
        task.cancel()
        await task  # returns normally, so that uvicorn sends nothing itself
        count = len(response.messages)
        handler.proceed.set()
        await handler.task
        assert len(response.messages) == count, "messages of a continuing handler must be dropped"
        return response

    response = asyncio.run(scenario())
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert response.headers["connection"] == "close"
    if path == "/servers":
        assert response.body == b"Toolcrib is shutting down. Retry in a moment.\n"
    else:
        assert response.error(path)["code"] == "stopping"


def test_a_started_response_is_aborted_and_not_overwritten():
    first = {"type": "http.response.start", "status": 200, "headers": []}

    async def scenario():
        response, task = await start_request(started_router(), "/api/v1/tools", Handler(first))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return response

    assert asyncio.run(scenario()).messages == [first]


@pytest.mark.parametrize("path", PATHS)
def test_an_internal_error_has_the_error_format_and_an_id_in_the_log(path, caplog):
    class Broken(Handler):
        async def __call__(self, *args: Any) -> None:
            raise LookupError("a secret")

    async def scenario():
        router = started_router()
        replace_handlers(router, Broken())
        return await request(router, "POST", path)

    response = asyncio.run(scenario())
    assert response.status == 500
    error = response.error(path)
    assert error["code"] == "internal"
    assert error["hint"].removeprefix("See request ").removesuffix(" in the log.") in caplog.text
    assert b"a secret" not in response.body


def test_a_rejection_by_a_rate_limit_may_be_delayed_and_other_responses_not(monkeypatch):
    delays = []

    async def record_delay():
        delays.append(1)

    monkeypatch.setattr(rate_limits, "delay_rejection", record_delay)

    def responding(status):
        async def handler(scope, receive, send):
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        return handler

    async def scenario():
        router = started_router()
        for status in (429, 200, 503):
            monkeypatch.setattr(router, "api", responding(status))
            assert (await request(router, "GET", "/api/v1/sessions")).status == status

    asyncio.run(scenario())
    assert delays == [1]
