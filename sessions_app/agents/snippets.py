"""Connection snippets: configuration for MCP clients and example programs.

Tests parse or run every snippet. The documentation contains the same texts.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from sessions_app.agents import snippet_templates as texts

KEY_PLACEHOLDER = "tcb_…"
SERVER_NAME = "toolcrib"  # in the clients' configuration


@dataclass(frozen=True)
class Snippet:
    title: str
    language: str
    text: str
    note: str = ""  # where to put it

    @property
    def slug(self) -> str:
        return self.title.lower().replace(" ", "-")


@dataclass(frozen=True)
class Example:
    """The tool that the example programs search for, load and call."""

    query: str = "weather forecast"
    group_id: str = "mcp:weather"
    tool_name: str = "weather__get_forecast"
    arguments: Mapping[str, object] = field(default_factory=lambda: {"city": "Oslo"})


def for_agent(
    base_url: str, key: str = KEY_PLACEHOLDER, *, example: Example | None = None
) -> list[Snippet]:
    """Return the snippets for an agent that uses this base URL and key."""
    base = base_url.rstrip("/")
    return [*clients(base, key), *programs(base, key, example or Example())]


def clients(base: str, key: str) -> list[Snippet]:
    mcp = f"{base}/mcp"
    header = f"Authorization: Bearer {key}"
    remote = {"url": mcp, "headers": _headers(key)}
    bearer = json.dumps(f"Bearer {key}", ensure_ascii=False)
    address, quoted = shlex.quote(mcp), shlex.quote(header)
    return [
        Snippet(
            "Claude Code",
            "sh",
            f"claude mcp add --transport http {SERVER_NAME} {address} \\\n  --header {quoted}\n",
            "Run this once. /mcp in Claude Code shows the connection.",
        ),
        Snippet(
            "Claude Desktop",
            "json",
            _json({"mcpServers": {SERVER_NAME: _mcp_remote(mcp, key)}}),
            "claude_desktop_config.json (Settings, Developer). Requires Node.",
        ),
        Snippet(
            "Codex CLI",
            "toml",
            f"[mcp_servers.{SERVER_NAME}]\nurl = {json.dumps(mcp)}\n"
            f"http_headers = {{ Authorization = {bearer} }}\n",
            "~/.codex/config.toml. codex exec runs call_read_only_tool unasked; for all tools add "
            'default_tools_approval_mode = "approve".',
        ),
        Snippet(
            "Gemini CLI",
            "sh",
            f"gemini mcp add --scope user --transport http {SERVER_NAME} {address} \\\n"
            f"  --header {quoted}\n",
            "Run this once. /mcp in Gemini CLI shows the connection.",
        ),
        Snippet(
            "Copilot CLI",
            "json",
            _json({"mcpServers": {SERVER_NAME: {"type": "http", **remote, "tools": ["*"]}}}),
            "~/.copilot/mcp-config.json.",
        ),
        Snippet(
            "opencode",
            "json",
            _json({"mcp": {SERVER_NAME: {"type": "remote", **remote}}}),
            "opencode.json in the project, or ~/.config/opencode/opencode.json.",
        ),
        Snippet(
            "VS Code",
            "json",
            _json(_vs_code(mcp)),
            ".vscode/mcp.json. VS Code asks for the key once and stores it.",
        ),
        Snippet(
            "Cursor",
            "json",
            _json({"mcpServers": {SERVER_NAME: remote}}),
            "~/.cursor/mcp.json.",
        ),
        Snippet(
            "MCP Inspector",
            "sh",
            f"npx @modelcontextprotocol/inspector --cli {address} --transport http \\\n"
            f"  --header {quoted} --method tools/list\n",
            "Lists the agent's tools. Requires Node 22.19 or newer.",
        ),
    ]


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _mcp_remote(mcp: str, key: str) -> dict[str, object]:
    """Configure mcp-remote as an HTTP bridge: Claude Desktop only starts stdio servers."""
    args = ["-y", "mcp-remote", mcp, "--header", "Authorization:${TOOLCRIB_AUTHORIZATION}"]
    if mcp.startswith("http://"):
        args.append("--allow-http")
    return {"command": "npx", "args": args, "env": {"TOOLCRIB_AUTHORIZATION": f"Bearer {key}"}}


def _vs_code(mcp: str) -> dict[str, object]:
    key_input = {
        "type": "promptString",
        "id": "toolcrib-key",
        "description": "Toolcrib agent key",
        "password": True,
    }
    server = {"type": "http", "url": mcp, "headers": _headers("${input:toolcrib-key}")}
    return {"inputs": [key_input], "servers": {SERVER_NAME: server}}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


MODEL = "MODEL is the name of your model"
AGENT_FRAMEWORK_PACKAGES = "agent-framework-core agent-framework-openai mcp tenacity"
PROGRAMS = (  # title, language, template, note
    (
        "OpenAI Agents SDK",
        "python",
        texts.OPENAI_AGENTS,
        f"pip install openai-agents. {MODEL}.",
    ),
    (
        "Anthropic SDK",
        "python",
        texts.ANTHROPIC,
        f"pip install anthropic toolcrib-client. {MODEL}.",
    ),
    ("OpenAI SDK", "python", texts.OPENAI, f"pip install openai toolcrib-client. {MODEL}."),
    ("AI SDK", "js", texts.AI_SDK, f"npm install ai @ai-sdk/mcp @ai-sdk/openai. {MODEL}."),
    (
        "Pydantic AI",
        "python",
        texts.PYDANTIC_AI,
        f"pip install 'pydantic-ai-slim[mcp,openai]'. {MODEL}, as provider:name.",
    ),
    (
        "LangChain",
        "python",
        texts.LANGCHAIN,
        "pip install langchain langchain-openai langchain-mcp-adapters. "
        f"{MODEL}, as provider:name.",
    ),
    (
        "LlamaIndex",
        "python",
        texts.LLAMA_INDEX,
        f"pip install llama-index-llms-openai llama-index-tools-mcp. {MODEL}.",
    ),
    ("Google ADK", "python", texts.GOOGLE_ADK, f"pip install 'google-adk[mcp]'. {MODEL}."),
    (
        "Semantic Kernel",
        "python",
        texts.SEMANTIC_KERNEL,
        f"pip install 'semantic-kernel[mcp]'. {MODEL}. It does not show load_tools, whose name it "
        "uses itself; search_tools and get_tool_details give the schemas.",
    ),
    (
        "Microsoft Agent Framework",
        "python",
        texts.AGENT_FRAMEWORK,
        f"pip install {AGENT_FRAMEWORK_PACKAGES}. {MODEL}.",
    ),
    ("CrewAI", "python", texts.CREWAI, f"pip install 'crewai-tools[mcp]'. {MODEL}."),
    ("Python", "python", texts.PYTHON, "pip install toolcrib-client."),
    ("Plain Python", "python", texts.PLAIN_PYTHON, "Requires only Python."),
)


def programs(base: str, key: str, example: Example) -> list[Snippet]:
    name, arguments = example.tool_name, dict(example.arguments)
    values: dict[str, object] = {
        "base": base,
        "address": f"{base}/api/v1",
        "mcp": f"{base}/mcp",
        "key": key,
        "query": example.query,
        "question": f"Use a tool: {example.query}",
        "group": example.group_id,
        "tool": name,
        "arguments": arguments,
        # Bodies of requests.
        "search": {"query": example.query},
        "load": {"group_id": example.group_id, "tool_names": [name]},
        "call": {"tool_name": name, "arguments": arguments},
    }
    literals = {key: _literal(value) for key, value in values.items()}
    words = {key: _shell_word(value) for key, value in values.items()}
    return [
        *(
            Snippet(title, language, template.format(**literals), note)
            for title, language, template, note in PROGRAMS
        ),
        Snippet("curl", "sh", texts.CURL.format(**words), "Paste this into a shell."),
    ]


def curl_call(base_url: str, tool_name: str, arguments: Mapping[str, object]) -> str:
    """Return shell commands that open a session and call a tool with these arguments."""
    call = {"tool_name": tool_name, "arguments": arguments}
    address = f"{base_url.rstrip('/')}/api/v1"
    words = {"key": KEY_PLACEHOLDER, "address": address, "call": call}
    return texts.CURL_CALL.format(**{name: _shell_word(value) for name, value in words.items()})


def _shell_word(value: object) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def _literal(value: object) -> str:
    """Return a JSON value as a Python literal, with double quotes; texts are JavaScript too."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return repr(value)


MAX_DEPTH = 4
SAMPLES = {"string": "text", "integer": 1, "number": 1, "boolean": True, "null": None}


def sample_arguments(
    schema: object, samples: Mapping[str, object] = SAMPLES, depth: int = 0
) -> dict[str, object]:
    """Return values for the arguments that a schema requires; `samples` has one per type."""
    if not isinstance(schema, Mapping) or depth >= MAX_DEPTH:
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    names = required if isinstance(required, list) else []
    return {
        name: _sample_value(known.get(name), samples, depth)
        for name in names[:100]
        if isinstance(name, str)
    }


def _sample_value(schema: object, samples: Mapping[str, object], depth: int) -> object:
    if not isinstance(schema, Mapping):
        return samples["string"]
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if isinstance(choices := schema.get(key), list) and choices:
            return choices[0]
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and choices and depth < MAX_DEPTH:
            return _sample_value(choices[0], samples, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), None)
    if kind == "array":
        return []
    if kind == "object" or "properties" in schema:
        return sample_arguments(schema, samples, depth + 1)
    return samples.get(str(kind), samples["string"])
