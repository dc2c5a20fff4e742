"""Request and response schemas of the agent API."""

from datetime import datetime
from typing import Annotated, Any, Literal

from ninja import Schema
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from toolcrib.lib.api_schemas import AgentBody, Integer, Strict, parse_digits

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

    format: Literal["json", "anthropic", "openai-responses"] = "json"
    call_id: Annotated[str, Field(max_length=200)] = Field(
        "", description="The provider's id of the tool call being answered"
    )


class DetailsIn(AgentBody):
    """Arguments of the meta-tool get_tool_details."""

    ALIASES = {"tool_name": "name"}

    name: Annotated[StrictStr, Field(min_length=1, max_length=500)]


class DetailIn(BaseModel):
    """Amount of a tool's definition in a response."""

    detail: DetailName = "full"


class Resume(Strict):
    strategy: StrategyName
    expanded_groups: dict[str, list[Text] | None] = {}


class OpenIn(AgentBody):
    strategy: StrategyName | None = None
    mode: Literal["auto", "deferred", "full"] | None = None
    context_window: (
        Annotated[StrictInt, Field(gt=0, le=10**9), BeforeValidator(parse_digits)] | None
    ) = None
    model: Annotated[str, Field(max_length=200)] = ""
    groups: Annotated[list[Text], Field(max_length=1000)] | None = None
    servers: Annotated[list[Text], Field(max_length=1000)] | None = None
    without_mcp: StrictBool = False
    preload: Annotated[list[Text], Field(max_length=1000)] = []
    header: Annotated[str, Field(max_length=4000)] | None = None
    metadata: dict[str, Any] = {}
    resume: Resume | None = None


class LoadIn(AgentBody):
    group_id: Text
    tool_names: Names | None = None


class SearchIn(AgentBody):
    query: StrictStr = ""
    pattern: StrictStr = ""
    name: Text = ""
    strategy: Literal["hybrid", "bm25", "embedding", "regex"] | None = None
    server: Text = ""
    limit: Integer = 10
    detail: DetailName = "summary"
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


class PreloadIn(AgentBody):
    tool_names: Names


class CatalogPart(Schema):
    text: str
    etag: str
    revision: int
    tokens: int
    left_out: dict[str, Any] | None


class Stats(Schema):
    total_registered: int
    loaded: int
    deferred: int
    deferred_mode: bool
    auto_deferred: bool
    threshold: int
    tool_names: list[str]
    tokens: dict[str, Any]


class SessionOut(Schema):
    id: str
    agent: str
    state: str
    parent: str | None
    strategy: str
    mode: str
    auto_deferred: bool
    decided_by: str
    catalog: CatalogPart
    tools: list[dict[str, Any]]
    stats: Stats
    suggested_iteration_multiplier: int
    unknown: list[str]
    metadata: dict[str, Any]
    created_at: datetime


class SessionRow(Schema):
    id: str
    agent: str
    state: str
    strategy: str
    mode: str
    parent: str | None
    created_at: datetime
    last_used_at: datetime
    calls: int
    errors: int
    tokens: dict[str, Any]


class SessionPage(Schema):
    items: list[SessionRow]
    next_cursor: str | None


class LoadOut(Schema):
    group_id: str
    expanded: bool
    tool_names: list[str]
    remaining: int
    unknown: list[str]
    schemas: list[dict[str, Any]] | None
    error: dict[str, Any] | None


class SearchOut(Schema):
    status: Literal["success", "no_matches"]
    strategy: str
    total_matches: int
    tools: list[dict[str, Any]]
    newly_loaded: int
    message: str
    suggestions: list[str] | None = None


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
    state: str
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
    schemas: list[dict[str, Any]] | None


class StateOut(Schema):
    strategy: str
    expanded_groups: dict[str, list[str] | None]


class EventOut(Schema):
    id: int
    at: datetime
    kind: str
    tool_name: str
    group_id: str
    tokens: int
    details: dict[str, Any]
    call_id: str | None


class EventPage(Schema):
    items: list[EventOut]
    next_cursor: str | None
