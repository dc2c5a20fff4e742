"""Hostile inputs to the agent API: each is handled or rejected with a readable error.

The numbers in the section titles refer to the review list of hostile inputs.
"""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools.actions import hold, save_custom_tool
from servers.connections import calls as upstream_calls
from servers.models import Server
from sessions_app.models import AgentSession, Call, Event, Expansion
from sessions_app.sessions import lifecycle
from tests.support.agent_client import add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, make_program, tool_object
from tests.support.waiting import scaled, wait_for
from toolcrib.lib.json_codec import canonical


@pytest.fixture
def shout(db):
    """A custom tool that accepts anything and needs no server."""
    tool = save_custom_tool(tool_object("shout", description="Shout a word."), actor=SYSTEM)
    make_group("own", tool)
    return tool


@pytest.fixture
def shouting(shout):
    return make_agent_client("shouter", mode="deferred").open()


def rejected(answer, *statuses):
    """Check the shape of an error: a code, a sentence, no internals. Return it."""
    assert answer.status in statuses, answer.bytes
    error = answer["error"]
    assert error["code"]
    assert error["message"].endswith((".", "…"))
    assert "Traceback" not in answer.bytes.decode()
    return error


def in_threads(*functions):
    """Run functions concurrently, each on its own database connection."""
    start = threading.Barrier(len(functions))

    def run(function):
        try:
            start.wait(scaled(30))
            return function()
        finally:
            connection.close()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


# --- 31: patterns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=x)", "Look-ahead"),
        (r"(a)\1", "Back-references"),
        ("x{1000}{1000}", "repetition"),
        ("a" * 10_240, "200"),
    ],
)
def test_an_unsupported_pattern_is_rejected_with_the_reason(session, pattern, reason):
    error = rejected(session.search(pattern=pattern), 400)
    assert error["code"] == "invalid_pattern"
    assert reason in error["message"]
    assert "searched" not in session.kinds


def test_a_pattern_with_catastrophic_backtracking_returns_in_time(db):
    add_tools("long", *(f"t{n}" for n in range(20)), **{f"t{n}": "a" * 10_000 for n in range(20)})
    session = make_agent_client().open()
    for pattern in ("(a+)+$", "(a|a)*b", "(.*)*x", "((a{1,9}){1,9}){1,9}b"):
        assert session.search(pattern=pattern).status in (200, 400), pattern


def test_a_pattern_with_invalid_unicode_is_rejected(session):
    for body in (b'{"pattern": "\xff\xfe"}', b'{"pattern": "\\ud800"}', b'{"pattern": "\\u0000"}'):
        rejected(session.post("/search", body), 400, 422)


# --- 32: query-language syntax in queries ---------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    ["%", "_", "'", '"', "*", "NEAR(", "AND", "OR NOT", "hello-world", "a:b", "'; DROP TABLE x;--",
     "\\", "issue AND", '"issue', "(issue", "issue*", "name:issue", "^issue", "\u202eissue", "🔧"],
)  # fmt: skip
def test_query_language_syntax_is_treated_as_text(session, query):
    answer = session.search(query)
    assert answer.status == 200, answer.bytes
    assert answer["status"] in ("success", "no_matches")
    if "issue" in query:
        assert "github__create_issue" in [tool["name"] for tool in answer["tools"]]
    else:
        assert answer["total_matches"] == 0
    assert session.search(query, strategy="bm25").status == 200


def test_a_long_query_next_to_a_name_is_not_stored(session):
    """A name takes precedence over the query, so the query's length is not checked."""
    assert session.search("x" * 500_000, name="github__get_file").status == 200
    assert max(len(event.details) for event in Event.objects.all()) < 2_000


# --- 33: arguments --------------------------------------------------------------------------------


def nested(depth):
    return b"[" * depth + b"]" * depth


