"""Connection settings of a server (ServerSpec) and its tool listing (Listing). Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from servers.credential_filter import CredentialFilter
from servers.secret import Secret

EMPTY = Secret("")
OnProgress = Callable[[float, float | None, str | None], None]  # progress, total, message
TOOLS_CALL = "tools/call"
UI_EXTENSION = "io.modelcontextprotocol/ui"  # MCP Apps
PROMPTS_GET, RESOURCES_READ, COMPLETE = "prompts/get", "resources/read", "completion/complete"


@dataclass(frozen=True)
class ServerSpec:
    """The connection settings of one server, with decrypted credentials as Secret."""

    server_id: int
    slug: str
    generation: int
    transport: str  # stdio, http, sse
    argv: tuple[Secret, ...] = ()  # with variables resolved, hence secret
    cwd: str = ""
    env: Mapping[str, Secret] = field(default_factory=dict)
    url: Secret = EMPTY  # the query may contain a key
    headers: Mapping[str, Secret] = field(default_factory=dict)
    hidden: tuple[Secret, ...] = ()  # values of variables, to redact in output

    @cached_property
    def credential_filter(self) -> CredentialFilter:
        return CredentialFilter.from_credentials(self.headers, (*self.hidden, *self.env.values()))


@dataclass(frozen=True)
class Listing:
    """All tools of a server, raw: an item may be of any JSON type."""

    tools: tuple[object, ...]
    pages: int
    ttl_ms: int | None  # as sent by the server; clamped by scheduling.next_poll
    warnings: tuple[str, ...] = ()
    # The items of the other lists, raw, by the kind of feature; those that could be fetched.
    features: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # What it lists to clients that can ask their user, None if that was not fetched, and the names
    # of tools that only those get, None if not known.
    tools_for_askers: tuple[object, ...] | None = None
    needing_user: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for tool in self.tools if (name := name_of(tool)) is not None)


def name_of(tool: object) -> str | None:
    """Return the name of a raw tool, if it has one."""
    name = tool.get("name") if isinstance(tool, Mapping) else None
    return name if isinstance(name, str) else None
