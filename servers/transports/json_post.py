"""POST of one JSON body: to an address that the operator of this machine configured, or an admin.

The first is not checked: a model may run on this machine. The second passes the same SSRF
protection as MCP servers. No redirects, no proxies of the environment, and a limit on the response.
"""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2
from django.conf import settings

from servers.transports.http import check_url, guarded_transport
from servers.transports.response_body import connection_error

MAX_RESPONSE_BYTES = 1024 * 1024
TIMEOUT = 120.0  # seconds


GUARDED_TIMEOUT = 10.0  # seconds for the whole exchange


class PostFailed(Exception):
    """No usable response; the message says why, without the request's headers."""


def post_json(url: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Any:
    """Send a JSON object and return the parsed response. Raises PostFailed."""
    try:
        with (
            httpx2.Client(timeout=TIMEOUT, trust_env=False, follow_redirects=False) as client,
            client.stream("POST", url, headers=dict(headers), json=dict(body)) as response,
        ):
            if response.status_code != 200:
                raise PostFailed(f"status {response.status_code}")
            data = b""
            for part in response.iter_bytes():
                data += part
                if len(data) > MAX_RESPONSE_BYTES:
                    raise PostFailed("the response is over 1 MB")
            return httpx2.Response(200, content=data).json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise PostFailed(type(error).__name__) from error


def post_guarded(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """Send a body to an address that an admin entered; return the status of the response.

    Raises PostFailed, or UpstreamError for an address that is not allowed.
    """
    check_url(url)
    try:
        return asyncio.run(_post_guarded(url, headers, body))
    except TimeoutError:
        raise PostFailed("The receiver did not answer in time.") from None
    except (httpx2.HTTPError, ssl.SSLError, OSError) as error:
        raise PostFailed(connection_error(error).message) from None


async def _post_guarded(url: str, headers: Mapping[str, str], body: bytes) -> int:
    own = {**headers, "User-Agent": f"toolcrib/{settings.VERSION}", "Accept-Encoding": "identity"}
    async with (
        asyncio.timeout(GUARDED_TIMEOUT),
        httpx2.AsyncClient(
            transport=guarded_transport(), trust_env=False, timeout=GUARDED_TIMEOUT
        ) as client,
        client.stream("POST", url, headers=own, content=body) as response,
    ):
        return response.status_code
