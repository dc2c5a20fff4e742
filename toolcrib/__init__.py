"""Composition root of the project. Imports nothing of it: `celery -A toolcrib` finds celery.py."""

import sys
from pathlib import Path

# In a clone, the Python client is imported from its folder; a wheel of Toolcrib depends on it.
_client = Path(__file__).resolve().parent.parent / "clients" / "python" / "src"
if _client.is_dir() and str(_client) not in sys.path:
    sys.path.append(str(_client))
