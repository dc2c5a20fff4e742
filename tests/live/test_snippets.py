"""What people are given to paste does what it says, as it stands."""

import json
import subprocess
import sys

import pytest

from sessions_app.snippets import Example, for_agent
from tests.installation import Installation

pytestmark = pytest.mark.xdist_group("live")

EXAMPLE = Example(
    query="convert a temperature",
    group_id="mcp:demo",
    tool_name="demo__convert_temperature",
    arguments={"value": 100, "scale": "celsius", "to": "fahrenheit"},
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """An installation with the demo server and an agent, and the agent's key."""
    folder = tmp_path_factory.mktemp("snippets")
    file = folder / "mcp.json"
    program = {"command": sys.executable, "args": ["-m", "servers.demo"], "cwd": "."}
    with Installation(folder / "data") as toolcrib:
        program["cwd"] = str(toolcrib.cwd)
        file.write_text(json.dumps({"mcpServers": {"demo": program}}))
        done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")
        assert done.returncode == 0, done.stderr
        made = toolcrib.command("create_agent", "scout", "--group", "mcp:demo", "--json")
        assert made.returncode == 0, made.stderr
        yield toolcrib, json.loads(made.stdout)["key"]


@pytest.mark.parametrize(("title", "program"), [("curl", ["bash", "-eu"]), ("Python", None)])
def test_a_snippet_opens_searches_loads_calls_and_closes(demo, title, program):
    toolcrib, key = demo
    snippet = next(
        one for one in for_agent(toolcrib.url, key, example=EXAMPLE) if one.title == title
    )
    done = subprocess.run(
        program or [sys.executable, "-"],
        input=snippet.text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "212" in done.stdout
    newest = toolcrib.api("GET", "/sessions?limit=1")[1]["items"][0]
    kinds = [
        event["kind"]
        for event in toolcrib.api("GET", f"/sessions/{newest['id']}/events")[1]["items"]
    ]
    assert kinds == ["opened", "searched", "loaded", "called", "closed"]
