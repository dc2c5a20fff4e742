"""Python client and agent loop, against the API in memory."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from anthropic.types import Message
from asgiref.sync import async_to_sync, sync_to_async
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from google.genai.types import GenerateContentResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

import toolcrib_client
from catalog.audit import SYSTEM
from catalog.tools.actions import save_custom_tool
from sessions_app.models import Call, Event
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.asgi_requests import send_api
from tests.support.factories import tool_object
from tests.support.scripted_models import ScriptedProvider
from toolcrib_client import (
    AgentLoop,
    ApiError,
    AsyncAgentLoop,
    AsyncToolcrib,
    MissingServers,
    Toolcrib,
    ToolcribError,
    ToolFailed,
    Unreachable,
    prepare_resumed_state,
)
from toolcrib_client import requests as api_requests
from toolcrib_client.http import _Retries
from toolcrib_client.providers import PROVIDERS, ToolCall, ToolResult
from toolcrib_client.steps import appended

WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
REPLIES = {
    "anthropic": ("/messages", Message),
    "openai": ("/chat/completions", ChatCompletion),
    "openai-responses": ("/responses", Response),
    "gemini": (":generateContent", GenerateContentResponse),
}


def model_reply(provider, *calls, typed=True):
    """Return a model's reply with these calls, as an SDK object or as JSON."""
    model = ScriptedProvider(list(calls))
    model.requests.append({})
    path, kind = REPLIES[provider]
    body = model.reply(path)
    return kind.model_validate(body) if typed else body


@pytest.fixture
def key(db):
    """Return the key of an agent with two groups to load and a custom tool."""
    add_tools("github", "create_issue", "list_issues", create_issue="Create an issue.")
    add_tools("slack", "post_message")
    shout = save_custom_tool(
        tool_object("shout", description="Shout a word.", inputSchema=WORD), actor=SYSTEM
    )
    make_group("own", shout)
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield make_agent_client("scout", mode="deferred").key
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


def send(request):
    """Send a request to the API in this thread."""
    url = request.url.raw_path.decode()
    headers = {name: value for name, value in request.headers.items() if name != "host"}
    response = send_api(request.method, url, request.read(), headers)
    return httpx2.Response(
        response.status_code, headers=dict(response.headers), content=response.content
    )


class Wire(httpx2.BaseTransport):
    """Transport to the API that can fail before or after a request."""

    def __init__(self):
        self.faults = []
        self.sent = []

    def handle_request(self, request):
        self.sent.append(f"{request.method} {request.url.path.rpartition('/')[2]}")
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, httpx2.ConnectError):
            raise fault
        response = send(request)
        if fault is not None:
            raise fault
        return response


class AsyncWire(httpx2.AsyncBaseTransport):
    async def handle_async_request(self, request):
        return await sync_to_async(send)(request)


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def crib(key, wire):
    with Toolcrib("http://testserver/", key, http=httpx2.Client(transport=wire)) as client:
        yield client


def shouting(word):
    return word.upper()


def texts(results):
    return json.dumps(results, ensure_ascii=False)


# --- The client -----------------------------------------------------------------------------------


