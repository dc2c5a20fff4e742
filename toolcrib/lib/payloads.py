"""Limits on JSON values from agents, redaction of secrets, and the truncated copies stored."""

import json
import re
from typing import Any

from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical

MAX_DEPTH = 64
MAX_KEYS = 1_000
MAX_NODES = 100_000
MAX_STORED_BYTES = 8 * 1024
UNSENDABLE = re.compile(r"[\x00\ud800-\udfff]")
SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|secret|token$|api_?key|authorization|credential|private_?key|cookie",
    re.IGNORECASE,
)
# The same in JSON, where a name is followed by a quotation mark and a colon.
SECRET_IN_JSON = re.compile(
    r"(?:pass(?:word|wd|phrase)?|token)\\*\"\s*:|secret|api_?key|authorization|credential"
    r"|private_?key|cookie",
    re.IGNORECASE,
)


def check_value(value: object, where: str) -> None:
    """Raise Invalid, with a JSON pointer, for a value that cannot be sent on as JSON."""
    stack: list[tuple[str, object, int]] = [(where, value, 1)]
    nodes = 0
    while stack:
        path, node, depth = stack.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise _invalid(path, f"is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise _invalid(where, f"has more than {MAX_NODES:,} values")
        if isinstance(node, dict):
            if len(node) > MAX_KEYS:
                raise _invalid(path, f"has {len(node):,} keys; the limit is {MAX_KEYS:,}")
            for key, sub in node.items():
                _check_text(f"{path}/{_pointer(key)}", key)
                stack.append((f"{path}/{_pointer(key)}", sub, depth + 1))
        elif isinstance(node, list):
            stack.extend((f"{path}/{index}", sub, depth + 1) for index, sub in enumerate(node))
        elif isinstance(node, str):
            _check_text(path, node)
        elif isinstance(node, float) and (node != node or node in (float("inf"), float("-inf"))):
            raise _invalid(path, "is not a valid JSON number")
        elif isinstance(node, int) and abs(node) >= 10**100:
            raise _invalid(path, "is a number with more than 100 digits")


def _check_text(path: str, text: str) -> None:
    if text.isascii() and "\0" not in text:  # the common case, faster than the search
        return
    match = UNSENDABLE.search(text)
    if match:
        character = "NUL" if match[0] == "\0" else "a lone surrogate"
        raise _invalid(path, f"contains {character}, which cannot be sent on")


def _pointer(key: str) -> str:
    escaped = key[:60].replace("~", "~0").replace("/", "~1")
    return UNSENDABLE.sub("?", escaped)


def _invalid(path: str, reason: str) -> Invalid:
    return Invalid(
        f"{path[:300] or '/'} {reason}.", hint="Correct the value and retry.",
        details={"pointer": path[:300]},
    )  # fmt: skip


def stored_copy(value: object, text: str = "") -> str:
    """Return a redacted JSON copy of a value; a long one is truncated and stored as a string.

    `text` is the value as canonical JSON, if known.
    """
    text = text or canonical(value)
    if SECRET_IN_JSON.search(text):  # much faster than `redact`
        text = canonical(redact(value))
    data = text.encode()
    if len(data) <= MAX_STORED_BYTES:
        return text
    start = data[:MAX_STORED_BYTES].decode("utf-8", "ignore")
    return canonical({"cut": True, "bytes": len(data), "start": start})


def stored_arguments(arguments: object) -> str:
    """Return arguments for the ledger; those sent as a JSON string are parsed and redacted too."""
    try:
        return stored_copy(parse_arguments(arguments))
    except Invalid:
        return stored_copy(arguments)


def parse_arguments(arguments: object) -> dict[str, Any]:
    """Return a call's arguments, sent as an object or as a JSON string of an object."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise Invalid(
                "arguments is a string that is not valid JSON.", code="invalid_arguments",
                hint="Send an object.",
            ) from None  # fmt: skip
        check_value(arguments, "/arguments")  # the caller has checked the string only
    if not isinstance(arguments, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean"}
        kind = kinds.get(type(arguments), "a number")
        raise Invalid(
            f"arguments must be an object, not {kind}.",
            code="invalid_arguments",
            hint="Send the tool's parameters by name.",
        )
    return arguments


def redact(value: Any) -> Any:
    """Return a copy of a value with everything under a secret-like key masked."""
    if isinstance(value, dict):
        return {
            key: "***" if SECRET_NAME.search(key) and sub not in (None, "") else redact(sub)
            for key, sub in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value
