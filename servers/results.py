"""What a server answered to a call: whether it is a result at all, how large, and what to hide.

Pure. A result passes as it is or not at all; only where it reports an error are the server's own
credentials taken out of it, since error texts are where they leak.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.canonical import canonical
from servers.secret import Secret
from servers.spec import ServerSpec

SECRET_LENGTH = 6  # shorter words are no secrets
SCHEMES = frozenset({"bearer", "basic", "token", "digest", "apikey"})


@dataclass(frozen=True)
class Result:
    """A result that may be passed on."""

    content: list[Any]
    structured: Any
    has_structured: bool
    is_error: bool
    written: tuple[str, str]  # content and structure, as canonical JSON
    size: int  # bytes of these


class Unusable(ValueError):
    """Why an answer cannot be passed on, as the end of a sentence."""


class InputRequired(Unusable):
    """The server asks something back instead of answering."""


def read(answer: Mapping[str, Any], *, max_items: int, hidden: Sequence[str]) -> Result:
    """Return the result in an answer to tools/call, or raise Unusable."""
    kind = answer.get("resultType", "complete")
    if kind == "input_required":
        raise InputRequired("asks for input, which Toolcrib does not pass on yet")
    if kind != "complete":
        raise Unusable("is of a kind that Toolcrib does not know")
    content = answer.get("content")
    if not isinstance(content, list):
        raise Unusable("has no list of content")
    if len(content) > max_items:
        raise Unusable(f"has {len(content):,} items of content, more than {max_items:,}")
    if not all(isinstance(item, dict) for item in content):
        raise Unusable("has an item of content that is not an object")
    is_error = answer.get("isError", False)
    if not isinstance(is_error, bool):
        raise Unusable("has an isError that is neither true nor false")
    if is_error:
        answer = without(answer, hidden)
    content, structured = answer["content"], answer.get("structuredContent")
    (content_text, content_size), (text, size) = written(content), written(structured)
    return Result(
        content=content,
        structured=structured,
        has_structured="structuredContent" in answer,
        is_error=is_error,
        written=(content_text, text),
        size=content_size + size,
    )


def written(value: object) -> tuple[str, int]:
    """Return a value as canonical JSON, and its bytes; raise where it has no such form."""
    try:
        text = canonical(value)
        return text, len(text.encode())
    except UnicodeEncodeError:
        raise Unusable("holds half a character (a lone surrogate)") from None
    except RecursionError:
        raise Unusable("is nested too deep") from None
    except (ValueError, TypeError):
        raise Unusable("holds a number that JSON cannot carry") from None


def credentials(spec: ServerSpec) -> list[str]:
    """Return the texts of a server's credentials, longest first."""
    found = {secret.reveal() for secret in (*spec.hidden, *spec.env.values())}
    for header in spec.headers.values():
        found |= _parts(header)
    return sorted((text for text in found if len(text) >= SECRET_LENGTH), key=len, reverse=True)


def _parts(header: Secret) -> set[str]:
    """Return a header's value, and the token in one such as `Bearer …`."""
    text = header.reveal()
    return {text, *(part for part in text.split() if part.lower() not in SCHEMES)}


def without(value: Any, hidden: Iterable[str]) -> Any:
    """Return a JSON value with each hidden text replaced by ***."""
    if isinstance(value, str):
        for text in hidden:
            value = value.replace(text, "***")
        return value
    if isinstance(value, list):
        return [without(item, hidden) for item in value]
    if isinstance(value, Mapping):
        return {without(key, hidden): without(item, hidden) for key, item in value.items()}
    return value
