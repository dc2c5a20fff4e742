"""How an agent's loop answers a model's calls, without sending anything itself.

Each method is a generator: it yields what is to be asked or run and is sent what came of it, so
that the loop that waits and the one for asyncio (client_loop) are the same.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

from toolcrib.client import requests as asks
from toolcrib.client.http import ApiError
from toolcrib.client.providers import PROVIDERS, ToolCall, ToolResult, compact, parsed, plain
from toolcrib.client.requests import (
    ApiRequest,
    CallResult,
    Form,
    Json,
    Loaded,
    OpenOptions,
    Session,
    State,
)
from toolcrib.client.resume import (
    CacheKey,
    LoaderCache,
    ResumedState,
    check_strategy,
    prepare_resumed_state,
)
from toolcrib.lib.errors import Invalid, ToolcribError

T = TypeVar("T")
SEARCHES = ("search_tools", "tool_search", "tool_search_regex")
DISPATCHERS = ("deferred_tool_call", "call_tool")
META = (*SEARCHES, "load_tools", "get_tool_details")
# What a model can mend by asking otherwise; the rest is for who runs it.
MENDABLE = (404, 409, 413, 422)
NOT_THE_MODELS = (
    "unknown_session",
    "session_closed",
    "session_expired",
    "idempotency_conflict",
    "not_toolcrib",
)


class ToolFailed(ToolcribError):
    """Raised by a caller's own function to tell the model that it failed, and why."""

    code = "tool_failed"


class MissingServers(ToolcribError):
    code = "missing_servers"
    status = 409


