"""TypeScript scripts on Deno: one process for each run, without any permission.

The process runs deno_host.js under the supervisor of stdio programs, with an empty environment,
limits of memory and processor time, and neither a JIT compiler nor WebAssembly. It writes a line
with the calls it waits for and reads a line with their answers. What it writes is checked: a script
may write such lines itself.

A heap of V8 cannot be stored. A paused script is a journal of the answers that it got, and is run
again to the same point: the host makes everything that a script sees follow from the program, the
journal, and the clock and seed in it.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from deno import find_deno_bin

from servers.errors import UpstreamError
from servers.transports import sandbox
from servers.transports.stdio import StdioProcess
from sessions_app.scripts.engines import (
    CPU_SECONDS,
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
from sessions_app.scripts.output import Logs, replace_surrogates
from toolcrib.lib.json_codec import canonical

logger = logging.getLogger(__name__)

HOST = Path(__file__).with_name("deno_host.js")
MAX_PROCESSES = 16  # a script keeps one until it ends or is paused
MAX_LINE_BYTES = 2_000_000  # of calls announced together
ON_LOOP_BYTES = 64 * 1024  # longer lines are parsed in a thread
# Of Deno itself, beside the heap of the script: 30 MB when it starts.
ENGINE_BYTES = 128 * 1024 * 1024
LIMITS = {"memory": ENGINE_BYTES + MEMORY_BYTES, "cpu": int(CPU_SECONDS) + 1}
FLAGS = (
    "--no-prompt", "--no-remote", "--no-npm", "--no-config", "--no-lock", "--cached-only",
    "--no-code-cache", "--deny-net", "--deny-read", "--deny-write", "--deny-env", "--deny-run",
    "--deny-ffi", "--deny-sys", "--deny-import",
    f"--v8-flags=--jitless,--max-old-space-size={MEMORY_BYTES // 1_000_000}",
)  # fmt: skip
# Deno would cache the scripts in its folder: here, none can be made.
ENVIRONMENT = {"DENO_DIR": "/dev/null/none", "DENO_NO_UPDATE_CHECK": "1", "NO_COLOR": "1",
               "TZ": "UTC"}  # fmt: skip
MAX_LINE = 100_000  # number of a line in a script
KIND = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.]{0,79}")  # a script chooses the name of its error
SIGNALLED = 128  # and more: exit codes of a process that a signal ended
DIVERGED = (
    "The script was paused and run again to this point, but did not make the same calls. It was "
    "not continued."
)


class TypeScriptEngine:
    """Starts processes, so many at a time in each event loop. None outlives its run."""

    def __init__(self) -> None:
        self._program = os.fsdecode(find_deno_bin())
        host = HOST.read_bytes()
        # The host is an argument, not a file: its imports would not need a permission to read.
        self._argv = [
            "deno", "run", *FLAGS, f"data:application/javascript;base64,{b64encode(host).decode()}",
        ]  # fmt: skip
        self._version = (
            f"deno {distribution_version('deno')} {hashlib.sha256(host).hexdigest()[:8]}"
        )
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    @property
    def version(self) -> str:
        """A journal belongs to one host: another may announce calls in another order."""
        return self._version

    @asynccontextmanager
    async def run(self, program: Program) -> AsyncIterator["TypeScriptExecution"]:
        now, seed = int(time.time() * 1000), secrets.randbits(32)
        async with self._process() as process:
            yield TypeScriptExecution(process, program, now, seed)

    @asynccontextmanager
    async def restore(
        self, program: Program, snapshot: bytes, waiting: Waiting
    ) -> AsyncIterator["TypeScriptExecution"]:
        journal = _Journal.read(snapshot)
        async with self._process() as process:
            yield TypeScriptExecution(process, program, journal.now, journal.seed, journal)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[StdioProcess]:
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_PROCESSES))
        async with slots:
            process = StdioProcess(redact=str)
            restrictions = sandbox.instructions(sandbox.current()) | LIMITS
            try:
                try:
                    await process.start(
                        self._program, self._argv, "/", dict(ENVIRONMENT), restrictions
                    )
                    yield process
                finally:
                    await process.stop()
            finally:
                process.close()

    async def close(self) -> None:
        """Do nothing: each process ends with its run."""


# --- Journal --------------------------------------------------------------------------------------


def _digest(arguments: Mapping[str, object]) -> str:
    text = canonical(arguments).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()


@dataclass
class _Journal:
    """The calls of a script that were answered, and those that it waits for, by number."""

    now: int  # milliseconds since 1970, for the script
    seed: int  # of its random numbers
    answers: dict[int, Answer] = field(default_factory=dict)
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)  # names and digests

    def note(self, calls: list[ToolCall]) -> None:
        for call in calls:
            self.calls[call.number] = call.name, _digest(call.arguments)

    def write(self) -> bytes:
        answers = {
            number: ["", answer.value]
            if isinstance(answer, Value)
            else [answer.kind, answer.message]
            for number, answer in self.answers.items()
        }
        journal = {"now": self.now, "seed": self.seed, "calls": self.calls, "answers": answers}
        return json.dumps(journal).encode()

    @classmethod
    def read(cls, snapshot: bytes) -> "_Journal":
        stored = json.loads(snapshot)
        answers: dict[int, Answer] = {
            int(number): Failure(kind, value) if kind else Value(value)
            for number, (kind, value) in stored["answers"].items()
        }
        calls = {int(number): (name, digest) for number, (name, digest) in stored["calls"].items()}
        return cls(stored["now"], stored["seed"], answers, calls)


# --- Run ------------------------------------------------------------------------------------------


class TypeScriptExecution:
    def __init__(
        self,
        process: StdioProcess,
        program: Program,
        now: int,
        seed: int,
        earlier: _Journal | None = None,
    ) -> None:
        self._process, self._program = process, program
        self._lines = process.messages()
        self._journal, self._earlier = _Journal(now, seed), earlier
        self._waiting: list[ToolCall] = []
        self._printed = Logs()

    @property
    def logs(self) -> str:
        return self._printed.text

    async def start(self) -> Step:
        if not await self._is_ready():
            logger.error("Deno did not start: %s", self._process.stderr_tail())
            raise ScriptFailed("InternalError", "The engine of this script did not start.")
        modules = {
            name: [tool.function for tool in tools] for name, tools in self._program.modules.items()
        }
        await self._send(
            {
                "code": self._program.code,
                "input": self._program.input,
                "modules": modules,
                "now": self._journal.now,
                "seed": self._journal.seed,
            }
        )
        step = await self._advance()
        return step if self._earlier is None else await self._repeat(step, self._earlier)

    async def _repeat(self, step: Step, earlier: _Journal) -> Step:
        """Give the script the answers it had, until it waits for the calls it was paused at."""
        while isinstance(step, Waiting):
            numbers = [call.number for call in step.calls]
            if any(self._journal.calls[number] != earlier.calls.get(number) for number in numbers):
                break
            if not earlier.answers.keys() & numbers:
                self._printed = Logs()  # what it printed before the pause is stored
                return step
            if not earlier.answers.keys() >= set(numbers):
                break
            step = await self.resume({number: earlier.answers[number] for number in numbers})
        raise ScriptFailed("Diverged", DIVERGED)

    async def resume(self, answers: Mapping[int, Answer]) -> Step:
        lines: list[dict[str, object]] = []
        for call in self._waiting:
            answer = self._journal.answers[call.number] = answers[call.number]
            if isinstance(answer, Failure):
                error = {"kind": answer.kind, "message": answer.message}
                lines.append({"number": call.number, "error": error})
            else:
                lines.append({"number": call.number, "value": answer.value})
        await self._send(lines)
        return await self._advance()

    async def dump(self) -> bytes:
        return await asyncio.to_thread(self._journal.write)

    # --- Lines ------------------------------------------------------------------------------------

    async def _send(self, message: object) -> None:
        line = await asyncio.to_thread(json.dumps, message)
        try:
            await self._process.send(line.encode("ascii"), None)
        except OSError:  # it has ended, as the end of its lines will tell
            return

    async def _read(self) -> dict[str, Any]:
        """Return the next line. Raises ScriptFailed if there is none, or it is no object."""
        try:
            line = await anext(self._lines, b"")
            if len(line) > MAX_LINE_BYTES:
                raise _too_large()
            parse = asyncio.to_thread(_parse, line) if len(line) > ON_LOOP_BYTES else None
            message = _parse(line) if parse is None else await parse
        except UpstreamError:
            raise _too_large() from None
        except (ValueError, RecursionError):
            raise (_invalid() if line else await self._ended()) from None
        if not isinstance(message, dict):
            raise _invalid()
        return message

    async def _is_ready(self) -> bool:
        try:
            return await self._read() == {"ready": True}
        except ScriptFailed:
            return False

    async def _ended(self) -> ScriptFailed:
        try:
            async with asyncio.timeout(1):
                await self._process.exited.wait()
        except TimeoutError:
            pass
        code = self._process.exit_code
        if code is not None and code >= SIGNALLED:
            text = "The script was ended: it used too much processor time or memory."
            return ScriptFailed("LimitExceeded", text)
        return ScriptFailed("Exited", "The script ended its process before it returned.")

    async def _advance(self) -> Step:
        """Read lines until the script waits for calls or ends."""
        while True:
            match await self._read():
                case {"logs": str(text)}:
                    try:
                        self._printed.add("stdout", text)
                    except MemoryError as error:
                        raise ScriptFailed("LimitExceeded", f"Ended: {error}.") from None
                case {"calls": [_, *_] as calls}:
                    self._waiting = self._read_calls(calls)
                    await asyncio.to_thread(self._journal.note, self._waiting)
                    return Waiting(self._waiting)
                case {"returned": value}:
                    return Finished(value)
                case {"cut": {"bytes": int(size), "start": str(start)}} if size > 0:
                    return Finished(start, cut_bytes=size)
                case {"failed": {"kind": str(kind), "message": str(message), **more}}:
                    line, traceback = more.get("line"), more.get("traceback")
                    raise ScriptFailed(
                        kind if KIND.fullmatch(kind) else "Error",
                        replace_surrogates(message),
                        line=line if isinstance(line, int) and 0 < line <= MAX_LINE else None,
                        traceback=replace_surrogates(traceback)
                        if isinstance(traceback, str)
                        else "",
                    )
                case _:
                    raise _invalid()

    def _read_calls(self, calls: list[object]) -> list[ToolCall]:
        """Return announced calls. Their numbers follow those before, so that none is used twice."""
        found: list[ToolCall] = []
        for number, call in enumerate(calls, len(self._journal.calls) + 1):
            match call:
                case {"number": int(given), "name": str(name), "arguments": dict(arguments)} if (
                    given == number
                ):
                    found.append(ToolCall(number, name, arguments))
                case _:
                    raise _invalid()
        return found


def _parse(line: bytes) -> Any:
    return json.loads(line, parse_constant=_reject)


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON.")


def _invalid() -> ScriptFailed:
    return ScriptFailed("ProtocolError", "The script wrote to the output of its engine.")


def _too_large() -> ScriptFailed:
    text = f"The arguments of calls made together are larger than {MAX_LINE_BYTES:,} bytes."
    return ScriptFailed("LimitExceeded", text)
