"""Catalogs in each provider's format: exact bytes, and acceptance by the providers' SDKs."""

import json
import os
import re
from pathlib import Path

import anthropic
import jsonschema_rs
import openai
import pytest
from anthropic.types import (
    ToolParam,
    ToolResultBlockParam,
    ToolSearchToolBm25_20251119Param,
    ToolSearchToolRegex20251119Param,
)
from anthropic.types.beta import BetaMCPToolsetParam, BetaRequestMCPServerURLDefinitionParam
from google import genai
from google.genai import types as gemini
from mcp_types import Tool as McpTool
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import FunctionTool, NamespaceTool, ToolSearchTool
from openai.types.responses.response_tool_search_output_item_param_param import (
    ResponseToolSearchOutputItemParamParam,
)
from pydantic import TypeAdapter

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import Group, Tool
from catalog.tools.actions import save_custom_tool
from sessions_app.formats import native as native_formats
from sessions_app.formats import providers
from sessions_app.formats.native import Offer
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, make_server, tool_object
from tests.support.scripted_models import scripted_provider
from tests.support.upstreams.zoo import UNUSUAL_TOOLS, tool_definitions
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "formats"
SAFE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FORMS = {
    "text": "format=text",
    "json": "format=json",
    "anthropic": "format=anthropic",
    "anthropic-native-regex": "format=anthropic&native=true",
    "anthropic-native-bm25": "format=anthropic&native=true&search=bm25",
    "anthropic-native-client": "format=anthropic&native=true&search=client",
    "anthropic-toolset": "format=anthropic&native=true&toolset=true",
    "openai": "format=openai",
    "openai-responses": "format=openai-responses",
    "openai-responses-native": "format=openai-responses&native=true",
    "openai-responses-client": "format=openai-responses&native=true&search=client",
    "gemini": "format=gemini",
    "mcp": "format=mcp",
}


def preload(name):
    tool = Tool.objects.get(public_name=name)
    membership = tool.memberships.get()
    group_actions.set_preload(membership.group, [tool], True, actor=SYSTEM)


@pytest.fixture(autouse=True)
def _public_address(settings):
    settings.PUBLIC_URL = "https://toolcrib.example.org"


@pytest.fixture
def zoo(db):
    """Tools with unusual schemas and 590 more, one of them preloaded, and a second group."""
    ingest_tools(make_server(slug="zoo", trust="auto"), *tool_definitions(590))
    add_tools("github", "create_issue", create_issue="Create an issue.")
    preload("zoo__mixed")
    return make_agent_client("scout")


@pytest.fixture
def few(db):
    """Two groups (unusual and plain schemas), one preloaded tool in each, and a custom tool."""
    ingest_tools(make_server(slug="zoo", name="The zoo", trust="auto"), *tool_definitions(0))
    add_tools("github", "create_issue", "list_issues", create_issue="Create an issue.")
    preload("zoo__mixed")
    preload("github__create_issue")
    make_group("own", save_custom_tool(tool_object("shout", description="Shout."), actor=SYSTEM))
    return make_agent_client("scout", mode="deferred")


def fetch(session, form, what="/catalog"):
    answer = session.get(f"{what}?{form}")
    assert answer.status == 200, answer.bytes
    return answer


def native(session, form):
    return fetch(session, form).json["tools"]


# --- Golden files ---------------------------------------------------------------------------------


