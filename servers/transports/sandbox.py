"""Sandbox of stdio programs: what a program must not access, its user and its limits.

Decided here and applied by process_supervisor.py in the child, between fork and exec: no access to
Toolcrib's data folder and key files, and no changes to Toolcrib's code (landlock.py); the user
TOOLCRIB_STDIO_USER; a limit on memory.
"""

import logging
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from django.conf import settings

from servers.errors import ParkedError
from servers.transports import landlock

logger = logging.getLogger(__name__)

# Environment variables that a program inherits; no others, such as DATABASE_URL.
INHERITED = (
    "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR",
)  # fmt: skip
CODE = ("catalog", "servers", "sessions_app", "static", "templates", "toolcrib", "manage.py")
# Folders in the home folder where package runners store what they download.
CACHE_FOLDERS = (".cache", ".config", ".local", ".npm")


@dataclass(frozen=True)
class Sandbox:
    """How programs are restricted on this machine."""

    landlock: bool
    user: pwd.struct_passwd | None  # other than Toolcrib's own
    reason: str = ""  # why Landlock is not used

    @property
    def is_root(self) -> bool:
        """Return whether programs run as root, which Landlock restricts but does not confine."""
        return self.user is None and os.geteuid() == 0

    @property
    def protects_data(self) -> bool:
        return self.landlock or self.user is not None

    @property
    def sentence(self) -> str:
        """Describe the sandbox for the server's page and the log."""
        parts = []
        if self.landlock:
            parts.append("No access to Toolcrib's data folder and keys (Landlock).")
        if self.user:
            parts.append(f"Runs as the user {self.user.pw_name}.")
        if self.landlock and self.is_root:
            parts.append(
                "Runs as root, which could get around this by changing files of the system."
            )
        if not self.protects_data:
            parts.append("The program can read Toolcrib's keys and database.")
        return " ".join([*parts, self.reason]).strip()


def current() -> Sandbox:
    user = pwd.getpwnam(settings.STDIO_USER) if settings.STDIO_USER else None
    if user and user.pw_uid == os.geteuid():
        user = None
    if not settings.STDIO_LANDLOCK:
        return Sandbox(False, user, "Landlock is disabled by TOOLCRIB_STDIO_LANDLOCK.")
    if landlock_version() < landlock.MIN_ABI:
        return Sandbox(False, user, "Landlock needs Linux 5.19 or later with Landlock enabled.")
    return Sandbox(True, user)


@lru_cache(maxsize=1)
def landlock_version() -> int:
    return landlock.abi_version()


@lru_cache(maxsize=8)
def warn_once(sentence: str) -> None:
    logger.warning(
        "Stdio programs run with Toolcrib's rights. %s Set TOOLCRIB_STDIO_USER to run them as "
        "another user.",
        sentence,
    )


def prepare(sandbox: Sandbox, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program, and create its cache and temporary folders."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    uid = os.geteuid()
    if sandbox.user:
        uid, own_home = sandbox.user.pw_uid, _home_of(sandbox.user)
        inherited |= dict.fromkeys(("USER", "LOGNAME"), sandbox.user.pw_name)
        inherited |= {"HOME": own_home, "XDG_CACHE_HOME": f"{own_home}/.cache"}
    if sandbox.landlock:
        # No program can create files directly in a folder that contains one of these.
        restricted = [Path(path) for path in (*denied_paths(), *read_only_paths())]
        temporary = Path(inherited.get("TMPDIR") or tempfile.gettempdir()).resolve()
        if any(path.is_relative_to(temporary) for path in restricted):
            inherited["TMPDIR"] = _private_folder(temporary / f"toolcrib-programs-{uid}", uid)
        home = Path(inherited.get("HOME") or "/").resolve()
        if not sandbox.user and any(path.is_relative_to(home) for path in restricted):
            for name in CACHE_FOLDERS:
                (home / name).mkdir(mode=0o700, exist_ok=True)
    return inherited | dict(env)


def _home_of(user: pwd.struct_passwd) -> str:
    """Return the user's home folder, or one of its own where it has none, as nobody."""
    home = Path(user.pw_dir)
    if home.is_dir() and home.stat().st_uid == user.pw_uid:
        return str(home)
    return _private_folder(Path("/var/tmp") / f"toolcrib-{user.pw_name}", user.pw_uid)  # noqa: S108


def _private_folder(path: Path, uid: int) -> str:
    """Create a folder that only the user can access; refuse one that somebody else prepared."""
    try:
        path.mkdir(mode=0o700)
        if uid != os.geteuid():
            os.chown(path, uid, -1)
    except FileExistsError:
        pass
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o022:
        raise ParkedError(
            f"{path} is not a private folder of the user that runs programs.",
            code="sandbox",
            hint="Remove it, or set TMPDIR or the user's home folder.",
        )
    return str(path)


def denied_paths() -> list[str]:
    """Return the data folder and the files with secrets, as far as they exist."""
    paths = [settings.DATA_DIR, *settings.SECRET_FILES]
    return [str(path) for path in paths if path.exists()]


def read_only_paths() -> list[str]:
    """Return Toolcrib's code and its Python: a change to them would run with Toolcrib's rights."""
    code = [settings.BASE_DIR / name for name in CODE]
    paths = {str(path.resolve()) for path in (*code, Path(sys.prefix), Path(sys.base_prefix))}
    return sorted(paths - {"/", "/usr"})  # a Python of the system belongs to root


def check_paths(sandbox: Sandbox, *paths: str) -> None:
    """Raise if the program or its working directory is in the data folder."""
    denied = denied_paths() if sandbox.landlock else []
    if any(Path(path).resolve().is_relative_to(name) for path in paths if path for name in denied):
        raise ParkedError(
            "The command or its working directory is in Toolcrib's data folder, which programs "
            "cannot access.",
            code="sandbox",
            hint="Move it to another folder.",
        )


def instructions(sandbox: Sandbox) -> dict[str, object]:
    """Return what the supervisor applies to the program, as JSON values."""
    user = sandbox.user
    return {
        "denied": denied_paths() if sandbox.landlock else None,
        "read_only": read_only_paths(),
        "user": [user.pw_name, user.pw_uid, user.pw_gid] if user else None,
        "memory": settings.MAX_PROGRAM_MEMORY * 1024 * 1024,
        # Of the user, where it runs nothing else; the supervisor counts in any case.
        "processes": settings.MAX_PROCESSES if user else 0,
    }
