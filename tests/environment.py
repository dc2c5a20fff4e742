"""Loaded before Django's settings: tests never touch an installation's own data folder."""

import os
import tempfile

_folder = tempfile.TemporaryDirectory(prefix="toolcrib-tests-")
for _name in list(os.environ):
    if _name.startswith("TOOLCRIB_") or _name in {"DATABASE_URL", "REDIS_URL", "DEBUG", "PORT"}:
        del os.environ[_name]
os.environ["TOOLCRIB_DATA"] = _folder.name
