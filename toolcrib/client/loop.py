"""Agent loop around a model, synchronous and asyncio. Part of toolcrib.client.

with Toolcrib(url, key) as crib, AgentLoop(crib, "anthropic") as loop:
    for _ in loop.turns():
        reply = model(system=loop.system, tools=loop.tools, messages=messages)
        results = loop.answer(reply)
        if not results:
            break
        messages += [<the reply>, *results]
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import cached_property
from itertools import count
from typing import Any, Self, TypeVar

from toolcrib.client.http import AsyncToolcrib, Toolcrib
from toolcrib.client.providers import ToolCall, ToolResult
from toolcrib.client.requests import ApiRequest, Json, State
from toolcrib.client.steps import META, Loop

T = TypeVar("T")
MAX_CONCURRENT_CALLS = 8  # of one reply; servers reject more as busy


class AgentLoop(Loop[Toolcrib]):
    """One run of an agent. A context manager: opens a session and closes the one it opened."""

    def __enter__(self) -> Self:
        complete(self.opening())
        return self

    def __exit__(self, *_: object) -> None:
        if not self._session_id:
            self.crib.close(self.session.id)

    def turns(self) -> Iterator[int]:
        """Yield turn numbers up to the limit; refresh the tools from the second turn on."""
        for turn in count(1) if self.limit is None else range(1, self.limit + 1):
            if turn > 1:
                self.refresh()
            yield turn
        self.exhausted = True

    def refresh(self) -> None:
        """Read the tools array again if loaded tools are added to it (strategy inject)."""
        if self.session.strategy == "inject":
            complete(self.reading())

    def take(self, reply: Any, messages: list[Any]) -> bool:
        """Append a reply and the results of its calls; return False if it has no calls."""
        messages += self.said_of(reply)
        results = self.answer(reply)
        messages += results
        return bool(results)

    def answer(self, reply: Any) -> list[Json]:
        """Run every call in a model's reply; return the result messages, empty without calls."""
        return self.messages_of([self.run(call) for call in self.calls_of(reply)])

    def run(self, call: ToolCall) -> ToolResult:
        return complete(self.answering(call))

    def export(self) -> State:
        """Return the loaded tools, to continue later with `resume`."""
        return self.crib.state(self.session.id)

    async def send(self, request: ApiRequest[T]) -> T:
        return self.crib.send(request)

    async def run_function(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class AsyncAgentLoop(Loop[AsyncToolcrib]):
    """The same loop for asyncio. Calls of one reply run concurrently; loads run in order."""

    @cached_property
    def _meta_lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    @cached_property
    def _call_slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def __aenter__(self) -> Self:
        await self.opening()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._session_id:
            await self.crib.close(self.session.id)

    async def turns(self) -> AsyncIterator[int]:
        for turn in count(1) if self.limit is None else range(1, self.limit + 1):
            if turn > 1:
                await self.refresh()
            yield turn
        self.exhausted = True

    async def refresh(self) -> None:
        if self.session.strategy == "inject":
            await self.reading()

    async def take(self, reply: Any, messages: list[Any]) -> bool:
        messages += self.said_of(reply)
        results = await self.answer(reply)
        messages += results
        return bool(results)

    async def answer(self, reply: Any) -> list[Json]:
        calls = self.calls_of(reply)
        results = await asyncio.gather(*map(self.run, calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return self.messages_of([result for result in results if isinstance(result, ToolResult)])

    async def run(self, call: ToolCall) -> ToolResult:
        async with self._meta_lock if call.name in META else self._call_slots:
            return await self.answering(call)

    async def export(self) -> State:
        return await self.crib.state(self.session.id)

    async def send(self, request: ApiRequest[T]) -> T:
        return await self.crib.send(request)

    async def run_function(self, function: Callable[..., Any], *arguments: Any) -> Any:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value


def complete(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, without an event loop."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("The coroutine waited for an event loop.")