def assert_matches_golden(name, text):
    """Compare with the golden file, which is indented for readability."""
    formatted = text
    if name != "text":
        body = json.loads(text)
        assert text == canonical(body)
        formatted = json.dumps(body, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    file = GOLDEN / f"{name}.{'txt' if name == 'text' else 'json'}"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(formatted)
    assert formatted == file.read_text(), f"{file.name} differs; UPDATE_GOLDEN=1 updates it"


@pytest.mark.parametrize("name", FORMS)
def test_a_format_matches_its_golden_file(few, name):
    session = few.open()
    text = fetch(session, FORMS[name]).bytes.decode().replace(session.id, "SESSION")
    assert_matches_golden(name, text)


@pytest.mark.parametrize("format_", ["anthropic", "openai-responses"])
def test_a_search_response_matches_its_golden_file(few, format_):
    session = few.open()
    path = f"/sessions/{session.id}/search?format={format_}&call_id=call_1"
    answer = few.send("POST", path, {"name": "github__list_issues"})
    assert_matches_golden(f"{format_}-found", answer.bytes.decode())


def test_a_format_keeps_its_bytes_and_etag_after_changes(few):
    session = few.open()
    first = {name: fetch(session, form) for name, form in FORMS.items()}
    changed = [{**tool, "description": "Another now."} for tool in tool_definitions(0)]
    ingest_tools(Group.objects.get(group_id="mcp:zoo").follows, *changed[:-1])
    add_tools("slack", "post_message")

    for name, form in FORMS.items():
        assert fetch(session, form).bytes == first[name].bytes
        known = session.get(f"/catalog?{form}", If_None_Match=first[name].headers["ETag"])
        assert (known.status, known.bytes) == (304, b"")
        if name != "text":
            assert fetch(session, form, "/tools").json == first[name].json["tools"]


def test_the_agents_catalog_supports_the_native_forms(few):
    session = few.open()
    form = FORMS["anthropic-native-regex"]
    preview = few.send("GET", f"/catalog?{form}")
    assert preview.bytes == fetch(session, form).bytes
    connector = few.send("GET", f"/catalog?{FORMS['anthropic-toolset']}").json
    assert connector["mcp_servers"][0]["url"].endswith("/mcp")


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("format=gemini&native=true", "no_native_form"),
        ("native=true", "no_native_form"),
        ("format=anthropic&native=true&search=server", "unknown_search"),
        ("format=openai-responses&native=true&search=bm25", "unknown_search"),
        ("format=anthropic&toolset=true", "no_native_form"),
        ("format=openai-responses&native=true&toolset=true", "no_native_form"),
        ("format=anthropic&native=true&toolset=true&search=client", "no_native_form"),
    ],
)
def test_an_unsupported_form_is_rejected_with_a_hint(few, form, code):
    session = few.open()
    for what in ("/catalog", "/tools"):
        answer = session.get(f"{what}?{form}")
        assert (answer.status, answer["error"]["code"]) == (422, code)
        assert answer["error"]["hint"]


# --- Anthropic ------------------------------------------------------------------------------------


def assert_valid(type_, tools):
    """Validate tools against an SDK type: nothing is missing, nothing is unknown."""
    adapter = TypeAdapter(type_)
    for tool in tools:
        assert adapter.validate_python(tool) == tool


def test_the_native_form_has_all_tools_and_defers_all_but_the_preloaded(zoo):
    session = zoo.open()
    first, *tools = native(session, "format=anthropic&native=true")

    assert_valid(ToolSearchToolRegex20251119Param, [first])
    assert "defer_loading" not in first
    assert len(tools) == 603
    assert [tool["name"] for tool in tools if not tool.get("defer_loading")] == ["zoo__mixed"]
    assert tools[0]["name"] == "zoo__mixed"
    assert not any("cache_control" in tool for tool in tools)
    assert len({tool["name"] for tool in tools}) == 603
    other = native(session, "format=anthropic&native=true&search=bm25")
    assert_valid(ToolSearchToolBm25_20251119Param, other[:1])
    assert other[1:] == tools
    client = native(session, "format=anthropic&native=true&search=client")
    assert client[0]["name"] == "search_tools"
    assert "defer_loading" not in client[0]