BAD_ARGUMENTS = {
    "NaN": b'{"a": {"b": NaN}}',
    "infinity": b'{"a": {"b": -Infinity}}',
    "number overflow": b'{"a": {"b": 1e999}}',
    "NUL": b'{"a": {"b": "x\\u0000"}}',
    "a lone surrogate": b'{"a": {"b": "\\udfff"}}',
    "depth": b'{"a": {"b": ' + nested(100) + b"}}",
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_invalid_json_values_in_arguments_are_rejected_with_a_pointer(shouting, case):
    body = b'{"tool_name": "shout", "arguments": ' + BAD_ARGUMENTS[case] + b"}"
    error = rejected(shouting.post("/call", body), 422)
    assert error["details"]["pointer"].startswith("/arguments/a/b")
    assert not Call.objects.exists()


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments_sent_as_a_json_string_are_checked_too(shouting, case):
    answer = shouting.post(
        "/call", {"tool_name": "shout", "arguments": BAD_ARGUMENTS[case].decode()}
    )
    assert answer.status == 200
    assert (answer["state"], answer["is_error"]) == ("refused", True)
    assert "/arguments/a/b" in answer["content"][0]["text"]


@pytest.mark.parametrize("tool", ["shout", "no_such_tool"])
def test_secrets_in_arguments_are_redacted_in_objects_and_json_strings(shouting, tool):
    secrets = {"password": "hunter2", "nested": [{"api_key": "hunter2"}], "word": "hey"}
    for arguments in (secrets, json.dumps(secrets)):
        shouting.post("/call", {"tool_name": tool, "arguments": arguments})
        assert "hunter2" not in Call.objects.first().arguments
        assert json.loads(Call.objects.first().arguments)["word"] == "hey"


def test_a_deeply_nested_body_is_rejected(shouting):
    for depth in (1_000, 50_000):
        body = b'{"tool_name": "shout", "arguments": {"a": ' + nested(depth) + b"}}"
        assert "deep" in rejected(shouting.post("/call", body), 422)["message"]


def test_five_megabytes_are_rejected_with_the_limit(shouting):
    body = {"tool_name": "shout", "arguments": {"a": "x" * 5_000_000}}
    error = rejected(shouting.post("/call", body), 413)
    assert "1024 KB" in error["message"]


def test_ten_thousand_keys_are_rejected_with_the_limit(shouting):
    many = {f"k{number}": 1 for number in range(10_000)}
    error = rejected(shouting.call("shout", {"a": many}), 422)
    assert "10,000 keys" in error["message"]
    assert error["details"]["pointer"] == "/arguments/a"


def test_special_property_names_are_treated_as_plain_names(shouting):
    arguments = {"__proto__": {"x": 1}, "constructor": 2, "__class__": 3, "": 4, "ключ": "🔧"}
    answer = shouting.call("shout", arguments)
    assert answer["structured_content"] == arguments
    assert Call.objects.get().arguments == canonical(arguments)


def test_a_number_with_too_many_digits_is_rejected(shouting):
    for digits in (101, 5_000):
        number = b"9" * digits
        body = b'{"tool_name": "shout", "arguments": {"a": ' + number + b"}}"
        rejected(shouting.post("/call", body), 400, 422)


# --- 34: loads ------------------------------------------------------------------------------------


def test_10_001_names_are_rejected_with_the_limit(session):
    names = [f"n{number}" for number in range(10_001)]
    for path, body in (
        ("/load", {"group_id": "mcp:github", "tool_names": names}),
        ("/preload", {"tool_names": names}),
    ):
        error = rejected(session.post(path, body), 422)
        assert "10,001" in error["message"]
        assert "10,000" in error["message"]
    assert session.state == {}


@pytest.mark.timeout(30)  # a separate lookup of each name took two minutes
def test_ten_thousand_unknown_names_are_cheap(db):
    """A load holds a write lock, so a slow one would block other writers."""
    add_tools("many", *(f"tool_{number}" for number in range(500)))
    client = make_agent_client("guesser", mode="deferred")
    session = client.open()
    names = [f"tool_x{number}" for number in range(10_000)]
    assert len(session.load("mcp:many", *names)["unknown"]) == 10_000
    assert len(session.post("/preload", {"tool_names": names})["unknown"]) == 10_000
    assert len(client.open(preload=names[:1000]).opened["unknown"]) == 1000
    groups = {f"mcp:many{number}": None for number in range(1_000)}
    resumed = client.open(resume={"strategy": "dispatch", "expanded_groups": groups})
    assert len(resumed.opened["unknown"]) == 1_000


def test_a_session_resumes_at_most_a_thousand_groups(scout):
    groups = {f"g{number}": None for number in range(1_001)}
    body = {"resume": {"strategy": "dispatch", "expanded_groups": groups}}
    error = rejected(scout.send("POST", "/sessions", body), 422)
    assert "1,000" in error["message"]
    assert not AgentSession.objects.exists()


def test_the_same_tool_a_thousand_times_is_loaded_once(session):
    answer = session.load("mcp:github", *["get_file"] * 500, *["github__get_file"] * 500)
    assert answer["tool_names"].count("github__get_file") == len(answer["tool_names"])
    once = session.load("mcp:github", "get_file")
    again = session.post("/preload", {"tool_names": ["get_file"] * 1000})
    assert once["tool_names"] == again["preloaded"] == ["github__get_file"]
    assert session.state == {"mcp:github": ["github__get_file"]}
    assert Expansion.objects.count() == 1


def test_hidden_and_pending_tools_are_not_loaded_and_the_error_gives_the_reason(db):
    add_tools("safe", "secret", "other")
    Server.objects.update(trust="strict")
    server = Server.objects.get()
    ingest_tools(server, *(tool_object(name) for name in ("secret", "other", "late")))
    hold(Tool.objects.get(name="secret"), "it returns wrong results", actor=SYSTEM)
    session = make_agent_client("careful", mode="deferred").open()
    hidden = session.load("mcp:safe", "secret")
    assert (hidden["expanded"], hidden["error"]["code"]) == (False, "held")
    assert "hidden by an admin: it returns wrong results." in hidden["error"]["message"]
    pending = session.load("mcp:safe", "late")
    assert (pending["expanded"], pending["error"]["code"]) == (False, "waiting")
    assert session.state == {}
    partial = session.load("mcp:safe", "secret", "other")
    assert (partial["tool_names"], partial["unknown"]) == (["safe__other"], ["secret"])


def test_names_are_compared_exactly(session):
    for name in ("GET_FILE", "github__Get_File", "get_file ", "ｇet_file", "get_file\u200b"):
        answer = session.load("mcp:github", name)
        assert answer["expanded"] is False, name
        assert answer["unknown"] == [name]
    assert rejected(session.get("/tools/GITHUB__GET_FILE"), 404)["code"] == "unknown_tool"
    assert session.load("MCP:GITHUB")["error"]["code"] == "unknown_group"


# --- 35: calls without a load, and sessions that end during a call --------------------------------


@pytest.fixture
def slow(transactional_db):
    """An agent with a concurrency limit of one, and a slow server."""
    server = make_program("raw_calls", slug="raw")
    ingest_tools(server, *(tool_object(name) for name in ("say", "later")))
    cache.clear()
    return make_agent_client("patient", mode="deferred", calls_in_flight=1)


def with_calls(scenario):
    async def run():
        async with asyncio.timeout(scaled(100)), upstream_calls.call_pool():
            return await scenario()

    return asyncio.run(run())


async def in_thread(function, *args, **more):
    """Run a function in its own thread, as a request would."""

    def run():
        try:
            return function(*args, **more)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


async def start_call(session, seconds, **more):
    """Start a call and return when it has been sent to the server."""
    call = asyncio.create_task(in_thread(session.call, "raw__later", {"seconds": seconds}, **more))
    sent = Call.objects.filter(state="sent")
    await in_thread(wait_for, sent.exists, what="a call that is sent")
    return call


def test_calling_a_tool_that_was_not_loaded_is_recorded_as_an_implicit_load(slow):
    async def scenario():
        session = await in_thread(slow.open)
        content = {"content": [{"type": "text", "text": "hello"}], "resultType": "complete"}
        return await in_thread(session.call, "raw__say", {"result": json.dumps(content)}), session

    answer, session = with_calls(scenario)
    assert (answer["state"], answer["implicit_load"]) == ("succeeded", True), answer.bytes
    assert answer["content"][0]["text"] == "hello"
    assert session.state == {}
    assert session.kinds == ["opened", "implicit_load", "called"]


@pytest.mark.parametrize("isolation", ["shared", "per_session"])
def test_a_call_succeeds_although_its_session_is_closed_during_it(slow, isolation):
    Server.objects.update(isolation=isolation)

    async def scenario():
        session = await in_thread(slow.open)
        call = await start_call(session, 3)
        closed = await in_thread(session.post, "/close")
        assert not call.done()
        return session, closed, await call

    session, closed, answer = with_calls(scenario)
    assert closed["state"] == "closed"
    assert (answer.status, answer["state"]) == (200, "succeeded"), answer.bytes
    assert Call.objects.get().state == "succeeded"
    assert session.kinds[-1] == "called"
    assert session.get("")["state"] == "closed"


def test_a_call_succeeds_although_its_session_expires_during_it(slow):
    async def scenario():
        session = await in_thread(slow.open)
        call = await start_call(session, 3)
        await in_thread(make_idle, session, days=2)
        assert await in_thread(lifecycle.expire_idle) == 1
        return session, await call

    session, answer = with_calls(scenario)
    assert answer["state"] == "succeeded"
    assert session.get("")["state"] == "expired"
    assert rejected(session.call("raw__say"), 409)["code"] == "session_expired"


def make_idle(session, **duration):
    used = timezone.now() - timedelta(**duration)
    AgentSession.objects.filter(session_id=session.id).update(last_used_at=used)


def test_calls_above_the_concurrency_limit_get_a_retry_after(slow):
    async def scenario():
        session = await in_thread(slow.open)
        call = await start_call(session, 3)
        other = await in_thread(slow.open)
        second = await in_thread(other.call, "raw__later", {"seconds": 0})
        assert not call.done()
        await call
        return second, await in_thread(other.call, "raw__later", {"seconds": 0})

    second, third = with_calls(scenario)
    assert rejected(second, 429)["code"] == "too_many_calls"
    assert int(second.headers["Retry-After"]) >= 1
    assert third["state"] == "succeeded"
    assert Call.objects.count() == 2


# --- 36: idempotency keys -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["", " ", "x" * 256, "x" * 10_240, "a\r\nSet-Cookie: b=c", "a\nb", "a\tb", "\x7f", "ключ", "é"],
)
def test_an_invalid_idempotency_key_is_rejected_and_nothing_runs(shouting, key):
    answer = shouting.call("shout", {"a": 1}, Idempotency_Key=key)
    assert "1 to 255" in rejected(answer, 422)["message"]
    assert "Set-Cookie" not in answer.headers
    assert not Call.objects.exists()


