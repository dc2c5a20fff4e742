"""The clients of docs/clients.md: what each is tested for, and the page itself.

`python -m tests.support.client_table` writes the page from what the tests recorded. A cell is *ok*,
or a number: a limit of the client's own. A test fails for a cell that is neither, and for a limit
that its client no longer has.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.support import parts
from tests.support.installation import ROOT, Api

PAGE = ROOT / "docs" / "clients.md"
RECORDS = ROOT / ".cache" / "clients"  # what the tests of the last `make test-clients` saw
CELLS = (
    "connect",
    "list",
    "search",
    "load",
    "dispatch",
    "structured",
    "image",
    "error",
    "progress",
    "cancel",
    "restart",
)
NO_PROGRESS = "The client has no callback for the progress of a call."
NO_FLAG = "The client returns the text of an error without saying that it is one."
IN_TEXT = "The client passes an image on as text."
TEXT_ONLY = "The client passes on the content of a result without the structured content."
KEEPS_WAITING = "The client drops a call that is cancelled without telling its server."
BLOCKS = "The client calls tools by functions that block, which cannot be cancelled."
NO_CANCEL = "The client has no way to cancel a call."
FORGETS = "The program ends on Ctrl+C without cancelling its call."
REFUSES = (
    "The program refuses the first calls after a restart, and stops connecting again after 5 s."
)
STAYS_CLOSED = "The client does not connect again once a restart has cut its connection."
NO_IMAGES = "The program shows an image to its user, and gives none to a model of one's own."
OWN_LOAD_TOOLS = "The client leaves out load_tools, since it has a method of that name."


@dataclass(frozen=True)
class Client:
    """A client that is not ours, run by tests/e2e/clients."""

    title: str
    environment: str  # of tests/support/parts.py
    package: str  # that connects
    program: str = ""  # in tests/e2e/clients/outside; without one it is an agent program
    better: str = "deferred"  # mode, for many tools
    limits: Mapping[str, str] = field(default_factory=dict)  # by cell
    reconnects: bool = False  # by itself after a restart; until then its calls fail

    @property
    def on_demand(self) -> bool:
        locked = (*parts.LOCKED_CLIENTS, "npm-clients", "npm-agents")
        return self.environment not in locked

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())


def _python(title: str, environment: str, package: str, program: str, **fields: Any) -> Client:
    return Client(title, environment, package, f"{program}.py", **fields)


CLIENTS = (
    Client(
        "Claude Code",
        "npm-agents",
        "@anthropic-ai/claude-code",
        better="either",
        reconnects=True,
    ),
    Client("Codex CLI", "npm-agents", "@openai/codex"),
    Client(
        "Gemini CLI",
        "gemini",
        "@google/gemini-cli",
        limits={"structured": TEXT_ONLY, "cancel": FORGETS},
    ),
    Client(
        "opencode", "opencode", "opencode-ai", limits={"structured": TEXT_ONLY, "cancel": FORGETS}
    ),
    Client(
        "Copilot CLI",
        "copilot",
        "@github/copilot",
        limits={"image": NO_IMAGES, "restart": REFUSES},
    ),
    Client("mcp-remote", "mcp-remote", "mcp-remote", "mcp_remote.mjs"),
    Client(
        "mcporter",
        "mcporter",
        "mcporter",
        "mcporter.mjs",
        limits={"progress": NO_PROGRESS, "cancel": NO_CANCEL},
    ),
    Client("TypeScript SDK 1", "npm-clients", "sdk-1", "sdk1.mjs"),
    Client("TypeScript SDK 2", "npm-agents", "@modelcontextprotocol/client", "sdk2.mjs"),
    Client("AI SDK", "npm-agents", "@ai-sdk/mcp", "ai_sdk.mjs", limits={"progress": NO_PROGRESS}),
    _python("Python SDK 1", "mcp1", "mcp", "mcp1", limits={"cancel": KEEPS_WAITING}),
    _python("FastMCP", "fastmcp", "fastmcp", "fastmcp_client"),
    _python(
        "OpenAI Agents SDK",
        "openai_agents",
        "openai-agents",
        "openai_agents",
        limits={"progress": NO_PROGRESS},
    ),
    _python(
        "CrewAI",
        "crewai",
        "crewai-tools",
        "crewai_client",
        limits={
            "structured": TEXT_ONLY,
            "image": IN_TEXT,
            "error": NO_FLAG,
            "progress": NO_PROGRESS,
            "cancel": BLOCKS,
        },
    ),
    _python(
        "Pydantic AI",
        "pydantic_ai",
        "pydantic-ai-slim",
        "pydantic_ai_client",
        limits={"progress": NO_PROGRESS},
    ),
    _python(
        "LangChain",
        "langchain",
        "langchain-mcp-adapters",
        "langchain_client",
        limits={"cancel": KEEPS_WAITING},
    ),
    _python(
        "LlamaIndex",
        "llama_index",
        "llama-index-tools-mcp",
        "llama_index_client",
        limits={"progress": NO_PROGRESS},
    ),
    _python("Google ADK", "google_adk", "google-adk", "google_adk"),
    _python(
        "Semantic Kernel",
        "semantic_kernel",
        "semantic-kernel",
        "semantic_kernel_client",
        limits={
            "load": OWN_LOAD_TOOLS,
            "structured": TEXT_ONLY,
            "error": NO_FLAG,
            "progress": NO_PROGRESS,
            "cancel": KEEPS_WAITING,
        },
    ),
    _python(
        "Microsoft Agent Framework",
        "agent_framework",
        "agent-framework-core",
        "agent_framework_client",
        limits={"progress": NO_PROGRESS, "restart": STAYS_CLOSED},
    ),
    _python(
        "AutoGen",
        "autogen",
        "autogen-ext",
        "autogen_client",
        limits={"structured": TEXT_ONLY, "progress": NO_PROGRESS, "cancel": KEEPS_WAITING},
    ),
    _python(
        "smolagents",
        "smolagents",
        "smolagents",
        "smolagents_client",
        limits={"error": NO_FLAG, "progress": NO_PROGRESS, "cancel": BLOCKS},
    ),
    _python(
        "mcp-use",
        "mcp_use",
        "mcp-use",
        "mcp_use_client",
        limits={"progress": NO_PROGRESS, "cancel": KEEPS_WAITING},
    ),
    _python("Strands Agents", "strands", "strands-agents", "strands_client"),
    _python(
        "Agno", "agno", "agno", "agno_client", limits={"error": NO_FLAG, "progress": NO_PROGRESS}
    ),
    _python(
        "Haystack",
        "haystack",
        "mcp-haystack",
        "haystack_client",
        limits={"image": IN_TEXT, "progress": NO_PROGRESS, "cancel": BLOCKS},
    ),
)
BY_TITLE = {client.title: client for client in CLIENTS}


def installed_version(client: Client) -> str:
    """Return the version of a client's package in its environment."""
    if client.environment in parts.NPM_CLIENTS:
        folder = parts.modules_of(client.environment) / client.package
        return str(json.loads((folder / "package.json").read_text())["version"])
    packages = Path(parts.client_bin(client.environment) or "").parent / "lib"
    (site,) = packages.glob("python*/site-packages")
    found = {each.name: each.version for each in distributions(path=[str(site)])}
    return found[client.package]


