"""Programs that speak MCP over stdin and stdout: start, read, write, stop, and leave nothing.

Every program runs under process_supervisor.py, which ends it and its descendants when we stop or
die. Lines are bytes here; client.py knows what they mean. Runs on any event loop, in any thread.
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

from servers.errors import UpstreamError
from servers.transports.buffers import TURN, ChunkBuffer
from servers.transports.process_supervisor import CANNOT_RUN, MARK, TOO_MANY_PROCESSES
from servers.transports.request_trace import HEAD, RequestTrace, TooLarge
from toolcrib.lib.text import escape_hidden

logger = logging.getLogger(__name__)

SUPERVISOR = Path(__file__).with_name("process_supervisor.py")
# What a program inherits from us. Everything else, DATABASE_URL included, stays here.
INHERITED = (
    "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR",
)  # fmt: skip
CHUNK = 64 * 1024
STDERR_LINES = 20
EOF_GRACE = 0.7  # seconds a program gets to leave by itself once stdin ends
STOP_GRACE = 2.5  # the supervisor needs 2 s at most to end everything


class StdioProcess:
    """One running program. `messages` and `send` are its wire; `exited` is set when it is gone."""

    side_by_side = False

    def __init__(
        self, max_line: int, stderr_bytes: int, redact: Callable[[str], str], most: int
    ) -> None:
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self._max_line = max_line
        self._stderr = bytearray()
        self._stderr_bytes = stderr_bytes
        self._redact = redact
        self._most = most
        self._stderr_ended = asyncio.Event()
        self._stdin = -1
        self._lifeline = -1
        self._stdout: asyncio.StreamReader
        self._transports: list[asyncio.ReadTransport] = []
        self._drain: asyncio.Task[None]

    async def start(self, program: str, argv: Sequence[str], cwd: str, env: dict[str, str]) -> None:
        """Spawn the supervisor and tell it what to run.

        The order goes through the lifeline, so that no argument shows in a command line of ours.
        """
        lifeline_end, self._lifeline = os.pipe()
        try:
            process = _spawn(lifeline_end, cwd, env)
        except OSError:
            self.exited.set()
            raise UpstreamError(
                "The program could not be started.",
                code="not_executable",
                hint="Check that the working directory exists and can be entered.",
                parked=True,
            ) from None
        finally:
            os.close(lifeline_end)
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        if stdin is None or stdout is None or stderr is None:
            raise RuntimeError("Popen gave no pipes.")
        self._stdin = os.dup(stdin.fileno())
        stdin.close()
        for fd in (self._stdin, self._lifeline):
            os.set_blocking(fd, False)
        _wait_in_thread(process, self)
        self._stdout = await self._reader(stdout)
        self._drain = asyncio.create_task(self._keep_tail(await self._reader(stderr)))
        # Python sets LC_CTYPE for itself in a C locale; the program shall not inherit that.
        unset = [] if "LC_CTYPE" in env else ["LC_CTYPE"]
        order = json.dumps(
            {"program": program, "argv": list(argv), "unset": unset, "most": self._most}
        )
        with suppress(BrokenPipeError):  # it died already: the end of stdout tells
            await _write(self._lifeline, bytearray(order.encode() + b"\n"))

    async def _reader(self, pipe: IO[bytes]) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=CHUNK)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._transports.append(transport)
        return reader

    async def _keep_tail(self, stderr: asyncio.StreamReader) -> None:
        try:
            while chunk := await stderr.read(CHUNK):
                self._stderr += chunk
                if len(self._stderr) > 2 * self._stderr_bytes:
                    del self._stderr[: -self._stderr_bytes]
        finally:
            self._stderr_ended.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield each line of stdout until it ends. A line over the cap ends the connection.

        However many there are at once, others on the loop get their turn meanwhile.
        """
        line = ChunkBuffer()
        while chunk := await self._stdout.read(CHUNK):
            start, began = 0, time.monotonic()
            while (end := chunk.find(b"\n", start)) >= 0:
                self._add(line, chunk[start:end])
                start = end + 1
                if line.size:
                    yield line.take()
                if time.monotonic() - began > TURN:
                    await asyncio.sleep(0)
                    began = time.monotonic()
            self._add(line, chunk[start:])

    def _add(self, line: ChunkBuffer, some: bytes) -> None:
        line.add(some)
        if line.size > self._max_line:
            raise TooLarge("program wrote a line", self._max_line, line.head(HEAD))

    async def send(self, message: bytes, seen: RequestTrace | None) -> None:
        """Write one line. Callers take turns: a line must not be cut by another."""
        left = bytearray(message + b"\n")
        try:
            await _write(self._stdin, left)
        finally:
            # A part of a message means nothing. The end of stdin may do for the end of a line.
            if seen is not None and len(left) > 1:
                seen.sent = False

    def stderr_tail(self) -> str:
        """Return the last lines of stderr, safe to show and to log: our secrets show as ***."""
        text = bytes(self._stderr[-self._stderr_bytes :]).decode("utf-8", "replace")
        text = self._redact(text)
        lines = text.replace("\r\n", "\n").rstrip().split("\n")[-STDERR_LINES:]
        return escape_hidden("\n".join(line[:2000] for line in lines), keep="\n\t")

    async def ended(self, while_what: str) -> UpstreamError:
        """Say how the program ended, once its output has. Waits a second for the exit code."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self.exited.wait()
                await self._stderr_ended.wait()
        detail = self.stderr_tail()
        if self.exit_code is None:
            return UpstreamError(
                f"The program closed its output {while_what}, but is still running.",
                code="closed",
                hint="It may not speak MCP over stdio, or need an argument that makes it do so.",
                detail=detail,
            )
        if self.exit_code == CANNOT_RUN and detail.startswith("toolcrib: cannot run the program"):
            return UpstreamError(
                "The command was found, but this machine cannot run it: it is not a program for "
                "it, or the interpreter it names is missing.",
                code="not_executable",
                hint="Name the interpreter as the command and the file as its first argument.",
                detail=detail,
                parked=True,
            )
        if self.exit_code == TOO_MANY_PROCESSES and detail.endswith(MARK):
            return UpstreamError(
                f"The program was ended {while_what}: it ran more than {self._most:,} processes "
                "and threads at once.",
                code="crashed",
                hint="If it needs that many, raise TOOLCRIB_MAX_PROCESSES.",
                detail=detail,
            )
        how = (
            f"was killed by signal {self.exit_code - 128}"
            if self.exit_code > 128
            else f"exited with code {self.exit_code}"
        )
        return UpstreamError(
            f"The program {how} {while_what}.",
            code="crashed",
            hint="Its last lines on stderr may say why."
            if detail
            else "It wrote nothing to stderr. Run the same command in a shell to see what it does.",
            detail=detail,
        )

    async def stop(self) -> None:
        """End stdin, then everything, in about three seconds at most."""
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
            # The supervisor goes on killing without us: it must not be killed itself.
            logger.warning("A stdio program is slow to end; its supervisor keeps at it.")

    def release(self) -> None:
        """Give back what is left of files and tasks, whatever happened before."""
        for fd in (self._stdin, self._lifeline):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._lifeline = -1
        if hasattr(self, "_drain"):
            self._drain.cancel()
        for transport in self._transports:
            transport.close()


@asynccontextmanager
async def run_process(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    redact: Callable[[str], str],
    max_line: int,
    stderr_bytes: int,
    most: int,
) -> AsyncIterator[StdioProcess]:
    """Run a program for as long as the block lasts, or until it has become more than so many."""
    full_env = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(env)
    program = find_program(argv, cwd, full_env)
    child = StdioProcess(max_line, stderr_bytes, redact, most)
    try:
        try:
            await child.start(program, argv, cwd, full_env)
            yield child
        finally:
            await child.stop()
    finally:
        child.release()


def find_program(argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> str:
    """Return the path of the command, looked up as the program's own environment would."""
    if cwd and not Path(cwd).is_dir():
        raise UpstreamError(
            "The working directory does not exist.",
            code="command_not_found",
            hint="Correct it, or leave it empty.",
            parked=True,
        )
    if not argv or not argv[0]:
        raise UpstreamError("The command is empty.", code="command_not_found", parked=True)
    if any("\0" in text for text in (*argv, *env, *env.values())):
        raise UpstreamError(
            "An argument or variable holds a NUL character.", code="not_executable", parked=True
        )
    if any(not name or "=" in name for name in env):
        raise UpstreamError(
            "A variable has a name that no variable can have.", code="not_executable", parked=True
        )
    if "/" in argv[0]:
        path = Path(cwd or ".", argv[0]).absolute()
        found = str(path) if path.is_file() else None
        if found and not os.access(found, os.X_OK):
            raise UpstreamError(
                "The command is a file that may not be executed.",
                code="not_executable",
                hint="Make it executable (chmod +x) or name its interpreter as the command.",
                parked=True,
            )
    else:
        found = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    if not found:
        raise UpstreamError(
            "The command was not found on this machine.",
            code="command_not_found",
            hint="Install it, or give its full path. PATH is that of the Toolcrib process.",
            parked=True,
        )
    return str(Path(found).absolute())


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
    """Collect the exit code off the loop: child watchers differ between loops and threads."""
    loop = asyncio.get_running_loop()

    def tell(code: int) -> None:
        child.exit_code = 128 - code if code < 0 else code
        child.exited.set()

    def wait() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop has ended before the program
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="stdio-wait", daemon=True).start()


async def _write(fd: int, left: bytearray) -> None:
    """Write all of it without blocking the loop, however slowly the other side reads.

    What was written is no longer in `left`.
    """
    loop = asyncio.get_running_loop()
    while left:
        try:
            del left[: os.write(fd, left)]
        except BlockingIOError:
            writable = asyncio.Event()
            loop.add_writer(fd, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(fd)
