"""Stdio transport: run a program and exchange lines over its stdin and stdout.

Every program runs under process_supervisor.py, which kills it and its descendants when this
process stops or dies. Lines are bytes here; `servers.connections.streams` parses them. Works on
any event loop, in any thread.
"""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from django.conf import settings

from servers.errors import SEE_STDERR, ParkedError, UpstreamError
from servers.transports import sandbox
from servers.transports.buffers import YIELD_AFTER, ChunkBuffer
from servers.transports.process_supervisor import (
    CANNOT_RUN,
    SANDBOX_FAILED,
    TOO_MANY_MESSAGE,
    TOO_MANY_PROCESSES,
)
from servers.transports.request_trace import HEAD_BYTES, RequestTrace, TooLarge
from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.text import escape_hidden

logger = logging.getLogger(__name__)

SUPERVISOR = Path(__file__).with_name("process_supervisor.py")
READ_BYTES = 64 * 1024
STDERR_LINES = 20
EOF_GRACE = 0.7  # seconds for a program to exit by itself after stdin ends
STOP_GRACE = 2.5  # seconds; the supervisor needs at most 2 to kill everything


class StdioProcess:
    """One running program; a MessageStream for `servers.connections.streams`."""

    concurrent_sends = False

    def __init__(self, redact: Callable[[str], str]) -> None:
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self._stderr = bytearray()
        self._redact = redact
        self._stderr_ended = asyncio.Event()
        self._stdin = -1
        self._lifeline = -1
        self._stdout: asyncio.StreamReader
        self._transports: list[asyncio.ReadTransport] = []
        self._stderr_reader: asyncio.Task[None]

    async def start(
        self,
        program: str,
        argv: Sequence[str],
        cwd: str,
        env: dict[str, str],
        restrictions: Mapping[str, object],
    ) -> None:
        """Spawn the supervisor; send it the command by the lifeline, not on its command line."""
        lifeline_end, self._lifeline = os.pipe()
        try:
            process = _spawn(lifeline_end, cwd, env)
        except OSError:
            self.exited.set()
            raise ParkedError(
                "The program could not be started.",
                code="not_executable",
                hint="Check that the working directory exists and is accessible.",
            ) from None
        finally:
            os.close(lifeline_end)
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        if stdin is None or stdout is None or stderr is None:
            raise RuntimeError("Popen returned no pipes.")
        self._stdin = os.dup(stdin.fileno())
        stdin.close()
        for fd in (self._stdin, self._lifeline):
            os.set_blocking(fd, False)
        _wait_in_thread(process, self)
        self._stdout = await self._reader(stdout)
        self._stderr_reader = asyncio.create_task(self._read_stderr(await self._reader(stderr)))
        # In a C locale the supervisor's Python sets LC_CTYPE; the program must not inherit it.
        unset = [] if "LC_CTYPE" in env else ["LC_CTYPE"]
        command = {
            "program": program,
            "argv": list(argv),
            "unset": unset,
            "max_processes": settings.MAX_PROCESSES,
            "sandbox": restrictions,
        }
        line = json.dumps(command) + "\n"
        with suppress(BrokenPipeError):  # it died already, which the end of stdout reports
            await _write(self._lifeline, bytearray(line.encode()))

    async def _reader(self, pipe: IO[bytes]) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=READ_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._transports.append(transport)
        return reader

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        try:
            while chunk := await stderr.read(READ_BYTES):
                self._stderr += chunk
                if len(self._stderr) > 2 * settings.STDERR_BYTES:
                    del self._stderr[: -settings.STDERR_BYTES]
        finally:
            self._stderr_ended.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield each line of stdout, returning to the loop in between. An oversized line raises."""
        line = ChunkBuffer()
        while chunk := await self._stdout.read(READ_BYTES):
            start, started = 0, time.monotonic()
            while (end := chunk.find(b"\n", start)) >= 0:
                self._add(line, chunk[start:end])
                start = end + 1
                if line.size:
                    yield line.pop_all()
                if time.monotonic() - started > YIELD_AFTER:
                    await asyncio.sleep(0)
                    started = time.monotonic()
            self._add(line, chunk[start:])

    def _add(self, line: ChunkBuffer, data: bytes) -> None:
        line.add(data)
        if line.size > (limit := settings.MAX_MESSAGE_BYTES):
            raise TooLarge("program wrote a line", limit, line.head(HEAD_BYTES))

    async def send(self, message: bytes, trace: RequestTrace | None) -> None:
        """Write one line. Not reentrant: lines must not be interleaved."""
        unsent = bytearray(message + b"\n")
        try:
            await _write(self._stdin, unsent)
        finally:
            # A partial message cannot be processed. Without the newline it can: EOF ends a line.
            if trace is not None and len(unsent) > 1:
                trace.sent = False

    def stderr_tail(self) -> str:
        """Return the last lines of stderr, safe to display and log: secrets are redacted."""
        text = bytes(self._stderr[-settings.STDERR_BYTES :]).decode("utf-8", "replace")
        text = redact_text(self._redact(text)).replace("\r\n", "\n")
        lines = text.rstrip().split("\n")[-STDERR_LINES:]
        return escape_hidden("\n".join(line[:2000] for line in lines), keep="\n\t")

    async def exit_error(self, when: str) -> UpstreamError:
        """Return how the program ended, after its stdout did. Waits 1 s for the exit code."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self.exited.wait()
                await self._stderr_ended.wait()
        detail = self.stderr_tail()
        code = self.exit_code
        if code is None:
            return UpstreamError(
                f"The program closed its output {when}, but is still running.",
                code="closed",
                hint="It may not support MCP over stdio, or need an argument to enable it.",
                detail=detail,
            )
        if code == CANNOT_RUN and detail.startswith("toolcrib: cannot run the program"):
            return ParkedError(
                "The command was found, but cannot be executed: it is not a program for this "
                "machine, or its interpreter is missing.",
                code="not_executable",
                hint="Name the interpreter as the command and the file as its first argument.",
                detail=detail,
            )
        if code == CANNOT_RUN and detail.startswith(SANDBOX_FAILED):
            return ParkedError(
                "The program was not started, because it could not be restricted.",
                code="sandbox",
                hint="To run it as TOOLCRIB_STDIO_USER, Toolcrib needs root rights.",
                detail=detail,
            )
        how = f"was killed by signal {code - 128}" if code > 128 else f"exited with code {code}"
        message = f"The program {how} {when}."
        hint = SEE_STDERR
        if not detail:
            hint = "It wrote nothing to stderr. Run the same command in a shell to see its output."
        elif code == TOO_MANY_PROCESSES and detail.endswith(TOO_MANY_MESSAGE):
            limit = f"{settings.MAX_PROCESSES:,} processes and threads at once"
            message = f"The program was killed {when}: it ran more than {limit}."
            hint = "If it needs that many, raise TOOLCRIB_MAX_PROCESSES."
        return UpstreamError(message, code="crashed", hint=hint, detail=detail)

    async def stop(self) -> None:
        """Close stdin, then kill everything; takes about three seconds at most."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), EOF_GRACE)
        finally:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
        try:
            await asyncio.wait_for(self.exited.wait(), STOP_GRACE)
        except TimeoutError:
            # Do not kill the supervisor: it keeps killing the program's descendants.
            logger.warning("Stdio program still running after stop; its supervisor continues")

    def close(self) -> None:
        """Release the remaining file descriptors and tasks. Safe in any state."""
        for fd in (self._stdin, self._lifeline):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._lifeline = -1
        if hasattr(self, "_stderr_reader"):
            self._stderr_reader.cancel()
        for transport in self._transports:
            transport.close()


@asynccontextmanager
async def run_process(
    argv: Sequence[str], *, cwd: str, env: Mapping[str, str], redact: Callable[[str], str]
) -> AsyncIterator[StdioProcess]:
    restrictions = sandbox.current()
    if not restrictions.protects_data or restrictions.is_root:
        sandbox.warn_once(restrictions.sentence)
    full_env = sandbox.prepare(restrictions, env)
    program = find_program(argv, cwd, full_env)
    sandbox.check_paths(restrictions, program, cwd)
    child = StdioProcess(redact)
    try:
        try:
            await child.start(program, argv, cwd, full_env, sandbox.instructions(restrictions))
            yield child
        finally:
            await child.stop()
    finally:
        child.close()


def find_program(argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> str:
    if cwd and not Path(cwd).is_dir():
        raise ParkedError(
            "The working directory does not exist.",
            code="command_not_found",
            hint="Correct it, or leave it empty.",
        )
    if not argv or not argv[0]:
        raise ParkedError("The command is empty.", code="command_not_found")
    if any("\0" in text for text in (*argv, *env, *env.values())):
        raise ParkedError(
            "An argument or variable contains a NUL character.", code="not_executable"
        )
    if any(not name or "=" in name for name in env):
        raise ParkedError("A variable has an invalid name.", code="not_executable")
    if "/" in argv[0]:
        path = Path(cwd or ".", argv[0]).absolute()
        executable = str(path) if path.is_file() else None
        if executable and not os.access(executable, os.X_OK):
            raise ParkedError(
                "The command is a file without execute permission.",
                code="not_executable",
                hint="Make it executable (chmod +x) or name its interpreter as the command.",
            )
    else:
        executable = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    if not executable:
        raise ParkedError(
            "The command was not found on this machine.",
            code="command_not_found",
            hint="Install it, or give its full path. PATH is that of the Toolcrib process.",
        )
    return str(Path(executable).absolute())


def _spawn(lifeline_end: int, cwd: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the supervisor, without a shell
        [sys.executable, "-I", "-S", str(SUPERVISOR), str(lifeline_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(lifeline_end,),
        cwd=cwd or None,
        env=env,
        start_new_session=True,
        bufsize=0,
    )


def _wait_in_thread(process: subprocess.Popen[bytes], child: StdioProcess) -> None:
    """Wait for the exit code in a thread: child watchers depend on the loop and the thread."""
    loop = asyncio.get_running_loop()

    def set_exit_code(code: int) -> None:
        child.exit_code = 128 - code if code < 0 else code
        child.exited.set()

    def wait() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop was closed before the program exited
            loop.call_soon_threadsafe(set_exit_code, code)

    threading.Thread(target=wait, name="stdio-wait", daemon=True).start()


async def _write(fd: int, unsent: bytearray) -> None:
    """Write `unsent` without blocking the loop, and remove the written bytes from it."""
    loop = asyncio.get_running_loop()
    while unsent:
        try:
            del unsent[: os.write(fd, unsent)]
        except BlockingIOError:
            writable = asyncio.Event()
            loop.add_writer(fd, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(fd)