def test_idempotency_keys_are_scoped_to_the_agent(shout):
    first, second = (make_agent_client(name, mode="deferred").open() for name in ("one", "two"))
    mine = first.call("shout", {"a": "mine"}, Idempotency_Key="same")
    theirs = second.call("shout", {"a": "theirs"}, Idempotency_Key="same")
    assert mine["structured_content"] == {"a": "mine"}
    assert theirs["structured_content"] == {"a": "theirs"}
    assert Call.objects.count() == 2


def test_an_idempotency_key_of_another_request_is_a_conflict(shouting):
    assert shouting.call("shout", {"a": 1}, Idempotency_Key="one").status == 200
    for answer in (
        shouting.call("shout", {"a": 2}, Idempotency_Key="one"),
        shouting.call("nothing", {"a": 1}, Idempotency_Key="one"),
        shouting.client.open().call("shout", {"a": 1}, Idempotency_Key="one"),
    ):
        assert rejected(answer, 409)["code"] == "idempotency_conflict"
    assert Call.objects.count() == 1


# --- 39: pagination and ids -----------------------------------------------------------------------

LISTS = ("/sessions", "/sessions/{id}/events")


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("limit", ["-1", "0", "201", "1000000000", "1e3", "Infinity", "1 OR 1=1"])
def test_an_invalid_limit_is_rejected_with_its_bound(session, path, limit):
    answer = session.client.send("GET", f"{path.format(id=session.id)}?limit={limit}")
    message = rejected(answer, 422)["message"]
    assert "query.limit" in message
    if limit.lstrip("-").isdecimal():
        bound = "greater than or equal to 1." if int(limit) < 1 else "less than or equal to 200."
        assert message.endswith(bound)


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize(
    "cursor", ["1 OR 1=1", "-1", "Infinity", "%00", "9" * 19, "9" * 5000, "1.0", "%F0%9F%94%A7"]
)
def test_an_invalid_cursor_is_rejected(session, path, cursor):
    answer = session.client.send("GET", f"{path.format(id=session.id)}?cursor={cursor}")
    assert "cursor" in rejected(answer, 422)["message"]


