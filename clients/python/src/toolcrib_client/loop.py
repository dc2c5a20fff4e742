"""Agent loop around a model, synchronous and asyncio.

with Toolcrib(url, key) as crib, AgentLoop(crib, "anthropic") as loop:
    for _ in loop.turns():
        reply = model(system=loop.system, tools=loop.tools, messages=messages)
        if not loop.take(reply, messages):
            break
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import cached_property
from itertools import count
from typing import Any, Self, TypeVar

from toolcrib_client.http import AsyncToolcrib, Toolcrib
from toolcrib_client.providers import ToolCall, ToolResult
from toolcrib_client.requests import ApiRequest, Json, State
from toolcrib_client.steps import META, Attempt, Loop, not_run

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
        """Append a reply and the results of its calls; return False if it has no calls.

        Every call gets a result, also if an error is raised: the messages stay valid.
        """
        messages += self.said_of(reply)
        try:
            return bool(self.answer(reply))
        finally:
            messages += self.results

    def answer(self, reply: Any) -> list[Json]:
        """Run every call in a model's reply; return the result messages, empty without calls.

        An error that no model can correct is raised once `results` has a result for every call.
        """
        self.results = []
        outcomes: list[ToolResult] = []
        failure: BaseException | None = None
        for call in self.calls_of(reply):
            result = not_run(call)
            if failure is None:
                try:
                    result, failure = complete(self.attempt(call))
                except BaseException as error:  # noqa: BLE001 - such as Ctrl-C; raised below
                    failure = error
            outcomes.append(result)
        return self.settle(outcomes, failure)

    def run(self, call: ToolCall) -> ToolResult:
        """Run one call; raise what the model cannot correct."""
        result, failure = complete(self.attempt(call))
        if failure is not None:
            raise failure
        return result

    def export(self) -> State:
        """Return the loaded tools, to continue later with `resume`."""
        return self.crib.state(self.session.id)

    async def send(self, request: ApiRequest[T]) -> T:
        return self.crib.send(request)

    async def run_function(
        self, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Any:
        return function(*arguments, **named)


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
        try:
            return bool(await self.answer(reply))
        finally:
            messages += self.results

    async def answer(self, reply: Any) -> list[Json]:
        self.results = []
        calls = self.calls_of(reply)
        tasks = [asyncio.ensure_future(self._attempt(call)) for call in calls]
        cancelled: BaseException | None = None
        try:
            if tasks:
                await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        outcomes: list[Attempt] = [
            (not_run(call), None) if task.cancelled() else task.result()
            for call, task in zip(calls, tasks, strict=True)
        ]
        failures = [failure for _, failure in outcomes if failure is not None]
        failure = cancelled or next(iter(failures), None)
        return self.settle([result for result, _ in outcomes], failure)

    async def run(self, call: ToolCall) -> ToolResult:
        result, failure = await self._attempt(call)
        if failure is not None:
            raise failure
        return result

    async def _attempt(self, call: ToolCall) -> Attempt:
        async with self._meta_lock if call.name in META else self._call_slots:
            return await self.attempt(call)

    async def export(self) -> State:
        return await self.crib.state(self.session.id)

    async def send(self, request: ApiRequest[T]) -> T:
        return await self.crib.send(request)

    async def run_function(
        self, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Any:
        value = function(*arguments, **named)
        return await value if inspect.isawaitable(value) else value


def complete(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, without an event loop."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("The coroutine waited for an event loop.")
