"""`import_servers` end to end: valid servers are saved and synced, errors are reported."""

import json
import sys

import pytest

from tests.support.installation import Installation
from tests.support.upstreams.running import ROOT, running_http, stdio_argv


def program(module, *args):
    command, *rest = stdio_argv(module, *args)
    return {"command": command, "args": rest, "cwd": str(ROOT)}


def ten_servers(url, sse_url):
    return {
        "mcpServers": {
            "Weather": program("healthy"),
            "Weather legacy": program("healthy", "--legacy"),
            "Demo": {"command": sys.executable, "args": ["-m", "servers.demo"], "cwd": str(ROOT)},
            "Pages": program("many", "--tools", "30", "--pages", "3"),
            "Web": {"type": "http", "url": url, "headers": {"X-Team": "blue ${TEAM}"}},
            "Stream": {"type": "sse", "url": sse_url},
            "Weather!": {**program("healthy"), "env": {"REGION": "${REGION:-north}"}},
            "Not found": {"command": "no-such-program-anywhere"},
            "Broken file entry": {"command": "x", "url": "https://both.example"},
            "Crashes": program("raw_stdio", "--do", "crash"),
        }
    }


@pytest.mark.parametrize("running", [False, True], ids=["alone", "beside a running server"])
def test_seven_of_ten_servers_are_synced_and_three_reported_with_errors(tmp_path, running):
    toolcrib = Installation(tmp_path / "data")
    assert toolcrib.command("migrate", "-v0").returncode == 0
    if running:
        toolcrib.start()
    try:
        with running_http("healthy") as url, running_http("healthy", "--sse", "0") as sse_url:
            file = tmp_path / "mcp.json"
            file.write_text(json.dumps(ten_servers(url, sse_url)))
            done = toolcrib.command(
                "import_servers",
                *(str(file), "--allow-stdio", "--wait", "--json"),
                env={"TEAM": "canary-team"},
            )
        assert done.returncode == 3, done.stderr
        rows = {row["name"]: row for row in json.loads(done.stdout)["servers"]}
        bad = {name: row["code"] for name, row in rows.items() if row["status"] == "failed"}
        assert bad == {
            "Not found": "command_not_found",
            "Broken file entry": "ambiguous",
            "Crashes": "crashed",
        }
        good = {row["slug"]: row["tools"] for row in rows.values() if row["status"] == "synced"}
        assert good == {
            "weather": 7,
            "weather-legacy": 7,
            "demo": 24,
            "pages": 30,
            "web": 7,
            "stream": 7,
            "weather-2": 7,
        }
        assert all(rows[name]["message"] and rows[name]["hint"] for name in bad)
        assert "canary-team" not in done.stdout + done.stderr
        repeated = toolcrib.command("import_servers", str(file), "--allow-stdio", "--json")
        statuses = [row["status"] for row in json.loads(repeated.stdout)["servers"]]
        assert (repeated.returncode, sorted(statuses)) == (3, ["failed"] + ["known"] * 9)
    finally:
        if running:
            toolcrib.stop()


def test_a_file_whose_servers_are_all_synced_exits_with_0(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    toolcrib.command("migrate", "-v0")
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"Weather": program("healthy")}}))

    done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")

    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["servers"]
    assert (row["status"], row["slug"], row["tools"]) == ("synced", "weather", 7)


def test_stdio_servers_must_be_allowed_and_their_argv_is_printed(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    toolcrib.command("migrate", "-v0")
    canary = tmp_path / "ran"
    file = tmp_path / "mcp.json"
    file.write_text(
        json.dumps({"mcpServers": {"touch": {"command": "touch", "args": [str(canary)]}}})
    )

    done = toolcrib.command("import_servers", str(file), "--wait")

    assert done.returncode == 1
    assert f"touch {canary}" in done.stdout
    assert not canary.exists()


@pytest.mark.parametrize("content", ["", "{", "[1, 2", '{"mcpServers": {}}', "\x00\x01"], ids=repr)
def test_an_unreadable_file_exits_with_1_and_a_reason(tmp_path, content):
    toolcrib = Installation(tmp_path / "data")
    toolcrib.command("migrate", "-v0")
    file = tmp_path / "mcp.json"
    file.write_text(content)

    done = toolcrib.command("import_servers", str(file), "--json")

    assert done.returncode == 1
    assert json.loads(done.stdout)["servers"][0]["message"]
    assert toolcrib.command("import_servers", str(tmp_path / "absent.json")).returncode == 1
