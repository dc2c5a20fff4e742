"""Request and response schemas of the agent API."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from ninja import Schema
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from sessions_app.models import CallState, EventKind, SessionState
from toolcrib.lib.api_schemas import AgentBody, Integer, Strict, choices, parse_digits

MAX_METADATA_BYTES = 16 * 1024
Text = Annotated[str, Field(max_length=500)]
Names = Annotated[list[Text], Field(max_length=20_000)]
StrategyName = Literal["dispatch", "inject"]
FormatName = Literal["text", "json", "anthropic", "openai", "openai-responses", "gemini", "mcp"]
DetailName = Literal["name", "summary", "full"]


class FormatIn(Schema):
    """Format of a catalog or tools response."""

    format: FormatName = "json"
    native: bool = Field(
        False,
        description="All tools, with the provider's deferred loading (anthropic, openai-responses)",
    )
    search: Literal["regex", "bm25", "server", "client"] | None = Field(
        None,
        description="Native: how tools are searched. anthropic: regex, bm25; "
        "openai-responses: server; both: client",
    )
    toolset: bool = Field(False, description="Native, anthropic: through the MCP connector")


class FoundIn(Schema):
    """Format of a search response."""

    compat: Literal["logicore"] | None = Field(
        None, description="logicore: the result of its tool_search_regex, instead of Toolcrib's own"
    )
    format: Literal["json", "anthropic", "openai-responses"] = "json"
    call_id: Annotated[str, Field(max_length=200)] = Field(
        "", description="The provider's id of the tool call being answered"
    )


class DetailsIn(AgentBody):
    """Arguments of the meta-tool get_tool_details."""

    ALIASES = {"tool_name": "name"}

    name: Annotated[StrictStr, Field(min_length=1, max_length=500)]
    detail: DetailName = "full"


class DetailIn(BaseModel):
    """Amount of a tool's definition in a response."""

    detail: DetailName = "full"


class Resume(Strict):
    """The state of another session. `session_id` says which: rules ask what it has read."""

    session_id: Annotated[str, Field(max_length=40)] = ""
    strategy: StrategyName
    expanded_groups: dict[str, list[Text] | None] = {}
    load_order: Names = Field([], description="Of all loaded tools, as GET …/state returns it")


class OpenIn(AgentBody):
    strategy: StrategyName | None = None
    mode: Literal["auto", "deferred", "full"] | None = None
    context_window: (
        Annotated[StrictInt, Field(gt=0, le=10**9), BeforeValidator(parse_digits)] | None
    ) = None
    tool_threshold: Integer | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="Defer from this number of tools on; default the agent's",
    )
    threshold_tokens: Integer | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="Defer above this many tokens; default the agent's",
    )
    threshold_percent: (
        Annotated[StrictInt | StrictFloat, Field(ge=0, le=100), BeforeValidator(parse_digits)]
        | None
    ) = Field(
        default=None, description="Defer above this share of context_window; default the agent's"
    )
    model: Annotated[str, Field(max_length=200)] = ""
    groups: Annotated[list[Text], Field(max_length=1000)] | None = None
    servers: Annotated[list[Text], Field(max_length=1000)] | None = None
    without_mcp: StrictBool = False
    preload: Annotated[list[Text], Field(max_length=1000)] = []
    header: Annotated[str, Field(max_length=4000)] | None = None
    metadata: dict[str, Any] = Field(
        default={}, description="Your own values, at most 16 KB as JSON"
    )
    resume: Resume | None = None


class LoadIn(AgentBody):
    group_id: Text
    tool_names: Names | None = None
    confirm: StrictBool = Field(
        False, description="Load a whole group although it has more than 20,000 tokens"
    )
    signatures: StrictBool | Literal["python", "typescript"] = Field(
        False,
        description="For agents that run scripts: typed functions in this language instead of "
        "schemas; true: in Python",
    )

    @property
    def signature_language(self) -> Literal["python", "typescript"] | None:
        if isinstance(self.signatures, bool):
            return "python" if self.signatures else None
        return self.signatures


