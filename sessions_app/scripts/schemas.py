"""Bodies of the script API."""

from typing import Annotated, Any, Literal

from ninja import Schema
from pydantic import Field

from sessions_app.models import CallState
from sessions_app.scripts.engines import MAX_SECONDS
from toolcrib.lib.api_schemas import AgentBody, Number, Strict, choices

MAX_SDK_TOOLS = 300  # in one response


class SdkIn(Strict):
    lang: Literal["python", "typescript"] = "python"
    tools: str = Field("", description="Names of tools, separated by commas; empty: all")
    group_id: str = Field("", description="Only tools of this group")


class SdkOut(Schema):
    lang: Literal["python", "typescript"]
    text: str = Field(description="Python stubs or TypeScript declarations")
    tokens: int
    names: dict[str, str] = Field(description="The public name of each function")
    left_out: int = Field(description=f"Tools beyond the first {MAX_SDK_TOOLS}")


class ScriptIn(AgentBody):
    code: str = Field(
        description="The script. Its return, or in Python its last expression, is the result"
    )
    language: Literal["python", "typescript"] = "python"
    timeout: Number | None = Field(
        None, ge=1, le=MAX_SECONDS, description="Seconds of running; pauses are not counted"
    )
    input: Any = Field(None, description="Any JSON value, which the script has as `input`")


class ScriptError(Schema):
    type: str
    message: str
    line: int | None
    traceback: str


class ScriptCall(Schema):
    seq: int
    call_id: str
    tool: str
    state: Annotated[str, choices(CallState)]
    is_error: bool


class ScriptTokens(Schema):
    given: int = Field(description="Of result, error and logs")
    spared: int = Field(description="Of the results of calls, which the model did not receive")


class ScriptRunOut(Schema):
    run_id: str
    status: Literal["running", "completed", "held", "failed"]
    language: Literal["python", "typescript"]
    is_error: bool
    result: Any
    error: ScriptError | None
    logs: str = Field(description="What the script printed")
    calls: list[ScriptCall]
    tokens: ScriptTokens
    truncated: bool = Field(description="The result was too long and was cut")
