"""Byte buffer for messages that arrive in chunks. Pure.

Growing one bytearray to ten megabytes reallocates it repeatedly, for milliseconds at a time. Here
each byte is copied twice: into a fixed-size chunk, and when the message is complete.
"""

CHUNK_BYTES = 64 * 1024
YIELD_AFTER = 0.002  # seconds of work on received data before yielding to the event loop


class ChunkBuffer:
    def __init__(self) -> None:
        self.size = 0
        self._full: list[bytes] = []
        self._tail = bytearray()  # collects small inputs into large chunks

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._tail += data
        if len(self._tail) >= CHUNK_BYTES:
            self._full.append(bytes(self._tail))
            self._tail.clear()

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes, at most one chunk."""
        return (self._full[0] if self._full else bytes(self._tail))[:size]

    def pop_all(self, skip: int = 0, strip: bytes = b"") -> bytes:
        """Return the content without its first `skip` bytes and trailing `strip`; then clear."""
        chunks = [*self._full, bytes(self._tail)] if self._tail else self._full
        self.size, self._full = 0, []
        self._tail.clear()
        if not chunks:
            return b""
        if strip:
            chunks[-1] = chunks[-1].rstrip(strip)
        if skip:
            chunks[0] = chunks[0][skip:]
        return b"".join(chunks)
