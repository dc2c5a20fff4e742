"""Core of the agent loop, shared by its synchronous and asyncio versions.

Coroutines that await nothing but `send` and `run_function`, which each version implements.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from toolcrib_client import requests
from toolcrib_client.errors import Invalid, ToolcribError
from toolcrib_client.http import ApiError, AsyncToolcrib, Toolcrib, Unreachable
from toolcrib_client.providers import PROVIDERS, ToolCall, ToolResult, compact, parsed, plain
from toolcrib_client.requests import ApiRequest, Form, Json, OpenOptions, Session, State
from toolcrib_client.resume import (
    CacheKey,
    LoaderCache,
    ResumedState,
    check_strategy,
    prepare_resumed_state,
)

C = TypeVar("C", Toolcrib, AsyncToolcrib)
T = TypeVar("T")
SEARCHES = ("search_tools", "tool_search", "tool_search_regex")
READ_ONLY_DISPATCHER = "call_read_only_tool"
DISPATCHERS = (READ_ONLY_DISPATCHER, "deferred_tool_call", "call_tool")
META = (*SEARCHES, "load_tools", "get_tool_details", "check_call")
RUN_SCRIPT = "run_script"
SCRIPT_WAIT = 20.0  # seconds of one request; a script runs for at most a minute
# Errors that the model can correct become results; others are raised to the caller.
MODEL_ERROR_STATUSES = (400, 404, 405, 409, 413, 422)
MODEL_ERROR_CODES = ("too_many_held_calls",)
CALLER_ERROR_CODES = (
    "unknown_session",
    "session_closed",
    "session_expired",
    "idempotency_conflict",
    "not_toolcrib",
)


class ToolFailed(ToolcribError):
    """Raised by a caller's own function to report a failure to the model."""

    code = "tool_failed"


class MissingServers(ToolcribError):
    code = "missing_servers"
    status = 409


logger = logging.getLogger("toolcrib_client")
# A result, and the error that ends the run if the model cannot correct it.
Attempt = tuple[ToolResult, Exception | None]


class _Interrupted(Exception):
    """An error of the caller's hook after a call had its result."""

    def __init__(self, error: Exception, result: ToolResult) -> None:
        super().__init__()
        self.error, self.result = error, result


Before = Callable[[ToolCall], Any]
After = Callable[[ToolCall, ToolResult], Any]


