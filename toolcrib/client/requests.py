"""Requests and responses of the agent API as plain values.

Part of toolcrib.client; uses neither network nor Django. Each response keeps its complete JSON in
`raw`, which includes fields added by newer versions of Toolcrib.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class ApiRequest(Generic[T]):
    """One request and the function that parses its response."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True  # idempotent
    seconds: float | None = None  # response timeout, if longer than the default


class State(TypedDict):
    """Loaded tools of a session; pass it as `resume`."""

    strategy: str
    expanded_groups: dict[str, list[str] | None]


class OpenOptions(TypedDict, total=False):
    """Options for opening a session."""

    strategy: str
    mode: str
    context_window: int
    model: str
    groups: Sequence[str]
    servers: Sequence[str]
    without_mcp: bool
    preload: Sequence[str]
    header: str
    metadata: Json
    resume: State


class Form(TypedDict, total=False):
    """Catalog format: see Formats in docs/agents.md."""

    format: str
    native: bool
    search: str
    toolset: bool


class SearchOptions(TypedDict, total=False):
    """Search options."""

    query: str
    pattern: str
    name: str
    strategy: str
    server: str
    limit: int
    detail: str
    load: bool


@dataclass(frozen=True)
class Session:
    id: str
    strategy: str
    mode: str
    text: str  # for the system prompt
    tools: list[Json]
    suggested_iteration_multiplier: int
    unknown: list[str]
    raw: Json = field(repr=False)


@dataclass(frozen=True)
class Catalog:
    """A catalog in one format. Pass `etag` with the next request."""

    body: Json
    etag: str


@dataclass(frozen=True)
class Found:
    status: str
    total_matches: int
    tools: list[Json]
    newly_loaded: int
    message: str
    raw: Json = field(repr=False)


@dataclass(frozen=True)
class Loaded:
    group_id: str
    tool_names: list[str]
    remaining: int
    unknown: list[str]
    schemas: list[Json] | None
    error: Json | None
    raw: Json = field(repr=False)


@dataclass(frozen=True)
class CallResult:
    call_id: str
    tool_name: str
    state: str
    is_error: bool
    content: list[Json]
    structured_content: Any
    error: Json | None
    raw: Json = field(repr=False)


def _session(raw: Json) -> Session:
    return Session(
        raw["id"],
        raw["strategy"],
        raw["mode"],
        raw["catalog"]["text"],
        raw["tools"],
        raw["suggested_iteration_multiplier"],
        raw["unknown"],
        raw,
    )


def _found(raw: Json) -> Found:
    keys = ("status", "total_matches", "tools", "newly_loaded", "message")
    return Found(**{key: raw[key] for key in keys}, raw=raw)


def _loaded(raw: Json) -> Loaded:
    keys = ("group_id", "tool_names", "remaining", "unknown", "schemas", "error")
    return Loaded(**{key: raw[key] for key in keys}, raw=raw)


def _called(raw: Json) -> CallResult:
    keys = ("call_id", "tool_name", "state", "is_error", "content", "structured_content")
    return CallResult(**{key: raw[key] for key in keys}, error=raw.get("error"), raw=raw)


def _unchanged(raw: Any) -> Any:
    return raw


def _path(session_id: str, path: str = "") -> str:
    return f"/sessions/{quote(session_id, safe='')}{path}"


def _query(options: Mapping[str, object]) -> dict[str, str]:
    """Return query parameters; false and empty options are omitted."""
    return {
        name: "true" if value is True else str(value) for name, value in options.items() if value
    }


def open_session(wish: OpenOptions) -> ApiRequest[Session]:
    return ApiRequest("POST", "/sessions", _session, wish, repeatable=False)


def session(session_id: str) -> ApiRequest[Session]:
    return ApiRequest("GET", _path(session_id), _session)


def close(session_id: str) -> ApiRequest[Session]:
    return ApiRequest("POST", _path(session_id, "/close"), _session, {})


def fork(session_id: str) -> ApiRequest[Session]:
    return ApiRequest("POST", _path(session_id, "/fork"), _session, {}, repeatable=False)


def catalog(session_id: str, form: Form, etag: str = "") -> ApiRequest[Catalog | None]:
    """Read the catalog. The response is None if the etag still matches."""
    headers = {"If-None-Match": etag} if etag else {}
    path = _path(session_id, "/catalog")
    return ApiRequest("GET", path, _unchanged, query=_query(form), headers=headers)


def tools(session_id: str, form: Form) -> ApiRequest[list[Json]]:
    return ApiRequest("GET", _path(session_id, "/tools"), _unchanged, query=_query(form))


def details(session_id: str, name: str, detail: str = "full") -> ApiRequest[Json]:
    path = _path(session_id, f"/tools/{quote(name, safe='')}")
    return ApiRequest("GET", path, _unchanged, query={"detail": detail})


def search(session_id: str, looking: Mapping[str, Any]) -> ApiRequest[Found]:
    return ApiRequest("POST", _path(session_id, "/search"), _found, looking)


def provider_search(
    session_id: str, looking: Mapping[str, Any], format_: str, call_id: str
) -> ApiRequest[Json]:
    """Search with results in the provider's own format."""
    query = _query({"format": format_, "call_id": call_id})
    return ApiRequest("POST", _path(session_id, "/search"), _unchanged, looking, query)


def load(session_id: str, body: Mapping[str, Any]) -> ApiRequest[Loaded]:
    return ApiRequest("POST", _path(session_id, "/load"), _loaded, body)


def preload(session_id: str, tool_names: Sequence[str]) -> ApiRequest[Json]:
    return ApiRequest(
        "POST", _path(session_id, "/preload"), _unchanged, {"tool_names": list(tool_names)}
    )


def call(
    session_id: str,
    tool_name: str,
    arguments: object = None,
    *,
    timeout: float | None = None,
    idempotency_key: str = "",
) -> ApiRequest[CallResult]:
    """Call a tool. Its idempotency key makes retries safe."""
    body: Json = {"tool_name": tool_name, "arguments": {} if arguments is None else arguments}
    if timeout is not None:
        body["timeout"] = timeout
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    path = _path(session_id, "/call")
    return ApiRequest("POST", path, _called, body, headers=headers, seconds=timeout or 300)


def state(session_id: str) -> ApiRequest[State]:
    return ApiRequest("GET", _path(session_id, "/state"), _unchanged)


def stats(session_id: str) -> ApiRequest[Json]:
    return ApiRequest("GET", _path(session_id, "/stats"), _unchanged)


def events(session_id: str, limit: int = 100, cursor: str = "") -> ApiRequest[Json]:
    query = _query({"limit": limit, "cursor": cursor})
    return ApiRequest("GET", _path(session_id, "/events"), _unchanged, query=query)