@pytest.mark.parametrize("form", ["format=anthropic&native=true", "format=anthropic"])
def test_anthropic_accepts_unusual_schemas(zoo, form):
    session = zoo.open(mode="full")
    tools = [tool for tool in native(session, form) if "input_schema" in tool]

    assert len(tools) == 603
    assert_valid(ToolParam, tools)
    for tool in tools:
        schema = tool["input_schema"]
        assert SAFE.fullmatch(tool["name"])
        assert schema["type"] == "object"
        assert not {"oneOf", "anyOf", "allOf", "$schema"} & schema.keys()
        assert all(providers.PROPERTY_NAME.fullmatch(name) for name in schema.get("properties", {}))
        jsonschema_rs.meta.validate(schema)


def test_unsupported_keywords_are_moved_to_the_description(zoo):
    session = zoo.open()
    tools = {tool["name"]: tool for tool in native(session, "format=anthropic&native=true")}

    renamed = tools["zoo________"]["input_schema"]
    assert renamed["properties"] == {"plain": {"type": "string"}}
    assert renamed["required"] == ["plain"]
    assert renamed["description"].startswith("How to filter.\n")
    assert '"full name":{"type":"string"}' in renamed["description"]
    assert '"required":["full name"]' in renamed["description"]
    either = next(tool for name, tool in tools.items() if name.endswith("__ndern"))
    assert '"anyOf":[{"required":["id"]}' in either["input_schema"]["description"]
    old = tools["zoo__draft_7"]["input_schema"]
    assert set(old) == {"type", "description"}
    assert '"items":[{"type":"string"}' in old["description"]
    assert tools["zoo__nested"]["input_schema"] == UNUSUAL_TOOLS[5][1]


def test_a_toolset_of_a_full_session_defers_tools(zoo):
    session = zoo.open(mode="full")
    body = fetch(session, "format=anthropic&native=true&toolset=true&search=bm25").json
    search, toolset = body["tools"]

    assert_valid(ToolSearchToolBm25_20251119Param, [search])
    assert_valid(BetaMCPToolsetParam, [toolset])
    assert_valid(BetaRequestMCPServerURLDefinitionParam, body["mcp_servers"])
    assert toolset["default_config"]["defer_loading"] is True
    assert toolset["configs"] == {"zoo__mixed": {"enabled": True, "defer_loading": False}}
    assert body["mcp_servers"][0]["url"].endswith(f"/mcp/{session.id}")
    assert zoo.key not in canonical(body)
    assert "`mcp:zoo`" in body["system"]


def test_a_toolset_needs_an_address_that_the_provider_can_reach(zoo, settings):
    settings.PUBLIC_URL = "http://localhost:8000"
    answer = zoo.open().get("/catalog?format=anthropic&native=true&toolset=true")
    assert (answer.status, answer["error"]["code"]) == (422, "toolset_needs_https")


def test_a_toolset_of_a_deferred_session_defers_nothing(zoo):
    """Its endpoint lists only the meta-tools and the preloaded tools."""
    body = fetch(zoo.open(), "format=anthropic&native=true&toolset=true").json
    assert [tool["type"] for tool in body["tools"]] == ["mcp_toolset"]
    assert body["tools"][0]["default_config"]["defer_loading"] is False
    assert "search_tools" in body["system"]


def test_tools_of_a_group_that_is_not_deferred_are_not_deferred(zoo):
    group_actions.edit(Group.objects.get(group_id="mcp:zoo"), deferred=False, actor=SYSTEM)
    session = zoo.open(mode="full")
    tools = native(session, "format=anthropic&native=true")
    deferred = [tool["name"] for tool in tools if tool.get("defer_loading")]
    toolset = native(session, "format=anthropic&native=true&toolset=true")[1]
    assert deferred == ["github__create_issue"]
    assert toolset["default_config"]["defer_loading"] is False
    assert toolset["configs"] == {"github__create_issue": {"enabled": True, "defer_loading": True}}


def test_there_is_no_search_tool_if_everything_is_preloaded(few):
    session = few.open(groups=["own"])
    assert [tool["name"] for tool in native(session, "format=anthropic&native=true")] == ["shout"]
    assert fetch(session, "format=anthropic&native=true").json["system"] == ""
    for search in ("server", "client"):
        form = f"format=openai-responses&native=true&search={search}"
        assert [tool["type"] for tool in native(session, form)][:1] == ["namespace"]


