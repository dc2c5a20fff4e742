"""Run one program so that nothing of it outlives the process that asked for it.

Started by stdio.py as `python -I -S process_supervisor.py FD`; standard library only, no project
import. FD is the read end of a lifeline. Its first line says what to run; then it stays open, and
its end, whether by close, crash or SIGKILL of the other side, is the order to stop. Exits with the
program's status, 128+n when signal n killed it, 126 when it could not be executed, 125 when it was
ended since it had become too many.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
LOOK = 0.5  # seconds between two looks at how many it has become
ALWAYS, UNTOLD = 60, 4  # looks after which they are counted whatever the machine tells
CANNOT_RUN, TOO_MANY_PROCESSES = 126, 125
MARK = "toolcrib: ended, since it ran too many processes"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set a process attribute on Linux. Elsewhere the process group has to do."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError, ImportError):
            import ctypes  # some builds of Python lack it

            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def read_order(lifeline: int) -> dict[str, object] | None:
    """Return the first line of the lifeline, or None when it ended before."""
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = os.read(lifeline, 65536)
        if not chunk:
            return None
        received += chunk
    order: dict[str, object] = json.loads(received)
    return order


def execute(program: str, argv: list[str], parent: int) -> None:
    """Become the program. Never returns."""
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the supervisor died before the line above
        os._exit(CANNOT_RUN)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, argv, os.environ)  # noqa: S606 - no shell, on purpose
    except OSError as error:
        os.write(2, f"toolcrib: cannot run the program: {error.strerror}\n".encode())
    os._exit(CANNOT_RUN)


def descendants() -> dict[int, int]:
    """Return every process below this one and its threads: orphans come to us, the subreaper."""
    known: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                after_name = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if after_name[0] != b"Z":
                    known[int(entry.name)] = int(after_name[1]), int(after_name[17])
    found: dict[int, int] = {}
    grew = {os.getpid()}
    while grew:
        grew = {pid for pid, (parent, _) in known.items() if parent in grew and pid not in found}
        found |= {pid: known[pid][1] for pid in grew}
    return found


class ProcessCount:
    """Tells when the program has become more processes and threads than it may be.

    To count them takes milliseconds, so it is done only where the machine has more than before.
    """

    def __init__(self, most: int) -> None:
        self.most, self.looks, self.over = most, 0, False
        self.before = self.on_machine()

    def on_machine(self) -> int:
        try:
            return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        except (OSError, ValueError, IndexError):
            return 0

    def is_too_large(self) -> bool:
        now = self.on_machine()
        self.looks += 1
        self.before = min(now, self.before)
        # Now and then in any case: others may have ended meanwhile, or the machine does not tell.
        due = self.looks % (ALWAYS if now else UNTOLD) == 0
        if now - self.before <= self.most // 10 and not due:
            return False
        self.before = now
        self.over = sum(descendants().values()) > self.most
        return self.over


def reap(pid: int) -> int | None:
    """Collect every dead child; return the exit status of `pid` when it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            dead, raw = os.waitpid(-1, os.WNOHANG)
            if dead == 0:
                break
            if dead == pid:
                code = os.waitstatus_to_exitcode(raw)
                status = code if code >= 0 else 128 - code
    return status


def kill_all(group: int) -> None:
    """Kill the group and every descendant, until none is left that we may kill."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    while pids := descendants():
        killed = [pid for pid in pids if kill(pid)]
        if not killed:  # programs of another user, by set-uid: not ours to end
            return
        reap(0)
        time.sleep(0.01)
    reap(0)


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def watch(pid: int, lifeline: int, wakeup: int, crowd: ProcessCount) -> int | None:
    """Wait for the program to end, or for the order to stop it. Return its status if it ended."""
    deadline: float | None = None
    while True:
        timeout = LOOK if deadline is None else max(0.0, deadline - time.monotonic())
        sources = [wakeup] if deadline else [wakeup, lifeline]
        ready, _, _ = select.select(sources, [], [], timeout)
        stop = lifeline in ready and not os.read(lifeline, 4096)
        if wakeup in ready:
            signals = os.read(wakeup, 4096)
            stop = stop or signal.SIGTERM in signals or signal.SIGHUP in signals
        status = reap(pid)
        if status is not None:
            return status
        if deadline is not None and time.monotonic() >= deadline:
            return None
        if crowd.is_too_large():
            return TOO_MANY_PROCESSES
        if stop and deadline is None:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE


def main() -> int:
    lifeline = int(sys.argv[1])
    os.set_inheritable(lifeline, False)
    if os.getsid(0) != os.getpid():
        os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    order = read_order(lifeline)
    if order is None:
        return CANNOT_RUN
    for name in list(order["unset"]):  # type: ignore[call-overload]
        os.environ.pop(name, None)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    supervisor, crowd = os.getpid(), ProcessCount(int(str(order["most"])))
    pid = os.fork()
    if pid == 0:
        execute(str(order["program"]), list(order["argv"]), supervisor)  # type: ignore[call-overload]
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # whichever of the two comes first
    # The program alone holds its pipes, so that their end means what it seems to mean.
    told = os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    status = watch(pid, lifeline, wakeup, crowd)
    kill_all(pid)
    if crowd.over:
        with contextlib.suppress(OSError):
            os.write(told, f"\n{MARK}\n".encode())
    return 128 + signal.SIGKILL if status is None else status


if __name__ == "__main__":
    sys.exit(main())
