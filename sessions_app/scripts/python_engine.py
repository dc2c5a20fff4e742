"""Python scripts on pydantic-monty: an interpreter in worker processes, without any ability.

A script is type-checked against the stubs of its tools, then run. It cannot open files, connect,
read the environment or start processes. Calls of tools are announced, answered as pending, and
settled when the script waits for them, all calls of an `asyncio.gather` at once.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pydantic_monty
from pydantic_monty import (
    AsyncFunctionSnapshot,
    AsyncFutureSnapshot,
    AsyncMonty,
    AsyncMontySession,
    AsyncNameLookupSnapshot,
    ExternalModule,
    MontyComplete,
    MontyCrashedError,
    MontyError,
    MontyRuntimeError,
    MontySyntaxError,
    MontyTypingError,
)

from sessions_app.scripts import python_stubs
from sessions_app.scripts.engines import (
    CPU_SECONDS,
    EXTRACT,
    MAX_CALLS,
    MEMORY_BYTES,
    Answer,
    Failure,
    Finished,
    Program,
    ScriptFailed,
    Step,
    ToolCall,
    Value,
    Waiting,
)
from sessions_app.scripts.output import Logs

T = TypeVar("T")
MAX_WORKERS = 16  # a script keeps one until it ends or is paused
TURN_SECONDS = CPU_SECONDS + 5.0  # after which a worker that does not answer is killed
LIMITS: pydantic_monty.ResourceLimits = {
    "max_feed_duration_secs": CPU_SECONDS,
    "max_turn_duration_secs": CPU_SECONDS,
    "max_memory": MEMORY_BYTES,
    "max_suspensions": 20 * MAX_CALLS,
    "max_recursion_depth": 200,
}
POLICY: pydantic_monty.OSPolicy = {"sleep": "zero"}
IMPORT = "import"
# The checker rejects what the interpreter accepts at the top level of a script.
RETURN_OUTSIDE = "`return` statement outside of a function"
DIAGNOSTIC = re.compile(r"^script\.py:(\d+):\d+: ", re.MULTILINE)
KINDS: Mapping[str, type[Exception]] = {
    "PermissionError": PermissionError,
    "RuntimeError": RuntimeError,
    "TimeoutError": TimeoutError,
}


class PythonEngine:
    """Worker processes, one pool for each event loop; started by the first script."""

    def __init__(self) -> None:
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncMonty] = WeakKeyDictionary()
        self._lock = asyncio.Lock()

    @property
    def version(self) -> str:
        return f"pydantic-monty {pydantic_monty.__version__}"

    @asynccontextmanager
    async def run(self, program: Program) -> AsyncIterator["PythonExecution"]:
        async with self._session(program) as session:
            yield PythonExecution(session, program)

    @asynccontextmanager
    async def restore(
        self, program: Program, snapshot: bytes, waiting: Waiting
    ) -> AsyncIterator["PythonExecution"]:
        async with self._session(program) as session:
            yield PythonExecution(session, program, snapshot, waiting)

    @asynccontextmanager
    async def _session(self, program: Program) -> AsyncIterator[AsyncMontySession]:
        pool = await self._pool()
        modules = {name: _module(name, tools) for name, tools in program.modules.items()}
        try:
            async with pool.checkout(
                script_name="script.py",
                limits=LIMITS,
                os_policy=POLICY,
                type_check=True,
                type_check_stubs=python_stubs.GLOBALS,
                type_check_format="concise",
                external_modules=modules,
            ) as session:
                yield session
        except MontyError as error:
            raise _as_failure(error) from None

    async def _pool(self) -> AsyncMonty:
        loop = asyncio.get_running_loop()
        async with self._lock:
            pool = self._pools.get(loop)
            if pool is None:
                pool = AsyncMonty(
                    min_processes=1,
                    max_processes=MAX_WORKERS,
                    checkout_timeout=None,  # a run has a time limit of its own
                    request_timeout=TURN_SECONDS,
                    max_checkouts_per_worker=200,
                )
                await pool.__aenter__()
                self._pools[loop] = pool
        return pool

    async def close(self) -> None:
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.__aexit__(None, None, None)


def _module(name: str, tools: Any) -> ExternalModule:
    functions: dict[str, Callable[..., Any]] = {tool.function: _never_called for tool in tools}
    return ExternalModule(functions, stubs=python_stubs.module_stub(tools, docs=False))


def _never_called(*args: object, **named: object) -> None:
    """Stand for a tool: calls of it are announced, never made in this process."""
    raise RuntimeError("Tools are called by the broker.")


class PythonExecution:
    def __init__(
        self,
        session: AsyncMontySession,
        program: Program,
        snapshot: bytes = b"",
        waiting: Waiting | None = None,
    ) -> None:
        self._session, self._program = session, program
        self._snapshot, self._restored = snapshot, waiting
        self._printed = Logs()
        self._announced: dict[int, ToolCall] = {}
        self._stopped: AsyncFutureSnapshot | None = None

    @property
    def logs(self) -> str:
        return self._printed.text

    async def start(self) -> Step:
        if self._restored is not None:
            self._announced = {call.number: call for call in self._restored.calls}
            load = self._session.load_snapshot(self._snapshot, print_callback=self._printed.add)
            return await self._advance(await load)
        if self._program.modules:
            await self._session.feed_run(f"import {', '.join(self._program.modules)}")
        try:
            return await self._advance(await self._feed(is_checked=True))
        except MontyTypingError as error:
            lines = [line for line in error.display().splitlines() if line.strip()]
            problems = [line for line in lines if RETURN_OUTSIDE not in line]
            if problems:
                raise _typing_failure(problems) from None
        return await self._advance(await self._feed(is_checked=False))

    async def _feed(self, *, is_checked: bool) -> Any:
        return await self._session.feed_start(
            self._program.code,
            inputs={"input": self._program.input},
            print_callback=self._printed.add,
            skip_type_check=not is_checked,
        )

    async def resume(self, answers: Mapping[int, Answer]) -> Step:
        assert self._stopped is not None  # noqa: S101 - start has returned Waiting
        settled = {number: _settled(answers[number]) for number in self._stopped.pending_call_ids}
        for number in settled:
            del self._announced[number]
        return await self._advance(await self._stopped.resume(settled))

    async def dump(self) -> bytes:
        assert self._stopped is not None  # noqa: S101 - start has returned Waiting
        dumped: Any = self._stopped.dump()
        return bytes(await dumped if asyncio.iscoroutine(dumped) else dumped)

    async def _advance(self, snapshot: Any) -> Step:
        """Run until the script waits for calls or ends."""
        while not isinstance(snapshot, MontyComplete):
            if isinstance(snapshot, AsyncFutureSnapshot):
                self._stopped = snapshot
                # In the order of the script: the engine's own is arbitrary.
                return Waiting(
                    [self._announced[call] for call in sorted(snapshot.pending_call_ids)]
                )
            if isinstance(snapshot, AsyncNameLookupSnapshot):
                snapshot = await snapshot.resume()
            elif snapshot.is_os_function:
                is_import = snapshot.function_name == IMPORT
                unhandled = snapshot.resume_not_handled
                snapshot = await (snapshot.resume_auto() if is_import else unhandled())
            else:
                self._announce(snapshot)
                snapshot = await snapshot.resume({"future": ...})
        return Finished(snapshot.output)

    def _announce(self, snapshot: AsyncFunctionSnapshot) -> None:
        number, name = snapshot.call_id, str(snapshot.function_name)
        arguments, positional = dict(snapshot.kwargs), len(snapshot.args)
        if name == EXTRACT:
            # Types as their names, which a paused run can store.
            given = [item.__name__ if isinstance(item, type) else item for item in snapshot.args]
            arguments, positional = arguments | dict(zip(("value", "type"), given, strict=False)), 0
        self._announced[number] = ToolCall(number, name, arguments, positional)
        if len(self._announced) > 20 * MAX_CALLS:
            raise ScriptFailed("LimitExceeded", "The script announced too many calls.")


def _settled(answer: Answer) -> Any:
    if isinstance(answer, Failure):
        return {"exception": KINDS[answer.kind](answer.message)}
    assert isinstance(answer, Value)  # noqa: S101 - there is no third kind
    return {"return_value": answer.value}


def _typing_failure(problems: list[str]) -> ScriptFailed:
    found = DIAGNOSTIC.search("\n".join(problems))
    text = "\n".join(DIAGNOSTIC.sub(r"line \1: ", problem) for problem in problems[:20])
    message = f"The script was not run, since its types do not match:\n{text}"
    return ScriptFailed("TypeCheckError", message, line=int(found[1]) if found else None)


def _as_failure(error: MontyError) -> ScriptFailed:
    if isinstance(error, MontyTypingError):
        return _typing_failure(error.display().splitlines())
    if isinstance(error, MontyCrashedError):
        text = "The script was ended: it used too much processor time or memory."
        return ScriptFailed("LimitExceeded", text)
    kind, _, message = str(error).partition(": ")
    if not message:
        kind, message = type(error.exception()).__name__, str(error)
    if not isinstance(error, MontyRuntimeError | MontySyntaxError):
        return ScriptFailed(kind, message)
    frames = error.traceback()
    line = frames[-1].line if frames else None
    return ScriptFailed(kind, message, line=line, traceback=_readable(error.display()))


def _readable(traceback: str) -> str:
    """Return a traceback with the name of the script instead of the interpreter's."""
    return re.sub(r'File "<python-input-\d+>"', 'File "script.py"', traceback)[:8_000]