class Loop(Generic[C]):
    """One run of an agent: the model's context, and the results of its calls."""

    def __init__(
        self,
        crib: C,
        provider: str,
        *,
        native: bool = False,  # use the provider's own deferred tools
        search: str = "",  # native: who runs the search
        toolset: bool = False,  # native: the provider connects to the MCP endpoint itself
        wish: OpenOptions | None = None,  # options for the session to open
        session_id: str = "",  # use this open session instead, and do not close it
        resume: State | None = None,
        loader_cache: LoaderCache | None = None,
        require_servers: Sequence[str] = (),
        max_iterations: int | None = None,
        before: Before | None = None,  # receives the resolved call; a returned text rejects it
        after: After | None = None,  # receives the call and its result; may replace the result
        functions: Mapping[str, Callable[..., Any]] | None = None,  # for custom tools, by name
        on_tools_expanded: Callable[[list[str]], Any] | None = None,
    ) -> None:
        if provider not in PROVIDERS:
            raise Invalid(
                f"Unknown provider {provider!r}.", hint=f"Use one of: {', '.join(PROVIDERS)}."
            )
        self.crib: C = crib
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
        self.exhausted = False  # the turn limit was reached before the model finished
        self.system = ""
        self.tools: list[Json] = []
        self.results: list[Json] = []  # messages with the results of the last reply
        self.extras: Json = {}  # further parameters of the provider's request: mcp_servers, betas
        self.resumed: ResumedState | None = None
        self._resume = resume
        self._session_id = session_id
        self._session: Session | None = None
        self._etag = ""
        self._known: dict[str, list[str]] | None = None  # tools by group
        self._loaded: set[str] = set()

    async def send(self, request: ApiRequest[T]) -> T:
        raise NotImplementedError

    async def run_function(
        self, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Any:
        """Run a function of the caller."""
        raise NotImplementedError

    @property
    def session(self) -> Session:
        if self._session is None:
            raise Invalid("No session is open.", hint="Use the loop as a context manager.")
        return self._session

    @property
    def limit(self) -> int | None:
        """Return the turn limit, which is higher if tools are deferred."""
        if self.max_iterations is None:
            return None
        return self.max_iterations * self.session.suggested_iteration_multiplier

    # --- The session ----------------------------------------------------------------------------

    async def opening(self) -> None:
        """Open or fetch the session, check requirements and read the tools."""
        if self._resume is not None:
            check_strategy(self._resume, self.wish.get("strategy") or self._resume["strategy"])
            self.wish = {**self.wish, "resume": self._resume, "strategy": self._resume["strategy"]}
        first = (
            requests.session(self._session_id)
            if self._session_id
            else requests.open_session(**self.wish)
        )
        self._session = await self.send(first)
        try:
            if self.require_servers or self.before or self._resume:
                await self._read_groups()
            await self.reading()
        except ToolcribError:
            if not self._session_id:
                await self.send(requests.close(self.session.id))
            raise

    async def _read_groups(self) -> None:
        catalog = await self.send(requests.catalog(self.session.id, format="json"))
        assert catalog is not None  # noqa: S101 - only with an etag
        self._known = {line["group_id"]: line["tool_names"] for line in catalog.body["groups"]}
        missing = [slug for slug in self.require_servers if slug not in catalog.body["servers"]]
        if missing:
            available = ", ".join(catalog.body["servers"]) or "none"
            raise MissingServers(
                f"The session has no tools of the required servers: {', '.join(missing)}.",
                hint=f"Grant the agent a group with these tools. Available servers: {available}.",
            )
        if self._resume is not None:
            state = await self.send(requests.state(self.session.id))
            self.resumed = prepare_resumed_state(
                self._known, state["expanded_groups"], self.session.strategy, self.loader_cache
            )
            self._loaded |= set(self.resumed.pre_loaded_tools)

    async def reading(self) -> None:
        """Read the catalog text and the tools array; existing tools keep their position."""
        catalog = await self.send(requests.catalog(self.session.id, self._etag, **self.form))
        if catalog is None:
            return
        self._etag = catalog.etag
        body = dict(catalog.body)
        self.system = body.pop("text" if self.provider == "json" else "system")
        self.tools = appended(self.tools, body.pop("tools"))
        self.extras = {} if self.provider == "json" else with_key(body, self.crib.key)

    # --- Calls ----------------------------------------------------------------------------------

    def calls_of(self, reply: Any) -> list[ToolCall]:
        return PROVIDERS[self.provider].calls(plain(reply))

    def messages_of(self, results: Sequence[ToolResult]) -> list[Json]:
        return PROVIDERS[self.provider].messages(results) if results else []

    def said_of(self, reply: Any) -> list[Any]:
        return PROVIDERS[self.provider].history(reply)

    def settle(self, results: Sequence[ToolResult], failure: BaseException | None) -> list[Json]:
        """Keep the messages of all results, then raise the error that ended the run."""
        self.results = self.messages_of(results)
        if failure is not None:
            raise failure
        return self.results

    async def attempt(self, asked: ToolCall) -> Attempt:
        """Run one call; an error that the model cannot correct comes with the result to record."""
        try:
            return await self._run(asked), None
        except _Interrupted as interrupted:
            return interrupted.result, interrupted.error
        except ToolcribError as error:
            message = f"The result of this call is unknown: {error.sentence}"
            return refusal(asked, message), error
        except Exception as error:  # noqa: BLE001 - raised again when every call has its result
            return refusal(asked, "The agent's program failed. The result is unknown."), error

    async def _run(self, asked: ToolCall) -> ToolResult:
        is_meta = asked.search or asked.name in (*META, *DISPATCHERS, RUN_SCRIPT)
        if is_meta and not isinstance(asked.arguments, dict):
            return refusal(asked, "The arguments must be a JSON object.")
        try:
            if asked.search or asked.name in SEARCHES:
                return await self._searching(asked)
            if asked.name == "load_tools":
                return await self._load(asked)
            if asked.name == "get_tool_details":
                return await self._details(asked)
            if asked.name == "check_call":
                return await self._check(asked)
            if asked.name == RUN_SCRIPT:
                return await self._run_script(asked)
            return await self._call(asked)
        except ApiError as error:
            if not _is_correctable(error):
                raise
            return refusal(asked, error.sentence, error.details)

    async def _searching(self, asked: ToolCall) -> ToolResult:
        options = dict(_object(asked.arguments))
        if asked.name == "tool_search_regex":
            options = {"load": True, **options}
            if "query" in options:
                options.setdefault("pattern", options.pop("query"))
        is_native = self.form.get("native") and (
            asked.search or self.form.get("search") == "client"
        )
        if is_native:
            ready = await self.send(
                requests.provider_search(self.session.id, options, self.provider, asked.id)
            )
            return ToolResult(asked, asked, [], ready=ready)
        matches = await self.send(requests.send_search(self.session.id, options))
        result = json_result(asked, matches.raw)
        names = [tool["name"] for tool in matches.tools if tool.get("loaded")]
        return await self._report_loaded(names, result)

    async def _load(self, asked: ToolCall) -> ToolResult:
        body = _object(asked.arguments)
        key = _cache_key(body)
        cached = self.loader_cache.get(key) if key else None
        # A cached result of another session is valid only if this session loaded the tools too.
        if cached is not None and set(cached.tool_names) <= self._loaded:
            return json_result(asked, cached.raw)
        loaded = await self.send(requests.send_load(self.session.id, body))
        if loaded.error is not None:
            return refusal(asked, f"{loaded.error['message']} {loaded.error['hint']}".strip())
        if key:
            self.loader_cache[key] = loaded
        return await self._report_loaded(loaded.tool_names, json_result(asked, loaded.raw))

    async def _details(self, asked: ToolCall) -> ToolResult:
        name = _object(asked.arguments).get("name")
        if not isinstance(name, str) or not name:
            return refusal(asked, "Give the name of a tool.")
        return json_result(asked, await self.send(requests.details(self.session.id, name)))

    async def _check(self, asked: ToolCall) -> ToolResult:
        body = _object(asked.arguments)
        call_id, wait = body.get("call_id"), body.get("wait_seconds") or 0
        seconds = min(max(wait if isinstance(wait, int | float) else 0, 0), 20)
        if isinstance(run_id := body.get("run_id"), str) and run_id:
            return _script_result(asked, await self.send(requests.check_script(run_id, seconds)))
        if not isinstance(call_id, str) or not call_id:
            return refusal(asked, "Give the call_id of the call.")
        response = await self.send(requests.check_call(call_id, wait=seconds))
        call = replace(asked, name=response.tool_name)
        structured = response.structured_content
        content, is_error = response.content, response.is_error
        return ToolResult(asked, call, content, is_error, structured, response.state)

    async def _run_script(self, asked: ToolCall) -> ToolResult:
        """Run a script to its end, or until a person has to decide. `before` may reject it."""
        body = _object(asked.arguments)
        if self.before is not None:
            objection = await self.run_function(self.before, asked)
            if objection is not None:
                return refusal(asked, str(objection))
        run = await self.send(requests.send_script(self.session.id, body))
        while run["status"] == "running":
            run = await self.send(requests.check_script(run["run_id"], SCRIPT_WAIT))
        result = _script_result(asked, run)
        if self.after is not None:
            replacement = await self._run_hook(result, self.after, asked, result)
            result = result if replacement is None else replacement
        return result

    async def _report_loaded(self, names: Sequence[str], result: ToolResult) -> ToolResult:
        fresh = [name for name in names if name not in self._loaded]
        self._loaded |= set(fresh)
        if fresh and self.on_tools_expanded is not None:
            await self._run_hook(result, self.on_tools_expanded, fresh)
        return result

    async def _run_hook(self, result: ToolResult, hook: Callable[..., Any], *given: Any) -> Any:
        """Run a hook of the caller; its error does not lose the result."""
        try:
            return await self.run_function(hook, *given)
        except Exception as error:
            raise _Interrupted(error, result) from error

    async def _call(self, asked: ToolCall) -> ToolResult:
        call = unwrapped(asked)
        if call is None:
            return refusal(asked, "Give the name of the tool to run, and its arguments.")
        if self.before is not None and isinstance(call.arguments, dict):
            call = replace(call, name=await self._resolve_name(call.name))
            objection = await self.run_function(self.before, call)
            if objection is not None:
                return replace(refusal(asked, str(objection)), call=call)
        read_only = asked.name == READ_ONLY_DISPATCHER
        response = await self.send(
            requests.call(self.session.id, call.name, call.arguments, read_only=read_only)
        )
        call = replace(call, name=response.tool_name)
        result = ToolResult(
            asked,
            call,
            response.content,
            response.is_error,
            response.structured_content,
            response.state,
        )
        if response.state == "client":
            result, value = await self._run_custom_tool(result)
            await self._report(response.call_id, result, value)
        if self.after is not None:
            replacement = await self._run_hook(result, self.after, call, result)
            result = result if replacement is None else replacement
        return result

    async def _run_custom_tool(self, result: ToolResult) -> tuple[ToolResult, Any]:
        """Run the caller's function for a custom tool, with the validated arguments by name.

        Also return the value of the function; None if it failed.
        """
        name = result.call.name
        function = self.functions.get(name)
        if function is None:
            message = f"{name} runs in the agent's own program, which has no function for it."
            return replace(refusal(result.asked, message), call=result.call), None
        try:
            value = await self.run_function(function, **_object(result.structured))
            text = value if isinstance(value, str) else compact(value)
        except ToolcribError as error:
            return replace(refusal(result.asked, error.sentence), call=result.call), None
        except Exception as error:
            logger.exception("The function of the custom tool %s failed", name)
            message = f"{name} failed: {type(error).__name__}: {error}"
            return replace(refusal(result.asked, message), call=result.call), None
        return replace(result, content=[{"type": "text", "text": text}], structured=None), value

    async def _report(self, call_id: str, result: ToolResult, value: Any) -> None:
        """Report a custom tool's result for the ledger; the model has it even if that fails."""
        structured = value if isinstance(value, dict) else None
        report = requests.report_result(
            call_id, result.content, structured, is_error=result.is_error
        )
        try:
            await self.send(report)
        except (ApiError, Unreachable) as error:
            logger.warning("Reporting the result of %s failed: %s", call_id, error)

    async def _resolve_name(self, name: str) -> str:
        """Return a tool's full name, so that `before` never sees an unprefixed one."""
        names = {tool for group in (self._known or {}).values() for tool in group}
        if name in names:
            return name
        matches = [tool for tool in names if tool.partition("__")[2] == name]
        if len(matches) == 1:
            return matches[0]
        try:
            tool_details = await self.send(requests.details(self.session.id, name, "name"))
        except ApiError:
            return name  # the call itself will be rejected with a message
        return str(tool_details["name"])


def unwrapped(asked: ToolCall) -> ToolCall | None:
    """Return the call of the real tool; None if a dispatcher call names no tool."""
    if asked.name not in DISPATCHERS:
        return asked
    body = _object(asked.arguments)
    names = {body[key] for key in ("name", "tool_name") if isinstance(body.get(key), str)}
    name = names.pop() if len(names) == 1 else ""
    if not name:
        return None
    arguments = body.get("arguments")
    return ToolCall(asked.id, name, parsed(body.get("args") if arguments is None else arguments))


def _is_correctable(error: ApiError) -> bool:
    if error.code in MODEL_ERROR_CODES:
        return True
    return error.status in MODEL_ERROR_STATUSES and error.code not in CALLER_ERROR_CODES


def refusal(
    asked: ToolCall, message: str, details: Mapping[str, object] | None = None
) -> ToolResult:
    """Return an error result with all that the model needs to correct its call."""
    given = details or {}
    problems, suggestions = given.get("problems"), given.get("suggestions")
    if isinstance(problems, list) and problems:
        message += f" Problems: {'; '.join(map(_problem, problems))}."
    if isinstance(suggestions, list) and suggestions:
        message += f" Did you mean: {', '.join(map(str, suggestions))}?"
    return ToolResult(asked, asked, [{"type": "text", "text": message}], is_error=True)


def _problem(problem: object) -> str:
    if isinstance(problem, Mapping) and "problem" in problem:
        return f"{problem.get('at', '')}: {problem['problem']}".removeprefix(": ")
    return str(problem)


def not_run(asked: ToolCall) -> ToolResult:
    """Return the result of a call that the end of the run prevented or interrupted."""
    return refusal(asked, "No result: the agent's program stopped before this call ended.")


def json_result(asked: ToolCall, body: Json) -> ToolResult:
    return ToolResult(asked, asked, [{"type": "text", "text": compact(body)}])


def _script_result(asked: ToolCall, run: Json) -> ToolResult:
    return replace(json_result(asked, run), is_error=run["is_error"])


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
    """Append new tools to the array; the provider caches its prefix, so that must not change."""
    if old and "functionDeclarations" in old[0]:
        inner = appended(old[0]["functionDeclarations"], new[0]["functionDeclarations"])
        return [{"functionDeclarations": inner}]
    known = [_name(tool) for tool in old]
    return [*old, *(tool for tool in new if _name(tool) not in known)]


def _name(tool: Json) -> object:
    return tool.get("name") or tool.get("function", tool).get("name") or tool.get("type")


def with_key(extras: Json, key: str) -> Json:
    """Add the key to MCP servers that the provider connects to itself; Toolcrib never sends it."""
    if "mcp_servers" not in extras:
        return extras
    servers = [{**server, "authorization_token": key} for server in extras["mcp_servers"]]
    return {**extras, "mcp_servers": servers}
