"""Argon2 within bounds: a sign-in costs memory, and anybody may try to sign in."""

import threading
from typing import Any

from django.contrib.auth.hashers import Argon2PasswordHasher

AT_ONCE = threading.BoundedSemaphore(2)


class BoundedArgon2(Argon2PasswordHasher):
    """OWASP's smaller setting, two at a time: 20 MB each, whoever knocks and how often."""

    memory_cost = 19_456
    time_cost = 3
    parallelism = 1

    def encode(self, password: str, salt: str) -> str:
        with AT_ONCE:
            encoded: str = super().encode(password, salt)
            return encoded

    def verify(self, password: str, encoded: str) -> bool:
        with AT_ONCE:
            right: bool = super().verify(password, encoded)
            return right

    def harden_runtime(self, password: str, encoded: str) -> Any:
        return None