def test_the_client_does_not_import_django():
    code = (
        "import sys, toolcrib_client\n"
        "owned = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not owned & {'django', 'ninja', 'celery', 'toolcrib', 'catalog', 'servers'}\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(toolcrib_client.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_each_method_returns_its_response_as_an_object(crib):
    session = crib.open(metadata={"run": 7})
    assert (session.mode, session.strategy) == ("deferred", "dispatch")
    assert "mcp:github" in session.text
    assert crib.session(session.id).id == session.id

    found = crib.search(session.id, query="create issue", limit=1)
    assert found.tools[0]["name"] == "github__create_issue"
    loaded = crib.load(session.id, "mcp:github", ["create_issue"])
    assert (loaded.tool_names, loaded.remaining) == (["github__create_issue"], 1)
    assert crib.preload(session.id, ["post_message"])["preloaded"] == ["slack__post_message"]
    assert crib.details(session.id, "shout")["parameters"] == WORD
    called = crib.call(session.id, "shout", {"word": "hey"})
    assert (called.state, called.structured_content) == ("client", {"word": "hey"})
    state = crib.state(session.id)
    assert state["expanded_groups"] == {
        "mcp:github": ["github__create_issue"],
        "mcp:slack": None,
    }
    assert crib.stats(session.id)["tokens"]["delivered"] > 0
    assert crib.tools(session.id, format="anthropic")[0]["name"] == "search_tools"
    servers = crib.servers(session.id)
    assert [(row["slug"], row["tools"]) for row in servers["items"]] == [
        ("github", 2),
        ("slack", 1),
    ]
    page = crib.servers(session.id, cursor=crib.servers(session.id, limit=1)["next_cursor"])
    assert ([row["slug"] for row in page["items"]], page["next_cursor"]) == (["slack"], None)
    first = crib.catalog(session.id, format="anthropic", native=True)
    assert first.body["tools"][0]["type"] == "tool_search_tool_regex_20251119"
    assert crib.catalog(session.id, first.etag, format="anthropic", native=True) is None
    assert crib.catalog(session.id, format="text").body["text"] == session.text
    child = crib.fork(session.id)
    assert crib.state(child.id) == state
    assert crib.close(session.id).raw["state"] == "closed"
    assert [event["kind"] for event in crib.events(session.id)["items"]][-1] == "closed"


def test_an_error_has_code_message_and_hint(crib):
    session = crib.open()
    with pytest.raises(ApiError) as refused:
        crib.details(session.id, "quagga")
    error = refused.value
    assert (error.code, error.status) == ("unknown_tool", 404)
    assert "not available" in error.message
    assert "search_tools" in error.hint
    assert isinstance(error, ToolcribError)
    with pytest.raises(ApiError, match="Session not found"):
        crib.state("ses_none")


def test_a_response_of_another_program_is_reported_as_such(key):
    transport = httpx2.MockTransport(lambda request: httpx2.Response(404, text="<h1>nginx</h1>"))
    with (
        Toolcrib("http://elsewhere", key, http=httpx2.Client(transport=transport)) as crib,
        pytest.raises(ApiError) as refused,
    ):
        crib.open()
    assert refused.value.code == "not_toolcrib"
    assert "elsewhere" in refused.value.message


def test_a_call_with_a_lost_response_is_retried_and_runs_once(crib, wire):
    session = crib.open()
    wire.faults = [httpx2.ReadError("reset")]

    answer = crib.call(session.id, "shout", {"word": "hey"})

    assert answer.state == "client"
    assert wire.sent[-2:] == ["POST call", "POST call"]
    assert Call.objects.count() == 1


def test_requests_that_are_not_idempotent_are_not_retried(crib, wire):
    wire.faults = [httpx2.ReadError("reset")]
    with pytest.raises(Unreachable, match="reset"):
        crib.open()
    wire.faults = [httpx2.ConnectError("refused")]  # nothing was sent
    assert crib.open().id
    assert wire.sent == ["POST sessions"] * 3


def test_retries_stop_after_the_maximum_attempts(key, wire):
    crib = Toolcrib("http://testserver", key, attempts=2, http=httpx2.Client(transport=wire))
    wire.faults = [httpx2.ConnectError("refused")] * 9
    with crib, pytest.raises(Unreachable):
        crib.open()
    assert len(wire.sent) == 2


def error_response(status, code, **headers):
    body = {"error": {"code": code, "message": "m", "hint": "h"}}
    return httpx2.Response(status, json=body, headers=headers)


def test_temporary_errors_are_retried_after_a_bounded_delay():
    request = api_requests.call("ses_1", "a")
    assert (
        _Retries(request, 2).after_error_response(
            error_response(429, "rate_limited", **{"Retry-After": "7"})
        )
        == 7
    )
    assert (
        _Retries(request, 2).after_error_response(
            error_response(503, "busy", **{"Retry-After": "999"})
        )
        == 30
    )
    in_progress = error_response(409, "idempotency_in_progress", **{"Retry-After": "1"})
    last = _Retries(request, 1)
    assert [last.after_error_response(in_progress) for _ in range(5)] == [1] * 5
    for response in (
        error_response(409, "idempotency_conflict"),
        error_response(429, "rate_limited"),
    ):
        with pytest.raises(ApiError):
            _Retries(request, 1).after_error_response(response)


# --- The loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("provider", REPLIES)
def test_results_have_the_format_of_the_provider(crib, provider, typed):
    reply = model_reply(
        provider,
        ("search_tools", {"query": "shout"}),
        ("deferred_tool_call", {"tool_name": "shout", "arguments": {"word": "hey"}}),
        ("shout", {"word": "ho"}),
        ("deferred_tool_call", {"tool_name": "quagga", "arguments": {}}),
        typed=typed,
    )
    with AgentLoop(crib, provider, functions={"shout": shouting}) as loop:
        assert loop.system == loop.session.text
        messages = loop.answer(reply)
    expected = {
        "anthropic": lambda: [
            (part["tool_use_id"], part["content"][0]["text"], part.get("is_error", False))
            for part in messages[0]["content"]
        ],
        "openai": lambda: [
            (item["tool_call_id"], item["content"], item["content"].startswith("Error: "))
            for item in messages
        ],
        "openai-responses": lambda: [
            (item["call_id"], item["output"], item["output"].startswith("Error: "))
            for item in messages
        ],
        "gemini": lambda: [
            (
                part["function_response"]["name"],
                texts(part["function_response"]["response"]),
                "error" in part["function_response"]["response"],
            )
            for part in messages[0]["parts"]
        ],
    }[provider]()
    assert len({call_id for call_id, _, _ in expected}) >= 3
    assert "Shout a word." in expected[0][1]
    assert "HEY" in expected[1][1]
    assert "HO" in expected[2][1]
    assert "not available in this session" in expected[3][1]
    assert [failed for _, _, failed in expected] == [False, False, False, True]


def test_replies_can_be_responses_messages_lists_or_single_calls(crib):
    block = {"type": "tool_use", "id": "t", "name": "shout", "input": {"word": "a"}}
    chat = {"id": "c", "type": "function", "function": {"name": "shout", "arguments": '{"word":1}'}}
    item = {"type": "function_call", "call_id": "c", "name": "shout", "arguments": ""}
    part = {"function_call": {"name": "shout", "args": {"word": "a"}}}
    searched = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}}
    forms = {
        "anthropic": [block, [block], [searched, block], {"content": [searched, block]}],
        "openai": [chat, [chat], {"tool_calls": [chat]}, {"choices": [{"message": {
            "tool_calls": [chat]}}, {"message": {}}]}],
        "openai-responses": [item, [item], {"output": [{"type": "reasoning"}, item]}],
        "gemini": [part, part["function_call"], [part, {"text": "hm"}], {"parts": [part]},
                   {"candidates": [{"content": {"parts": [part]}}]}],
        "json": [{"name": "shout", "arguments": {"word": "a"}}],
    }  # fmt: skip
    for provider, replies in forms.items():
        for reply in replies:
            assert [call.name for call in PROVIDERS[provider].calls(reply)] == ["shout"], reply
    for provider, nothing in (
        ("anthropic", {"content": [{"type": "text", "text": "hm"}]}),
        ("openai", {"choices": [{"message": {"content": "hm", "tool_calls": None}}]}),
        ("openai-responses", {"output": []}),
        ("gemini", {"candidates": [{"content": {"parts": [{"text": "hm"}]}}]}),
        ("gemini", {"candidates": []}),
        ("json", []),
    ):
        assert PROVIDERS[provider].calls(nothing) == []
    with AgentLoop(crib, "anthropic") as loop:
        assert loop.answer({"content": [{"type": "text", "text": "done"}]}) == []


