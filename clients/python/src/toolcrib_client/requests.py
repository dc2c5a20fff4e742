"""Requests and responses of the agent API as plain values.

Uses no network. Each response keeps its complete JSON in
`raw`, which includes fields added by newer versions of Toolcrib.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NotRequired, Self, TypedDict, TypeVar, Unpack
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
    load_order: NotRequired[list[str]]


class OpenOptions(TypedDict, total=False):
    strategy: str
    mode: str
    context_window: int
    tool_threshold: int
    threshold_tokens: int
    threshold_percent: float
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
    query: str
    queries: Sequence[str]
    pattern: str
    name: str
    strategy: str
    server: str
    limit: int
    detail: str
    explain: bool
    load: bool


@dataclass(frozen=True)
class Response:
    """The main fields of a response; `raw` has all of them."""

    raw: Json = field(repr=False, kw_only=True)

    @classmethod
    def read(cls, raw: Json) -> Self:
        known = {each.name: raw[each.name] for each in fields(cls) if each.name in raw}
        return cls(**{**known, "raw": raw})


@dataclass(frozen=True)
class Session(Response):
    id: str
    strategy: str
    mode: str
    suggested_iteration_multiplier: int
    unknown: list[str]
    tools: list[Json] = field(default_factory=list)  # empty for a session that was closed

    @property
    def text(self) -> str:
        """Return the catalog for the system prompt; empty for a session that was closed."""
        return str(self.raw.get("catalog", {}).get("text", ""))


@dataclass(frozen=True)
class Catalog:
    """A catalog in one format. Pass `etag` with the next request."""

    body: Json
    etag: str


@dataclass(frozen=True)
class Found(Response):
    status: str
    total_matches: int
    tools: list[Json]
    newly_loaded: int
    message: str
    more: list[str] = field(default_factory=list)  # names of further matches


@dataclass(frozen=True)
class Loaded(Response):
    group_id: str
    tool_names: list[str]
    remaining: int
    unknown: list[str]
    schemas: list[Json] | None
    error: Json | None


@dataclass(frozen=True)
class CallResult(Response):
    call_id: str
    tool_name: str
    state: str
    is_error: bool
    content: list[Json]
    structured_content: Any
    error: Json | None = None


def _unchanged(raw: Any) -> Any:
    return raw


def _path(session_id: str, path: str = "") -> str:
    return f"/sessions/{quote(session_id, safe='')}{path}"


def _query(options: Mapping[str, object]) -> dict[str, str]:
    """Return query parameters; false and empty options are omitted."""
    return {
        name: "true" if value is True else str(value) for name, value in options.items() if value
    }


def open_session(**wish: Unpack[OpenOptions]) -> ApiRequest[Session]:
    return ApiRequest("POST", "/sessions", Session.read, wish, repeatable=False)


def session(session_id: str) -> ApiRequest[Session]:
    query = {"include": "catalog,tools"}
    return ApiRequest("GET", _path(session_id), Session.read, query=query)


def close(session_id: str) -> ApiRequest[Session]:
    return ApiRequest("POST", _path(session_id, "/close"), Session.read, {})


def fork(session_id: str) -> ApiRequest[Session]:
    return ApiRequest("POST", _path(session_id, "/fork"), Session.read, {}, repeatable=False)


def catalog(session_id: str, etag: str = "", **form: Unpack[Form]) -> ApiRequest[Catalog | None]:
    """Read the catalog. The response is None if the etag still matches."""
    headers = {"If-None-Match": etag} if etag else {}
    path = _path(session_id, "/catalog")
    return ApiRequest("GET", path, _unchanged, query=_query(form), headers=headers)


def tools(session_id: str, **form: Unpack[Form]) -> ApiRequest[list[Json]]:
    return ApiRequest("GET", _path(session_id, "/tools"), _unchanged, query=_query(form))


def servers(session_id: str, limit: int = 50, cursor: str = "") -> ApiRequest[Json]:
    """List the servers in the session's scope: slug, name, groups, number of tools, state."""
    query = _query({"limit": limit, "cursor": cursor})
    return ApiRequest("GET", _path(session_id, "/servers"), _unchanged, query=query)


def details(session_id: str, name: str, detail: str = "full") -> ApiRequest[Json]:
    path = _path(session_id, f"/tools/{quote(name, safe='')}")
    return ApiRequest("GET", path, _unchanged, query={"detail": detail})


def search(session_id: str, **looking: Unpack[SearchOptions]) -> ApiRequest[Found]:
    return send_search(session_id, looking)


