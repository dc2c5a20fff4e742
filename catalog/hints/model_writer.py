"""Asks a language model to write hints for new tools, in a worker, if an endpoint is configured.

The endpoint is OpenAI's chat completions or Anthropic's messages, or compatible. Its answer is
untrusted: only hints for the tools of the request are taken from it.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.conf import settings

from catalog.cache import CachedTool
from catalog.hints import exchange
from catalog.models import Revision
from toolcrib.lib.errors import Invalid
from toolcrib.lib.roles import SYSTEM

logger = logging.getLogger(__name__)

TOOLS_PER_REQUEST = 20
MAX_TOKENS = 4_096  # of an answer
RETRY_SECONDS = 600.0  # after a failed request

Post = Callable[[str, Mapping[str, str], Mapping[str, Any]], Any]

_lock = threading.Lock()
_checked_revision = -1
_retry_at = 0.0
# Definitions that were sent, so that a tool for which the model writes nothing is sent once.
_sent: set[tuple[int, str]] = set()


class ModelFailed(Exception):
    """The endpoint did not answer as expected; the message says how."""


def is_due() -> bool:
    return (
        bool(settings.HINTS_URL)
        and time.monotonic() >= _retry_at
        and Revision.current() != _checked_revision
    )


def write_missing(post: Post) -> int:
    """Ask for hints of tools that have none, and return how many tools got some."""
    global _checked_revision, _retry_at
    if not is_due() or not _lock.acquire(blocking=False):
        return 0
    try:
        revision, written = Revision.current(), 0
        while batch := _next_batch():
            rows = _ask(batch, post)
            _sent.update(_identify(tool) for tool in batch)
            written += exchange.import_hints(rows, actor=SYSTEM).changed
        _checked_revision = revision
        return written
    except ModelFailed as error:
        logger.warning("The model for search hints did not answer: %s", error)
        _retry_at = time.monotonic() + RETRY_SECONDS
        return 0
    finally:
        _lock.release()


def _next_batch() -> list[CachedTool]:
    """Return tools of one server, chosen at random: several workers share the work."""
    tools = [tool for tool in exchange.tools_to_describe() if _identify(tool) not in _sent]
    if not tools:
        return []
    server = random.choice(tools).server  # noqa: S311 - not a secret
    return [tool for tool in tools if tool.server == server][:TOOLS_PER_REQUEST]


def _identify(tool: CachedTool) -> tuple[int, str]:
    return tool.tool_id, tool.approved.sha256 if tool.approved else ""


def _ask(tools: list[CachedTool], post: Post) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(exchange.export_tool(tool), ensure_ascii=False) for tool in tools)
    url, key = settings.HINTS_URL, settings.HINTS_KEY
    is_anthropic = url.rstrip("/").endswith("/messages")
    body: dict[str, Any] = {"model": settings.HINTS_MODEL, "max_tokens": MAX_TOKENS}
    user = {"role": "user", "content": lines}
    if is_anthropic:
        headers = {"anthropic-version": "2023-06-01", **({"x-api-key": key} if key else {})}
        body |= {"system": exchange.PROMPT, "messages": [user]}
    else:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body["messages"] = [{"role": "system", "content": exchange.PROMPT}, user]
    answer = post(url, headers, body)
    text = _read_anthropic(answer) if is_anthropic else _read_openai(answer)
    names = {tool.name for tool in tools}
    return [row for row in _parse(text) if row.get("name") in names]


def _read_openai(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise ModelFailed("the response has no message") from None


def _read_anthropic(answer: Any) -> str:
    try:
        return "\n".join(str(part["text"]) for part in answer["content"] if part["type"] == "text")
    except (KeyError, TypeError):
        raise ModelFailed("the response has no text") from None


def _parse(text: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an answer; models add fences and sentences, which are skipped."""
    for line in text.split("\n"):
        try:
            rows = exchange.parse_lines(line.strip().rstrip(","))
        except Invalid:
            continue
        yield from (
            row
            for row in rows
            if isinstance(row.get("name"), str) and isinstance(row.get("hints"), list)
        )