def test_a_reply_is_appended_unchanged_with_its_results(crib):
    for provider, history_of in {
        "anthropic": lambda reply: [{"role": "assistant", "content": reply.content}],
        "openai": lambda reply: [reply.choices[0].message],
        "openai-responses": lambda reply: reply.output,
        "gemini": lambda reply: [reply.candidates[0].content],
    }.items():
        with AgentLoop(crib, provider, functions={"shout": shouting}) as loop:
            reply = model_reply(provider, ("shout", {"word": "hey"}))
            history = ["before"]
            assert loop.take(reply, history) is True
            assert history[:2] == ["before", *history_of(reply)]
            assert "HEY" in texts(history[2])
            body = model_reply(provider, typed=False)
            assert loop.take(body, history) is False


def test_the_before_hook_receives_the_full_tool_name(crib):
    seen = []

    def before(call):
        seen.append((call.name, call.arguments))
        return "Creating issues is not allowed." if call.name == "github__create_issue" else None

    calls = [
        ("deferred_tool_call", {"tool_name": "github__create_issue", "arguments": '{"what": "a"}'}),
        ("call_tool", {"name": "create_issue", "args": {"what": "b"}}),
        ("create_issue", {"what": "c"}),
        ("shout", {"word": "d"}),
        ("search_tools", {"query": "issue"}),
    ]
    with AgentLoop(crib, "anthropic", before=before, functions={"shout": shouting}) as loop:
        (message,) = loop.answer(model_reply("anthropic", *calls))
    assert seen == [
        ("github__create_issue", {"what": "a"}),
        ("github__create_issue", {"what": "b"}),
        ("github__create_issue", {"what": "c"}),
        ("shout", {"word": "d"}),
    ]
    parts = message["content"]
    assert [part.get("is_error", False) for part in parts] == [True, True, True, False, False]
    assert "not allowed" in parts[2]["content"][0]["text"]
    assert Call.objects.get().tool_name == "shout"


