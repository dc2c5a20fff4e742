"""Decrypt what an installation stored about calls, with its encryption key."""

import hashlib
import hmac
import sqlite3
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARK = "~"
KEY_ID, SALT, NONCE = slice(1, 5), slice(5, 17), slice(17, 29)
DATA_KEYS = "select ciphertext from sessions_app_datakey"


class PayloadReader:
    def __init__(self, encryption_key: str, data_keys: Iterable[str]) -> None:
        fernet = Fernet(urlsafe_b64encode(hashlib.sha256(encryption_key.encode()).digest()))
        keys = []
        for ciphertext in data_keys:
            with suppress(InvalidToken):  # of an installation that used the database before
                keys.append(b64decode(fernet.decrypt(ciphertext)))
        self._keys = {hashlib.sha256(b"toolcrib data key:" + key).digest()[:4]: key for key in keys}

    @classmethod
    def of_folder(cls, folder: Path) -> "PayloadReader":
        """Return a reader for the SQLite database of a data folder."""
        database = f"file:{folder / 'toolcrib.sqlite3'}?mode=ro"
        with sqlite3.connect(database, uri=True) as connection:
            rows = connection.execute(DATA_KEYS).fetchall()
        key = (folder / "encryption.key").read_text(encoding="ascii").strip()
        return cls(key, (ciphertext for (ciphertext,) in rows))

    def read(self, text: str) -> str:
        """Return a payload in clear."""
        if not text.startswith(MARK):
            return text
        data = b64decode(text[len(MARK) :])
        key = hmac.digest(self._keys[data[KEY_ID]], b"payload:" + data[SALT], "sha256")
        return AESGCM(key).decrypt(data[NONCE], data[NONCE.stop :], None).decode()
