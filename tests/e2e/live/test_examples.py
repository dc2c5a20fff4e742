"""The examples in docs/ run unchanged against an installation, and calls in the format of each
provider reach the right tool among 600."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import anthropic
import openai
import pytest
from google import genai
from google.genai.types import HttpOptions

import toolcrib_client
from tests.support.agents import make_agent
from tests.support.installation import ROOT, clean_environment
from tests.support.scripted_models import scripted_provider
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.upstreams.zoo import example_arguments, tool_definitions
from tests.support.waiting import scaled
from toolcrib_client import AsyncAgentLoop, AsyncToolcrib

pytestmark = [pytest.mark.timeout(240)]
ORDINARY, UNUSUAL = 590, 12
TOOL = "demo__convert_temperature"
CLIENT = Path(toolcrib_client.__file__).parents[1]


def run_example(demo, name, folder):
    toolcrib, key = demo
    environment = {"TOOLCRIB_URL": toolcrib.url, "TOOLCRIB_KEY": key, "PYTHONPATH": str(CLIENT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "examples" / name)],
        env=clean_environment(environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_anthropic_example(demo, tmp_path):
    output = run_example(demo, "anthropic_loop.py", tmp_path)
    assert output.startswith("It is done: ")
    assert "212" in output


def test_the_openai_example_and_its_resumption(demo, tmp_path):
    first = run_example(demo, "openai_loop.py", tmp_path).splitlines()
    arguments = '{"value": 100, "scale": "celsius", "to": "fahrenheit"}'
    assert first[0] == f"loaded {TOOL}"
    assert first[1] == f"{TOOL} {arguments}: ok"
    assert first[2].startswith("It is done: ")
    assert "212" in first[2]
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {
        "strategy": "dispatch",
        "expanded_groups": {"mcp:demo": [TOOL]},
        "load_order": [TOOL],
    }

    resumed = run_example(demo, "openai_loop.py", tmp_path).splitlines()

    assert resumed == first[1:]  # already loaded


def test_the_readme_contains_the_shortest_example():
    readme = (ROOT / "README.md").read_text()
    example = (ROOT / "docs" / "examples" / "anthropic_loop.py").read_text()
    loop = example[example.index("with Toolcrib") : example.index("\nprint(")]
    assert f"```python\n{loop}```" in readme


# --- 600 tools ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(demo):
    """An agent with the unusual tools and 590 others, and their public names by original name."""
    toolcrib, _ = demo
    with running_http("zoo", "--tools", str(ORDINARY)) as url:
        register(toolcrib, "zoo", url)
        approve_all(toolcrib)  # some names imitate others
        limits = {"calls_per_minute": 10_000, "cost_per_minute": 100_000, "calls_in_flight": 100}
        keeper = make_agent(toolcrib, "keeper", groups=["mcp:zoo"], **limits)
        yield keeper, dict(public_names(toolcrib))


def approve_all(toolcrib):
    _, page = toolcrib.api("GET", "/tools?server=zoo&state=waiting&limit=100")
    for tool in page["items"]:
        status, body = toolcrib.api("POST", f"/tools/{tool['name']}/approve", {})
        assert status == 200, body


def public_names(toolcrib):
    cursor = ""
    while cursor is not None:
        path = f"/tools?server=zoo&limit=100&cursor={cursor}"
        status, page = toolcrib.api("GET", path)
        assert status == 200, page
        yield from ((tool["original_name"], tool["name"]) for tool in page["items"])
        cursor = page["next_cursor"]


async def ask_model(provider, client, tools, system):
    """Send one request through the provider's SDK and return its response object."""
    match provider:
        case "anthropic":
            return await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}],
                tools=tools, system=system,
            )  # fmt: skip
        case "openai":
            return await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], tools=tools
            )
        case "openai-responses":
            return await client.responses.create(model="m", input="go", tools=tools)
    return await client.aio.models.generate_content(
        model="m", contents="go", config={"tools": tools}
    )


def client_of(provider, url):
    if provider == "anthropic":
        return anthropic.AsyncAnthropic(api_key="x", base_url=url, max_retries=0)
    if provider.startswith("openai"):
        return openai.AsyncOpenAI(api_key="x", base_url=url, max_retries=0)
    return genai.Client(api_key="x", http_options=HttpOptions(base_url=url))


@pytest.mark.parametrize(
    ("provider", "native"),
    [
        ("anthropic", False),
        ("anthropic", True),
        ("openai", False),
        ("openai-responses", False),
        ("openai-responses", True),
        ("gemini", False),
    ],
)
def test_calls_of_a_model_reach_the_right_tool(zoo, provider, native):
    known = tool_definitions(ORDINARY)
    # All unusual tools, and every fortieth of the others.
    chosen = known[:UNUSUAL] + known[UNUSUAL::40]
    keeper, names = zoo
    assert len(names) == ORDINARY + UNUSUAL
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names.values())
    direct = [(names[tool["name"]], example_arguments(tool)) for tool in chosen]
    if provider == "openai-responses" and native:
        direct = [(f"mcp_zoo {name}", arguments) for name, arguments in direct]
    wrapped = [
        (
            "deferred_tool_call",
            {"tool_name": names[tool["name"]], "arguments": example_arguments(tool)},
        )
        for tool in chosen[:UNUSUAL]
    ]
    calls = direct + ([] if native else wrapped)
    results = []

    async def run():
        with scripted_provider(calls) as model:
            client = client_of(provider, model.url)
            async with (
                AsyncToolcrib(keeper.url, keeper.key) as crib,
                AsyncAgentLoop(
                    crib, provider, native=native, after=lambda call, result: results.append(result)
                ) as loop,
            ):
                reply = await ask_model(provider, client, loop.tools, loop.system)
                messages = await loop.answer(reply)
            await (client.aio.aclose() if provider == "gemini" else client.close())
            return messages

    messages = asyncio.run(run())

    assert len(results) == len(calls)
    outputs = {
        result.asked.id or str(at): json.loads(result.text) for at, result in enumerate(results)
    }
    repeated = [] if native else chosen[:UNUSUAL]
    assert sorted(output["tool"] for output in outputs.values()) == sorted(
        tool["name"] for tool in [*chosen, *repeated]
    )
    by_name = {tool["name"]: example_arguments(tool) for tool in chosen}
    assert all(output["given"] == by_name[output["tool"]] for output in outputs.values())
    assert not any(result.is_error for result in results)
    count = {"anthropic": lambda: messages[0]["content"], "gemini": lambda: messages[0]["parts"]}
    assert len(count.get(provider, lambda: messages)()) == len(calls)
