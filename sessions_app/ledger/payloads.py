"""What agents send and what is kept of it: bounds, redaction, cutting. Pure."""

import json
import re
from typing import Any

from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.redaction import redact

MAX_DEPTH = 64
MAX_KEYS = 1_000
MAX_NODES = 100_000
KEPT_BYTES = 8 * 1024
BROKEN = re.compile(r"[\x00\ud800-\udfff]")


def check_value(value: object, where: str) -> None:
    """Refuse what no JSON peer could keep, with a pointer to it."""
    stack: list[tuple[str, object, int]] = [(where, value, 1)]
    nodes = 0
    while stack:
        path, node, depth = stack.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise _refused(path, f"is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise _refused(where, f"has more than {MAX_NODES:,} values")
        if isinstance(node, dict):
            if len(node) > MAX_KEYS:
                raise _refused(path, f"has {len(node):,} keys; the cap is {MAX_KEYS:,}")
            for key, sub in node.items():
                _check_text(f"{path}/{_pointer(key)}", key)
                stack.append((f"{path}/{_pointer(key)}", sub, depth + 1))
        elif isinstance(node, list):
            stack.extend((f"{path}/{at}", sub, depth + 1) for at, sub in enumerate(node))
        elif isinstance(node, str):
            _check_text(path, node)
        elif isinstance(node, float) and (node != node or node in (float("inf"), float("-inf"))):
            raise _refused(path, "is a number that JSON does not have")
        elif isinstance(node, int) and abs(node) >= 10**100:
            raise _refused(path, "is a number of over 100 digits")


def _check_text(path: str, text: str) -> None:
    if text.isascii() and "\0" not in text:  # most are, and a search looks at each character
        return
    found = BROKEN.search(text)
    if found:
        what = "NUL" if found[0] == "\0" else "a lone surrogate"
        raise _refused(path, f"holds {what}, which cannot be sent on")


def _pointer(key: str) -> str:
    shown = key[:60].replace("~", "~0").replace("/", "~1")
    return BROKEN.sub("?", shown)


def _refused(path: str, why: str) -> Invalid:
    return Invalid(
        f"{path[:300] or '/'} {why}.", hint="Mend the value and send it again.",
        details={"pointer": path[:300]},
    )  # fmt: skip


def stored_copy(value: object) -> str:
    """Return a value as JSON for the ledger: redacted, and cut to a JSON text where too long."""
    text = canonical(redact(value))
    whole = text.encode()
    if len(whole) <= KEPT_BYTES:
        return text
    head = whole[:KEPT_BYTES].decode("utf-8", "ignore")
    return canonical({"cut": True, "bytes": len(whole), "start": head})


def stored_arguments(given: object) -> str:
    """Return arguments for the ledger; in an object written as a text, secrets are masked too."""
    try:
        return stored_copy(parse_arguments(given))
    except Invalid:
        return stored_copy(given)


def parse_arguments(given: object) -> dict[str, Any]:
    """Read a call's arguments: an object, or an object written as a JSON text."""
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise Invalid(
                "arguments is a text that is not JSON.", code="invalid_arguments",
                hint="Send an object.",
            ) from None  # fmt: skip
        check_value(given, "/arguments")  # what stood in a text was not looked into before
    if not isinstance(given, dict):
        kind = {list: "a list", str: "a text", bool: "true or false"}.get(type(given), "a number")
        raise Invalid(
            f"arguments must be an object, not {kind}.",
            code="invalid_arguments",
            hint="Send the tool's parameters by name.",
        )
    return given
