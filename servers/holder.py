"""Which process holds a lease, and whether one that does still lives. Pure.

A lease of a process that died on this machine need not run out: the next one takes it at once.
"""

import os
import socket
from pathlib import Path


def this_process() -> str:
    return f"{socket.gethostname()[:150]} {os.getpid()} {_started(os.getpid())}"


def is_dead(holder: str) -> bool:
    """True only where it is certain: same machine, and the process is gone or another one."""
    host, _, rest = holder.rpartition(" ")[0].rpartition(" ")
    if not host or host != socket.gethostname()[:150] or not rest.isdecimal():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(int(rest)) != holder.rpartition(" ")[2]


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; the same for all where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
