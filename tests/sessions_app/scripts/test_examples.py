"""The examples of docs/scripts.md run, checked against the types of their tools."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deno import find_deno_bin

from sessions_app.dispatch import dispatcher
from sessions_app.models import Agent
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_program, tool_object
from toolcrib.lib.token_counter import count

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "scripts.md"
BLOCK = r"^```{}\n(.*?)^```"
EXAMPLES, TYPESCRIPT = (
    re.findall(BLOCK.format(language), DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    for language in ("python", "typescript")
)
ENTRIES = [{"message": f"disk {n % 3} is full", "host": "h" * 200} for n in range(90)]


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
ENTRY = schema(message=TEXT, host=TEXT)


@pytest.fixture
def agent(agent):
    logs, tickets = (make_program("raw_calls", slug=slug) for slug in ("logs", "tickets"))
    ingest_tools(
        logs,
        tool_object(
            "query_logs",
            inputSchema=schema(level={"enum": ["error", "warning"]}, minutes=NUMBER),
            outputSchema=schema(entries={"type": "array", "items": ENTRY}),
        ),
    )
    ingest_tools(
        tickets,
        tool_object("create_ticket", inputSchema=schema(title=TEXT), outputSchema=schema(id=TEXT)),
    )
    Agent.objects.all().delete()
    return make_agent_client("writer", mode="deferred", code_mode=True)


@pytest.fixture
def made(monkeypatch):
    """Answer calls in place of servers; return the arguments of those that were made."""
    made: list[Any] = []

    async def call(caller: Any, request: Any) -> Any:
        made.append((request.tool_name, request.arguments))
        is_error = request.arguments.get("title") == ""
        content: Any = {"id": f"T-{len(made)}"}
        if request.tool_name == "logs__query_logs":
            wanted = ENTRIES if request.arguments["level"] == "error" else []
            content = {"entries": wanted}
        text = "The title is empty." if is_error else json.dumps(content)
        return SimpleNamespace(
            state="succeeded",
            held_call=None,
            is_error=is_error,
            error=None,
            tokens=count(text),
            content=json.dumps([{"type": "text", "text": text}]),
            structured="null" if is_error else json.dumps(content),
        )

    monkeypatch.setattr(dispatcher, "call", call)
    return made


@pytest.mark.parametrize("language", ["python", "typescript"])
def test_one_ticket_for_each_error_costs_a_tenth_of_the_tokens_at_most(script, made, language):
    example = {"python": EXAMPLES, "typescript": TYPESCRIPT}[language][0]
    answer = script(example, language=language)
    assert answer["status"] == "completed", answer
    assert answer["result"] == ["T-2", "T-3", "T-4"]
    assert answer["logs"] == "90 entries\n"
    assert [arguments["title"] for _, arguments in made[1:]] == [
        f"disk {n} is full" for n in range(3)
    ]
    assert answer["tokens"]["spared"] > 10 * answer["tokens"]["given"]


def test_calls_at_the_same_time(script, made):
    assert script(EXAMPLES[1])["result"] == {"errors": 90, "warnings": 0}


def test_errors_are_caught(script, made):
    answer = script(EXAMPLES[2])
    assert answer["result"] == "failed: tickets.create_ticket: The title is empty."


def test_calls_at_the_same_time_and_errors_in_typescript(script, made):
    answer = script(TYPESCRIPT[1], language="typescript")
    assert answer["result"] == {
        "errors": 90,
        "warnings": 0,
        "outcome": "failed: tickets.create_ticket: The title is empty.",
    }


def check_types(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.ts").write_text(text)
    return subprocess.run(
        [find_deno_bin(), "check", "--no-config", "--no-lock", "script.ts"],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"DENO_DIR": str(folder / "deno"), "HOME": str(folder), "NO_COLOR": "1"},
    )  # fmt: skip


def test_the_examples_match_the_declarations_of_their_tools(agent, tmp_path):
    sdk = agent.open().get("/sdk?lang=typescript").json["text"]
    scripts = ", ".join(f"async () => {{\n{example}}}" for example in TYPESCRIPT)
    done = check_types(tmp_path, f"{sdk}\nexport default [{scripts}];\n")
    assert done.returncode == 0, done.stderr
    wrong = scripts.replace('level: "error"', 'level: "fatal"')
    assert "fatal" in check_types(tmp_path, f"{sdk}\nexport default [{wrong}];\n").stderr


def test_every_example_is_tested_and_wrong_types_are_found_first(script, made):
    assert (len(EXAMPLES), len(TYPESCRIPT)) == (3, 2)
    answer = script(EXAMPLES[0].replace('level="error"', 'level="fatal"'))
    assert answer["error"]["type"] == "TypeCheckError"
    assert made == []