def test_session_ids_are_compared_exactly(session):
    ids = ["1 OR 1=1", session.id.upper(), f"{session.id}%00", f"{session.id} ", "Infinity", "%",
           "..", "ses_" + "f" * 10_000, "%C3%A9", "%FF", f"{session.id}'--"]  # fmt: skip
    for id_ in ids:
        error = rejected(session.client.send("GET", f"/sessions/{id_}"), 404)
        assert error["code"] == "unknown_session", id_


# --- Bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/sessions", "/load", "/preload", "/search", "/call"])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"null", b"5", b'"text"', b"{", b"{}{}", b"\xff\xfe\xff", b'{"a": "\xc3\x28"}',
     b'{"a": 1}', b'{"__proto__": {}}', b"nan", nested(2_000)],
)  # fmt: skip
def test_a_malformed_body_is_rejected(session, path, body):
    at = path if path == "/sessions" else f"/sessions/{session.id}{path}"
    rejected(session.client.send("POST", at, body), 400, 422)


def test_duplicate_keys_are_rejected(shouting):
    body = b'{"tool_name": "shout", "arguments": {"a": 1, "b": {"c": 1, "c": 2}}}'
    assert "Duplicate key 'c'" in rejected(shouting.post("/call", body), 422)["message"]
    body = b'{"tool_name": "other", "tool_name": "shout"}'
    assert "Duplicate key 'tool_name'" in rejected(shouting.post("/call", body), 422)["message"]
    assert not Call.objects.exists()