def test_an_unprefixed_name_missing_in_the_catalog_is_resolved_by_a_request(crib):
    seen = []
    with AgentLoop(crib, "json", before=lambda call: seen.append(call.name)) as loop:
        add_tools("later", "sing.song")
        loop.answer([{"name": "sing.song", "arguments": {}}, {"name": "quagga", "arguments": {}}])
    assert seen == ["later__sing_song", "quagga"]


def test_the_after_hook_can_replace_the_result(crib):
    def after(call, result):
        assert (call.name, result.asked.name) == ("shout", "deferred_tool_call")
        return ToolResult(result.asked, call, [{"type": "text", "text": "hidden"}])

    call = ("deferred_tool_call", {"tool_name": "shout", "arguments": {"word": "hey"}})
    with AgentLoop(crib, "openai", after=after, functions={"shout": shouting}) as loop:
        assert loop.answer(model_reply("openai", call))[0]["content"] == "hidden"


def test_a_custom_tool_can_fail_or_have_no_function(crib):
    def failing(word):
        raise ToolFailed("No voice today.", hint="Whisper.")

    call = {"id": "1", "name": "shout", "arguments": {"word": "hey"}}
    with AgentLoop(crib, "json", functions={"shout": failing}) as loop:
        (failed,) = loop.answer([call])
        (wrong,) = loop.answer([{**call, "arguments": {"word": 5}}])
    with AgentLoop(crib, "json") as loop:
        (missing,) = loop.answer([call])
    assert (failed["is_error"], failed["content"][0]["text"]) == (True, "No voice today. Whisper.")
    assert wrong["is_error"]
    assert '"properties"' in wrong["content"][0]["text"]  # the error contains the schema
    assert "no function for it" in missing["content"][0]["text"]


def test_errors_the_model_can_correct_are_results_and_others_are_raised(crib):
    correctable = [
        {"name": "search_tools", "arguments": {"limit": "ten"}},
        {"name": "search_tools", "arguments": {}},
        {"name": "load_tools", "arguments": {"group_id": "none"}},
        {"name": "load_tools", "arguments": {}},
        {"name": "get_tool_details", "arguments": {"name": "github__create_isue"}},
        {"name": "get_tool_details", "arguments": {}},
        {"name": "deferred_tool_call", "arguments": {}},
        {"name": "deferred_tool_call", "arguments": {"tool_name": "deferred_tool_call"}},
        {"name": "shout", "arguments": "no json"},
    ]
    with AgentLoop(crib, "json") as loop:
        results = loop.answer(correctable)
        assert all(result["is_error"] for result in results)
        assert all(result["content"][0]["text"] for result in results)
        assert "github__create_issue" in results[4]["content"][0]["text"]
        crib.close(loop.session.id)
        with pytest.raises(ApiError) as ended:
            loop.answer([{"name": "shout", "arguments": {}}])
    assert ended.value.code == "session_closed"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"name": "search_tools", "arguments": {"pattern": "("}}, "pattern"),
        ({"name": "search_tools", "arguments": {"pattern": "a(?=b)"}}, "pattern"),
        ({"name": "search_tools", "arguments": {"pattern": "a" * 201}}, "200"),
        ({"name": "load_tools", "arguments": {"group_id": "own", "tool_names": "shout"}}, "list"),
        ({"name": "load_tools", "arguments": "{broken"}, "JSON object"),
        ({"name": "search_tools", "arguments": {"query": "x", "limit": "many"}}, "limit"),
    ],
)
def test_a_mistake_of_the_model_names_the_problem_and_loses_no_other_result(crib, call, words):
    shout = {"id": "1", "name": "shout", "arguments": {"word": "hey"}}
    with AgentLoop(crib, "json", functions={"shout": shouting}) as loop:
        before, mistake, after = loop.answer([shout, {"id": "2", **call}, {**shout, "id": "3"}])
    assert (before["content"][0]["text"], after["content"][0]["text"]) == ("HEY", "HEY")
    assert mistake["is_error"]
    assert words in mistake["content"][0]["text"]


