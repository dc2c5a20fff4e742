"""HTTP clients for the agent API, synchronous and asyncio, with retries.

Idempotent requests are retried after a connection error. Calls always are: their Idempotency-Key
makes Toolcrib run them once. Temporary errors (429, 503, a call still in progress) are retried
after the delay in Retry-After.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx2

from toolcrib_client import requests
from toolcrib_client.errors import ToolcribError
from toolcrib_client.requests import ApiRequest, Catalog

P = ParamSpec("P")
T = TypeVar("T")
MAX_RETRY_DELAY = 30.0  # seconds
TEMPORARY_STATUSES = (429, 503)
PERSISTENT_CODES = ("too_many_held_calls",)  # a person has to act first


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
        is_temporary = in_progress or (
            response.status_code in TEMPORARY_STATUSES and error.code not in PERSISTENT_CODES
        )
        if not is_temporary or self.remaining < 0:
            raise error
        seconds = response.headers.get("Retry-After", "1")
        return min(float(seconds), MAX_RETRY_DELAY) if seconds.isdecimal() else 1.0


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


class _Method(Generic[P, T]):
    """A method of both clients that sends the request built by a function."""

    def __init__(self, build: Callable[P, ApiRequest[T]]) -> None:
        self.build = build

    @overload
    def __get__(self, client: "Toolcrib", owner: object) -> Callable[P, T]: ...
    @overload
    def __get__(
        self, client: "AsyncToolcrib", owner: object
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Any, owner: object) -> Callable[P, Any]:
        @wraps(self.build)
        def send(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self.build(*args, **kwargs))

        return send


class _BaseClient:
    open = _Method(requests.open_session)
    session = _Method(requests.session)
    close = _Method(requests.close)
    fork = _Method(requests.fork)
    catalog = _Method(requests.catalog)
    tools = _Method(requests.tools)
    servers = _Method(requests.servers)
    details = _Method(requests.details)
    search = _Method(requests.search)
    load = _Method(requests.load)
    preload = _Method(requests.preload)
    call = _Method(requests.call)
    check_call = _Method(requests.check_call)
    report_result = _Method(requests.report_result)
    run_script = _Method(requests.run_script)
    check_script = _Method(requests.check_script)
    state = _Method(requests.state)
    stats = _Method(requests.stats)
    events = _Method(requests.events)

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
