"""The examples in docs/ run as they stand against an installation, and what a model of each
provider asks for reaches the right one of 600 strange tools."""

import asyncio
import json
import re
import subprocess
import sys

import anthropic
import openai
import pytest
from google import genai
from google.genai.types import HttpOptions

from tests.support.agents import make_agent
from tests.support.installation import ROOT, clean_environment
from tests.support.scripted_models import scripted_provider
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.upstreams.zoo import example_arguments, tool_definitions
from tests.support.waiting import scaled
from toolcrib.client import AsyncAgentLoop, AsyncToolcrib

pytestmark = [pytest.mark.timeout(240)]
ORDINARY, STRANGE = 590, 12
TOOL = "demo__convert_temperature"


def run_example(demo, name, folder):
    toolcrib, key = demo
    environment = {"TOOLCRIB_URL": toolcrib.url, "TOOLCRIB_KEY": key, "PYTHONPATH": str(ROOT)}
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


def test_the_example_in_anthropics_shape(demo, tmp_path):
    told = run_example(demo, "anthropic_loop.py", tmp_path)
    assert told.startswith("It is done: ")
    assert "212" in told


def test_the_example_in_openais_shape_and_going_on_with_it(demo, tmp_path):
    first = run_example(demo, "openai_loop.py", tmp_path).splitlines()
    arguments = '{"value": 100, "scale": "celsius", "to": "fahrenheit"}'
    assert first[0] == f"loaded {TOOL}"
    assert first[1] == f"{TOOL} {arguments}: ok"
    assert first[2].startswith("It is done: ")
    assert "212" in first[2]
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {"strategy": "dispatch", "expanded_groups": {"mcp:demo": [TOOL]}}

    again = run_example(demo, "openai_loop.py", tmp_path).splitlines()

    assert again == first[1:]  # loaded already


def test_the_readme_shows_the_shortest_of_them():
    readme = (ROOT / "README.md").read_text()
    example = (ROOT / "docs" / "examples" / "anthropic_loop.py").read_text()
    loop = example[example.index("with Toolcrib") : example.index("\nprint(")]
    assert f"```python\n{loop}```" in readme


# --- 600 tools ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(demo):
    """An agent with the strange tools and 590 more, and their public names by the servers' own."""
    toolcrib, _ = demo
    with running_http("zoo", "--tools", str(ORDINARY)) as url:
        register(toolcrib, "zoo", url)
        keeper = make_agent(
            toolcrib, "keeper", groups=["mcp:zoo"], calls_per_minute=10_000, calls_in_flight=100
        )
        yield keeper, dict(named(toolcrib))


def named(toolcrib):
    cursor = ""
    while cursor is not None:
        path = f"/tools?server=zoo&limit=100&cursor={cursor}"
        status, page = toolcrib.api("GET", path)
        assert status == 200, page
        yield from ((tool["original_name"], tool["name"]) for tool in page["items"])
        cursor = page["next_cursor"]


async def ask_model(provider, client, tools, system):
    """Let the provider's SDK send one request; its answer is an object of its own."""
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
def test_what_a_model_asks_for_reaches_the_right_tool(zoo, provider, native):
    wanted = tool_definitions(ORDINARY)
    # All that are strange, and of the others one in forty.
    chosen = wanted[:STRANGE] + wanted[STRANGE::40]
    keeper, names = zoo
    assert len(names) == ORDINARY + STRANGE
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names.values())
    direct = [(names[one["name"]], example_arguments(one)) for one in chosen]
    if provider == "openai-responses" and native:
        direct = [(f"mcp_zoo {name}", given) for name, given in direct]
    wrapped = [
        (
            "deferred_tool_call",
            {"tool_name": names[one["name"]], "arguments": example_arguments(one)},
        )
        for one in chosen[:STRANGE]
    ]
    calls = direct + ([] if native else wrapped)
    seen = []

    async def run():
        with scripted_provider(calls) as model:
            client = client_of(provider, model.url)
            async with (
                AsyncToolcrib(keeper.url, keeper.key) as crib,
                AsyncAgentLoop(
                    crib, provider, native=native, after=lambda call, result: seen.append(result)
                ) as loop,
            ):
                reply = await ask_model(provider, client, loop.tools, loop.system)
                messages = await loop.answer(reply)
            await (client.aio.aclose() if provider == "gemini" else client.close())
            return messages

    messages = asyncio.run(run())

    assert len(seen) == len(calls)
    told = {result.asked.id or str(at): json.loads(result.text) for at, result in enumerate(seen)}
    again = [] if native else chosen[:STRANGE]
    assert sorted(one["tool"] for one in told.values()) == sorted(
        one["name"] for one in [*chosen, *again]
    )
    by_name = {one["name"]: example_arguments(one) for one in chosen}
    assert all(one["given"] == by_name[one["tool"]] for one in told.values())
    assert not any(result.is_error for result in seen)
    count = {"anthropic": lambda: messages[0]["content"], "gemini": lambda: messages[0]["parts"]}
    assert len(count.get(provider, lambda: messages)()) == len(calls)