def test_an_exception_in_a_function_is_a_result(crib, caplog):
    def failing(word):
        raise KeyError(word)

    call = {"id": "1", "name": "shout", "arguments": {"word": "hey"}}
    for function, text in (
        (failing, "shout failed: KeyError: 'hey'"),
        (lambda other: other, "unexpected keyword argument"),
        (lambda word: object(), "not JSON serializable"),
    ):
        with AgentLoop(crib, "json", functions={"shout": function}) as loop:
            (result,) = loop.answer([call])
        assert result["is_error"]
        assert text in result["content"][0]["text"]
    assert len(caplog.records) == 3  # with the traceback


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ToolcribError("Enough."), ValueError()])
def test_every_call_has_a_result_when_an_error_ends_the_run(crib, error):
    """Providers refuse messages in which a call has no result."""

    def before(call):
        if call.arguments["word"] == "stop":
            raise error

    calls = [("shout", {"word": word}) for word in ("one", "stop", "three")]
    messages = []
    options = {"before": before, "functions": {"shout": shouting}}
    with AgentLoop(crib, "anthropic", **options) as loop:
        with pytest.raises(type(error)):
            loop.take(model_reply("anthropic", *calls, typed=False), messages)
        assert loop.results == messages[1:]
    asked = [block["id"] for block in messages[0]["content"] if block["type"] == "tool_use"]
    results = messages[1]["content"]
    assert [block["tool_use_id"] for block in results] == asked
    assert results[0]["content"][0]["text"] == "ONE"
    assert [block.get("is_error") for block in results] == [None, True, True]


def test_a_result_is_kept_when_the_after_hook_fails(crib):
    def after(call, result):
        raise ValueError("broken hook")

    call = {"id": "1", "name": "shout", "arguments": {"word": "hey"}}
    with AgentLoop(crib, "json", after=after, functions={"shout": shouting}) as loop:
        with pytest.raises(ValueError, match="broken hook"):
            loop.answer([call])
        assert loop.results[0]["content"][0]["text"] == "HEY"


class ScriptWire(Wire):
    """Answers requests about scripts: the first says that it is running."""

    def __init__(self, *answers):
        super().__init__()
        self.answers, self.asked = list(answers), []

    def handle_request(self, request):
        if "/scripts" not in request.url.path:
            return super().handle_request(request)
        body = json.loads(request.content) if request.method == "POST" else {}
        self.asked.append((request.method, body, request.headers.get("idempotency-key")))
        status, is_error = self.answers.pop(0)
        answer = {"run_id": "run_1", "status": status, "is_error": is_error, "result": 3}
        return httpx2.Response(200, json=answer)


def client_of(key, wire):
    return Toolcrib("http://testserver/", key, http=httpx2.Client(transport=wire))


CODE = {"code": "await github.list_issues()", "input": [1]}


@pytest.mark.parametrize("provider", REPLIES)
def test_every_provider_runs_scripts_to_their_end(key, provider):
    wire = ScriptWire(("running", False), ("running", False), ("completed", False))
    reply = model_reply(provider, ("run_script", CODE))
    with (
        client_of(key, wire) as crib,
        AgentLoop(crib, provider) as loop,
    ):
        messages = json.dumps(loop.answer(reply))
    assert [method for method, _, _ in wire.asked] == ["POST", "GET", "GET"]
    assert wire.asked[0][1] == CODE
    assert len(wire.asked[0][2]) == 36  # so a lost response is asked for again, not run again
    assert "completed" in messages
    assert "running" not in messages


def test_a_held_script_is_returned_and_asked_for_by_its_id(key):
    wire = ScriptWire(("held", False), ("failed", True))
    asked = [("run_script", CODE), ("check_call", {"run_id": "run_1", "wait_seconds": 5})]
    reply = model_reply("anthropic", *asked[:1])
    with client_of(key, wire) as crib, AgentLoop(crib, "anthropic") as loop:
        held = loop.answer(reply)[0]["content"][0]
        ended = loop.run(ToolCall("2", *asked[1]))
    assert '"held"' in json.dumps(held["content"]).replace("\\", "")
    assert ended.is_error is True
    assert [method for method, _, _ in wire.asked] == ["POST", "GET"]


