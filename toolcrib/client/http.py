"""HTTP clients for the agent API, synchronous and asyncio, with retries.

Idempotent requests are retried after a connection error. Calls always are: their Idempotency-Key
makes Toolcrib run them once. Temporary errors (429, 503, a call still in progress) are retried
after the delay in Retry-After.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self, TypeVar, Unpack

import httpx2

from toolcrib.client import requests
from toolcrib.client.requests import (
    ApiRequest,
    CallResult,
    Catalog,
    Form,
    Found,
    Json,
    Loaded,
    OpenOptions,
    SearchOptions,
    Session,
    State,
)
from toolcrib.lib.errors import ToolcribError

T = TypeVar("T")
MAX_RETRY_DELAY = 30.0  # seconds
TEMPORARY_STATUSES = (429, 503)


class ApiError(ToolcribError):
    """An error response: `status`, `code`, `message`, `hint` and `details` are Toolcrib's."""


class Unreachable(ToolcribError):
    """Toolcrib could not be reached, or the response was lost."""

    code = "unreachable"
    status = 503


class _Retries:
    """Attempts of one request: the delay before the next, or the final error."""

    def __init__(self, request: ApiRequest[Any], attempts: int) -> None:
        self.request = request
        self.remaining = attempts - 1
        self.delay = 0.0  # the first retry is immediate: a kept-alive connection may be stale

    def after_transport_error(self, error: httpx2.TransportError) -> float:
        never_sent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        if self.remaining <= 0 or not (self.request.repeatable or never_sent):
            reason = str(error) or type(error).__name__
            raise Unreachable(
                f"Toolcrib did not respond: {reason}.",
                hint="Check the URL and that Toolcrib is running.",
            ) from error
        self.remaining -= 1
        delay, self.delay = self.delay, self.delay * 2 or 0.2
        return delay

    def after_error_response(self, response: httpx2.Response) -> float:
        error = _error(response)
        in_progress = error.code == "idempotency_in_progress"
        # Waiting for a call in progress does not use up attempts.
        if not in_progress:
            self.remaining -= 1
        is_temporary = in_progress or response.status_code in TEMPORARY_STATUSES
        if not is_temporary or self.remaining < 0:
            raise error
        return _retry_delay(response.headers.get("Retry-After", "1"))


def _retry_delay(text: str) -> float:
    return min(float(text), MAX_RETRY_DELAY) if text.isdecimal() else 1.0


def _error(response: httpx2.Response) -> ApiError:
    try:
        body = response.json()["error"]
        return ApiError(
            body["message"],
            hint=body["hint"],
            code=body["code"],
            status=response.status_code,
            details=body.get("details"),
        )
    except (ValueError, KeyError, TypeError):
        return ApiError(
            f"{response.url.host} returned status {response.status_code} without a Toolcrib error.",
            hint="Check the URL: it may belong to another program.",
            code="not_toolcrib",
            status=response.status_code,
        )


def _read(request: ApiRequest[T], response: httpx2.Response) -> T:
    if request.path.endswith("/catalog"):
        if response.status_code == 304:
            return request.read(None)
        is_text = response.headers.get("Content-Type", "").startswith("text/plain")
        body = {"text": response.text} if is_text else response.json()
        return request.read(Catalog(body, response.headers["ETag"]))
    return request.read(response.json())


class _BaseClient:
    def __init__(self, url: str, key: str, attempts: int) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.attempts = attempts
        self.headers = {"Authorization": f"Bearer {key}"}

    def request(self, ask: ApiRequest[Any]) -> dict[str, Any]:
        """Return the arguments for httpx."""
        body = {} if ask.body is None else {"json": dict(ask.body)}
        # Longer than the tool's own timeout, so that Toolcrib can report that timeout.
        timeout = {} if ask.seconds is None else {"timeout": ask.seconds + 30}
        return {
            "method": ask.method,
            "url": f"{self.url}/api/v1{ask.path}",
            "params": dict(ask.query),
            "headers": {**self.headers, **ask.headers},
            **body,
            **timeout,
        }


