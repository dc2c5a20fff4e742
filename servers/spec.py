"""What it takes to reach a server, and what comes back: plain values that cross the border.

Pure: no Django, no network.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from servers.credential_filter import CredentialFilter
from servers.secret import Secret

EMPTY = Secret("")
OnProgress = Callable[[float, float | None, str | None], None]  # done, of, in words


@dataclass(frozen=True)
class ServerSpec:
    """One server as the transport needs it, credentials decrypted but unprintable."""

    server_id: int
    slug: str
    generation: int
    transport: str  # stdio, http, sse
    argv: tuple[Secret, ...] = ()  # variables filled in, hence secret
    cwd: str = ""
    env: Mapping[str, Secret] = field(default_factory=dict)
    url: Secret = EMPTY  # may carry a key in its query
    headers: Mapping[str, Secret] = field(default_factory=dict)
    hidden: tuple[Secret, ...] = ()  # variables and environment, which a program may repeat

    @cached_property
    def credential_filter(self) -> CredentialFilter:
        return CredentialFilter.of(self.headers, (*self.hidden, *self.env.values()))


@dataclass(frozen=True)
class Listing:
    """Every page of a server's tools, raw: each item is what the server sent, of any type."""

    tools: tuple[object, ...]
    pages: int
    ttl_ms: int | None  # as the server claims; clamped by whoever plans the next poll
    warnings: tuple[str, ...] = ()