def test_the_before_hook_can_reject_a_script(key):
    wire = ScriptWire()
    options = {"before": lambda call: "No scripts." if call.name == "run_script" else None}
    with client_of(key, wire) as crib, AgentLoop(crib, "anthropic", **options) as loop:
        result = loop.run(ToolCall("1", "run_script", CODE))
    assert result.content[0]["text"] == "No scripts."
    assert wire.asked == []


def test_search_aliases_work(crib):
    expanded = []
    with AgentLoop(crib, "json", on_tools_expanded=expanded.append) as loop:
        loop.answer([{"name": "tool_search_regex", "arguments": {"query": "^github__create"}}])
        assert loop.export()["expanded_groups"] == {"mcp:github": ["github__create_issue"]}
        (found,) = loop.answer([{"name": "tool_search", "arguments": {"query": "post message"}}])
    assert expanded == [["github__create_issue"]]
    assert "slack__post_message" in found["content"][0]["text"]


# --- State ----------------------------------------------------------------------------------------


def test_a_run_can_be_resumed(crib, wire):
    expanded = []
    load = {"name": "load_tools", "arguments": {"group_id": "mcp:github"}}
    with AgentLoop(crib, "json", on_tools_expanded=expanded.append) as first:
        (answer,) = first.answer([load])
        state, cache = json.loads(json.dumps(first.export())), first.loader_cache
    assert expanded == [["github__create_issue", "github__list_issues"]]

    again = AgentLoop(
        crib, "json", resume=state, loader_cache=cache, on_tools_expanded=expanded.append
    )
    with again as second:
        wire.sent.clear()
        (same,) = second.answer([load])
        assert wire.sent == []  # answered from the cache
        assert second.export() == state
        second.answer([{"name": "load_tools", "arguments": {"group_id": "mcp:slack"}}])
    assert same["content"] == answer["content"]
    assert expanded[1:] == [["slack__post_message"]]
    assert second.resumed.pre_loaded_tools == ["github__create_issue", "github__list_issues"]
    assert "mcp:github" in second.resumed.remaining_groups


def test_the_loader_cache_of_another_run_is_not_used_for_unloaded_tools(crib, wire):
    load = {"name": "load_tools", "arguments": {"group_id": "mcp:github"}}
    with AgentLoop(crib, "json") as first:
        first.answer([load])
    with AgentLoop(crib, "json", loader_cache=first.loader_cache) as second:
        second.answer([load])
        assert second.export()["expanded_groups"] == {"mcp:github": None}


def test_a_state_of_another_strategy_is_rejected_before_any_request(crib, wire):
    state = {"strategy": "inject", "expanded_groups": {}}
    loop = AgentLoop(crib, "json", resume=state, wish={"strategy": "dispatch"})
    with pytest.raises(ToolcribError, match="strategy inject") as refused, loop:
        pass
    assert refused.value.code == "strategy_mismatch"
    assert wire.sent == []


def test_loaded_groups_remain_loadable_with_dispatch_and_not_with_inject():
    groups = {"a": ["a1", "a2"], "b": ["b1", "b2"], "c": ["c1"]}
    expanded = {"a": None, "b": ["b2"], "gone": None}
    dispatch = prepare_resumed_state(groups, expanded, "dispatch")
    inject = prepare_resumed_state(groups, expanded, "inject", {("a", None): "answer"})
    assert dispatch.pre_loaded_tools == inject.pre_loaded_tools == ["a1", "a2", "b2"]
    assert dispatch.remaining_groups == groups
    assert inject.remaining_groups == {"b": ["b1"], "c": ["c1"]}
    assert inject.loader_cache == {("a", None): "answer"}


@pytest.mark.parametrize("provider", [*REPLIES, "json"])
def test_with_inject_new_tools_are_appended_to_the_array(crib, provider):
    def names(tools):
        inner = tools[0]["functionDeclarations"] if provider == "gemini" else tools
        return [tool.get("name") or tool["function"]["name"] for tool in inner]

    calls = [("load_tools", {"group_id": "mcp:slack"}), ("load_tools", {"group_id": "mcp:github"})]
    wish = {"strategy": "inject"}
    with AgentLoop(crib, provider, wish=wish, max_iterations=1) as loop:
        arrays, texts_ = [], []
        for turn in loop.turns():
            arrays.append(loop.tools)
            texts_.append(loop.system)
            if turn <= len(calls):
                name, arguments = calls[turn - 1]
                loop.run(ToolCall(f"c{turn}", name, arguments))
    assert loop.exhausted
    first, second, third = arrays
    assert names(second)[len(names(first)) :] == ["slack__post_message"]
    added = ["github__create_issue", "github__list_issues"]
    assert names(third)[len(names(second)) :] == added
    assert names(third)[: len(names(first))] == names(first)
    assert "mcp:slack" in texts_[0]
    assert "mcp:slack" not in texts_[1]


