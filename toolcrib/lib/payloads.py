"""Limits on JSON values from agents, and the redacted, truncated copies that are stored."""

import json
import re
from functools import lru_cache
from typing import Any

from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.redaction.redactor import may_contain_secret, redact

MAX_DEPTH = 64
MAX_KEYS = 1_000
MAX_NODES = 100_000
MAX_STORED_BYTES = 8 * 1024
UNSENDABLE = re.compile(r"[\x00\ud800-\udfff]")
# Of a long value more than is stored is redacted: a secret at the end is recognized as a whole.
REDACTED_LENGTH = MAX_STORED_BYTES + 4_096


# Where a value is: the start of its JSON pointer, or the path of what contains it and its key.
Path = tuple[str] | tuple["Path", str]


def check_value(value: object, where: str) -> None:
    """Raise Invalid, with a JSON pointer, for a value that cannot be sent on as JSON."""
    stack: list[tuple[Path, object, int]] = [((where,), value, 1)]
    nodes = 0
    while stack:
        path, node, depth = stack.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise _invalid(path, f"is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise _invalid((where,), f"has more than {MAX_NODES:,} values")
        if isinstance(node, dict):
            if len(node) > MAX_KEYS:
                raise _invalid(path, f"has {len(node):,} keys; the limit is {MAX_KEYS:,}")
            for key, sub in node.items():
                here = (path, key)
                _check_text(here, key)
                stack.append((here, sub, depth + 1))
        elif isinstance(node, list):
            stack.extend(((path, str(at)), sub, depth + 1) for at, sub in enumerate(node))
        elif isinstance(node, str):
            _check_text(path, node)
        elif isinstance(node, float) and (node != node or node in (float("inf"), float("-inf"))):
            raise _invalid(path, "is not a valid JSON number")
        elif isinstance(node, int) and abs(node) >= 10**100:
            raise _invalid(path, "is a number with more than 100 digits")


def _check_text(path: Path, text: str) -> None:
    if text.isascii() and "\0" not in text:  # the common case, faster than the search
        return
    match = UNSENDABLE.search(text)
    if match:
        character = "NUL" if match[0] == "\0" else "a lone surrogate"
        raise _invalid(path, f"contains {character}, which cannot be sent on")


def _invalid(path: Path, reason: str) -> Invalid:
    pointer = _pointer(path)[:300]
    return Invalid(
        f"{pointer or '/'} {reason}.", hint="Correct the value and retry.",
        details={"pointer": pointer},
    )  # fmt: skip


def _pointer(path: Path) -> str:
    keys: list[str] = []
    while len(path) == 2:
        path, key = path
        keys.append(UNSENDABLE.sub("?", key[:60].replace("~", "~0").replace("/", "~1")))
    return "/".join((path[0], *reversed(keys)))


@lru_cache(maxsize=64)
def strictest_storage(*settings: str) -> str:
    """Return the strictest of storage settings: `nothing`, `masked` or `all`."""
    order = ("nothing", "masked", "all")
    return min((name for name in settings if name in order), key=order.index, default="masked")


def stored_copy(value: object, text: str = "", *, storage: str = "masked") -> str:
    """Return a redacted JSON copy of a value; a long one is truncated and stored as a string.

    `text` is the value as canonical JSON, if known. With the storage `nothing` the copy is empty,
    with `all` it is not redacted.
    """
    if storage == "nothing":
        return ""
    data = (text or canonical(value)).encode()
    size = len(data)
    if storage != "all" and may_contain_secret(data[:REDACTED_LENGTH]):
        data = canonical(redact(value, REDACTED_LENGTH)).encode()
    if size <= MAX_STORED_BYTES and len(data) <= MAX_STORED_BYTES:
        return data.decode()
    start = data[:MAX_STORED_BYTES].decode("utf-8", "ignore")
    return canonical({"cut": True, "bytes": size, "start": start})


def redacted_json(value: object) -> str:
    """Return a value as canonical JSON, redacted."""
    text = canonical(value)
    return canonical(redact(value)) if may_contain_secret(text.encode()) else text


def stored_arguments(arguments: object, storage: str = "masked") -> str:
    """Return arguments for the ledger; those sent as a JSON string are parsed and redacted too."""
    try:
        return stored_copy(parse_arguments(arguments), storage=storage)
    except Invalid:
        return stored_copy(arguments, storage=storage)


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
