"""Request bodies of rules, as the API and the form accept them."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from sessions_app.rules.evaluation import OPERATORS
from toolcrib.lib.api_schemas import AgentBody, Integer

MAX_RULES, MAX_CONDITIONS = 500, 20
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]
Names = Annotated[list[Name], Field(max_length=200)]
EffectName = Literal["allow", "hold", "deny"]
ApproverName = Literal["operator", "caller"]


class ConditionIn(AgentBody):
    path: Annotated[StrictStr, Field(max_length=500)] = Field(
        description="JSON pointer into the arguments; `*` stands for every element or member",
        examples=["/repository/owner", "/recipients/*"],
    )
    op: Annotated[str, Field(json_schema_extra={"enum": list(OPERATORS)})]
    value: Any = Field(None, description="What the operator compares with")


class AnnotationsIn(AgentBody):
    """Annotations of the tool, with MCP's defaults where the server sets none."""

    readOnlyHint: StrictBool | None = None
    destructiveHint: StrictBool | None = None
    idempotentHint: StrictBool | None = None
    openWorldHint: StrictBool | None = None


class MatchIn(AgentBody):
    """What a call must be like. An empty or absent part matches every call."""

    agents: Names = Field(default=[], description="Names of agents")
    tools: Names = Field(default=[], description="Globs on public and original names of tools")
    servers: Names = Field(default=[], description="Slugs of the tool's server")
    groups: Names = Field(default=[], description="Ids of groups that contain the tool")
    annotations: AnnotationsIn = AnnotationsIn()
    origin: Literal["any", "direct", "script"] = "any"
    first_use: StrictBool = Field(
        default=False, description="The agent has not used the tool before"
    )
    arguments: Annotated[list[ConditionIn], Field(max_length=MAX_CONDITIONS)] = []
    after: Names = Field(
        default=[], description="Slugs: one of these servers has given results before"
    )
    after_scope: Literal["session", "agent"] = Field(
        default="session", description="To this session, or to the agent within 24 hours"
    )
    not_servers: Names = []
    not_tools: Names = []


class RuleIn(AgentBody):
    name: StrictStr
    effect: EffectName
    reason: StrictStr = Field("", description="Told to agents and people")
    enabled: StrictBool = True
    position: Integer | None = Field(
        None, ge=0, le=MAX_RULES, description="From 0; default, and past the end: the last"
    )
    match: MatchIn = Field(default_factory=MatchIn)
    approver: ApproverName = Field("operator", description="Who may allow a held call")


class RuleEdit(AgentBody):
    name: StrictStr | None = None
    effect: EffectName | None = None
    reason: StrictStr | None = None
    enabled: StrictBool | None = None
    position: Integer | None = Field(
        None, ge=0, le=MAX_RULES, description="From 0; past the end: the last"
    )
    match: MatchIn | None = Field(None, description="Replaces the whole match")
    approver: ApproverName | None = None
