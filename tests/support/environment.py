"""Pytest plugin that sets the environment before Django's settings are loaded.

Tests use a temporary data folder. With TEST_DATABASE_URL they run on PostgreSQL, as in
tests/e2e/production/test_on_postgres.py.
"""

import os
import tempfile
from pathlib import Path

_folder = tempfile.TemporaryDirectory(prefix="toolcrib-tests-")
for _name in list(os.environ):
    if _name.startswith("TOOLCRIB_") or _name in {"DATABASE_URL", "REDIS_URL", "DEBUG", "PORT"}:
        del os.environ[_name]
os.environ["TOOLCRIB_DATA"] = _folder.name
os.environ["TOOLCRIB_AUDIT_SEAL"] = str(Path(_folder.name) / "audit.seal")
# The embedding model is downloaded once; tests of semantic search enable it themselves.
os.environ["TOOLCRIB_MODELS"] = str(Path(__file__).resolve().parents[2] / ".cache" / "models")
os.environ["TOOLCRIB_EMBEDDINGS"] = "0"
if "TEST_DATABASE_URL" in os.environ:
    os.environ |= {
        "DATABASE_URL": os.environ["TEST_DATABASE_URL"],
        "REDIS_URL": "redis://127.0.0.1:1/0",  # no listener: Redis is tested elsewhere
        "TOOLCRIB_SECRET_KEY": "k" * 48,
        "TOOLCRIB_ENCRYPTION_KEYS": "e" * 48,
        "TOOLCRIB_HOSTS": "testserver,localhost",
        "TOOLCRIB_HTTPS": "0",
        "TOOLCRIB_ALLOW_STDIO": "1",
        "TOOLCRIB_ALLOW_PLAIN_HTTP": "1",
        "TOOLCRIB_ALLOWED_NETWORKS": "127.0.0.0/8,::1/128",
    }
