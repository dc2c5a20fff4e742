"""What went wrong with a server, as a code, a sentence and a way out.

A leaf that the transports (network.py, stdio.py) and client.py share; others import these
names from client.py. No text here holds what a server sent, nor a header, argument, variable
or query of ours: only numbers, names of classes and host names.
"""

import unicodedata
from collections.abc import Mapping

from toolcrib.errors import ToolcribError


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


def printable(text: str) -> str:
    """Return the text with control and invisible characters escaped, newlines and tabs kept."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char)[0] != "C"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def megabytes(count: int) -> str:
    """Write a cap the way a person says it: 10 MiB, 64 KiB, 500 bytes."""
    for size, unit in ((1024 * 1024, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