def test_more_than_ten_thousand_deferred_tools_are_rejected():
    tool = {"name": "a", "description": "", "parameters": {"type": "object"}}
    offers = [Offer(tool, preloaded=False)] * 10_001
    with pytest.raises(Invalid, match=r"at most 10,000 deferred tools; this session has 10,001"):
        native_formats.anthropic_tools(offers, "regex", tool)
    allowed = [*offers[:10_000], Offer(tool, preloaded=True)]
    assert len(native_formats.anthropic_tools(allowed, "regex", tool)) == 10_002


def test_a_search_returns_references_only_to_tools_of_the_session(zoo):
    session = zoo.open()
    ingest_tools(
        make_server(slug="late"), tool_object("list_issues_late", description="List issues.")
    )
    path = f"/sessions/{session.id}/search?format=anthropic&call_id=toolu_1"

    matches = zoo.send("POST", path, {"query": "list issues", "limit": 50}).json
    too_late = zoo.send("POST", path, {"name": "late__list_issues_late"}).json

    adapter = TypeAdapter(ToolResultBlockParam)
    for result in (matches, too_late):
        typed = adapter.validate_python(result)
        assert list(typed.pop("content")) == result["content"]
        assert typed == {"type": "tool_result", "tool_use_id": "toolu_1"}
    known = {tool["name"] for tool in native(session, "format=anthropic&native=true")}
    names = [block["tool_name"] for block in matches["content"]]
    assert 1 < len(names) <= 5
    assert set(names) <= known
    assert {block["type"] for block in matches["content"]} == {"tool_reference"}
    assert "Open a new session" in too_late["content"][0]["text"]
    nothing = zoo.send("POST", path, {"query": "quagga"}).json
    assert nothing["content"][0]["text"].startswith("No tool matches")


# --- OpenAI ---------------------------------------------------------------------------------------


def test_openai_accepts_unusual_schemas(zoo):
    session = zoo.open(mode="full")
    chat = native(session, "format=openai")
    assert_valid(ChatCompletionFunctionToolParam, chat)
    flat = native(session, "format=openai-responses")
    assert len(chat) == len(flat) == 603
    for tool in flat:
        assert FunctionTool.model_validate(tool).to_dict() == tool
    for function in (*(tool["function"] for tool in chat), *flat):
        assert SAFE.fullmatch(function["name"])
        assert not {"oneOf", "anyOf", "allOf", "not", "enum"} & function["parameters"].keys()
        assert function["parameters"]["type"] == "object"


def test_a_long_description_continues_in_the_schemas_description(zoo):
    tools = native(zoo.open(mode="full"), "format=openai")
    assert max(len(tool["function"]["description"]) for tool in tools) == 1024
    (long,) = (t for t in tools if t["function"]["name"] == "zoo__files_read_v2")
    function = long["function"]
    description = function["description"][:-1] + function["parameters"]["description"][1:]
    assert description == tool_definitions(0)[1]["description"]


def test_each_group_is_a_namespace_with_deferred_members(zoo):
    tools = native(zoo.open(), "format=openai-responses&native=true")
    *spaces, search = tools
    assert ToolSearchTool.model_validate(search).to_dict() == {"type": "tool_search"}
    for space in spaces:
        assert NamespaceTool.model_validate(space).to_dict() == space
    assert {space["name"] for space in spaces} == {"mcp_github", "mcp_zoo"}
    github, many = sorted(spaces, key=lambda space: space["name"])
    assert github["description"] == "Github. Tools: github__create_issue."
    assert len(many["description"]) <= 500
    assert re.search(r"zoo__\w+, … \d+ more\.$", many["description"])
    system = fetch(zoo.open(), "format=openai-responses&native=true").json["system"]
    assert "`mcp:github`" in system
    assert "`mcp:zoo`" in system
    members = [member for space in spaces for member in space["tools"]]
    assert len(members) == 603
    preloaded = [member["name"] for member in members if not member.get("defer_loading")]
    assert preloaded == ["zoo__mixed"]


