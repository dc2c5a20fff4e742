"""Loaded before Django's settings: tests never touch an installation's own data folder.

TEST_DATABASE_URL runs the tests of the apps on PostgreSQL; tests/production does so.
"""

import os
import tempfile
from pathlib import Path

_folder = tempfile.TemporaryDirectory(prefix="toolcrib-tests-")
for _name in list(os.environ):
    if _name.startswith("TOOLCRIB_") or _name in {"DATABASE_URL", "REDIS_URL", "DEBUG", "PORT"}:
        del os.environ[_name]
os.environ["TOOLCRIB_DATA"] = _folder.name
# Prepared once for all tests; those that search by meaning ask for it.
os.environ["TOOLCRIB_MODELS"] = str(Path(__file__).resolve().parents[2] / ".cache" / "models")
os.environ["TOOLCRIB_EMBEDDINGS"] = "0"
if "TEST_DATABASE_URL" in os.environ:
    os.environ |= {
        "DATABASE_URL": os.environ["TEST_DATABASE_URL"],
        "REDIS_URL": "redis://127.0.0.1:1/0",  # nobody there: what needs Redis is tested elsewhere
        "TOOLCRIB_SECRET_KEY": "k" * 48,
        "TOOLCRIB_ENCRYPTION_KEYS": "e" * 48,
        "TOOLCRIB_HOSTS": "testserver,localhost",
        "TOOLCRIB_HTTPS": "0",
        "TOOLCRIB_ALLOW_STDIO": "1",
        "TOOLCRIB_ALLOW_PLAIN_HTTP": "1",
        "TOOLCRIB_ALLOWED_NETWORKS": "127.0.0.0/8,::1/128",
    }
