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
from sessions_app.agents.slots import MAX_CONCURRENT
from tests.support.waiting import wait_for
from toolcrib.api import api
from toolcrib.asgi import Router
from toolcrib.http.http_protocol import ClientState

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
            if path == "/api/v1/calls/decisions":  # for GET it is the id of a call
                continue
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


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        "/.well-known/oauth-protected-resource",
        "/.well-known/oauth-protected-resource/mcp",
        "/.well-known/oauth-authorization-server",
        "/.well-known/openid-configuration",
        "/mcp/.well-known/openid-configuration",
        "/register",
    ],
)
def test_clients_that_look_for_oauth_get_json(method, path):
    response = asyncio.run(request(started_router(), method, path))
    assert (response.status, response.headers["content-type"]) == (404, "application/json")
    error = json.loads(response.body)["error"]
    assert error["code"] == "no_oauth"
    assert "Authorization: Bearer" in error["hint"]


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


# --- Clients that have shown a valid key -------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key", "status", "known"),
    [
        ("/api/v1/tools", True, 200, True),
        ("/api/v1/sessions/ses_1/call", True, 200, True),
        ("/mcp", True, 202, True),
        ("/mcp", True, 401, False),
        ("/api/v1/tools", True, 403, False),
        ("/api/v1/tools", False, 200, False),
        ("/api/v1/openapi.json", True, 200, False),
        ("/api/v1/docs", True, 200, False),
        ("/livez", True, 200, False),
    ],
)
def test_a_client_is_known_after_a_successful_request_with_a_key(path, key, status, known):
    class Answering(Handler):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def scenario():
        router = started_router()
        replace_handlers(router, Answering())
        state = ClientState()
        headers = {"authorization": "Bearer tcb_x"} if key else {}
        asked = scope("POST", path, **headers) | {"state": {"client": state}}
        await router(asked, empty_body(), AsgiResponse().send)
        return state.is_known

    assert asyncio.run(scenario()) is known


# --- Hosts and large bodies ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/sign-in", "/livez", "/static/css/base.css"])
def test_a_page_for_an_unknown_host_is_rejected_with_one_log_line(path, caplog):
    response = asyncio.run(
        request(started_router(), "GET", path, host="evil.example\n" + "x" * 500)
    )
    assert response.status == 421
    assert response.body.startswith(b"Unknown host. Use Toolcrib's own address")
    (record,) = caplog.records
    assert record.exc_info is None
    assert len(record.getMessage()) < 250


# Django does not close the temporary file of a body that it was not given completely.
unclosed_body = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@unclosed_body
@pytest.mark.parametrize("path", ["/sign-in", "/api/v1/servers", "/api/v1/sessions/ses_1/call"])
def test_a_body_that_is_too_large_is_read_before_it_is_rejected(path, db):
    chunks = [b"x" * 100_000] * 50

    async def scenario():
        left = list(chunks)

        async def receive():
            body = left.pop() if left else b""
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        response = AsgiResponse()
        await started_router()(scope("POST", path), receive, response.send)
        return response, left

    response, left = asyncio.run(scenario())
    assert (response.status, left) == (413, [])


@unclosed_body
def test_a_body_without_end_is_not_read_for_ever(db):
    received = []

    async def receive():
        received.append(1)
        return {"type": "http.request", "body": b"x" * 1_000_000, "more_body": True}

    async def scenario():
        response = AsgiResponse()
        await started_router()(scope("POST", "/api/v1/servers"), receive, response.send)
        return response.status

    assert asyncio.run(scenario()) == 413
    assert len(received) < 40


ORIGIN = "https://inspector.example.org"


@pytest.mark.parametrize("path", ["/mcp", "/api/v1/sessions"])
def test_pages_of_named_origins_may_use_a_key_and_no_cookie(path, settings, db):
    def ask(method, path, **headers):
        return asyncio.run(request(started_router(), method, path, **headers))

    asks = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization, mcp-param-city",
    }
    assert "access-control-allow-origin" not in ask("OPTIONS", path, origin=ORIGIN, **asks).headers
    settings.BROWSER_ORIGINS = [ORIGIN]

    preflight = ask("OPTIONS", path, origin=ORIGIN, **asks)
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert preflight.headers["access-control-allow-methods"] == "POST"
    assert preflight.headers["access-control-allow-headers"] == "authorization, mcp-param-city"

    answer = ask("POST", path, origin=ORIGIN)
    assert answer.status == 401  # its error can be read, as every response
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "mcp-session-id" in answer.headers["access-control-expose-headers"]
    other = ask("POST", path, origin="https://other.example.org")
    for response in (preflight, answer, other, ask("OPTIONS", "/", origin=ORIGIN, **asks)):
        assert "access-control-allow-credentials" not in response.headers
    assert "access-control-allow-origin" not in other.headers


# --- Slots ----------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("slow", ["its response", "its body"])
def test_a_client_that_is_slow_with_its_body_or_response_holds_no_slot(slow):
    """Clients of all slots' keys are slow; others of the same keys are served meanwhile."""
    path, keys = "/api/v1/catalog", [f"Bearer tcb_{number}" for number in range(MAX_CONCURRENT)]

    async def scenario():
        router, never, stuck = started_router(), asyncio.Event(), []

        async def block(*_: Any) -> Any:
            stuck.append(1)
            await never.wait()
            return {"type": "http.disconnect"}

        def slow_request(key: str) -> Any:
            receive = block if slow == "its body" else empty_body()
            send = AsgiResponse().send if slow == "its body" else block
            return router(scope("GET", path, authorization=key), receive, send)

        tasks = [asyncio.create_task(slow_request(key)) for key in keys for _ in range(2)]
        await asyncio.to_thread(wait_for, lambda: len(stuck) == len(tasks))
        responses = [await request(router, "GET", path, authorization=key) for key in keys]
        never.set()
        await asyncio.gather(*tasks)
        return [response.status for response in responses]

    assert asyncio.run(scenario()) == [401] * len(keys)