def test_a_client_side_search_returns_the_tools(zoo):
    session = zoo.open()
    *_, search = native(session, "format=openai-responses&native=true&search=client")
    assert ToolSearchTool.model_validate(search).to_dict() == search
    path = f"/sessions/{session.id}/search?format=openai-responses&call_id=call_7"

    item = zoo.send("POST", path, {"query": "list issues", "limit": 3}).json

    adapter = TypeAdapter(ResponseToolSearchOutputItemParamParam)
    assert adapter.validate_python(item)["call_id"] == "call_7"
    assert (item["execution"], item["status"]) == ("client", "completed")
    tools = [tool for space in item["tools"] for tool in space["tools"]]
    assert "zoo__github_list_issues" in [tool["name"] for tool in tools]
    assert all(tool["parameters"]["type"] == "object" for tool in tools)


# --- Gemini, MCP, and requests --------------------------------------------------------------------


def test_gemini_and_mcp_accept_unusual_schemas(zoo):
    session = zoo.open(mode="full")
    (tool,) = native(session, "format=gemini")
    typed = gemini.Tool.model_validate(tool)
    assert typed.model_dump(exclude_none=True, by_alias=True) == tool
    assert len(typed.function_declarations) == 603
    tools = [McpTool.model_validate(body) for body in native(session, "format=mcp")]
    assert len(tools) == 603
    schemas = {schema["name"]: schema["parameters"] for schema in native(session, "format=json")}
    assert all(tool.input_schema == schemas[tool.name] for tool in tools)


def test_gemini_names_start_with_a_letter_or_an_underscore(db):
    add_tools("7zip", "pack")
    tools = native(make_agent_client("scout").open(mode="full"), "format=gemini")
    assert [tool["name"] for tool in tools[0]["functionDeclarations"]] == ["_7zip__pack"]


def test_each_sdk_sends_the_tools_unchanged(zoo):
    session = zoo.open()
    deferred = fetch(session, "format=anthropic&native=true").json
    spaces = fetch(session, "format=openai-responses&native=true").json
    full = zoo.open(mode="full")
    chat, declared = (fetch(full, f"format={name}").json for name in ("openai", "gemini"))
    connector = fetch(full, "format=anthropic&native=true&toolset=true").json
    messages = [{"role": "user", "content": "hello"}]
    with scripted_provider(*["hello"] * 5) as provider:
        claude = anthropic.Anthropic(api_key="x", base_url=provider.url, max_retries=0)
        gpt = openai.OpenAI(api_key="x", base_url=provider.url, max_retries=0)
        options = gemini.HttpOptions(base_url=provider.url)
        bard = genai.Client(api_key="x", http_options=options)
        with claude, gpt:
            claude.messages.create(model="m", max_tokens=9, messages=messages, **deferred)
            claude.beta.messages.create(model="m", max_tokens=9, messages=messages, **connector)
            gpt.responses.create(model="m", input="hello", tools=spaces["tools"])
            gpt.chat.completions.create(model="m", messages=messages, tools=chat["tools"])
            config = {"system_instruction": declared["system"], "tools": declared["tools"]}
            bard.models.generate_content(model="m", contents="hello", config=config)
            bard.close()
    sent = provider.requests
    assert sent[0]["tools"] == deferred["tools"]
    assert sent[1]["tools"] == connector["tools"]
    assert sent[1]["mcp_servers"] == connector["mcp_servers"]
    assert provider.headers[1]["anthropic-beta"] == "mcp-client-2025-11-20"
    assert sent[2]["tools"] == spaces["tools"]
    assert sent[3]["tools"] == chat["tools"]
    names = [tool["name"] for tool in sent[4]["tools"][0]["functionDeclarations"]]
    assert names == [tool["name"] for tool in declared["tools"][0]["functionDeclarations"]]
