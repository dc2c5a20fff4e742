"""Frameworks run the programs of agent pages with a scripted model, to the result.

Each is installed in its own environment. It connects as its snippet says, shows its model the
tools, and runs what the model asks for: a search, a load and a call of a server's tool. Agent
programs, such as Claude Code, are run by tests/e2e/clients.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.live.test_snippets import ARGUMENTS, META, TOOL, newest_kinds, snippet
from tests.support import parts
from tests.support.agent_programs import Home, codex
from tests.support.client_programs import NO_TRAFFIC
from tests.support.installation import clean_environment
from tests.support.scripted_models import scripted_provider
from tests.support.waiting import scaled

pytestmark = pytest.mark.timeout(240)
ANSWER = "It is done."
SCRIPT = (
    [("search_tools", {"query": "convert a temperature"})],
    [("load_tools", {"group_id": "mcp:demo", "tool_names": [TOOL]})],
    [("deferred_tool_call", {"name": TOOL, "arguments": ARGUMENTS})],
    ANSWER,
)
KINDS = ["opened", "searched", "loaded", "called"]


@pytest.fixture
def model():
    """A model that asks for SCRIPT, whatever names a client gives to the tools."""
    with scripted_provider(*SCRIPT, is_agent=True) as provider:
        yield provider


def run(argv, model, folder, **environment):
    """Run a program of a client whose home is a folder; return its output."""
    settings = {
        "HOME": str(folder),
        "NO_COLOR": "1",
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_API_KEY": "x",
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_BASE": model.url,
        "OPENAI_API_KEY": "x",
        "GOOGLE_GEMINI_BASE_URL": model.url,
        "GOOGLE_API_KEY": "x",
        **environment,
    }
    done = subprocess.run(
        argv,
        env=clean_environment(settings),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_run(demo, model, kinds=KINDS):
    """Check what the model saw, and what is recorded of the newest session."""
    shown = json.dumps(model.requests[0]["tools"])
    assert [name for name in META if name not in shown and name != "load_tools"] == []
    assert "212" in json.dumps(model.requests[-1])
    assert [kind for kind in newest_kinds(demo[0]) if kind != "closed"] == kinds


@pytest.mark.needs_client("npm-agents")
def test_codex_runs_a_reading_tool_unasked(demo, tmp_path):
    """As the note of its snippet says: the other dispatcher needs a permission."""
    item = snippet(demo, "Codex CLI")
    assert "runs call_read_only_tool unasked" in item.note
    calls = (
        [("deferred_tool_call", {"name": TOOL, "arguments": ARGUMENTS})],
        [("call_read_only_tool", {"name": TOOL, "arguments": ARGUMENTS})],
    )
    with scripted_provider(*calls, ANSWER, is_agent=True) as model:
        home = Home(tmp_path, demo[0].url, demo[1], model)
        home.run(codex(home, permission=""))
    results = [json.dumps(request["input"][-1]) for request in model.requests[1:]]
    assert ["212" in result for result in results] == [False, True]


@pytest.mark.needs_client("npm-agents")
def test_the_ai_sdk_runs_an_agent(demo, model, tmp_path):
    (tmp_path / "node_modules").symlink_to(parts.modules_of("npm-agents"))
    (tmp_path / "agent.mjs").write_text(snippet(demo, "AI SDK").text)
    output = run([parts.node(), "agent.mjs"], model, tmp_path, MODEL="scripted")
    assert output.strip() == ANSWER
    check_run(demo, model)


def framework(title, name, called, *, on_demand=True, **fields):
    marks = [pytest.mark.needs_client(name), *([pytest.mark.on_demand] if on_demand else [])]
    values = {"script": SCRIPT, "kinds": KINDS, **fields}
    return pytest.param(title, name, called, *values.values(), id=name, marks=marks)


@pytest.mark.parametrize(
    ("title", "name", "called", "script", "kinds"),
    [
        framework("OpenAI Agents SDK", "openai_agents", "scripted", on_demand=False),
        framework("CrewAI", "crewai", "openai/gpt-4o", on_demand=False),
        framework("Pydantic AI", "pydantic_ai", "openai:scripted"),
        framework("LangChain", "langchain", "openai:scripted"),
        # Opens a session for each call; the newest has the last one.
        framework(
            "LlamaIndex", "llama_index", "gpt-4o", kinds=["opened", "implicit_load", "called"]
        ),
        framework("Google ADK", "google_adk", "gemini-scripted"),
        # Has a method of its own that is called load_tools.
        framework(
            *("Semantic Kernel", "semantic_kernel", "scripted"),
            script=(SCRIPT[0], *SCRIPT[2:]),
            kinds=["opened", "searched", "implicit_load", "called"],
        ),
        framework("Microsoft Agent Framework", "agent_framework", "scripted"),
    ],
)
def test_a_framework_runs_an_agent(demo, tmp_path, title, name, called, script, kinds):
    python = str(Path(parts.client_bin(name) or "") / "python")
    (tmp_path / "agent.py").write_text(snippet(demo, title).text)
    with scripted_provider(*script, is_agent=True) as model:
        output = run([python, "agent.py"], model, tmp_path, MODEL=called, **NO_TRAFFIC)
    assert ANSWER in output
    check_run(demo, model, kinds)