def read_protocol(toolcrib: Api, agent: str) -> str:
    """Return the version that the client of an agent's newest session speaks."""
    newest = toolcrib.api("GET", f"/sessions?limit=1&agent={agent}")[1]["items"][0]
    exported = toolcrib.api("GET", f"/sessions/{newest['id']}/export")[1]
    return str(exported["metadata"]["client"]["protocol"])


def record(client: Client, protocol: str) -> None:
    """Record what a passed test saw, for the page."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    values = {"version": installed_version(client), "protocol": protocol}
    (RECORDS / f"{client.slug}.json").write_text(json.dumps(values))


# --- The page -------------------------------------------------------------------------------------

TEMPLATE = Path(__file__).with_name("clients_page.md")


def numbered_limits() -> dict[str, int]:
    """Return the limits of all clients with the numbers that their cells have."""
    texts = dict.fromkeys(text for client in CLIENTS for text in client.limits.values())
    return {text: number for number, text in enumerate(texts, 1)}


def cells_of(client: Client) -> list[str]:
    numbers = numbered_limits()
    return [str(numbers[client.limits[cell]]) if cell in client.limits else "ok" for cell in CELLS]


def row_of(client: Client, values: Mapping[str, str]) -> str:
    title = f"{client.title} *" if client.on_demand else client.title
    cells = (title, values["version"], values["protocol"], client.better, *cells_of(client))
    return f"| {' | '.join(cells)} |\n"


def page(records: Mapping[str, Mapping[str, str]], date: str) -> str:
    """Return the page; `records` has version and protocol of each client, by its title."""
    rows = "".join(row_of(client, records[client.title]) for client in CLIENTS)
    limits = "\n".join(f"{number}. {text}" for text, number in numbered_limits().items())
    return TEMPLATE.read_text().format(
        date=date,
        cells=" | ".join(CELLS),
        rules="|".join(["---"] * len(CELLS)),
        rows=rows,
        limits=limits,
    )


def read_page() -> tuple[dict[str, dict[str, str]], str]:
    """Return what the page has that its tests recorded: version and protocol by title, and date."""
    text = PAGE.read_text()
    row = re.compile(r"^\| ([\w. -]+?)(?: \*)? \| ([\w.-]+) \| (\d{4}-\d\d-\d\d) \|", re.MULTILINE)
    rows = {title: {"version": v, "protocol": p} for title, v, p in row.findall(text)}
    date = re.search(r"Last written on (\d{4}-\d\d-\d\d)\.", text)
    return rows, date[1] if date else ""


def main() -> int:
    missing = [each.title for each in CLIENTS if not (RECORDS / f"{each.slug}.json").exists()]
    if missing:
        sys.stderr.write(f"No test recorded: {', '.join(missing)}\n")
        return 1
    records = {
        client.title: json.loads((RECORDS / f"{client.slug}.json").read_text())
        for client in CLIENTS
    }
    PAGE.write_text(page(records, datetime.now(UTC).date().isoformat()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
