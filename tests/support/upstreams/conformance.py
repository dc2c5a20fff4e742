"""Server with the tools, prompts and resources that the MCP conformance suite calls by name.

python -m tests.support.upstreams.conformance [--http PORT] [--legacy]; stdio by default.
"""

import json
import re
from typing import Any

import anyio
from mcp.server import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolResult,
    ClientCapabilities,
    CompleteResult,
    ElicitationCapability,
    EmptyResult,
    GetPromptResult,
    InputRequiredResult,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    ReadResourceResult,
    SamplingCapability,
    Tool,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tests.support.upstreams.rich import PIXEL
from tests.support.upstreams.serving import parser, serve

TEXT = {"type": "text", "text": "This is a simple text response for testing."}
IMAGE = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": "UklGRiQAAABXQVZF", "mimeType": "audio/wav"}
RESOURCE: dict[str, Any] = {
    "type": "resource",
    "resource": {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    },
}
CONTENT: dict[str, list[dict[str, Any]]] = {
    "test_simple_text": [TEXT],
    "test_image_content": [IMAGE],
    "test_audio_content": [AUDIO],
    "test_embedded_resource": [RESOURCE],
    "test_multiple_content_types": [TEXT, IMAGE, RESOURCE],
    "test_error_handling": [{"type": "text", "text": "This tool always answers with an error."}],
    "test_tool_with_progress": [TEXT],
}
HEADERED = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}
PLAIN = {"type": "object", "additionalProperties": False}


NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
COLOR = {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]}
CONTEXT = {"type": "object", "properties": {"context": {"type": "string"}}, "required": ["context"]}
USER = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("username", "email")},
    "required": ["username", "email"],
}
OPTIONS = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{number}", "title": f"Choice {number}"} for number in (1, 2, 3)]
DEFAULTS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {
            "type": "string",
            "enum": ["active", "inactive", "pending"],
            "default": "active",
        },
        "verified": {"type": "boolean", "default": True},
    },
}
ENUMS = {
    "type": "object",
    "properties": {
        "untitledSingle": {"type": "string", "enum": OPTIONS},
        "titledSingle": {"type": "string", "oneOf": TITLED},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": OPTIONS}},
        "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
    },
}
# Tools that ask the user: the questions of each round, by their key.
ASKING: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "test_elicitation": [("user", "Who are you?", USER)],
    "test_elicitation_sep1034_defaults": [("form", "Check these.", DEFAULTS)],
    "test_elicitation_sep1330_enums": [("form", "Choose.", ENUMS)],
    "test_input_required_result_elicitation": [("user_name", "What is your name?", NAME)],
    "test_input_required_result_request_state": [("confirm", "Please confirm", OK)],
    "test_input_required_result_tampered_state": [("confirm", "Please confirm", OK)],
    "test_input_required_result_multi_round": [
        ("step1", "Step 1: What is your name?", NAME),
        ("step2", "Step 2: What is your favorite color?", COLOR),
    ],
}
UI_EXTENSION = "io.modelcontextprotocol/ui"
VIEWER = ClientCapabilities(extensions={UI_EXTENSION: {}})
SAMPLER = ClientCapabilities(sampling=SamplingCapability())
ASKER = ClientCapabilities(elicitation=ElicitationCapability())
TEXT_URI, BINARY_URI = "test://static-text", "test://static-binary"
VIEW_URI = "ui://fixtures/view.html"
TEMPLATE = "test://template/{id}/data"
MESSAGE = {"type": "object", "properties": {"message": {"type": "string"}}}
PROMPTS: dict[str, list[str]] = {
    "test_simple_prompt": [],
    "test_prompt_with_arguments": ["arg1", "arg2"],
    "test_prompt_with_embedded_resource": ["resourceUri"],
    "test_prompt_with_image": [],
    "test_input_required_result_prompt": [],
}


def is_modern(ctx: Any) -> bool:
    return str(ctx.protocol_version) in MODERN_PROTOCOL_VERSIONS


async def ask(
    ctx: Any, params: Any, rounds: list[tuple[str, str, dict[str, Any]]]
) -> InputRequiredResult | dict[str, Any]:
    """Return the answers by key, or the next question, as the era of the client has it."""
    answers: dict[str, Any] = {}
    if not is_modern(ctx):
        for key, message, schema in rounds:
            answer = await ctx.session.elicit_form(message, schema, ctx.request_id)
            answers[key] = answer.model_dump(mode="json", by_alias=True)
        return answers
    state = json.loads(params.request_state or "{}")
    given = {
        key: answer.model_dump(mode="json", by_alias=True)
        for key, answer in (params.input_responses or {}).items()
    }
    for key, message, schema in rounds:
        if key in state:
            answers[key] = state[key]
        elif key in given:
            answers[key] = given[key]
        else:
            question = {"mode": "form", "message": message, "requestedSchema": schema}
            asked = {key: {"method": "elicitation/create", "params": question}}
            result = {"inputRequests": asked, "requestState": json.dumps(answers)}
            return InputRequiredResult.model_validate({**result, "resultType": "input_required"})
    return answers


def prompt_messages(name: str, arguments: dict[str, str]) -> list[dict[str, Any]]:
    block: dict[str, Any] = {"type": "text", "text": "This is a simple prompt for testing."}
    if name == "test_prompt_with_arguments":
        values = ", ".join(f"{key}='{arguments[key]}'" for key in ("arg1", "arg2"))
        block["text"] = f"Prompt with arguments: {values}"
    elif name == "test_prompt_with_image":
        block = IMAGE
    elif name == "test_prompt_with_embedded_resource":
        resource = {"uri": arguments["resourceUri"], "mimeType": "text/plain", "text": "Embedded."}
        block = {"type": "resource", "resource": resource}
    return [{"role": "user", "content": block}]


