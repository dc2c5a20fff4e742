"""Restarts in a fraction of the time, for rows that need hundreds.

Most of a start is Python reading modules. `Starter` keeps a process that has read them and done
nothing else; it forks, and the fork goes on as `manage.py serve` does, on the same data, port and
settings. What a restart is about (tables, recovery, connections, caches) happens in the fork.
Each row that uses this starts as usual now and then, too.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn, Self

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.support.installation import READY, Installation, descendants, is_alive  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402


class Forked:
    """A process that is not our child, as far as an Installation and the rows need one."""

    def __init__(self, pid: int, out: Path, err: Path) -> None:
        self.pid, self._out, self._err = pid, out, err

    @property
    def running(self) -> bool:
        return is_alive(self.pid)

    @property
    def log(self) -> str:
        return self._out.read_text() + self._err.read_text()

    def wait_for_line(self, start: str, seconds: float = 60) -> str:
        def found() -> str | None:
            lines = self._out.read_text().split("\n")[:-1]
            return next((line for line in lines if line.startswith(start)), None)

        wait_for(lambda: found() is not None or not self.running, seconds, every=0.02)
        line = found()
        assert line is not None, f"a forked start said no line {start!r}:\n{self.log}"
        return line.removeprefix(start)

    def children(self) -> list[int]:
        return descendants(self.pid)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> float:
        began = time.monotonic()
        if self.running:
            os.kill(self.pid, number)
        wait_for(lambda: not self.running, seconds, what="the installation ends")
        return time.monotonic() - began

    def kill(self) -> None:
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not self.running, 30, every=0.01, what="the installation is dead")


class Starter:
    """Starts an installation again and again. `with Starter(toolcrib) as quick: quick.start()`."""

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
        """Start it and wait until it says that it can be reached."""
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
        """End it, and leave the installation as it found it: started as usual."""
        usual = not isinstance(self.toolcrib.process, Forked)
        if not usual:
            self.toolcrib.kill()
        self._process.kill()
        self._process.communicate()
        if not usual:
            self.toolcrib.start()


# --- In the process that forks --------------------------------------------------------------------


def read_modules() -> None:
    """Read what `manage.py serve` reads, up to the first thing it does."""
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
    django.setup()
    from django.urls import get_resolver

    import toolcrib.config.databases
    import toolcrib.management.commands.serve  # noqa: F401

    assert get_resolver().url_patterns
    assert threading.active_count() == 1, threading.enumerate()


def become_installation(out: str, err: str) -> NoReturn:
    """Go on as `manage.py serve` does after its imports."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 256)
    from django.core.management import execute_from_command_line

    from sessions_app.dispatch import planner
    from sessions_app.ledger import calls as call_ledger
    from toolcrib.config.databases import make_tables_if_new
    from toolcrib.lib.process_identity import this_process

    # The one thing a module knows of the process that read it.
    for module in (call_ledger, planner):
        vars(module)["THIS_PROCESS"] = this_process()
    sys.argv = ["manage.py", "serve"]
    make_tables_if_new(sys.argv[1:2])
    execute_from_command_line(sys.argv)
    os._exit(0)


def main() -> None:
    read_modules()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that were killed
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
