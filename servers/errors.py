"""Upstream errors: a code, a message and a hint for every failure of a server.

Shared by transports and connections. Messages never contain data sent by a server, nor headers,
arguments, variables or queries: only numbers, class names and host names.
"""

import ssl

from toolcrib.lib.errors import ToolcribError

SEE_STDERR = "Its last lines on stderr may give the reason."


class UpstreamError(ToolcribError):
    """A server failed or violated the protocol. `detail` is for operators, such as its stderr."""

    code = "protocol"
    status = 502
    parked = False

    def __init__(
        self, message: str, *, code: str | None = None, hint: str = "", detail: str = ""
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.detail = detail


class ParkedError(UpstreamError):
    """A failure that is not retried until the server is edited."""

    parked = True


class ServerErrorResponse(UpstreamError):
    """The server answered a call with a JSON-RPC error. `server_message` is untrusted text."""

    code = "server_error"

    def __init__(self, server_message: str, rpc_code: int = 0) -> None:
        super().__init__("The server answered with an error.")
        self.server_message, self.rpc_code = server_message, rpc_code


class ListingError(UpstreamError):
    """The list of tools was endless or too large; none of it is used."""

    code = "page_limit"


def format_bytes(count: int) -> str:
    """Format a size for people: 10 MiB, 64 KiB, 500 bytes."""
    for size, unit in ((1024 * 1024, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def not_mcp_error(what: str) -> UpstreamError:
    return ParkedError(
        f"The server answered with {what}.",
        code="not_mcp",
        hint="Did you mean /mcp? The URL must be the MCP endpoint, not a web page.",
    )


def auth_error(status: int) -> UpstreamError:
    return ParkedError(
        f"The server requires credentials, or rejected those sent (HTTP {status}).",
        code="auth",
        hint="Toolcrib does not support OAuth yet. If the server accepts a token in a header, add "
        "it, e.g. Authorization: Bearer …",
    )


def status_error(status: int) -> UpstreamError:
    hint = "The server failed internally. Check its log."
    if status in (404, 405):
        hint = "Check the path: most servers use /mcp."
    elif status < 500:
        hint = "Check the URL and the headers."
    is_temporary = status >= 500 or status in (408, 425, 429)
    error = UpstreamError if is_temporary else ParkedError
    return error(f"The server answered HTTP {status}.", code="http_status", hint=hint)


def tls_error(error: ssl.SSLError) -> UpstreamError:
    reason = "its TLS handshake failed"
    hint = "Check that the port uses TLS."
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "Certificates are always verified. Install a valid one on the server."
        reason = {
            9: "its certificate is not valid yet",
            10: "its certificate has expired",
            18: "its certificate is self-signed",
            19: "its certificate is signed by an unknown authority",
            20: "its certificate is signed by an unknown authority",
            62: "its certificate is for another host name",
            64: "its certificate is for another address",
        }.get(error.verify_code, "its certificate is not valid")
    return ParkedError(f"TLS error: {reason}.", code="tls", hint=hint)