def test_a_byte_order_mark_is_accepted(shouting):
    body = b'\xef\xbb\xbf{"tool_name": "shout", "arguments": {"a": 1}}'
    assert shouting.post("/call", body)["structured_content"] == {"a": 1}


def test_metadata_is_stored_unchanged_or_rejected(scout):
    metadata = {"task": "🔧 ключ", "n": [1, 2.5, None, True], "": {"__proto__": 1}}
    assert scout.open(metadata=metadata).get("")["metadata"] == metadata
    big = scout.send("POST", "/sessions", {"metadata": {"a": "x" * settings.MAX_BODY_BYTES}})
    rejected(big, 413)
    for bad in (b'{"a": NaN}', b'{"a": "\\u0000"}', b'{"a": "\\ud800"}', b'{"\\ud800": 1}'):
        error = rejected(scout.send("POST", "/sessions", b'{"metadata": ' + bad + b"}"), 422)
        assert "pointer" in error.get("details", {}) or "problems" in error["details"]
    assert AgentSession.objects.count() == 1


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        ("/sessions", {"groups": ["mcp:github\0"]}, "/groups/0"),
        ("/sessions", {"servers": ["\0"]}, "/servers/0"),
        ("/sessions", {"model": "\0"}, "/model"),
        ("/sessions", {"header": "\0"}, "/header"),
        ("/sessions", {"preload": ["a", "\0"]}, "/preload/1"),
        ("/load", {"group_id": "mcp:github\0"}, "/group_id"),
        ("/load", {"group_id": "mcp:github", "tool_names": ["get_file\0"]}, "/tool_names/0"),
        ("/preload", {"tool_names": ["\0"]}, "/tool_names/0"),
        ("/search", {"query": "issue\0"}, "/query"),
        ("/search", {"query": "issue", "server": "\0"}, "/server"),
        ("/call", {"tool_name": "get_file\0"}, "/tool_name"),
    ],
)
def test_a_text_with_nul_is_rejected_with_a_pointer(session, path, body, pointer):
    at = path if path == "/sessions" else f"/sessions/{session.id}{path}"
    error = rejected(session.client.send("POST", at, body), 422)
    assert error["details"]["pointer"] == pointer
    assert "NUL" in error["message"]


