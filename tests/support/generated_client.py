"""A program that uses a generated client; run in the environment of its generator.

python generated_client.py SCHEMA URL AGENT_KEY ADMIN_KEY, with the generated package `crib` in the
working directory. Functions and bodies are found by the method and path of their operations.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SCHEMA, URL, AGENT_KEY, ADMIN_KEY = sys.argv[1:]
PATHS = json.loads(Path(SCHEMA).read_text())["paths"]
sys.path.insert(0, str(Path.cwd()))


def operation(method: str, path: str) -> Callable[..., Any]:
    """Return a function that sends one request with the generated client."""
    described = PATHS["/api/v1" + path][method]
    module = import_module(f"crib.api.{described['tags'][0]}.{described['operationId']}")

    def send(client: Any, body: Any = None, **parameters: Any) -> Any:
        if body is not None:
            media = described["requestBody"]["content"]["application/json"]["schema"]
            model = getattr(import_module("crib.models"), media["$ref"].rpartition("/")[2])
            parameters["body"] = model.from_dict(body)
        response = module.sync_detailed(client=client, **parameters)
        if response.status_code not in (200, 201):
            raise SystemExit(f"{method} {path}: {response.status_code} {response.content!r}")
        return response.parsed

    return send


def main() -> None:
    client = import_module("crib").AuthenticatedClient
    agent, admin = (client(base_url=URL, token=key) for key in (AGENT_KEY, ADMIN_KEY))
    name = "demo__convert_temperature"
    session = operation("post", "/sessions")(agent, {"mode": "deferred"})
    sid = session.id
    below = "/sessions/{session_id}"
    found = operation("post", below + "/search")(
        agent, {"query": "convert a temperature"}, session_id=sid
    )
    load = {"group_id": "mcp:demo", "tool_names": [name]}
    loaded = operation("post", below + "/load")(agent, load, session_id=sid)
    arguments = {"value": 21, "scale": "celsius", "to": "fahrenheit"}
    call = {"tool_name": name, "arguments": arguments}
    called = operation("post", below + "/call")(agent, call, session_id=sid)
    change = {"description": "Convert units and look at the clock."}
    edited = operation("patch", "/groups/{group_id}")(admin, change, group_id="mcp:demo")
    answers = {"found": found, "loaded": loaded, "called": called, "edited": edited}
    print(json.dumps({key: answer.to_dict() for key, answer in answers.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
