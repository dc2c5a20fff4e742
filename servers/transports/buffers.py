"""Bytes that arrive in pieces and are wanted whole. Pure.

A buffer that grows to ten megabytes is moved again and again, a few milliseconds at a time; here
every byte is copied twice, the second time when all are there.
"""

PIECE = 64 * 1024
TURN = 0.002  # seconds of work on what arrives, after which others on the loop get their turn


class ChunkBuffer:
    def __init__(self) -> None:
        self.size = 0
        self._full: list[bytes] = []
        self._tail = bytearray()  # however small what arrives is, it is kept in large pieces

    def add(self, some: bytes) -> None:
        self.size += len(some)
        self._tail += some
        if len(self._tail) >= PIECE:
            self._full.append(bytes(self._tail))
            self._tail.clear()

    def head(self, size: int) -> bytes:
        """Return the first bytes, at most a piece of them."""
        return (self._full[0] if self._full else bytes(self._tail))[:size]

    def take(self, skip: int = 0, end: bytes = b"") -> bytes:
        """Return all but the first few, without what it ends with, and begin anew."""
        pieces = [*self._full, bytes(self._tail)] if self._tail else self._full
        self.size, self._full = 0, []
        self._tail.clear()
        if not pieces:
            return b""
        if end:
            pieces[-1] = pieces[-1].rstrip(end)
        if skip:
            pieces[0] = pieces[0][skip:]
        return b"".join(pieces)