def test_unusual_group_names_to_resume_are_unknown_or_rejected(scout):
    for name in ("mcp:нет", "\u202e", "g" * 5_000, "a/b", ""):
        state = {"strategy": "dispatch", "expanded_groups": {name: None}}
        assert scout.open(resume=state).opened["unknown"] == [name]
    for name in (b"\\u0000", b"\\ud800"):
        groups = b'{"strategy": "dispatch", "expanded_groups": {"' + name + b'": null}}'
        rejected(scout.send("POST", "/sessions", b'{"resume": ' + groups + b"}"), 422)


def test_names_in_any_script_are_handled(session):
    for name in ("ключ", "🔧" * 100, "\u202egithub", "a b", "<script>", "{{7*7}}", "x" * 500):
        answer = session.call(name)
        assert answer["error"]["code"] == "unknown_tool", name
        assert session.load(name)["error"]["code"] == "unknown_group"
        assert session.search(name=name)["total_matches"] == 0


def test_long_headers_are_handled(session):
    for header in ("If_None_Match", "Accept", "User_Agent", "X_Anything"):
        assert session.get("/catalog", **{header: "x" * 100_000}).status == 200
    assert session.call("get_file", Idempotency_Key="x" * 100_000).status == 422


# --- Limits ---------------------------------------------------------------------------------------


def test_searches_above_the_rate_limit_get_a_retry_after(scout):
    scout.agent.searches_per_minute = 2
    scout.agent.save()
    session = scout.open()
    assert [session.search("issue").status for _ in range(2)] == [200, 200]
    answer = session.search("issue")
    assert rejected(answer, 429)["code"] == "rate_limited"
    assert 1 <= int(answer.headers["Retry-After"]) <= 120
    # The limit is shared by the agent's sessions; other requests do not count.
    assert scout.open().search("issue").status == 429
    assert session.load("mcp:github").status == 200


def test_calls_above_the_rate_limit_get_a_retry_after(shout):
    client = make_agent_client("hasty", mode="deferred", calls_per_minute=2)
    session = client.open()
    first = session.call("shout", {"a": 1}, Idempotency_Key="first")
    assert session.call("nothing").status == 200
    answer = session.call("shout", {"a": 1})
    assert rejected(answer, 429)["code"] == "rate_limited"
    assert 1 <= int(answer.headers["Retry-After"]) <= 120
    assert Call.objects.count() == 2
    # A replayed response is not counted, and another agent has its own limit.
    assert session.call("shout", {"a": 1}, Idempotency_Key="first").bytes == first.bytes
    assert make_agent_client("calm").open().call("shout").status == 200