class SearchIn(AgentBody):
    query: StrictStr = ""
    queries: Annotated[list[StrictStr], Field(max_length=4)] = Field(
        [], description="Several needs at once, instead of query: the best of each come first"
    )
    pattern: StrictStr = ""
    name: Text = ""
    strategy: Annotated[StrictStr, Field(max_length=100)] | None = Field(
        None, description="hybrid, bm25, embedding, regex, or the name of an installed ranker"
    )
    server: Text = ""
    limit: Integer | None = Field(
        None,
        description="1 to 50. Without it, 5 and the names of up to 10 more; 10 for a pattern",
    )
    detail: DetailName = "summary"
    explain: StrictBool = Field(
        False, description="Also server, source, tokens and score of each tool"
    )
    load: StrictBool | None = None
    server_hint: Annotated[StrictStr, Field(max_length=200)] = ""


class CallIn(AgentBody):
    ALIASES = {"name": "tool_name", "args": "arguments"}  # as meta-tools and many clients say

    tool_name: Annotated[StrictStr, Field(min_length=1, max_length=500)]
    arguments: Any = None
    timeout: (
        Annotated[StrictInt | StrictFloat, Field(gt=0, le=900), BeforeValidator(parse_digits)]
        | None
    ) = None
    read_only: StrictBool | None = Field(
        None, description="Refuse the call unless the tool only reads (not_read_only)"
    )


class WaitIn(Strict):
    """How long a request waits for the end of a call."""

    wait: float = Field(0, ge=0, le=20, description="Seconds to wait for the end of the call")


class CheckCallIn(AgentBody):
    """Arguments of the meta-tool check_call."""

    call_id: Annotated[StrictStr, Field(min_length=1, max_length=100)] | None = None
    run_id: Annotated[StrictStr, Field(min_length=1, max_length=100)] | None = None
    wait_seconds: (
        Annotated[StrictInt | StrictFloat, Field(ge=0, le=20), BeforeValidator(parse_digits)] | None
    ) = None

    @model_validator(mode="after")
    def check_one_id(self) -> Self:
        if (self.call_id is None) == (self.run_id is None):
            raise ValueError("give a call_id or a run_id")
        return self


class ResultIn(AgentBody):
    """The result of a custom tool, as the agent's own program returned it."""

    content: Annotated[list[dict[str, Any]], Field(max_length=1000)] = Field(
        description="Content blocks as in MCP: {type: text, text}"
    )
    structured_content: dict[str, Any] | None = Field(
        None, description="Required if the tool has an output schema"
    )
    is_error: StrictBool = False


class PreloadIn(AgentBody):
    tool_names: Names


class CatalogPart(Schema):
    text: str
    etag: str
    revision: int
    tokens: int
    left_out: dict[str, Any] | None


class SessionStats(Schema):
    total_registered: int
    loaded: int
    deferred: int
    deferred_mode: bool
    auto_deferred: bool
    threshold: int
    tokens: dict[str, Any]


class Stats(SessionStats):
    tool_names: list[str] = Field(description="Every tool of the session, loaded or not")


SESSION_PARTS = ("catalog", "tools")
SessionInclude = Annotated[str, Field(max_length=100, pattern=r"^((catalog|tools),?)*$")]


class SessionOut(Schema):
    id: str
    agent: str
    state: Annotated[str, choices(SessionState)]
    parent: str | None
    strategy: StrategyName
    mode: Literal["deferred", "full"]
    auto_deferred: bool
    decided_by: Literal["count", "tokens", "percent", "forced", "below"]
    stats: SessionStats
    suggested_iteration_multiplier: int
    unknown: list[str]
    ambiguous: dict[str, list[str]] = Field(description="Bare names of several tools: their names")
    metadata: dict[str, Any]
    created_at: datetime
    catalog: CatalogPart | None = Field(
        None, description="Text for the system prompt; only with include=catalog"
    )
    tools: list[dict[str, Any]] | None = Field(
        None,
        description="Objects for the model's tools array, fixed at the start; "
        "only with include=tools",
    )


