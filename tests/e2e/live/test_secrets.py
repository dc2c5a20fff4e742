"""A planted secret never appears in plain text: responses, logs, processes, files, database."""

import gzip
import json
from pathlib import Path

from tests.support.installation import Installation
from tests.support.servers import list_sync_runs
from tests.support.upstreams.running import ROOT, received_by, running_http, stdio_argv
from tests.support.waiting import wait_for

CANARY = "kanarie-7f3d9b1e55"


def everything_on_disk(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def command_lines():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield (entry / "cmdline").read_bytes()
            except OSError:
                continue


def test_a_planted_secret_never_appears_in_plain_text(tmp_path):
    responses = []
    command, *args = stdio_argv("healthy")
    with Installation(tmp_path / "data") as toolcrib, running_http("raw_http") as url:

        def api(method, path, body=None, expect=(200, 201, 202, 204, 409, 422)):
            status, body = toolcrib.api(method, path, body)
            assert status in expect, body
            responses.append(json.dumps(body))
            return body

        stdio = {
            "name": "program",
            "transport": "stdio",
            "command": command,
            "args": args,
            "cwd": str(ROOT),
            "env": {"API_TOKEN": CANARY},
        }
        api("POST", "/servers", stdio)  # refused: not confirmed
        api("POST", "/servers", {**stdio, "confirm_argv": [command, *args]})
        for path in ("tools", "401", "500", "html"):
            api(
                "POST",
                "/servers",
                {
                    "name": path,
                    "transport": "http",
                    "url": f"{url}/{path}?key=${{KEY}}",
                    "headers": {"Authorization": f"Bearer {CANARY}"},
                    "variables": {"KEY": CANARY},
                },
            )
            wait_for(
                lambda path=path: any(run["finished_at"] for run in list_sync_runs(toolcrib, path)),
                30,
            )
            api("POST", f"/servers/{path}/test")
        wait_for(lambda: any(run["finished_at"] for run in list_sync_runs(toolcrib, "program")), 30)
        api("PUT", "/servers/tools/credentials", {"kind": "header", "values": {"X-Key": CANARY}})
        api("PUT", "/servers/tools/credentials", {"kind": "header", "values": {"X\n": CANARY}})
        api("PATCH", "/servers/tools", {"connection": {"transport": "http", "url": f"{url}/other"}})
        text = json.dumps({"mcpServers": {"more": {"url": f"{url}/x?token={CANARY}"}}})
        api("POST", "/servers/import", {"text": text, "check_only": True})
        api("POST", "/servers/import", {"text": text})
        for path in ("/servers", "/servers/export", "/tools", "/audit", "/servers/program"):
            api("GET", path)
        exported = toolcrib.command("backup", "--plain", str(tmp_path / "copy"))
        assert exported.returncode == 0, exported.stderr
        responses += [exported.stdout, exported.stderr]

        upstream = json.dumps(received_by(url))
        assert f"Bearer {CANARY}" in upstream, "the secret must reach the server it is for"
        lines = list(command_lines())
        assert not any(CANARY.encode() in line for line in lines)
        for name, content in everything_on_disk(toolcrib.data_dir).items():
            assert CANARY.encode() not in content, name
        log = toolcrib.log
    assert CANARY not in log
    assert not any(CANARY in text for text in responses)
    assert CANARY.encode() not in gzip.decompress((tmp_path / "copy").read_bytes())