def test_at_the_session_limit_the_longest_idle_session_expires(scout):
    scout.agent.max_sessions = 2
    scout.agent.save()
    first, second = scout.open(), scout.open()
    answer = scout.send("POST", "/sessions", {})
    assert rejected(answer, 429)["code"] == "too_many_sessions"
    assert int(answer.headers["Retry-After"]) >= 1
    assert rejected(first.post("/fork"), 429)["code"] == "too_many_sessions"

    make_idle(first, minutes=29)
    assert scout.send("POST", "/sessions", {}).status == 429
    make_idle(first, minutes=31)
    make_idle(second, minutes=45)
    scout.open()
    assert [session.get("")["state"] for session in (first, second)] == ["open", "expired"]
    assert second.kinds[-1] == "expired"


def test_a_fork_does_not_expire_its_parent(scout):
    scout.agent.max_sessions = 2
    scout.agent.save()
    parent, other = scout.open(), scout.open()
    make_idle(parent, hours=2)
    make_idle(other, hours=1)
    assert parent.post("/fork").status == 201
    assert [session.get("")["state"] for session in (parent, other)] == ["open", "expired"]


@pytest.mark.django_db(transaction=True)
def test_concurrent_opens_do_not_exceed_the_session_limit(scout):
    scout.agent.max_sessions = 3
    scout.agent.save()
    scout.open(), scout.open()
    answers = in_threads(*[lambda: scout.send("POST", "/sessions", {})] * 4)
    assert sorted(answer.status for answer in answers) == [201, 429, 429, 429]
    assert AgentSession.objects.filter(state="open").count() == 3


# --- Ended sessions -------------------------------------------------------------------------------


def use(session):
    return {
        "load": session.load("mcp:github"),
        "preload": session.post("/preload", {"tool_names": ["get_file"]}),
        "search": session.search("issue"),
        "details": session.get("/tools/github__get_file"),
        "call": session.call("github__get_file", {"what": "x"}),
        "fork": session.post("/fork"),
    }


@pytest.mark.parametrize("how", ["closed", "expired", "idle"])
def test_an_ended_session_rejects_use_with_a_hint_to_resume(session, how):
    session.load("mcp:github", "get_file")
    before = session.state
    if how == "closed":
        session.post("/close")
    else:
        make_idle(session, hours=25)
    if how == "expired":
        assert lifecycle.expire_idle() == 1
    state = "closed" if how == "closed" else "expired"
    for name, answer in use(session).items():
        error = rejected(answer, 409)
        assert error["code"] == f"session_{state}", name
        assert "/state" in error["hint"]
        assert "resume" in error["hint"]
    # Reading is allowed and does not reopen the session.
    assert session.get("")["state"] == state
    assert session.get("/catalog").status == 200
    assert session.get("/stats").status == session.get("/events").status == 200
    assert session.load("mcp:github").status == 409
    assert not Call.objects.exists()
    # Following the hint works.
    resumed = session.client.open(resume=session.get("/state").json)
    assert resumed.state == before == {"mcp:github": ["github__get_file"]}


def test_closing_an_ended_session_changes_nothing(session):
    first = session.post("/close")
    assert first["state"] == "closed"
    assert session.post("/close").bytes == first.bytes
    assert session.kinds.count("closed") == 1


@pytest.mark.django_db(transaction=True)
def test_a_load_concurrent_with_a_close_is_complete_or_rejected(scout):
    for _ in range(5):
        session = scout.open()
        loads = [lambda: session.load("mcp:github"), lambda: session.load("mcp:slack")]  # noqa: B023
        closed, *loaded = in_threads(lambda: session.post("/close"), *loads)  # noqa: B023
        assert closed["state"] == "closed"
        assert {answer.status for answer in loaded} <= {200, 409}
        # Nothing is loaded after the close, and every load has an event.
        kinds = session.kinds
        assert kinds[-1] == "closed"
        expected = sum(answer.status == 200 for answer in loaded)
        assert kinds.count("loaded") == len(session.state) == expected
