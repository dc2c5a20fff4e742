"""What is said where a request gets no answer of its own: cut, failed, or with a wrong method.

Over the ASGI application as it is served. `/api/` says it in the one shape of errors, `/mcp` in
JSON-RPC with that shape in it, pages in words.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from toolcrib.api import api
from toolcrib.asgi import Router

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


class Told:
    """What came back over ASGI."""

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
        """Our own shape, from wherever it is at this address."""
        assert self.headers["content-type"].startswith("application/json"), self.body
        said = json.loads(self.body)
        if path.startswith("/mcp"):
            assert (said["jsonrpc"], said["id"], said["error"]["code"]) == ("2.0", None, -32000)
            assert said["error"]["message"]
            said = {"error": said["error"]["data"]}
        assert said.keys() == {"error"}
        assert said["error"].keys() - {"details"} == {"code", "message", "hint"}
        return dict(said["error"])


def scope(method: str, path: str, **headers: str) -> dict[str, Any]:
    given = {"host": "localhost"} | {name.replace("_", "-"): v for name, v in headers.items()}
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
    }


def receiving() -> Any:
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    return receive


def served() -> Router:
    router = Router()
    router.started = True
    return router


async def asked(router: Router, method: str, path: str, **headers: str) -> Told:
    told = Told()
    await router(scope(method, path, **headers), receiving(), told.send)
    return told


# --- A method that an address does not take -------------------------------------------------------


def test_every_address_of_the_api_refuses_a_wrong_method_in_the_one_shape(db):
    paths = api.get_openapi_schema()["paths"]
    assert len(paths) > 40

    async def scenario():
        router = served()
        for path, operations in paths.items():
            wrong = next(name for name in METHODS if name.lower() not in operations)
            told = await asked(router, wrong, re.sub(r"\{\w+\}", "1", path))
            assert told.status == 405, (wrong, path)
            assert told.error(path)["code"] == "method_not_allowed"
            allowed = {name.strip().lower() for name in told.headers["allow"].split(",")}
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
def test_the_mcp_endpoint_refuses_a_wrong_method_in_json_rpc(method, version, accept, allow, path):
    given = {"accept": accept} | ({"mcp_protocol_version": version} if version else {})
    told = asyncio.run(asked(served(), method, path, **given))
    assert (told.status, told.headers["allow"]) == (405, allow)
    assert told.error(path)["code"] == "method_not_allowed"


def test_a_host_that_is_not_ours_is_refused_in_the_shape_of_the_address():
    for path, status in (("/api/v1/tools", 400), ("/mcp", 421)):
        told = asyncio.run(asked(served(), "POST", path, host="evil.example"))
        assert told.status == status
        assert told.error(path)["hint"]


# --- A request that is cut, or that fails ---------------------------------------------------------

PATHS = ["/api/v1/tools", "/api/v1/sessions/ses_1/search", "/api/v1/sessions/ses_1/call", "/mcp"]


class Handler:
    """Stands where Django and the SDK do: says that it began, and waits."""

    def __init__(self, first: dict[str, Any] | None = None) -> None:
        self.first = first
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.late: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer() -> None:
            if self.first:
                await send(self.first)
            self.began.set()
            await self.go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        # As Django does it, whose task for the view outlives the request.
        self.late = asyncio.create_task(answer())
        await asyncio.wait({self.late})
        self.late.result()


async def under(router: Router, path: str, handler: Handler) -> tuple[Told, "asyncio.Task[None]"]:
    router.api = router.pages = router.mcp = handler  # type: ignore[assignment]
    told = Told()
    task = asyncio.create_task(router(scope("POST", path), receiving(), told.send))
    await handler.began.wait()
    return told, task


@pytest.mark.parametrize("path", [*PATHS, "/mcp/ses_1", "/servers"])
def test_a_request_that_is_cut_at_the_end_is_told_that_toolcrib_stops(path):
    async def scenario():
        handler = Handler()
        told, task = await under(served(), path, handler)
        task.cancel()
        await task  # ends without a word, so that uvicorn adds none
        count = len(told.messages)
        handler.go.set()
        await handler.late
        assert len(told.messages) == count, "a handler that goes on is not heard any more"
        return told

    told = asyncio.run(scenario())
    assert (told.status, told.headers["retry-after"]) == (503, "2")
    assert told.headers["connection"] == "close"
    if path == "/servers":
        assert told.body == b"Toolcrib stopped before it could answer. Try again in a moment.\n"
    else:
        assert told.error(path)["code"] == "stopping"


def test_an_answer_that_was_begun_is_broken_off_and_not_written_over():
    first = {"type": "http.response.start", "status": 200, "headers": []}

    async def scenario():
        told, task = await under(served(), "/api/v1/tools", Handler(first))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return told

    assert asyncio.run(scenario()).messages == [first]


@pytest.mark.parametrize("path", PATHS)
def test_a_fault_of_ours_has_the_shape_and_a_number_in_the_log(path, caplog):
    class Broken(Handler):
        async def __call__(self, *args: Any) -> None:
            raise LookupError("a secret")

    async def scenario():
        router = served()
        router.api = router.mcp = Broken()
        return await asked(router, "POST", path)

    told = asyncio.run(scenario())
    assert told.status == 500
    error = told.error(path)
    assert error["code"] == "internal"
    assert error["hint"].removeprefix("The log has it as ").rstrip(".") in caplog.text
    assert b"a secret" not in told.body
