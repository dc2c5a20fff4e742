"""Interface of the engines that run scripts, their limits, and which of them are installed.

An engine runs code in another process that can do nothing but ask for calls of tools. It stops at
each `await` and says which calls the script waits for; its caller answers them.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from sessions_app.models import ScriptLanguage
from sessions_app.scripts.tool_names import ScriptTool
from toolcrib.lib.errors import ToolcribError

EXTRACT = "extract"  # a function that every script has; its arguments need no names
MAX_SOURCE_BYTES = 64 * 1024
MAX_LOG_BYTES = MAX_RESULT_BYTES = 50_000
MAX_SECONDS = 60.0  # of running; pauses are not counted
CPU_SECONDS = 5.0
MEMORY_BYTES = 64_000_000
MAX_CALLS = 50
MAX_PARALLEL = 10
MAX_RUNS = 2  # at once, of one agent
MAX_HELD_RUNS = 20  # that wait for a person, of one agent


@dataclass(frozen=True)
class Program:
    """A script with what it can reach: its tools by module, and its input."""

    code: str
    modules: Mapping[str, Sequence[ScriptTool]]
    input: object = None


@dataclass(frozen=True)
class ToolCall:
    """A call that a script waits for. `number` identifies it in its run."""

    number: int
    name: str  # module and function, or a function that every script has
    arguments: Mapping[str, object]
    positional: int = 0  # arguments without a name, which tools do not take


@dataclass(frozen=True)
class Value:
    value: object


@dataclass(frozen=True)
class Failure:
    """An exception for the script: RuntimeError, PermissionError or TimeoutError."""

    kind: str
    message: str


Answer = Value | Failure


@dataclass(frozen=True)
class Waiting:
    """The script has stopped until these calls are answered."""

    calls: Sequence[ToolCall]


@dataclass(frozen=True)
class Finished:
    value: object
    cut_bytes: int = 0  # of the JSON whose beginning `value` is; 0: `value` is the whole value


Step = Waiting | Finished


class ScriptFailed(Exception):
    """The script ended with an error, or was ended at a limit."""

    def __init__(
        self, kind: str, message: str, *, line: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.line, self.traceback = kind, message, line, traceback


class Execution(Protocol):
    """A script in its process. Every method but `logs` may raise ScriptFailed."""

    @property
    def logs(self) -> str: ...

    async def start(self) -> Step: ...

    async def resume(self, answers: Mapping[int, Answer]) -> Step: ...

    async def dump(self) -> bytes: ...


class Engine(Protocol):
    """Runs scripts in one language. A snapshot can be continued by the same version only."""

    @property
    def version(self) -> str: ...

    def run(self, program: Program) -> AbstractAsyncContextManager[Execution]: ...

    def restore(
        self, program: Program, snapshot: bytes, waiting: Waiting
    ) -> AbstractAsyncContextManager[Execution]:
        """Return a stopped script, whose `start` returns what it waits for."""
        ...

    async def close(self) -> None: ...


class EngineMissing(ToolcribError):
    code = "engine_missing"
    status = 501


_engines: dict[str, Engine] = {}


def find_engine(language: str) -> Engine:
    """Return the engine of a language. Raises EngineMissing if it is not installed."""
    if language not in _engines:
        _engines[language] = _create_engine(language)
    return _engines[language]


def _create_engine(language: str) -> Engine:
    if language == ScriptLanguage.PYTHON:
        try:
            from sessions_app.scripts.python_engine import PythonEngine
        except ImportError:
            raise EngineMissing(
                "This installation cannot run scripts in Python: pydantic-monty is not installed.",
                hint="Ask your operator to install toolcrib[scripts], or call tools one by one.",
            ) from None
        return PythonEngine()
    try:
        from sessions_app.scripts.typescript_engine import TypeScriptEngine

        return TypeScriptEngine()
    except (ImportError, FileNotFoundError):  # the package, or its program
        raise EngineMissing(
            "This installation cannot run scripts in TypeScript: Deno is not installed.",
            hint="Ask your operator to install toolcrib[typescript], or write it in Python.",
        ) from None


async def close_engines() -> None:
    """End the processes of all engines."""
    while _engines:
        _, engine = _engines.popitem()
        await engine.close()
