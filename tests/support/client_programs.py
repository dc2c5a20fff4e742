"""Client programs of tests/e2e/clients/outside: each stays connected and does what it is told."""

import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.support import parts
from tests.support.agents import Agent
from tests.support.client_table import Client
from tests.support.installation import ROOT, clean_environment
from tests.support.waiting import scaled

NO_TRAFFIC = {  # what clients would report to their vendors
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "MCP_USE_ANONYMIZED_TELEMETRY": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
    "AGNO_TELEMETRY": "false",
}


OUTSIDE = ROOT / "tests" / "e2e" / "clients" / "outside"


def argv_of(client: Client, agent: Agent, path: str = "") -> list[str]:
    """Return the command of a client's program, for the endpoint of an agent at /mcp + path."""
    program, url = str(OUTSIDE / client.program), f"{agent.url}/mcp{path}"
    if client.environment in parts.NPM_CLIENTS:
        return [parts.node(), program, url, agent.key, str(parts.modules_of(client.environment))]
    python = Path(parts.client_bin(client.environment) or "") / "python"
    return [str(python), program, url, agent.key]


class ClientProgram:
    """A running program; `ask` sends a command and waits for its answer."""

    def __init__(self, argv: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._argv, self._log = list(argv), folder / "client.log"
        self._errors = self._log.open("w+")
        self._process = subprocess.Popen(
            self._argv,
            env=clean_environment({"HOME": str(folder), "NO_COLOR": "1", **NO_TRAFFIC}),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        self._kept: dict[int, Any] = {}  # answers by the id of their command
        self._last_id = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line[:1] in '{"':  # some clients also print what they do
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _next(self, seconds: float) -> Any:
        try:
            answer = self._answers.get(timeout=scaled(seconds))
        except queue.Empty:
            raise AssertionError(f"no answer of {self._argv[1]}:\n{self.log}") from None
        assert answer is not None, f"{self._argv[1]} ended:\n{self.log}"
        return answer

    @property
    def log(self) -> str:
        return self._log.read_text()[-3_000:]

    def send(self, do: str, **values: Any) -> int:
        """Send a command; return its id."""
        self._last_id += 1
        command = {"id": self._last_id, "do": do, **values}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._last_id

    def wait(self, number: int, seconds: float = 60) -> Any:
        """Return the answer to a command."""
        while number not in self._kept:
            answer = self._next(seconds)
            self._kept[answer["id"]] = answer
        return self._kept.pop(number)

    def ask(self, do: str, **values: Any) -> Any:
        return self.wait(self.send(do, **values))

    def call(self, tool: str, /, **arguments: Any) -> Any:
        return self.ask("call", name=tool, arguments=arguments)

    def cancel(self, number: int) -> None:
        """Cancel the call of a command; its answer may never come."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": "cancel", "id": number}) + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Self:
        assert self._next(90) == "ready"
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