def send_search(session_id: str, body: Mapping[str, Any]) -> ApiRequest[Found]:
    return ApiRequest("POST", _path(session_id, "/search"), Found.read, body)


def provider_search(
    session_id: str, body: Mapping[str, Any], format_: str, call_id: str
) -> ApiRequest[Json]:
    """Search with results in the provider's own format."""
    query = _query({"format": format_, "call_id": call_id})
    return ApiRequest("POST", _path(session_id, "/search"), _unchanged, body, query)


def load(
    session_id: str,
    group_id: str,
    tool_names: Sequence[str] | None = None,
    *,
    confirm: bool = False,
) -> ApiRequest[Loaded]:
    """Load tools of a group, or all; `confirm` also if they have more than 20,000 tokens."""
    body: Json = {"group_id": group_id}
    if tool_names is not None:
        body["tool_names"] = list(tool_names)
    if confirm:
        body["confirm"] = True
    return send_load(session_id, body)


def send_load(session_id: str, body: Mapping[str, Any]) -> ApiRequest[Loaded]:
    return ApiRequest("POST", _path(session_id, "/load"), Loaded.read, body)


def preload(session_id: str, tool_names: Sequence[str]) -> ApiRequest[Json]:
    body = {"tool_names": list(tool_names)}
    return ApiRequest("POST", _path(session_id, "/preload"), _unchanged, body)


def call(
    session_id: str,
    tool_name: str,
    arguments: object = None,
    *,
    timeout: float | None = None,
    idempotency_key: str = "",
    read_only: bool = False,
) -> ApiRequest[CallResult]:
    """Call a tool, with `read_only` only one that reads. Its idempotency key makes retries safe."""
    body: Json = {"tool_name": tool_name, "arguments": {} if arguments is None else arguments}
    if timeout is not None:
        body["timeout"] = timeout
    if read_only:
        body["read_only"] = True
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    path = _path(session_id, "/call")
    return ApiRequest("POST", path, CallResult.read, body, headers=headers, seconds=timeout or 300)


def check_call(call_id: str, wait: float = 0) -> ApiRequest[CallResult]:
    """Get the result of a call, or how it stands after at most `wait` seconds."""
    path = f"/calls/{quote(call_id, safe='')}"
    query = _query({"wait": wait})
    return ApiRequest("GET", path, CallResult.read, query=query, seconds=wait + 30)


def report_result(
    call_id: str,
    content: Sequence[Json],
    structured_content: Json | None = None,
    *,
    is_error: bool = False,
) -> ApiRequest[CallResult]:
    """Report what a custom tool returned to the agent's own program."""
    body: Json = {"content": list(content), "is_error": is_error}
    if structured_content is not None:
        body["structured_content"] = structured_content
    return ApiRequest("POST", f"/calls/{quote(call_id, safe='')}/result", CallResult.read, body)


def run_script(
    session_id: str,
    code: str,
    input: object = None,
    *,
    language: str = "python",
    timeout: float | None = None,
    idempotency_key: str = "",
) -> ApiRequest[Json]:
    """Run a script that calls tools. Its idempotency key makes retries safe.

    The response may say that it is still running, or held: ask `check_script` then.
    """
    body: Json = {"code": code, "language": language}
    if input is not None:
        body["input"] = input
    if timeout is not None:
        body["timeout"] = timeout
    return send_script(session_id, body, idempotency_key)


def send_script(
    session_id: str, body: Mapping[str, Any], idempotency_key: str = ""
) -> ApiRequest[Json]:
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    path = _path(session_id, "/scripts")
    return ApiRequest("POST", path, _unchanged, body, headers=headers, seconds=60)


def check_script(run_id: str, wait: float = 0) -> ApiRequest[Json]:
    """Get the result of a script, or how it stands after at most `wait` seconds."""
    path = f"/scripts/{quote(run_id, safe='')}"
    query = _query({"wait": wait})
    return ApiRequest("GET", path, _unchanged, query=query, seconds=wait + 30)


def state(session_id: str) -> ApiRequest[State]:
    return ApiRequest("GET", _path(session_id, "/state"), _unchanged)


def stats(session_id: str) -> ApiRequest[Json]:
    return ApiRequest("GET", _path(session_id, "/stats"), _unchanged)


def events(session_id: str, limit: int = 100, cursor: str = "") -> ApiRequest[Json]:
    query = _query({"limit": limit, "cursor": cursor})
    return ApiRequest("GET", _path(session_id, "/events"), _unchanged, query=query)