def test_existing_tools_keep_their_position_in_the_array():
    old = [{"name": "b"}, {"name": "a"}]
    assert appended(old, [{"name": "a"}, {"name": "c"}, {"name": "b"}]) == [*old, {"name": "c"}]
    chat = [{"type": "function", "function": {"name": name}} for name in "ba"]
    assert appended(chat, chat[::-1]) == chat
    declared = [{"functionDeclarations": old}]
    more = [{"functionDeclarations": [{"name": "c"}, *old]}]
    assert appended(declared, more)[0]["functionDeclarations"] == [*old, {"name": "c"}]
    assert appended([], old) == old


def test_the_turn_limit_is_multiplied_as_suggested(crib):
    with AgentLoop(crib, "json", max_iterations=2) as loop:
        assert list(loop.turns()) == [1, 2, 3, 4, 5, 6]
        assert loop.exhausted
    with AgentLoop(crib, "json", max_iterations=2, wish={"mode": "full"}) as loop:
        for _ in loop.turns():
            break
        assert (loop.limit, loop.exhausted) == (2, False)
    with AgentLoop(crib, "json") as loop:
        assert loop.limit is None
        assert next(iter(loop.turns())) == 1


def test_required_servers_must_have_tools_in_scope(crib):
    with AgentLoop(crib, "json", require_servers=["github", "slack"]):
        pass
    needed = AgentLoop(crib, "json", require_servers=["github", "jira"])
    with pytest.raises(MissingServers, match="required servers: jira") as refused, needed:
        pass
    assert "github, slack" in refused.value.hint
    assert Event.objects.filter(kind="closed").count() == 2  # no session is left open


def test_a_session_opened_by_the_caller_is_not_closed(crib):
    session = crib.open()
    with AgentLoop(crib, "anthropic", session_id=session.id) as loop:
        assert loop.session.id == session.id
    assert crib.session(session.id).raw["state"] == "open"


# --- Native forms ---------------------------------------------------------------------------------


def test_a_native_anthropic_search_returns_references(crib):
    with AgentLoop(crib, "anthropic", native=True, search="client") as loop:
        assert loop.tools[0]["name"] == "search_tools"
        (message,) = loop.answer(
            model_reply("anthropic", ("search_tools", {"query": "create issue"}))
        )
        reference = message["content"][0]["content"][0]
    assert reference == {"type": "tool_reference", "tool_name": "github__create_issue"}
    assert message["content"][0]["tool_use_id"] == "toolu_1_0"


def test_a_native_openai_search_returns_the_tools(crib):
    options = {"native": True, "search": "client", "functions": {"shout": shouting}}
    with AgentLoop(crib, "openai-responses", **options) as loop:
        assert loop.tools[-1]["execution"] == "client"
        calls = (("tool_search", {"query": "create issue"}), ("own shout", {"word": "hey"}))
        search, called = loop.answer(model_reply("openai-responses", *calls))
    assert (search["type"], search["call_id"]) == ("tool_search_output", "call_1_0")
    assert search["tools"][0]["tools"][0]["name"] == "github__create_issue"
    assert called["output"] == "HEY"  # the namespace is ignored


def test_a_toolset_contains_the_key(crib, key, settings):
    settings.PUBLIC_URL = "https://toolcrib.example"
    with AgentLoop(crib, "anthropic", native=True, toolset=True) as loop:
        assert loop.extras["mcp_servers"][0]["authorization_token"] == key
        assert loop.extras["betas"] == ["mcp-client-2025-11-20"]


# --- Result content -------------------------------------------------------------------------------


