"""What went wrong with a server, as a code, a sentence and a way out.

A leaf that the transports (network.py, stdio.py) and client.py share; others import these
names from client.py. No text here holds what a server sent, nor a header, argument, variable
or query of ours: only numbers, names of classes and host names.
"""

import ssl
from collections.abc import Mapping

from toolcrib.lib.errors import ToolcribError


class UpstreamError(ToolcribError):
    """A server could not be reached, or did not keep to the protocol.

    `parked`: pointless to retry until someone edits the server. `detail` is for operators, e.g.
    the last lines of a program's stderr.
    """

    code = "protocol"
    status = 502

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str = "",
        detail: str = "",
        parked: bool = False,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code, details=details)
        self.detail = detail
        self.parked = parked


class ListingError(UpstreamError):
    """The list of tools never ended, or was larger than allowed: none of it is used."""

    code = "page_limit"


def format_bytes(count: int) -> str:
    """Write a cap the way a person says it: 10 MiB, 64 KiB, 500 bytes."""
    for size, unit in ((1024 * 1024, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def not_mcp_error(what: str) -> UpstreamError:
    return UpstreamError(
        f"The server answered {what}.",
        code="not_mcp",
        hint="Did you mean /mcp? The URL must be that of the MCP endpoint, not of a web page.",
        parked=True,
    )


def auth_error(status: int) -> UpstreamError:
    return UpstreamError(
        f"The server needs credentials, or does not accept those it got (HTTP {status}).",
        code="auth",
        hint="Toolcrib does not do OAuth yet. If the server accepts a token in a header, add it, "
        "e.g. Authorization: Bearer …",
        parked=True,
    )


def status_error(status: int) -> UpstreamError:
    hint = "The server itself failed; its log may say why."
    if status in (404, 405):
        hint = "Check the path: most servers use /mcp."
    elif status < 500:
        hint = "Check the URL and the headers."
    return UpstreamError(
        f"The server answered HTTP {status}.",
        code="http_status",
        hint=hint,
        parked=status < 500 and status not in (408, 425, 429),
    )


def tls_error(error: ssl.SSLError) -> UpstreamError:
    reason = "its TLS handshake failed"
    hint = "Check that the port speaks TLS."
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "Certificates are always checked. Give the server a valid one."
        reason = {
            9: "its certificate is not valid yet",
            10: "its certificate has expired",
            18: "its certificate is self-signed",
            19: "its certificate is signed by an authority that this machine does not know",
            20: "its certificate is signed by an authority that this machine does not know",
            62: "its certificate is for another host name",
            64: "its certificate is for another address",
        }.get(error.verify_code, "its certificate is not valid")
    return UpstreamError(f"No secure connection: {reason}.", code="tls", hint=hint, parked=True)
