"""A running installation for the tests of this folder."""

import json
import sys

import pytest

from tests.support.installation import ROOT, Installation


@pytest.fixture(scope="module")
def toolcrib(tmp_path_factory):
    with Installation(tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """An installation with the demo server and an agent, and the agent's key."""
    folder = tmp_path_factory.mktemp("demo")
    file = folder / "mcp.json"
    program = {"command": sys.executable, "args": ["-m", "servers.demo"], "cwd": str(ROOT)}
    file.write_text(json.dumps({"mcpServers": {"demo": program}}))
    with Installation(folder / "data") as toolcrib:
        done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")
        assert done.returncode == 0, done.stderr
        made = toolcrib.command("create_agent", "scout", "--group", "mcp:demo", "--json")
        assert made.returncode == 0, made.stderr
        yield toolcrib, json.loads(made.stdout)["key"]