@dataclass(frozen=True)
class Run:
    """A function of the caller's to run."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


Step = ApiRequest[Any] | Run
Steps = Generator[Step, Any, T]
Before = Callable[[ToolCall], Any]
After = Callable[[ToolCall, ToolResult], Any]


class Options(TypedDict, total=False):
    """What a loop may be told beside the provider."""

    native: bool  # tools are deferred in the provider's own way
    search: str  # native: who finds them
    toolset: bool  # native: the provider reaches Toolcrib's MCP endpoint itself
    wish: OpenOptions  # for the session that is opened
    session_id: str  # or use this one, and leave it open
    resume: State
    loader_cache: LoaderCache
    require_servers: Sequence[str]
    max_iterations: int | None
    before: Before | None  # sees the real call first; words from it refuse the call
    after: After | None  # sees the real call and its result; may return another
    functions: Mapping[str, Callable[..., Any]]  # for custom tools, by name
    on_tools_expanded: Callable[[list[str]], Any] | None


class Loop:
    """One run of an agent: what to show its model, and what to answer its calls with."""

    def __init__(
        self,
        provider: str,
        *,
        native: bool = False,
        search: str = "",
        toolset: bool = False,
        wish: OpenOptions | None = None,
        session_id: str = "",
        resume: State | None = None,
        loader_cache: LoaderCache | None = None,
        require_servers: Sequence[str] = (),
        max_iterations: int | None = None,
        before: Before | None = None,
        after: After | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        on_tools_expanded: Callable[[list[str]], Any] | None = None,
    ) -> None:
        if provider not in PROVIDERS:
            raise Invalid(
                f"There is no provider {provider!r}.", hint=f"There are: {', '.join(PROVIDERS)}."
            )
        self.provider = provider
        self.form: Form = {"format": provider}
        if native:
            self.form |= {"native": True, "search": search, "toolset": toolset}
        self.wish: OpenOptions = wish or {}
        self.require_servers = list(require_servers)
        self.max_iterations = max_iterations
        self.before, self.after = before, after
        self.functions = dict(functions or {})
        self.on_tools_expanded = on_tools_expanded
        self.loader_cache: LoaderCache = dict(loader_cache or {})
        self.exhausted = False  # the last turn was had and the model had not done
        self.system = ""
        self.tools: list[Json] = []
        self.extras: Json = {}  # what else the provider's request wants: mcp_servers, betas
        self.resumed: ResumedState | None = None
        self._resume = resume
        self._session_id = session_id
        self._session: Session | None = None
        self._etag = ""
        self._known: dict[str, list[str]] | None = None  # tools by group
        self._loaded: set[str] = set()

    @property
    def session(self) -> Session:
        if self._session is None:
            raise Invalid("No session is open.", hint="Use the loop as a context manager.")
        return self._session

    @property
    def limit(self) -> int | None:
        """How many turns to allow: a run whose tools are deferred needs more of them."""
        if self.max_iterations is None:
            return None
        return self.max_iterations * self.session.suggested_iteration_multiplier

    # --- The session ----------------------------------------------------------------------------

    def opening(self) -> Steps[None]:
        if self._resume is not None:
            check_strategy(self._resume, self.wish.get("strategy") or self._resume["strategy"])
            self.wish = {**self.wish, "resume": self._resume, "strategy": self._resume["strategy"]}
        first = asks.session(self._session_id) if self._session_id else asks.open_session(self.wish)
        self._session = yield first
        try:
            if self.require_servers or self.before or self._resume:
                yield from self._look_around()
            yield from self.reading()
        except ToolcribError:
            if not self._session_id:
                yield asks.close(self.session.id)
            raise

    def _look_around(self) -> Steps[None]:
        found = yield asks.catalog(self.session.id, {"format": "json"})
        self._known = {line["group_id"]: line["tool_names"] for line in found.body["groups"]}
        missing = [slug for slug in self.require_servers if slug not in found.body["servers"]]
        if missing:
            there = ", ".join(found.body["servers"]) or "none"
            raise MissingServers(
                f"This agent needs tools of {', '.join(missing)}, and its session has none.",
                hint=f"Give it a group with them. Servers it has tools of: {there}.",
            )
        if self._resume is not None:
            state = yield asks.state(self.session.id)
            self.resumed = prepare_resumed_state(
                self._known, state["expanded_groups"], self.session.strategy, self.loader_cache
            )
            self._loaded |= set(self.resumed.pre_loaded_tools)

    def reading(self) -> Steps[None]:
        """Read the text and the array; what was in the array stays where it was."""
        found = yield asks.catalog(self.session.id, self.form, self._etag)
        if found is None:
            return
        self._etag = found.etag
        body = dict(found.body)
        self.system = body.pop("text" if self.provider == "json" else "system")
        self.tools = appended(self.tools, body.pop("tools"))
        self.extras = {} if self.provider == "json" else body

    # --- Calls ----------------------------------------------------------------------------------

    def calls_of(self, reply: Any) -> list[ToolCall]:
        return PROVIDERS[self.provider].calls(plain(reply))

    def messages_of(self, results: Sequence[ToolResult]) -> list[Json]:
        return PROVIDERS[self.provider].messages(results) if results else []

    def said_of(self, reply: Any) -> list[Any]:
        return PROVIDERS[self.provider].said(reply)

    def answering(self, asked: ToolCall) -> Steps[ToolResult]:
        """Answer one call. What the model can mend is a result; what it cannot is raised."""
        try:
            if asked.search or asked.name in SEARCHES:
                return (yield from self._searching(asked))
            if asked.name == "load_tools":
                return (yield from self._load(asked))
            if asked.name == "get_tool_details":
                return (yield from self._details(asked))
            return (yield from self._call(asked))
        except ApiError as error:
            if error.status not in MENDABLE or error.code in NOT_THE_MODELS:
                raise
            return refusal(asked, error.sentence, error.details)

    def _searching(self, asked: ToolCall) -> Steps[ToolResult]:
        looking = dict(_object(asked.arguments))
        if asked.name == "tool_search_regex":
            looking = {"load": True, **looking}
            if "query" in looking:
                looking.setdefault("pattern", looking.pop("query"))
        own = self.form.get("native") and (asked.search or self.form.get("search") == "client")
        if own:
            ready = yield asks.provider_search(self.session.id, looking, self.provider, asked.id)
            return ToolResult(asked, asked, [], ready=ready)
        found = yield asks.search(self.session.id, looking)
        yield from self._tell([tool["name"] for tool in found.tools if tool["loaded"]])
        return said(asked, found.raw)

    def _load(self, asked: ToolCall) -> Steps[ToolResult]:
        body = _object(asked.arguments)
        key = _cache_key(body)
        kept: Loaded | None = self.loader_cache.get(key) if key else None
        # Only what this very session has: another's answer says nothing of it.
        if kept is not None and set(kept.tool_names) <= self._loaded:
            return said(asked, kept.raw)
        loaded: Loaded = yield asks.load(self.session.id, body)
        if loaded.error is not None:
            return refusal(asked, f"{loaded.error['message']} {loaded.error['hint']}".strip())
        if key:
            self.loader_cache[key] = loaded
        yield from self._tell(loaded.tool_names)
        return said(asked, loaded.raw)

    def _details(self, asked: ToolCall) -> Steps[ToolResult]:
        name = _object(asked.arguments).get("name")
        if not isinstance(name, str) or not name:
            return refusal(asked, "Give the name of a tool.")
        return said(asked, (yield asks.details(self.session.id, name)))

    def _tell(self, names: Sequence[str]) -> Steps[None]:
        fresh = [name for name in names if name not in self._loaded]
        self._loaded |= set(fresh)
        if fresh and self.on_tools_expanded is not None:
            yield Run(self.on_tools_expanded, (fresh,))

    def _call(self, asked: ToolCall) -> Steps[ToolResult]:
        call = unwrapped(asked)
        if call is None:
            return refusal(asked, "Give tool_name, the name of the tool to run, and its arguments.")
        if self.before is not None and isinstance(call.arguments, dict):
            call = replace(call, name=(yield from self._real(call.name)))
            objection = yield Run(self.before, (call,))
            if objection is not None:
                return replace(refusal(asked, str(objection)), call=call)
        answer: CallResult = yield asks.call(self.session.id, call.name, call.arguments)
        call = replace(call, name=answer.tool_name)
        result = ToolResult(
            asked,
            call,
            answer.content,
            answer.is_error,
            answer.structured_content,
            answer.state,
        )
        if answer.state == "client":
            result = yield from self._own(result)
        if self.after is not None:
            other = yield Run(self.after, (call, result))
            result = result if other is None else other
        return result

    def _own(self, result: ToolResult) -> Steps[ToolResult]:
        """Run a tool that is the caller's own, with the arguments as they were checked."""
        name = result.call.name
        function = self.functions.get(name)
        if function is None:
            words = f"{name} is run by the agent's own program, which has no function for it."
            return replace(refusal(result.asked, words), call=result.call)
        try:
            value = yield Run(function, (result.structured,))
        except ToolFailed as error:
            return replace(refusal(result.asked, error.sentence), call=result.call)
        text = value if isinstance(value, str) else compact(value)
        return replace(result, content=[{"type": "text", "text": text}], structured=None)

    def _real(self, name: str) -> Steps[str]:
        """Return a tool's full name, so that no bare one slips by a rule about the full one."""
        names = {one for group in (self._known or {}).values() for one in group}
        if name in names:
            return name
        bare = [one for one in names if one.partition("__")[2] == name]
        if len(bare) == 1:
            return bare[0]
        try:
            found = yield asks.details(self.session.id, name, "name")
        except ApiError:
            return name  # which the call will be refused for, in words
        return str(found["name"])