class OpenedSession(SessionOut):
    """A session with all that it starts with."""

    catalog: CatalogPart
    tools: list[dict[str, Any]]


class SessionRow(Schema):
    id: str
    agent: str
    state: Annotated[str, choices(SessionState)]
    strategy: StrategyName
    mode: Literal["deferred", "full"]
    parent: str | None
    created_at: datetime
    last_used_at: datetime
    calls: int
    errors: int
    tokens: dict[str, Any]


class SessionPage(Schema):
    items: list[SessionRow]
    next_cursor: str | None


class SessionServer(Schema):
    """A server whose tools, prompts or resources a session has."""

    slug: str = Field(description="As in the parameter `server` of a search")
    name: str
    description: str
    groups: list[str] = Field(description="The session's groups that contain it, in their order")
    tools: int = Field(description="How many of its tools the session has")
    state: Literal["new", "connecting", "connected", "failing", "disabled"] = Field(
        description="State of Toolcrib's connection to it"
    )


class SessionServerPage(Schema):
    items: list[SessionServer]
    next_cursor: str | None


class LoadOut(Schema):
    group_id: str
    expanded: bool
    tool_names: list[str]
    remaining: int
    unknown: list[str]
    schemas: list[dict[str, Any]] | None
    signatures: str | None = Field(None, description="If asked for, instead of schemas")
    error: dict[str, Any] | None


class SearchOut(Schema):
    status: Literal["success", "no_matches"]
    strategy: str
    total_matches: int
    tools: list[dict[str, Any]]
    more: list[str] | None = Field(None, description="Names of further matches")
    newly_loaded: int
    message: str
    suggestions: list[str] | None = None
    features: list[dict[str, Any]] | None = Field(
        None, description="Prompts and resources that match, which clients get over MCP"
    )
    features_message: str | None = Field(None, description="How to get them")


class LogicoreSearchOut(Schema):
    """Search result as the tool_search_regex of Logicore, with `compat=logicore`."""

    status: Literal["success", "no_matches"]
    pattern: str
    total_matches: int
    tools: list[dict[str, Any]]
    newly_loaded: int
    message: str


class ToolResult(Schema):
    """Search result in Anthropic's format."""

    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: list[dict[str, Any]]


class ToolSearchOutput(Schema):
    """Search result in OpenAI's format."""

    type: Literal["tool_search_output"]
    call_id: str | None
    execution: Literal["client"]
    status: Literal["completed"]
    tools: list[dict[str, Any]]


class CallOut(Schema):
    call_id: str
    tool_name: str
    state: Annotated[str, choices(CallState)]
    is_error: bool
    content: list[Any]
    structured_content: Any
    meta: dict[str, Any] | None = Field(None, alias="_meta")
    error: dict[str, Any] | None = None
    tokens: int
    duration_ms: int
    implicit_load: bool


class PreloadOut(Schema):
    preloaded: list[str]
    unknown: list[str]
    ambiguous: dict[str, list[str]] = Field(description="Bare names of several tools: their names")
    schemas: list[dict[str, Any]] | None


class StateOut(Schema):
    strategy: StrategyName
    expanded_groups: dict[str, list[str] | None]
    load_order: list[str] = Field(description="All loaded tools, the first loaded first")


class EventOut(Schema):
    id: int
    at: datetime
    kind: Annotated[str, choices(EventKind)]
    tool_name: str
    group_id: str
    tokens: int
    details: dict[str, Any]
    call_id: str | None


class EventPage(Schema):
    items: list[EventOut]
    next_cursor: str | None