def test_content_is_converted_to_what_the_provider_supports():
    image = {"type": "image", "mimeType": "image/png", "data": "AAAA"}
    link = {"type": "resource_link", "uri": "file:///a", "name": "a"}
    content = [{"type": "text", "text": "words"}, image, link]
    call = ToolCall("7", "7zip__draw", {})

    def message(provider, **fields):
        result = ToolResult(call, call, **{"content": content, **fields})
        return PROVIDERS[provider].messages([result])[0]

    blocks = message("anthropic")["content"][0]["content"]
    assert [block["type"] for block in blocks] == ["text", "image", "text"]
    assert blocks[1]["source"] == {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    assert message("openai")["content"].splitlines()[:2] == ["words", "[image, image/png]"]
    parts = message("openai-responses")["output"]
    assert parts[1] == {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    response = message("gemini", structured={"a": 1})["parts"][0]["function_response"]
    assert response == {"id": "7", "name": "_7zip__draw", "response": {"output": {"a": 1}}}
    assert message("openai", content=[], structured={"a": 1})["content"] == '{"a":1}'
    empty = message("anthropic", content=[])["content"][0]["content"]
    assert empty == [{"type": "text", "text": "(no content)"}]
    assert PROVIDERS["gemini"].calls({"name": "_7zip__draw"})[0].name == "7zip__draw"


# --- asyncio --------------------------------------------------------------------------------------


def test_the_asyncio_client_and_loop(key):
    expanded, seen = [], []

    async def before(call):
        seen.append(call.name)

    async def shout(word):
        return word.upper()

    async def run():
        http = httpx2.AsyncClient(transport=AsyncWire())
        options = {"before": before, "functions": {"shout": shout}, "max_iterations": 1}
        async with (
            AsyncToolcrib("http://testserver", key, http=http) as crib,
            AsyncAgentLoop(
                crib,
                "anthropic",
                wish={"strategy": "inject"},
                on_tools_expanded=expanded.append,
                **options,
            ) as loop,
        ):
            arrays = []
            async for turn in loop.turns():
                arrays.append([tool["name"] for tool in loop.tools])
                if turn == 1:
                    reply = model_reply(
                        "anthropic",
                        ("load_tools", {"group_id": "mcp:slack"}),
                        ("shout", {"word": "hey"}),
                        ("load_tools", {"group_id": "mcp:github"}),
                        ("quagga", {}),
                    )
                    (message,) = await loop.answer(reply)
            state = await loop.export()
            with pytest.raises(ApiError, match="Session not found"):
                await crib.state("ses_none")
            found = await crib.search(loop.session.id, query="issue")
            return arrays, message["content"], state, found

    arrays, parts, state, found = async_to_sync(run)()
    assert [part["tool_use_id"] for part in parts] == [f"toolu_1_{at}" for at in range(4)]
    assert parts[1]["content"][0]["text"] == "HEY"
    assert parts[3]["is_error"]
    assert seen == ["shout", "quagga"]
    assert expanded == [["slack__post_message"], ["github__create_issue", "github__list_issues"]]
    assert list(state["expanded_groups"]) == ["mcp:slack", "mcp:github"]
    assert arrays[1][len(arrays[0]) :] == expanded[0] + expanded[1]
    assert found.total_matches >= 2


def test_a_cancelled_asyncio_loop_keeps_the_results_it_has(key):
    """The second call waits for ever; the task is cancelled once the first has its result."""
    messages = []

    async def run():
        waiting, finished = asyncio.Event(), asyncio.Event()

        async def shout(word):
            if word == "wait":
                waiting.set()
                await asyncio.Event().wait()
            return word.upper()

        http = httpx2.AsyncClient(transport=AsyncWire())
        options = {"functions": {"shout": shout}, "after": lambda *_: finished.set()}
        async with (
            AsyncToolcrib("http://testserver", key, http=http) as crib,
            AsyncAgentLoop(crib, "anthropic", **options) as loop,
        ):
            calls = [("shout", {"word": "hey"}), ("shout", {"word": "wait"})]
            reply = model_reply("anthropic", *calls, typed=False)
            task = asyncio.ensure_future(loop.take(reply, messages))
            await waiting.wait()
            await finished.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async_to_sync(run)()
    results = messages[1]["content"]
    assert results[0]["content"][0]["text"] == "HEY"
    assert results[1]["is_error"]


def test_the_asynchronous_client_lists_servers_too(key):
    async def run():
        http = httpx2.AsyncClient(transport=AsyncWire())
        async with AsyncToolcrib("http://testserver", key, http=http) as crib:
            session = await crib.open()
            return await crib.servers(session.id, limit=1)

    listed = async_to_sync(run)()
    assert [row["slug"] for row in listed["items"]] == ["github"]
    assert listed["next_cursor"]


def test_the_client_under_test_is_the_expected_one():
    """The tests of the wheel run this module against the wheel's files."""
    expected = os.environ.get("EXPECTED_CLIENT") or Path(__file__).parents[3] / "clients" / "python"
    assert Path(toolcrib_client.__file__).is_relative_to(expected)
