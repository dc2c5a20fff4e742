"""Which process holds a lease, and whether one that does still lives. Pure.

A lease of a process that died on this machine need not run out: the next one takes it at once.
Containers may share a host's name and count their processes apart, so a holder is named with the
PID namespace that its number is of, and with the root file system of its container.
"""

import hashlib
import os
import re
import socket
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def this_process() -> str:
    return f"{_host()}/{_namespace()}/{_root()} {os.getpid()} {_started(os.getpid())}"


def is_dead(holder: str) -> bool:
    """True only where it is certain: same machine, and the process is gone or another one."""
    place, _, rest = holder.rpartition(" ")[0].rpartition(" ")
    host, *more = place.split("/")
    if not host or host != _host() or not rest.isdecimal():
        return False
    # Holders of before have a host's name only, and are judged as they were.
    if len(more) == 2 and more[0] != _namespace():
        # One container has one namespace at a time: it was restarted, and that one is gone.
        return bool(more[1]) and more[1] == _root()
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(int(rest)) != holder.rpartition(" ")[2]


def _host() -> str:
    return socket.gethostname()[:150].replace("/", "-")


def _namespace() -> str:
    """The number of our PID namespace; the same for all where there is none."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


def _root() -> str:
    """What marks the root file system of our container, restarts included; empty outside one."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return ""
    found = re.search(r"^(?:\S+ ){4}/ .* - overlay .*?upperdir=([^,\s]+)", mounts, re.MULTILINE)
    return hashlib.sha256(found[1].encode()).hexdigest()[:12] if found else ""


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; the same for all where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