def unwrapped(asked: ToolCall) -> ToolCall | None:
    """Return the call of the real tool; None where the dispatcher was told none."""
    if asked.name not in DISPATCHERS:
        return asked
    given = _object(asked.arguments)
    name = given.get("tool_name", given.get("name"))
    if not isinstance(name, str) or not name:
        return None
    return ToolCall(asked.id, name, parsed(given.get("arguments", given.get("args"))))


def refusal(asked: ToolCall, words: str, details: Mapping[str, object] | None = None) -> ToolResult:
    near = (details or {}).get("suggestions")
    if isinstance(near, list) and near:
        words += f" Did you mean: {', '.join(map(str, near))}?"
    return ToolResult(asked, asked, [{"type": "text", "text": words}], is_error=True)


def said(asked: ToolCall, answer: Json) -> ToolResult:
    return ToolResult(asked, asked, [{"type": "text", "text": compact(answer)}])


def _object(arguments: Any) -> Json:
    return arguments if isinstance(arguments, dict) else {}


def _cache_key(body: Json) -> CacheKey | None:
    group_id, names = body.get("group_id"), body.get("tool_names")
    if not isinstance(group_id, str) or body.keys() - {"group_id", "tool_names"}:
        return None
    if names is None:
        return (group_id, None)
    return (group_id, tuple(map(str, names))) if isinstance(names, list) else None


def appended(old: list[Json], new: list[Json]) -> list[Json]:
    """Keep the array as it was and add what is new: the provider's cache holds a prefix."""
    if old and "function_declarations" in old[0]:
        inner = appended(old[0]["function_declarations"], new[0]["function_declarations"])
        return [{"function_declarations": inner}]
    known = [_name(tool) for tool in old]
    return [*old, *(tool for tool in new if _name(tool) not in known)]


def _name(tool: Json) -> object:
    return tool.get("name") or tool.get("function", tool).get("name") or tool.get("type")
