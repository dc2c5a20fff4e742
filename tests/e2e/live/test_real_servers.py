"""Third-party MCP servers with their documented commands."""

import json

import pytest

from tests.support import parts
from tests.support.installation import Installation
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_npm,
    pytest.mark.needs_pyservers,
]


def real_servers(folder):
    packages = parts.NPM / "node_modules" / "@modelcontextprotocol"
    python = parts.PYSERVERS / "bin"

    def node(name, *args):
        return {"command": "node", "args": [str(packages / name / "dist" / "index.js"), *args]}

    return {
        "everything": node("server-everything"),
        "filesystem": node("server-filesystem", str(folder)),
        "memory": {
            **node("server-memory"),
            "env": {"MEMORY_FILE_PATH": str(folder / "memory.jsonl")},
        },
        "time": {"command": str(python / "mcp-server-time")},
        "git": {"command": str(python / "mcp-server-git")},
    }


def test_five_real_servers_are_imported_synced_and_kept_connected(tmp_path):
    (tmp_path / "files").mkdir()
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": real_servers(tmp_path / "files")}))
    with Installation(tmp_path / "data") as toolcrib:
        done = toolcrib.command("import_servers", str(file), "--allow-stdio", "--wait", "--json")

        assert done.returncode == 0, done.stdout + done.stderr
        rows = {row["slug"]: row for row in json.loads(done.stdout)["servers"]}
        counts = {slug: row["tools"] for slug, row in rows.items()}
        assert set(counts) == {"everything", "filesystem", "memory", "time", "git"}
        assert all(count >= 2 for count in counts.values()), counts
        assert "get_current_time" in toolcrib.tool_names("time")
        assert "git_status" in toolcrib.tool_names("git")

        def all_connected():
            servers = toolcrib.api("GET", "/servers")[1]["items"]
            return {server["state"] for server in servers} == {"connected"}

        wait_for(all_connected, 30)
        _, tool = toolcrib.api("GET", "/tools/filesystem__read_text_file")
        assert tool["definition"]["inputSchema"]["properties"]["path"]
        assert tool["tokens"] > 20
