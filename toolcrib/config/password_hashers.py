"""Argon2 password hasher with a concurrency limit.

Each hash needs memory and anyone can attempt to sign in.
"""

import threading
from typing import Any

from django.contrib.auth.hashers import Argon2PasswordHasher

CONCURRENT_HASHES = threading.BoundedSemaphore(2)


class BoundedArgon2(Argon2PasswordHasher):
    """Argon2 with OWASP's minimum parameters; at most two hashes at once (20 MB each)."""

    memory_cost = 19_456
    time_cost = 3
    parallelism = 1

    def encode(self, password: str, salt: str) -> str:
        with CONCURRENT_HASHES:
            encoded: str = super().encode(password, salt)
            return encoded

    def verify(self, password: str, encoded: str) -> bool:
        with CONCURRENT_HASHES:
            is_correct: bool = super().verify(password, encoded)
            return is_correct

    def harden_runtime(self, password: str, encoded: str) -> Any:
        return None