class Toolcrib(_BaseClient):
    """Client for the agent API. A context manager; `http` replaces the default httpx client."""

    def __init__(
        self, url: str, key: str, *, attempts: int = 4, http: httpx2.Client | None = None
    ) -> None:
        super().__init__(url, key, attempts)
        self._http = http or httpx2.Client(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, ask: ApiRequest[T]) -> T:
        retries = _Retries(ask, self.attempts)
        while True:
            try:
                response = self._http.request(**self.request(ask))
            except httpx2.TransportError as error:
                delay = retries.after_transport_error(error)
            else:
                if response.is_success or response.status_code == 304:
                    return _read(ask, response)
                delay = retries.after_error_response(response)
            time.sleep(delay)

    def open(self, **wish: Unpack[OpenOptions]) -> Session:
        return self.send(requests.open_session(wish))

    def session(self, session_id: str) -> Session:
        return self.send(requests.session(session_id))

    def close(self, session_id: str) -> Session:
        return self.send(requests.close(session_id))

    def fork(self, session_id: str) -> Session:
        return self.send(requests.fork(session_id))

    def catalog(self, session_id: str, etag: str = "", **form: Unpack[Form]) -> Catalog | None:
        return self.send(requests.catalog(session_id, form, etag))

    def tools(self, session_id: str, **form: Unpack[Form]) -> list[Json]:
        return self.send(requests.tools(session_id, form))

    def details(self, session_id: str, name: str, detail: str = "full") -> Json:
        return self.send(requests.details(session_id, name, detail))

    def search(self, session_id: str, **looking: Unpack[SearchOptions]) -> Found:
        return self.send(requests.search(session_id, looking))

    def load(
        self, session_id: str, group_id: str, tool_names: Sequence[str] | None = None
    ) -> Loaded:
        return self.send(requests.load(session_id, _load_body(group_id, tool_names)))

    def preload(self, session_id: str, tool_names: Sequence[str]) -> Json:
        return self.send(requests.preload(session_id, tool_names))

    def call(
        self,
        session_id: str,
        tool_name: str,
        arguments: object = None,
        *,
        timeout: float | None = None,
        idempotency_key: str = "",
    ) -> CallResult:
        return self.send(
            requests.call(
                session_id, tool_name, arguments, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    def state(self, session_id: str) -> State:
        return self.send(requests.state(session_id))

    def stats(self, session_id: str) -> Json:
        return self.send(requests.stats(session_id))

    def events(self, session_id: str, limit: int = 100, cursor: str = "") -> Json:
        return self.send(requests.events(session_id, limit, cursor))


class AsyncToolcrib(_BaseClient):
    """The same client for asyncio."""

    def __init__(
        self, url: str, key: str, *, attempts: int = 4, http: httpx2.AsyncClient | None = None
    ) -> None:
        super().__init__(url, key, attempts)
        self._http = http or httpx2.AsyncClient(timeout=60)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, ask: ApiRequest[T]) -> T:
        retries = _Retries(ask, self.attempts)
        while True:
            try:
                response = await self._http.request(**self.request(ask))
            except httpx2.TransportError as error:
                delay = retries.after_transport_error(error)
            else:
                if response.is_success or response.status_code == 304:
                    return _read(ask, response)
                delay = retries.after_error_response(response)
            await asyncio.sleep(delay)

    async def open(self, **wish: Unpack[OpenOptions]) -> Session:
        return await self.send(requests.open_session(wish))

    async def session(self, session_id: str) -> Session:
        return await self.send(requests.session(session_id))

    async def close(self, session_id: str) -> Session:
        return await self.send(requests.close(session_id))

    async def fork(self, session_id: str) -> Session:
        return await self.send(requests.fork(session_id))

    async def catalog(
        self, session_id: str, etag: str = "", **form: Unpack[Form]
    ) -> Catalog | None:
        return await self.send(requests.catalog(session_id, form, etag))

    async def tools(self, session_id: str, **form: Unpack[Form]) -> list[Json]:
        return await self.send(requests.tools(session_id, form))

    async def details(self, session_id: str, name: str, detail: str = "full") -> Json:
        return await self.send(requests.details(session_id, name, detail))

    async def search(self, session_id: str, **looking: Unpack[SearchOptions]) -> Found:
        return await self.send(requests.search(session_id, looking))

    async def load(
        self, session_id: str, group_id: str, tool_names: Sequence[str] | None = None
    ) -> Loaded:
        return await self.send(requests.load(session_id, _load_body(group_id, tool_names)))

    async def preload(self, session_id: str, tool_names: Sequence[str]) -> Json:
        return await self.send(requests.preload(session_id, tool_names))

    async def call(
        self,
        session_id: str,
        tool_name: str,
        arguments: object = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the tool's timeout, which Toolcrib enforces
        idempotency_key: str = "",
    ) -> CallResult:
        return await self.send(
            requests.call(
                session_id, tool_name, arguments, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    async def state(self, session_id: str) -> State:
        return await self.send(requests.state(session_id))

    async def stats(self, session_id: str) -> Json:
        return await self.send(requests.stats(session_id))

    async def events(self, session_id: str, limit: int = 100, cursor: str = "") -> Json:
        return await self.send(requests.events(session_id, limit, cursor))


def _load_body(group_id: str, tool_names: Sequence[str] | None) -> Json:
    names = {} if tool_names is None else {"tool_names": list(tool_names)}
    return {"group_id": group_id, **names}