def conformance() -> Server[Any]:
    bus = InMemorySubscriptionBus()
    subscribed: list[tuple[Any, str]] = []  # sessions of the handshake era

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        plain = [
            Tool(name=name, description=f"Do what {name} says.", input_schema=PLAIN)
            for name in CONTENT
        ]
        headered = Tool(name="test_header", description="Give a region.", input_schema=HEADERED)
        asking = [
            Tool(name=name, description="Ask the user.", input_schema=MESSAGE) for name in ASKING
        ]
        touch = Tool(name="touch", description="Change a resource.", input_schema=PLAIN)
        view = Tool.model_validate(
            {
                "name": "view",
                "description": "Show a view.",
                "inputSchema": PLAIN,
                "_meta": {"ui": {"resourceUri": VIEW_URI}},
            }
        )
        tools = [*plain, headered, *asking, touch, view]
        if ctx.session.check_client_capability(ASKER):
            tools.append(Tool(name="only_asking", description="Ask.", input_schema=MESSAGE))
        if ctx.session.check_client_capability(SAMPLER):
            tools.append(Tool(name="only_sampling", description="Ask.", input_schema=MESSAGE))
        if ctx.session.check_client_capability(VIEWER):
            tools.append(Tool(name="only_with_views", description="Show.", input_schema=PLAIN))
        return ListToolsResult(tools=tools)

    async def call_tool(ctx: Any, params: Any) -> CallToolResult | InputRequiredResult:
        if params.name == "test_tool_with_progress":
            for step, message in enumerate(("begun", "halfway", "done")):
                await ctx.session.report_progress(step * 50.0, 100.0, message)
                await anyio.sleep(0.02)
        if params.name == "touch":
            await bus.publish(ResourceUpdated(uri=TEXT_URI))
            for session, uri in subscribed:
                await session.send_resource_updated(uri)
        content = CONTENT.get(params.name, [TEXT])
        if params.name in ASKING:
            answers = await ask(ctx, params, ASKING[params.name])
            if isinstance(answers, InputRequiredResult):
                return answers
            content = [{"type": "text", "text": f"state-ok User response: {json.dumps(answers)}"}]
        result = {"content": content, "isError": params.name == "test_error_handling"}
        return CallToolResult.model_validate(result)

    async def list_prompts(ctx: Any, params: Any) -> ListPromptsResult:
        prompts = [
            {
                "name": name,
                "description": f"The prompt {name}.",
                "arguments": [{"name": argument, "required": True} for argument in arguments],
            }
            for name, arguments in PROMPTS.items()
        ]
        return ListPromptsResult.model_validate({"prompts": prompts})

    async def get_prompt(ctx: Any, params: Any) -> GetPromptResult | InputRequiredResult:
        if params.name not in PROMPTS:
            raise MCPError(INVALID_PARAMS, "Unknown prompt")
        if params.name == "test_input_required_result_prompt":
            context = "What context should the prompt use?"
            answers = await ask(ctx, params, [("user_context", context, CONTEXT)])
            if isinstance(answers, InputRequiredResult):
                return answers
        messages = prompt_messages(params.name, params.arguments or {})
        return GetPromptResult.model_validate({"description": "Given.", "messages": messages})

    async def list_resources(ctx: Any, params: Any) -> ListResourcesResult:
        resources = [
            {"uri": TEXT_URI, "name": "text", "description": "Text.", "mimeType": "text/plain"},
            {"uri": BINARY_URI, "name": "binary", "mimeType": "image/png"},
            {"uri": VIEW_URI, "name": "view", "mimeType": "text/html;profile=mcp-app"},
        ]
        return ListResourcesResult.model_validate({"resources": resources})

    async def list_templates(ctx: Any, params: Any) -> ListResourceTemplatesResult:
        template = {"uriTemplate": TEMPLATE, "name": "data", "mimeType": "application/json"}
        return ListResourceTemplatesResult.model_validate({"resourceTemplates": [template]})

    async def read_resource(ctx: Any, params: Any) -> ReadResourceResult:
        uri, content = str(params.uri), {"mimeType": "text/plain", "text": "The content."}
        match = re.fullmatch(r"test://template/(.+)/data", uri)
        if match:
            text = json.dumps({"id": match[1], "templateTest": True})
            content = {"mimeType": "application/json", "text": text}
        elif uri == BINARY_URI:
            content = {"mimeType": "image/png", "blob": PIXEL}
        elif uri not in (TEXT_URI, VIEW_URI, RESOURCE["resource"]["uri"]):
            raise MCPError(INVALID_PARAMS, "Resource not found")
        return ReadResourceResult.model_validate({"contents": [{"uri": uri, **content}]})

    async def subscribe(ctx: Any, params: Any) -> EmptyResult:
        subscribed.append((ctx.session, str(params.uri)))
        return EmptyResult()

    async def unsubscribe(ctx: Any, params: Any) -> EmptyResult:
        subscribed[:] = [each for each in subscribed if each[1] != str(params.uri)]
        return EmptyResult()

    async def complete(ctx: Any, params: Any) -> CompleteResult:
        values = [name for name in ("paris", "park", "party") if name.startswith("p")]
        return CompleteResult.model_validate({"completion": {"values": values, "hasMore": False}})

    return Server(
        "conformance",
        version="1.0",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_subscribe_resource=subscribe,
        on_unsubscribe_resource=unsubscribe,
        on_subscriptions_listen=ListenHandler(bus),
        on_completion=complete,
    )


if __name__ == "__main__":
    serve(conformance(), parser().parse_args())
