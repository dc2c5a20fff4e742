"""Landlock: deny a process and its descendants access to folders and files (Linux 5.19 or later).

Standard library only, no project import: process_supervisor.py loads it by path. Landlock only
grants, and always to a whole folder. So everything is granted but the denied paths: of each folder
on the way to one, the other entries, as they are at that moment. New entries of such a folder are
not accessible, and none can be created in it. Names can be listed everywhere.
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Collection

MIN_ABI = 2  # version 1 forbids all moves between folders
SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
SCOPE_SIGNAL = 1 << 1
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 38, 24
# Of root: chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, net_raw,
# sys_chroot, audit_write, setfcap; as in containers, without those to make devices.
KEPT_CAPABILITIES = frozenset([0, 1, 3, 4, 5, 6, 7, 10, 13, 18, 29, 31])

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << bit for bit in range(4))
EVERYTHING = (1 << 14) - 1  # to MAKE_SYM, and REFER: moves between folders
TRUNCATE = 1 << 14  # from version 3
READ_ONLY = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE


def _syscall(number: int, *args: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(ctypes.c_long(number), *args)
    return result


def abi_version() -> int:
    """Return the version of Landlock in this kernel; 0 if it is missing or disabled."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION))


class Ruleset:
    """Grants everything but `denied`, and only reading and executing in `read_only`."""

    def __init__(self, denied: Collection[str], read_only: Collection[str] = ()) -> None:
        version = abi_version()
        if version < MIN_ABI:
            raise OSError("Landlock is not available.")
        self._all = EVERYTHING | (TRUNCATE if version >= 3 else 0)
        if os.geteuid() == 0:
            denied = [*denied, *_raw_devices()]
        self._denied, self._read_only = frozenset(denied), frozenset(read_only)
        self._split = {parent for path in (*denied, *read_only) for parent in _parents(path)}
        attributes = struct.pack("=QQQ", self._all, 0, SCOPE_SIGNAL)
        size = 24 if version >= 6 else 8  # signals to other processes are denied from version 6
        self._fd = _syscall(SYS_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "Landlock rejected the ruleset")
        self._add("/", READ_DIR)
        self._grant("/", is_dir=True, access=self._all)

    def _grant(self, path: str, *, is_dir: bool, access: int) -> None:
        if path in self._denied:
            return
        if path in self._read_only:
            access = READ_ONLY
        if path not in self._split:
            self._add(path, access if is_dir else access & OF_FILES)
            return
        try:
            entries = list(os.scandir(path))
        except OSError:  # not readable for this user
            return
        for entry in entries:
            if not entry.is_symlink():  # access through a link is decided by its target
                self._grant(entry.path, is_dir=entry.is_dir(follow_symlinks=False), access=access)

    def _add(self, path: str, access: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed since
            return
        try:
            rule = struct.pack("=Qi", access & self._all, fd)
            _syscall(SYS_ADD_RULE, self._fd, RULE_PATH_BENEATH, rule, 0)
        finally:
            os.close(fd)

    def apply(self) -> None:
        """Restrict this process for good. Setuid programs gain no rights from now on."""
        library = ctypes.CDLL(None, use_errno=True)
        if os.geteuid() == 0:  # root could read other processes and disks without opening a file
            for capability in range(64):
                if capability not in KEPT_CAPABILITIES:
                    library.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _syscall(
            SYS_RESTRICT_SELF, self._fd, 0
        ):
            raise OSError(ctypes.get_errno(), "Landlock could not be applied")
        os.close(self._fd)


def _raw_devices() -> list[str]:
    """Return the disks and the memory of the machine, as devices."""
    with os.scandir("/dev") as entries:
        return [
            entry.path
            for entry in entries
            if entry.name in ("mem", "kmem", "port")
            or stat.S_ISBLK(entry.stat(follow_symlinks=False).st_mode)
        ]


def _parents(path: str) -> list[str]:
    parents = []
    while (parent := os.path.dirname(path)) != path:  # noqa: PTH120 - pathlib is slower to start
        parents.append(parent)
        path = parent
    return parents
