"""Send what client_asks describes: a client that waits, and one for asyncio. No Django.

What may be repeated without harm is repeated when a connection breaks, and a call always may: its
Idempotency-Key makes Toolcrib run it once. Refusals that pass with time (429, 503, a call that is
still under way) are waited for, as long as the server says.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self, TypeVar, Unpack

import httpx2

from toolcrib.client import requests as asks
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
LONGEST_WAIT = 30.0
PASSING = (429, 503)


class ApiError(ToolcribError):
    """Toolcrib refused: `status`, `code`, `message`, `hint`, `details` are as it said."""


class Unreachable(ToolcribError):
    """Toolcrib could not be reached, or its answer was lost."""

    code = "unreachable"
    status = 503


class _Tries:
    """One request's attempts: what to wait before the next, or the error to end with."""

    def __init__(self, ask: ApiRequest[Any], most: int) -> None:
        self.ask = ask
        self.left = most - 1
        self.pause = 0.0  # a connection kept too long is made anew at once

    def broken(self, error: httpx2.TransportError) -> float:
        never_sent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        if self.left <= 0 or not (self.ask.repeatable or never_sent):
            reason = str(error) or type(error).__name__
            raise Unreachable(
                f"Toolcrib did not answer: {reason}.",
                hint="Check its address, and that it runs.",
            ) from error
        self.left -= 1
        pause, self.pause = self.pause, self.pause * 2 or 0.2
        return pause

    def refused(self, response: httpx2.Response) -> float:
        error = _error(response)
        passing = response.status_code in PASSING or error.code == "idempotency_in_progress"
        # A call that is under way ends when it ends; asking again costs nothing.
        if error.code != "idempotency_in_progress":
            self.left -= 1
        if not passing or self.left < 0:
            raise error
        return _seconds(response.headers.get("Retry-After", "1"))


def _seconds(text: str) -> float:
    return min(float(text), LONGEST_WAIT) if text.isdecimal() else 1.0


def _error(response: httpx2.Response) -> ApiError:
    try:
        said = response.json()["error"]
        return ApiError(
            said["message"],
            hint=said["hint"],
            code=said["code"],
            status=response.status_code,
            details=said.get("details"),
        )
    except (ValueError, KeyError, TypeError):
        return ApiError(
            f"Status {response.status_code} came from {response.url.host}, and not in Toolcrib's "
            "words.",
            hint="Check the address: it may be another program's.",
            code="not_toolcrib",
            status=response.status_code,
        )


def _read(ask: ApiRequest[T], response: httpx2.Response) -> T:
    if ask.path.endswith("/catalog"):
        if response.status_code == 304:
            return ask.read(None)
        is_text = response.headers.get("Content-Type", "").startswith("text/plain")
        body = {"text": response.text} if is_text else response.json()
        return ask.read(Catalog(body, response.headers["ETag"]))
    return ask.read(response.json())


class _Settings:
    def __init__(self, url: str, key: str, attempts: int) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.attempts = attempts
        self.headers = {"Authorization": f"Bearer {key}"}

    def request(self, ask: ApiRequest[Any]) -> dict[str, Any]:
        body = {} if ask.body is None else {"json": dict(ask.body)}
        # Longer than the tool has, so that its deadline is told and not cut off.
        patient = {} if ask.seconds is None else {"timeout": ask.seconds + 30}
        return {
            "method": ask.method,
            "url": f"{self.url}/api/v1{ask.path}",
            "params": dict(ask.query),
            "headers": {**self.headers, **ask.headers},
            **body,
            **patient,
        }


