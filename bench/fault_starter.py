"""Fast restarts by forking a process with all modules imported, for rows with many restarts.

Most of a start is importing modules. `Starter` runs a process that has only imported them; it
forks, and the fork continues as `manage.py serve` with the same data, port and settings. All other
work of a restart (tables, recovery, connections, caches) happens in the fork. Rows that use this
also do a full start at intervals.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.support.installation import READY, Installation, descendants, is_alive  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402


class Forked:
    """The interface of Process for a process that is not our child."""

    def __init__(self, pid: int, out: Path, err: Path) -> None:
        self.pid, self._out, self._err = pid, out, err

    @property
    def running(self) -> bool:
        return is_alive(self.pid)

    @property
    def log(self) -> str:
        return self._out.read_text() + self._err.read_text()

    def wait_for_line(self, prefix: str, seconds: float = 60) -> str:
        def find_line() -> str | None:
            lines = self._out.read_text().split("\n")[:-1]
            return next((line for line in lines if line.startswith(prefix)), None)

        wait_for(lambda: find_line() is not None or not self.running, seconds, every=0.02)
        line = find_line()
        assert line is not None, f"the forked process printed no line {prefix!r}:\n{self.log}"
        return line.removeprefix(prefix)

    def children(self) -> list[int]:
        return descendants(self.pid)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> float:
        started = time.monotonic()
        if self.running:
            os.kill(self.pid, number)
        wait_for(lambda: not self.running, seconds, what="the installation exits")
        return time.monotonic() - started

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it is dead already
            os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not self.running, 30, every=0.01, what="the installation is dead")


class Starter:
    """Starts an installation repeatedly: `with Starter(toolcrib) as quick: quick.start()`."""

    def __init__(self, toolcrib: Installation) -> None:
        self.toolcrib = toolcrib
        self.starts = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env=self.toolcrib.env, cwd=self.toolcrib.cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def start(self) -> None:
        """Start the installation and wait for its ready line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.starts += 1
        folder = self.toolcrib.data_dir.parent
        out, err = folder / "forked-out", folder / "forked-err"
        out.write_text("")
        err.write_text("")
        self._process.stdin.write(f"{out}\t{err}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        forked = Forked(pid, out, err)
        self.toolcrib.process = forked  # type: ignore[assignment]
        self.toolcrib.ready_line = forked.wait_for_line(READY)

    def __exit__(self, *exc: object) -> None:
        """Stop the forking process, and restart the installation normally."""
        normal = not isinstance(self.toolcrib.process, Forked)
        if not normal:
            self.toolcrib.kill()
        self._process.kill()
        self._process.communicate()
        if not normal:
            self.toolcrib.start()


# --- In the forking process -----------------------------------------------------------------------


def import_modules() -> None:
    """Import the modules of `manage.py serve` without running it."""
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
    django.setup()
    from django.urls import get_resolver

    import toolcrib.config.databases
    import toolcrib.management.commands.serve  # noqa: F401

    assert get_resolver().url_patterns
    assert threading.active_count() == 1, threading.enumerate()


def become_installation(out: str, err: str) -> NoReturn:
    """Continue as `manage.py serve` after its imports."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 256)
    from django.core.management import execute_from_command_line

    from toolcrib.config.databases import make_tables_if_new
    from toolcrib.lib.process_identity import this_process

    # The only state of the modules that depends on the process. A module that kept the identity of
    # the forking process, which lives on, would make recovery wait for leases and deadlines.
    for module in list(sys.modules.values()):
        if "THIS_PROCESS" in vars(module):
            vars(module)["THIS_PROCESS"] = this_process()
    sys.argv = ["manage.py", "serve"]
    make_tables_if_new(sys.argv[1:2])
    execute_from_command_line(sys.argv)
    os._exit(0)


def main() -> None:
    import_modules()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed children are reaped automatically
    for line in sys.stdin:
        out, err = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            try:
                become_installation(out, err)
            finally:
                os._exit(1)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
