"""Loaded before Django's settings: tests never touch an installation's own data folder."""

import os
import tempfile

_folder = tempfile.TemporaryDirectory(prefix="toolcrib-tests-")
os.environ["TOOLCRIB_DATA"] = _folder.name
for _name in ("DATABASE_URL", "REDIS_URL", "DEBUG", "TOOLCRIB_ALLOW_STDIO", "TOOLCRIB_BIND", "PORT"):
    os.environ.pop(_name, None)
