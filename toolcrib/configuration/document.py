"""The objects of a configuration file, as pydantic models; pure.

A field that is absent is not in `model_fields_set`: it stays as it is. Texts are normalized like
the actions that store them, so that a file can be compared with the database.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from catalog.tools.actions import normalize_tool
from sessions_app.rules.schemas import ApproverName, EffectName, MatchIn
from toolcrib.lib.api_schemas import Strict
from toolcrib.lib.errors import Invalid

VERSION = 1
MAX_OBJECTS = 10_000

Text = Annotated[StrictStr, AfterValidator(lambda text: text.replace("\r\n", "\n").strip())]
Line = Annotated[StrictStr, AfterValidator(lambda text: " ".join(text.split()))]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]
Number = StrictInt | StrictFloat


class ServerConfig(Strict):
    slug: Name
    name: Text | None = None
    description: Text | None = None
    type: Literal["stdio", "http", "sse"] | None = None
    command: StrictStr | None = None
    args: list[StrictStr] | None = None
    cwd: StrictStr | None = None
    url: StrictStr | None = None
    env: dict[StrictStr, StrictStr] | None = None
    headers: dict[StrictStr, StrictStr] | None = None
    connection_policy: StrictStr | None = None
    isolation: StrictStr | None = None
    trust: StrictStr | None = None
    call_timeout: StrictInt | None = None
    concurrency: StrictInt | None = None
    poll_seconds: StrictInt | None = None
    enabled: StrictBool | None = None


class CustomToolConfig(Strict):
    """A definition in MCP's format."""

    model_config = ConfigDict(extra="allow")
    name: Name

    @model_validator(mode="before")
    @classmethod
    def normalize(cls, raw: Any) -> Any:
        try:
            return normalize_tool(raw)
        except Invalid as error:
            raise ValueError(error.sentence) from error


class ParameterConfig(Strict):
    """Overrides of one parameter."""

    description: Text | None = None
    hidden: StrictBool | None = None
    fixed: Any = None


class ToolConfig(Strict):
    name: Name = Field(description="The public name that Toolcrib derived, not an alias")
    alias: Text | None = None
    description: Text | None = None
    parameters: dict[str, ParameterConfig] | None = None
    access: Literal["available", "blocked", "hidden"] | None = None
    reason: Text | None = None
    payload_storage: StrictStr | None = None
    read_only: StrictStr | None = None
    input_examples: list[dict[str, Any]] | None = None


class MemberConfig(Strict):
    tool: Name
    preload: StrictBool | None = None


class GroupConfig(Strict):
    group_id: Name
    display_name: Line | None = None
    description: Line | None = None
    preload_default: StrictBool | None = None
    deferred: StrictBool | None = None
    follows: StrictStr | None = None
    members: list[MemberConfig] | None = None

    @model_validator(mode="before")
    @classmethod
    def accept_names(cls, raw: Any) -> Any:
        """A member that is a text is a tool with the group's default preload."""
        if not isinstance(raw, dict) or not isinstance(raw.get("members"), list):
            return raw
        members = [{"tool": row} if isinstance(row, str) else row for row in raw["members"]]
        return {**raw, "members": members}


class AgentConfig(Strict):
    name: Name
    description: Text | None = None
    groups: Literal["all"] | list[StrictStr] | None = None
    enabled: StrictBool | None = None
    catalog_header: Text | None = None
    strategy: StrictStr | None = None
    mode: StrictStr | None = None
    tool_threshold: StrictInt | None = None
    threshold_tokens: StrictInt | None = None
    threshold_percent: Number | None = None
    catalog_budget: StrictInt | None = None
    budget: StrictInt | None = None
    calls_in_flight: StrictInt | None = None
    calls_per_minute: StrictInt | None = None
    searches_per_minute: StrictInt | None = None
    cost_per_minute: StrictInt | None = None
    max_sessions: StrictInt | None = None
    payload_storage: StrictStr | None = None
    code_mode: StrictBool | None = None
    runs_custom_tools: StrictBool | None = None


class RuleConfig(Strict):
    name: Name
    effect: EffectName | None = None
    reason: Text | None = None
    enabled: StrictBool | None = None
    approver: ApproverName | None = None
    match: MatchIn | None = None


class GoldenQueryConfig(Strict):
    query: Line
    tools: Annotated[
        list[Name],
        Field(min_length=1, max_length=20),
        AfterValidator(lambda names: sorted(set(names))),
    ]


class Document(Strict):
    """A whole file. Sections that are absent are not touched, also with --prune."""

    version: Literal[1] = 1
    servers: Annotated[list[ServerConfig], Field(max_length=MAX_OBJECTS)] = []
    custom_tools: Annotated[list[CustomToolConfig], Field(max_length=MAX_OBJECTS)] = []
    tools: Annotated[list[ToolConfig], Field(max_length=MAX_OBJECTS)] = []
    groups: Annotated[list[GroupConfig], Field(max_length=MAX_OBJECTS)] = []
    agents: Annotated[list[AgentConfig], Field(max_length=MAX_OBJECTS)] = []
    rules: Annotated[list[RuleConfig], Field(max_length=MAX_OBJECTS)] = []
    golden_queries: Annotated[list[GoldenQueryConfig], Field(max_length=MAX_OBJECTS)] = []


# The field that identifies an object of each section.
KEYS = {
    "servers": "slug",
    "custom_tools": "name",
    "tools": "name",
    "groups": "group_id",
    "agents": "name",
    "rules": "name",
    "golden_queries": "query",
}
# Fields whose null is a value of its own.
NULLABLE = {("agents", "budget"), ("groups", "follows")}


def parse_document(raw: object) -> Document:
    """Check the shape of a file. Raises Invalid with the path of every problem."""
    if not isinstance(raw, dict):
        raise Invalid("The file is not a configuration.", hint="toolcrib export-config writes one.")
    try:
        document = Document.model_validate(raw)
    except ValidationError as error:
        problems = [
            {"at": ".".join(map(str, item["loc"])) or "file", "problem": item["msg"]}
            for item in error.errors(include_input=False, include_url=False)[:20]
        ]
        lines = "; ".join(f"{item['at']}: {item['problem']}" for item in problems[:5])
        raise Invalid(
            f"The configuration is invalid: {lines}.", details={"problems": problems}
        ) from None
    for section, key in KEYS.items():
        seen: set[str] = set()
        for row in getattr(document, section):
            name = getattr(row, key)
            if name in seen:
                raise Invalid(f"{section} contains {name[:80]!r} twice.", hint="Keep one of them.")
            seen.add(name)
    return document


def object_fields(section: str, row: Strict) -> dict[str, Any]:
    """Return the fields that a file sets, as plain values, without the key."""
    values = row.model_dump(include=row.model_fields_set, exclude_unset=True)
    if section == "custom_tools":
        values = row.model_dump()
    if section == "rules" and "match" in values and isinstance(row, RuleConfig) and row.match:
        values["match"] = normalize_match(row.match)
    if section == "groups" and values.get("members") is not None and isinstance(row, GroupConfig):
        values["members"] = [member.model_dump() for member in row.members or ()]
    values.pop(KEYS[section], None)
    return {
        name: value
        for name, value in values.items()
        if value is not None or (section, name) in NULLABLE
    }


def normalize_match(match: MatchIn) -> dict[str, Any]:
    values = match.model_dump(exclude_defaults=True, exclude_none=True)
    return {name: value for name, value in values.items() if value not in ([], {}, False)}
