"""Process identity for leases, and the heartbeat file of background processes.

A lease of a process that died on this machine is taken over at once instead of at its expiry.
Containers may share a host name and have separate PIDs, so a holder is identified by host, PID
namespace, root file system of its container, PID and start time. Imports no Django.
"""

import hashlib
import os
import re
import socket
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def this_process() -> str:
    """Return the identity of this process, as stored in leases."""
    return f"{_host()}/{_namespace()}/{_root()} {os.getpid()} {_started(os.getpid())}"


def is_dead(holder: str) -> bool:
    """Return True only if certain: same machine, and the process ended or its PID was reused."""
    place, _, pid = holder.rpartition(" ")[0].rpartition(" ")
    host, *container = place.split("/")
    if not host or host != _host() or not pid.isdecimal():
        return False
    # Holders written by earlier versions have a host name only and skip the container check.
    if len(container) == 2 and container[0] != _namespace():
        # A container has one namespace at a time: it was restarted, and the old one ended.
        return bool(container[1]) and container[1] == _root()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(int(pid)) != holder.rpartition(" ")[2]


def heartbeat_file() -> Path | None:
    """Return the file named by TOOLCRIB_HEARTBEAT, if it is set."""
    path = os.environ.get("TOOLCRIB_HEARTBEAT")
    return Path(path) if path else None


def touch_heartbeat() -> None:
    """Record that this process has just done its work, for the container health check."""
    path = heartbeat_file()
    if path is not None:
        path.touch(mode=0o600)


def _host() -> str:
    return socket.gethostname()[:150].replace("/", "-")


def _namespace() -> str:
    """Return the inode of this PID namespace; 0 where there is no /proc."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


def _root() -> str:
    """Return a hash of the container's root file system, stable across restarts, or ""."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return ""
    match = re.search(r"^(?:\S+ ){4}/ .* - overlay .*?upperdir=([^,\s]+)", mounts, re.MULTILINE)
    return hashlib.sha256(match[1].encode()).hexdigest()[:12] if match else ""


def _started(pid: int) -> str:
    """Return a process's start time in kernel ticks; 0 where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
