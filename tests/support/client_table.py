"""The table of docs/clients.md, and the versions of clients that the tests install."""

import re
from dataclasses import dataclass

from tests.support import parts
from tests.support.installation import ROOT, Api

PACKAGES = {
    "Claude Code": "@anthropic-ai/claude-code",
    "Codex CLI": "@openai/codex",
    "AI SDK": "@ai-sdk/mcp",
    "OpenAI Agents SDK": "openai-agents",
    "Pydantic AI": "pydantic-ai-slim",
    "LangChain": "langchain-mcp-adapters",
    "MCP Inspector": "@modelcontextprotocol/inspector",
    "TypeScript SDK 2": "@modelcontextprotocol/client",
    "TypeScript SDK 1": "@modelcontextprotocol/sdk",
    "Python SDK 1": "mcp",
    "FastMCP": "fastmcp",
}
LOCKS = {
    "OpenAI Agents SDK": "openai_agents",
    "Pydantic AI": "pydantic_ai",
    "LangChain": "langchain",
    "Python SDK 1": "mcp1",
    "FastMCP": "fastmcp",
}


@dataclass(frozen=True)
class Row:
    version: str
    protocol: str
    on_demand: bool  # only in `make test-clients`


def read_table() -> dict[str, Row]:
    text = (ROOT / "docs" / "clients.md").read_text()
    pattern = re.compile(r"^\| ([\w ]+?)( \*)? \| ([\d.]+) \| (\d{4}-\d\d-\d\d) \|", re.MULTILINE)
    return {
        name: Row(version, protocol, bool(star))
        for name, star, version, protocol in pattern.findall(text)
    }


def installed_version(client: str) -> str:
    """Return the version of a client that the tests install."""
    package = PACKAGES[client]
    if (lock := LOCKS.get(client)) is not None:
        text, pattern = parts.CLIENT_LOCKS[lock].read_text(), rf"^{package}==([\d.]+)"
    else:
        text = "\n".join((*parts.AGENT_PACKAGES, *parts.CLIENT_PACKAGES))
        pattern = rf"(?:^|npm:){package}@([\d.]+)$"
    (version,) = re.findall(pattern, text, re.MULTILINE)
    return str(version)


def check_protocol(toolcrib: Api, client: str) -> None:
    """Check that the client of the newest session speaks the version that its row has."""
    newest = toolcrib.api("GET", "/sessions?limit=1")[1]["items"][0]
    exported = toolcrib.api("GET", f"/sessions/{newest['id']}/export")[1]
    assert exported["metadata"]["client"]["protocol"] == read_table()[client].protocol
