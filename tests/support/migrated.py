"""A migrated, empty SQLite database, made once for each set of migrations and copied.

Migrating takes longer than anything else in the start of a new installation. Tests of that start
ask for an installation without it.
"""

import fcntl
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "migrated"
DATABASE = "toolcrib.sqlite3"


def copy_database(data_dir: Path, env: Mapping[str, str]) -> None:
    """Copy the database into a data folder that does not exist yet, or is empty."""
    if data_dir.exists() and (any(data_dir.iterdir()) or not os.access(data_dir, os.W_OK)):
        return
    template = _template(env)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = data_dir / DATABASE
    shutil.copyfile(template, target)
    target.chmod(0o600)


def _template(env: Mapping[str, str]) -> Path:
    """Return the migrated database, made by the first process that needs it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    template = CACHE / f"{_digest()}.sqlite3"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not template.exists():
            for old in CACHE.glob("*.sqlite3"):
                old.unlink()
            _make(template, env)
    return template


def _digest() -> str:
    """Return a digest of all migrations, of the packages used, and of how the file is made."""
    digest = hashlib.sha256((ROOT / "requirements.lock").read_bytes())
    digest.update(Path(__file__).read_bytes())
    for path in sorted(ROOT.glob("*/migrations/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _make(template: Path, env: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="toolcrib-migrated-") as folder:
        subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), "migrate", "-v0"],
            env={**env, "TOOLCRIB_DATA": folder},
            cwd=ROOT,
            check=True,
        )
        with closing(sqlite3.connect(Path(folder) / DATABASE)) as database:
            with database:  # every installation makes its own, with its own encryption key
                database.execute("DELETE FROM sessions_app_datakey")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        part = template.with_suffix(".part")
        shutil.copyfile(Path(folder) / DATABASE, part)
    part.rename(template)
