"""Process supervisor: run one program and kill it with all its descendants when the parent ends.

Started by stdio.py as `python -I -S process_supervisor.py FD`; standard library only, no project
import. FD is the read end of a pipe, the lifeline. Its first line is the command. The lifeline then
stays open; its end (close, crash or SIGKILL of the parent) is the request to stop. Exits with the
program's status, 128+n when signal n killed it, 126 when it could not be executed, 125 when it
exceeded the limit of processes and threads.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
CHECK_INTERVAL = 0.5  # seconds between two checks of the process limit
# Every n-th check counts in any case: with, and without a system-wide count in /proc/loadavg.
COUNT_EVERY, COUNT_EVERY_UNKNOWN = 60, 4
CANNOT_RUN, TOO_MANY_PROCESSES = 126, 125
TOO_MANY_MESSAGE = "toolcrib: killed: too many processes"
SANDBOX_FAILED = "toolcrib: cannot restrict the program"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38


def prctl(option: int, value: int) -> None:
    """Set a process attribute on Linux. On other systems only the process group is killed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError, ImportError):
            import ctypes  # missing in some builds of Python

            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def read_command(lifeline: int) -> dict[str, Any] | None:
    """Return the first line of the lifeline, or None when the lifeline ended before."""
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = os.read(lifeline, 65536)
        if not chunk:
            return None
        received += chunk
    command: dict[str, Any] = json.loads(received)
    return command


def restrict(sandbox: dict[str, Any]) -> None:
    """Give up rights: limits, the user, then access to paths. See sandbox.py."""
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, sandbox["memory"])]
    if "cpu" in sandbox:
        limits.append((resource.RLIMIT_CPU, sandbox["cpu"]))
    if sandbox["processes"]:
        limits.append((resource.RLIMIT_NPROC, sandbox["processes"]))
    ruleset = None
    if sandbox["denied"] is not None:
        # Last in the path: the folder has modules named as some of the standard library.
        sys.path.append(str(Path(__file__).parent))
        import landlock  # type: ignore[import-not-found]  # servers.transports.landlock

        ruleset = landlock.Ruleset(sandbox["denied"], sandbox["read_only"])
    for limit, value in limits:
        if value or limit == resource.RLIMIT_CORE:
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
    if sandbox["user"]:
        name, uid, gid = sandbox["user"]
        os.initgroups(name, gid)
        os.setgid(gid)
        os.setuid(uid)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    if ruleset is not None:
        ruleset.apply()


def execute(program: str, argv: list[str], parent: int, sandbox: dict[str, Any]) -> None:
    """Replace this process with the program. Never returns."""
    os.setpgid(0, 0)
    try:
        restrict(sandbox)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program must not start
        os.write(2, f"{SANDBOX_FAILED}: {error}\n".encode())
        os._exit(CANNOT_RUN)
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
    """Map the pid of each descendant, orphans included, to its thread count."""
    processes: dict[int, tuple[int, int]] = {}  # pid: parent, threads
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                after_name = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if after_name[0] != b"Z":
                    processes[int(entry.name)] = int(after_name[1]), int(after_name[17])
    found: dict[int, int] = {}
    parents = {os.getpid()}
    while parents:
        children = {pid for pid, (parent, _) in processes.items() if parent in parents}
        parents = children - found.keys()
        found |= {pid: processes[pid][1] for pid in parents}
    return found


class ProcessCount:
    """Checks the program's processes and threads against a limit, if those of the machine grew."""

    def __init__(self, limit: int) -> None:
        self.limit, self.checks, self.exceeded = limit, 0, False
        self.baseline = self.count_on_machine()

    def count_on_machine(self) -> int:
        """Return the processes and threads of the machine; 0 where unknown."""
        try:
            return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        except (OSError, ValueError, IndexError):
            return 0

    def is_exceeded(self) -> bool:
        now = self.count_on_machine()
        self.checks += 1
        self.baseline = min(now, self.baseline)
        # Count regularly in any case: exits elsewhere may hide growth, or the count is unknown.
        due = self.checks % (COUNT_EVERY if now else COUNT_EVERY_UNKNOWN) == 0
        if now - self.baseline <= self.limit // 10 and not due:
            return False
        self.baseline = now
        self.exceeded = sum(descendants().values()) > self.limit
        return self.exceeded


def reap(pid: int) -> int | None:
    """Reap all dead children; return the exit status of `pid` if it is one of them."""
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
    """Kill the group and all descendants, until none is left that may be killed."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    while pids := descendants():
        killed = [pid for pid in pids if kill(pid)]
        if not killed:  # setuid programs of another user: no permission to kill them
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


def watch(pid: int, lifeline: int, wakeup: int, count: ProcessCount) -> int | None:
    """Wait for the program to exit or the request to stop it. Return its status if it exited."""
    deadline: float | None = None
    while True:
        timeout = CHECK_INTERVAL if deadline is None else max(0.0, deadline - time.monotonic())
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
        if count.is_exceeded():
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
    command = read_command(lifeline)
    if command is None:
        return CANNOT_RUN
    for name in command["unset"]:
        os.environ.pop(name, None)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    supervisor, count = os.getpid(), ProcessCount(command["max_processes"])
    pid = os.fork()
    if pid == 0:
        execute(command["program"], command["argv"], supervisor, command["sandbox"])
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # also done by the child: either may run first
    # Keep only the program's own copies of the pipes open, so that EOF means it closed them.
    original_stderr = os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    status = watch(pid, lifeline, wakeup, count)
    kill_all(pid)
    if count.exceeded:
        with contextlib.suppress(OSError):
            os.write(original_stderr, f"\n{TOO_MANY_MESSAGE}\n".encode())
    return 128 + signal.SIGKILL if status is None else status


if __name__ == "__main__":
    sys.exit(main())