class Toolcrib(_Settings):
    """An agent's way to Toolcrib. A context manager; `http` replaces the connection it makes."""

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
        tries = _Tries(ask, self.attempts)
        while True:
            try:
                response = self._http.request(**self.request(ask))
            except httpx2.TransportError as error:
                pause = tries.broken(error)
            else:
                if response.is_success or response.status_code == 304:
                    return _read(ask, response)
                pause = tries.refused(response)
            time.sleep(pause)

    def open(self, **wish: Unpack[OpenOptions]) -> Session:
        return self.send(asks.open_session(wish))

    def session(self, session_id: str) -> Session:
        return self.send(asks.session(session_id))

    def close(self, session_id: str) -> Session:
        return self.send(asks.close(session_id))

    def fork(self, session_id: str) -> Session:
        return self.send(asks.fork(session_id))

    def catalog(self, session_id: str, etag: str = "", **form: Unpack[Form]) -> Catalog | None:
        return self.send(asks.catalog(session_id, form, etag))

    def tools(self, session_id: str, **form: Unpack[Form]) -> list[Json]:
        return self.send(asks.tools(session_id, form))

    def details(self, session_id: str, name: str, detail: str = "full") -> Json:
        return self.send(asks.details(session_id, name, detail))

    def search(self, session_id: str, **looking: Unpack[SearchOptions]) -> Found:
        return self.send(asks.search(session_id, looking))

    def load(
        self, session_id: str, group_id: str, tool_names: Sequence[str] | None = None
    ) -> Loaded:
        return self.send(asks.load(session_id, _load_body(group_id, tool_names)))

    def preload(self, session_id: str, tool_names: Sequence[str]) -> Json:
        return self.send(asks.preload(session_id, tool_names))

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
            asks.call(
                session_id, tool_name, arguments, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    def state(self, session_id: str) -> State:
        return self.send(asks.state(session_id))

    def stats(self, session_id: str) -> Json:
        return self.send(asks.stats(session_id))

    def events(self, session_id: str, limit: int = 100, cursor: str = "") -> Json:
        return self.send(asks.events(session_id, limit, cursor))


class AsyncToolcrib(_Settings):
    """The same for asyncio."""

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
        tries = _Tries(ask, self.attempts)
        while True:
            try:
                response = await self._http.request(**self.request(ask))
            except httpx2.TransportError as error:
                pause = tries.broken(error)
            else:
                if response.is_success or response.status_code == 304:
                    return _read(ask, response)
                pause = tries.refused(response)
            await asyncio.sleep(pause)

    async def open(self, **wish: Unpack[OpenOptions]) -> Session:
        return await self.send(asks.open_session(wish))

    async def session(self, session_id: str) -> Session:
        return await self.send(asks.session(session_id))

    async def close(self, session_id: str) -> Session:
        return await self.send(asks.close(session_id))

    async def fork(self, session_id: str) -> Session:
        return await self.send(asks.fork(session_id))

    async def catalog(
        self, session_id: str, etag: str = "", **form: Unpack[Form]
    ) -> Catalog | None:
        return await self.send(asks.catalog(session_id, form, etag))

    async def tools(self, session_id: str, **form: Unpack[Form]) -> list[Json]:
        return await self.send(asks.tools(session_id, form))

    async def details(self, session_id: str, name: str, detail: str = "full") -> Json:
        return await self.send(asks.details(session_id, name, detail))

    async def search(self, session_id: str, **looking: Unpack[SearchOptions]) -> Found:
        return await self.send(asks.search(session_id, looking))

    async def load(
        self, session_id: str, group_id: str, tool_names: Sequence[str] | None = None
    ) -> Loaded:
        return await self.send(asks.load(session_id, _load_body(group_id, tool_names)))

    async def preload(self, session_id: str, tool_names: Sequence[str]) -> Json:
        return await self.send(asks.preload(session_id, tool_names))

    async def call(
        self,
        session_id: str,
        tool_name: str,
        arguments: object = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the tool's time, which Toolcrib keeps
        idempotency_key: str = "",
    ) -> CallResult:
        return await self.send(
            asks.call(
                session_id, tool_name, arguments, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    async def state(self, session_id: str) -> State:
        return await self.send(asks.state(session_id))

    async def stats(self, session_id: str) -> Json:
        return await self.send(asks.stats(session_id))

    async def events(self, session_id: str, limit: int = 100, cursor: str = "") -> Json:
        return await self.send(asks.events(session_id, limit, cursor))


def _load_body(group_id: str, tool_names: Sequence[str] | None) -> Json:
    names = {} if tool_names is None else {"tool_names": list(tool_names)}
    return {"group_id": group_id, **names}
