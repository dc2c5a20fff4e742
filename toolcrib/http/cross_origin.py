"""Requests from web pages of other origins (CORS), for the API and the MCP endpoint.

Off unless TOOLCRIB_BROWSER_ORIGINS names the origin. Such a page sends an agent's key; cookies are
never accepted (no Access-Control-Allow-Credentials), so any request header may be sent.
"""

from django.conf import settings

from toolcrib.lib.protocols.asgi import Message, Scope, Send

EXPOSED_HEADERS = (
    b"mcp-session-id, www-authenticate, retry-after, etag, location, ratelimit-policy, "
    b"ratelimit-limit, ratelimit-remaining, ratelimit-reset"
)
PREFLIGHT_SECONDS = b"600"


def find_origin(scope: Scope) -> bytes | None:
    """Return the origin of a request from a page that may use Toolcrib."""
    origin: bytes | None = dict(scope["headers"]).get(b"origin")
    allowed = origin is not None and origin.decode("latin-1") in settings.BROWSER_ORIGINS
    return origin if allowed else None


def allow(origin: bytes, send: Send) -> Send:
    """Return a `send` whose response the page of this origin may read."""

    async def allowing_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", EXPOSED_HEADERS),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return allowing_send


def is_preflight(scope: Scope) -> bool:
    """Return whether an OPTIONS request asks if a page of an allowed origin may send another."""
    headers = dict(scope["headers"])
    return b"access-control-request-method" in headers and find_origin(scope) is not None


async def answer_preflight(scope: Scope, send: Send) -> None:
    asked = dict(scope["headers"])
    headers = [
        (b"access-control-allow-methods", asked[b"access-control-request-method"]),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", PREFLIGHT_SECONDS),
    ]
    if asked.get(b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
