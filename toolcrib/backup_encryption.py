"""Encryption of backup files with a passphrase: scrypt, then AES-256-GCM in chunks.

The nonce of a chunk is its number and whether it is the last one, so chunks that are missing,
repeated or moved are found. The header is authenticated with every chunk.
"""

import hashlib
import hmac
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from toolcrib.config import environment as env
from toolcrib.lib.errors import Invalid

MAGIC = b"TOOLCRIB ENCRYPTED 1\n"
VARIABLE = "TOOLCRIB_BACKUP_PASSPHRASE"
MIN_LENGTH = 12
SALT_BYTES, CHECK_BYTES, TAG_BYTES = 16, 16, 16
HEADER_BYTES = len(MAGIC) + SALT_BYTES + CHECK_BYTES
CHUNK = 1 << 16
SCRYPT_COST = 1 << 17  # 128 MB and a third of a second


def read_passphrase(path: str | None) -> str:
    """Return the passphrase from a file, or from the environment; empty if there is none."""
    if not path:
        return env.secret("TOOLCRIB_BACKUP_PASSPHRASE")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Invalid(f"The passphrase cannot be read from {path}.") from error
    return lines[0].strip() if lines else ""


def check_new_passphrase(passphrase: str) -> None:
    if not passphrase:
        raise Invalid(
            "A backup contains everything, so it is encrypted, and there is no passphrase.",
            hint=f"Use --passphrase-file FILE or {VARIABLE}; --plain writes it unencrypted.",
        )
    if len(passphrase) < MIN_LENGTH:
        raise Invalid(
            f"The passphrase is too short: it needs at least {MIN_LENGTH} characters.",
            hint="Use several random words, and store them where the backup is not.",
        )


def is_encrypted(stream: IO[bytes]) -> bool:
    """Return whether a seekable stream is at the start of an encrypted file."""
    start = stream.tell()
    found = stream.read(len(MAGIC)) == MAGIC
    stream.seek(start)
    return found


@contextmanager
def encrypted_writer(stream: IO[bytes], passphrase: str) -> Iterator[IO[bytes]]:
    """Encrypt what is written. Without an error the last chunk is written at the end."""
    writer = _Writer(stream, passphrase)
    yield cast("IO[bytes]", writer)
    writer.finish()


def decrypted_reader(stream: IO[bytes], passphrase: str) -> IO[bytes]:
    """Return a stream of the decrypted content, which can be rewound. Raises Invalid."""
    if not passphrase:
        raise Invalid(
            "This file is encrypted with a passphrase.",
            hint=f"Give it with --passphrase-file FILE or {VARIABLE}.",
        )
    return cast("IO[bytes]", io.BufferedReader(_Reader(stream, passphrase), CHUNK))


def _derive(passphrase: str, salt: bytes) -> tuple[AESGCM, bytes]:
    """Return the cipher, and the bytes that tell a wrong passphrase from a damaged file."""
    key = Scrypt(salt=salt, length=64, n=SCRYPT_COST, r=8, p=1).derive(passphrase.encode())
    return AESGCM(key[:32]), hashlib.sha256(key[32:]).digest()[:CHECK_BYTES]


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


class _Writer(io.RawIOBase):
    def __init__(self, stream: IO[bytes], passphrase: str) -> None:
        self._stream, self._buffer, self._number = stream, bytearray(), 0
        salt = os.urandom(SALT_BYTES)
        self._cipher, check = _derive(passphrase, salt)
        self._header = MAGIC + salt + check
        stream.write(self._header)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._buffer += data
        while len(self._buffer) > CHUNK:  # the last chunk is never empty, unless the file is
            self._write_chunk(bytes(self._buffer[:CHUNK]), is_last=False)
            del self._buffer[:CHUNK]
        return len(data)

    def finish(self) -> None:
        self._write_chunk(bytes(self._buffer), is_last=True)

    def _write_chunk(self, chunk: bytes, *, is_last: bool) -> None:
        nonce = _nonce(self._number, is_last=is_last)
        self._stream.write(self._cipher.encrypt(nonce, chunk, self._header))
        self._number += 1


class _Reader(io.RawIOBase):
    def __init__(self, stream: IO[bytes], passphrase: str) -> None:
        self._stream = stream
        self._header = stream.read(HEADER_BYTES)
        if len(self._header) != HEADER_BYTES:
            raise _damaged()
        salt, check = self._header[len(MAGIC) : -CHECK_BYTES], self._header[-CHECK_BYTES:]
        self._cipher, expected = _derive(passphrase, salt)
        if not hmac.compare_digest(check, expected):
            raise Invalid(
                "The passphrase is wrong; nothing was changed.",
                hint="Use the passphrase that this backup was written with.",
            )
        self._start = stream.tell()
        self._rewind()

    def _rewind(self) -> None:
        self._stream.seek(self._start)
        self._number, self._rest = 0, b""
        self._next = self._stream.read(CHUNK + TAG_BYTES)
        self._ended = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if (offset, whence) != (0, io.SEEK_SET):
            raise io.UnsupportedOperation("only to the start")
        self._rewind()
        return 0

    def readinto(self, target: Any) -> int:
        while not self._rest and not self._ended:
            self._rest = self._read_chunk()
        part, self._rest = self._rest[: len(target)], self._rest[len(target) :]
        target[: len(part)] = part
        return len(part)

    def _read_chunk(self) -> bytes:
        chunk, self._next = self._next, self._stream.read(CHUNK + TAG_BYTES)
        self._ended = not self._next
        nonce = _nonce(self._number, is_last=self._ended)
        self._number += 1
        try:
            return self._cipher.decrypt(nonce, chunk, self._header)
        except InvalidTag as error:
            raise _damaged() from error


def _damaged() -> Invalid:
    return Invalid(
        "The backup is corrupt or truncated; nothing was changed.", hint="Use another copy."
    )
