"""Redaction of a server's credentials in its own output. Pure.

A credential that Toolcrib sends to a server (header, environment, variable) may come back in a
result, an error or on stderr. It is replaced by *** there, also when base64-encoded,
percent-encoded or JSON-escaped, and when a header value is repeated without its scheme. Image and
audio data is not changed.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from servers.secret import Secret

REPLACEMENT = "***"
MIN_LENGTH = 8  # characters of an environment value or a variable
MIN_HEADER_LENGTH = 4  # header values are credentials even if short
SCHEMES = frozenset({"bearer", "basic", "token", "digest", "apikey", "negotiate"})
BINARY_FIELDS = {"image": "data", "audio": "data"}  # by type of content item


class CredentialFilter:
    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for form in _encoded_forms(value)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._in_json = [json.dumps(form, ensure_ascii=False)[1:-1] for form in self._forms]

    @classmethod
    def from_credentials(
        cls, headers: Mapping[str, Secret], others: Iterable[Secret]
    ) -> "CredentialFilter":
        """Build the filter from a server's headers, and its variables and environment."""
        values = {text for secret in others if len(text := secret.reveal()) >= MIN_LENGTH}
        for name, secret in headers.items():
            parts = _header_parts(name, secret.reveal())
            values |= {text for text in parts if len(text) >= MIN_HEADER_LENGTH}
        return cls(values)

    def occurs_in(self, json_text: str) -> bool:
        """Tell whether a serialized JSON value may contain a credential. Fast: no parsing."""
        return any(form in json_text for form in self._in_json)

    def redact_text(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, REPLACEMENT)
        return text

    def redact(self, value: Any) -> Any:
        """Return a JSON value with every credential replaced, in keys and numbers too."""
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, list):
            return [self.redact(item) for item in value]
        if isinstance(value, Mapping):
            return {
                self.redact_text(key): item if _is_binary(value, key) else self.redact(item)
                for key, item in value.items()
            }
        if isinstance(value, int | float) and not isinstance(value, bool):
            return REPLACEMENT if self.redact_text(str(value)) != str(value) else value
        return value


def _is_binary(item: Mapping[str, Any], key: str) -> bool:
    """Tell whether a field contains the encoded bytes of an image, audio or resource."""
    kind = item.get("type")
    if isinstance(kind, str) and BINARY_FIELDS.get(kind) == key:
        return True
    return key == "blob" and "uri" in item


def _header_parts(name: str, value: str) -> set[str]:
    """Return a header's value, and the credentials inside it."""
    parts = {value}
    scheme, _, rest = value.partition(" ")
    if rest and scheme.lower() in SCHEMES:
        parts.add(rest.strip())
    if scheme.lower() == "basic":
        try:
            user_and_password = base64.b64decode(rest.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return parts
        parts |= {user_and_password, user_and_password.partition(":")[2]}
    if name.lower() == "cookie":
        parts |= {pair.partition("=")[2].strip() for pair in value.split(";")}
    return parts


def _encoded_forms(value: str) -> set[str]:
    """Return a value in plain text and in the encodings that servers use."""
    percent = {quote(value), quote(value, safe=""), quote_plus(value)}
    escaped = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    lower = {_lower_case_escapes(text) for text in percent}
    return {value, *percent, *lower, *escaped, *_base64_forms(value.encode())}


def _lower_case_escapes(text: str) -> str:
    parts = text.split("%")
    return "%".join([parts[0], *(part[:2].lower() + part[2:] for part in parts[1:])])


def _base64_forms(value: bytes) -> set[str]:
    """Return the substrings of base64 that depend on the value alone, at any offset.

    Inside other encoded bytes a value has three forms, depending on its offset modulo 3.
    Characters that also encode bits of neighbouring bytes are excluded.
    """
    forms = set()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + value).decode()
        first = (offset * 8 + 5) // 6  # first character without bits of preceding bytes
        last = (offset + len(value)) * 8 // 6  # first character with bits of following bytes
        core = encoded[first:last]
        if len(core) >= MIN_LENGTH:
            forms |= {core, core.translate(URL_SAFE)}
    return forms


URL_SAFE = str.maketrans("+/", "-_")
