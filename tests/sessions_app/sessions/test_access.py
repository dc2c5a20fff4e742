"""What an agent may not see is as good as not there, through every route of the API.

Each test asks everything twice: where the hidden group exists, and where it does not. Whatever
is asked, by whatever name, the two answers are the same bytes, but for ids and times. A route
that is added has to be added to REQUESTS before this passes.
"""

import json
import re
from itertools import cycle
from urllib.parse import quote

import pytest
from django.db import transaction

from catalog import cache
from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.models import Group, Tool
from catalog.tools.actions import hold, save_custom_tool
from sessions_app.agents import rate_limits
from sessions_app.models import Agent, AgentGroup
from tests.support.agent_client import AgentClient, add_tools, make_agent_client, regroup
from tests.support.factories import fold, make_server, tool_object
from toolcrib.api import api

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
FORMATS = ("text", "json", "anthropic", "openai", "openai-responses", "gemini", "mcp")
CANARY = "quagga"
SLUG = "quaggaslug"
GROUP = "mcp:vault-quagga"
TOOL = "quaggaslug__quaggatool"
# Names of hidden things, and of what is nearly one; each is also asked for where none is.
NAMES = [TOOL, "quaggatool", "quaggaslug__quaggatol", SLUG, GROUP, "search_code"]
NAMES += ["create_issues", "quagga_custom", "quagga:own", "quaggaheld"]
WORDS = ["quaggatext", "quaggaparam", "Quaggadisplay", "create issue", "*"]
PATTERNS = [".*", "", "^quagga", "issue|vault"]
SCHEMA = {
    "type": "object",
    "properties": {"quaggaparam": {"type": "string", "description": "A quaggaparam issue."}},
    "required": ["quaggaparam"],
}


def operations():
    """Yield every operation of the document with its path below /api/v1 and who may use it."""
    for path, methods in api.get_openapi_schema()["paths"].items():
        for method, operation in methods.items():
            (door,) = (name for doors in operation["security"] for name in doors)
            yield method.upper(), path.removeprefix("/api/v1"), door


AGENT_ROUTES = {f"{method} {path}" for method, path, door in operations() if door == "AgentAuth"}


def hide_a_vault():
    """A group that is made to be noticed: first in order, near in name, full of words."""
    server = make_server(slug=SLUG, name="Quagganame", description="Quaggaserver.")
    names = ("quaggatool", "search_code", "create_issues", "quaggaheld")
    fold(
        server,
        *(
            tool_object(
                name,
                title=f"Quaggatitle {name}",
                description=f"Create an issue in the quaggatext with {name}.",
                inputSchema=SCHEMA,
            )
            for name in names
        ),
    )
    Group.objects.filter(follows=server).update(
        group_id=GROUP,
        display_name="Quaggadisplay",
        description="Quaggadescription of issues.",
        position=0,
    )
    hold(Tool.objects.get(public_name="quaggaslug__quaggaheld"), "quaggareason", actor=SYSTEM)
    regroup("quagga:own", custom("quagga_custom"))


def custom(name):
    return save_custom_tool(tool_object(name, description=f"Shout {name}."), actor=SYSTEM)


def build(hidden):
    """The same installation with the hidden groups or without them."""
    cache.clear()
    rate_limits.clear()
    if hidden:
        hide_a_vault()
    add_tools(
        "github", "create_issue", "list_issues", "search_code",
        create_issue="Create an issue in a repository.",
    )  # fmt: skip
    add_tools("slack", "post_message")
    regroup("own", custom("shout"))


MANY = {"calls_per_minute": 10_000, "searches_per_minute": 10_000, "max_sessions": 10_000}
OPEN_GROUPS = ("mcp:github", "own")


def agent(name, *groups):
    held = [group for group in groups if Group.objects.filter(group_id=group).exists()]
    client = make_agent_client(name, *held, mode="deferred", **MANY)
    Agent.objects.filter(pk=client.agent.pk).update(all_groups=False)
    client.agent.refresh_from_db()
    return client


def viewer(kind):
    """An agent with a session, and whether its other sessions may see no more than this one."""
    everything = (GROUP, "quagga:own", *OPEN_GROUPS)
    match kind:
        case "another group":
            client, wish = agent("viewer", *OPEN_GROUPS), {}
        case "no group":
            client, wish = AgentClient(Agent.objects.create(name="viewer", **MANY)), {}
        case "groups":
            client, wish = agent("viewer", *everything), {"groups": list(OPEN_GROUPS)}
        case "servers":
            client, wish = agent("viewer", GROUP, *OPEN_GROUPS), {"servers": ["github"]}
        case "without_mcp":
            client, wish = agent("viewer", GROUP, *OPEN_GROUPS), {"without_mcp": True}
    return client.open(**wish), not wish


# --- Every request ------------------------------------------------------------------------------


def posts(route, *bodies):
    return {f"POST {route}": [("", body, {}) for body in bodies]}


def gets(route, *endings, **headers):
    return {f"GET {route}": [(ending, None, headers) for ending in endings]}


def requests(digests):
    """What is asked of each route: what follows its path, the body, the headers.

    Openings see what the agent may, so they are asked of agents that have nothing to narrow.
    """
    session = "/sessions/{session_id}"
    names = [*NAMES, *digests]
    chosen = [{"name": name} for name in names]
    return {
        **posts(
            "/sessions",
            *({}, {"mode": "full"}, {"mode": "auto"}, {"strategy": "inject"}),
            *({"groups": [name]} for name in names),
            *({"servers": [name]} for name in names),
            *({"mode": mode, "preload": names} for mode in ("deferred", "full")),
            {"resume": {"strategy": "dispatch", "expanded_groups": {GROUP: None, "own": names}}},
        ),
        **gets("/sessions", "", "?limit=1", f"?cursor={CANARY}", f"?state={CANARY}"),
        **gets(session, ""),
        **gets(
            f"{session}/catalog", *(f"?format={format_}" for format_ in FORMATS), "?format=quagga"
        ),
        **gets(f"{session}/tools", *(f"?format={format_}" for format_ in FORMATS)),
        f"GET {session}/tools/{{name}}": [
            (f"{name}{detail}", None, {})
            for name, detail in zip(names, cycle(["", "?detail=name", "?detail=summary"]))
        ],
        **gets("/catalog", *(f"?format={format_}" for format_ in FORMATS)),
        **posts(
            f"{session}/load",
            *({"group_id": name} for name in names),
            *({"group_id": "own", "tool_names": [name]} for name in names),
            *({"group_id": GROUP, "tool_names": [name]} for name in names),
            {"group_id": "mcp:github", "tool_names": [*names, "create_issue"]},
        ),
        **posts(f"{session}/preload", {"tool_names": names}, {"tool_names": []}),
        **posts(
            f"{session}/search",
            *chosen,
            *({"name": name, "load": False, "detail": "full"} for name in NAMES[:2]),
            *({"query": word} for word in [*WORDS, ""]),
            *({"query": word, "strategy": "regex", "detail": "full"} for word in WORDS),
            *({"query": "issue", "limit": limit} for limit in (-1, 50)),
            *({"query": "issue", "strategy": how} for how in ("bm25", "hybrid", "embedding")),
            *({"pattern": pattern, "detail": "full"} for pattern in PATTERNS),
            *({"query": "issue", "server": name} for name in names),
            *({"pattern": ".*", "server": name, "load": True} for name in (SLUG, "github")),
        ),
        f"POST {session}/call": [
            *(("", {"tool_name": name, "arguments": {"quaggaparam": 1}}, {}) for name in names),
            *(("", {"tool_name": name, "arguments": SLUG}, {}) for name in (TOOL, "quaggaheld")),
            # The key and the body of a call that somebody else made.
            ("", {"tool_name": TOOL, "arguments": {"wrong": 1}}, {"Idempotency_Key": "taken"}),
            ("", {"tool_name": "shout", "arguments": {"word": 1}}, {"Idempotency_Key": "taken"}),
        ],
        **gets(f"{session}/state", ""),
        **gets(f"{session}/stats", ""),
        **posts(f"{session}/fork", None),
        **gets(f"{session}/events", "", "?limit=3", f"?cursor={CANARY}"),
        **posts(f"{session}/close", None),
    }


def test_every_route_an_agent_may_use_is_asked_here():
    doors = {door for _, _, door in operations()}
    assert doors == {"AgentAuth", "KeyAuth"}
    assert requests([]).keys() == AGENT_ROUTES


OPENINGS = ("POST /sessions", "GET /catalog", "GET /sessions")


def ask_everything(session, digests, *, openings):
    """Send all of it, in one order; yield what was asked, and the answer."""
    for route, sent in requests(digests).items():
        if route in OPENINGS and not openings:
            continue
        method, _, path = route.partition(" ")
        path = path.replace("{session_id}", session.id).replace("/{name}", "/")
        for ending, body, headers in sent:
            yield (
                f"{route} {ending} {body} {headers}",
                session.client.send(method, path + ending, body, **headers),
            )
        for other in METHODS:
            if f"{other} {route.partition(' ')[2]}" not in AGENT_ROUTES:
                yield f"{other} {path}", session.client.send(other, f"{path}{CANARY}", {})


# --- The same bytes -----------------------------------------------------------------------------

NEVER_THE_SAME = [
    (re.compile(r"\b(ses|call)_[0-9a-f]+"), r"\1_…"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)"), "then"),
    (re.compile(r'("duration_ms"|"revision"|"id"|"next_cursor"): ?("?)\d+\2'), r"\1:0"),
]


def same(answer):
    """An answer without what differs whoever asks: ids, times, and the catalog's revision."""
    text = answer.bytes.decode()
    for pattern, put in NEVER_THE_SAME:
        text = pattern.sub(put, text)
    mine = {"X-Request-Id", "Content-Length", "ETag"}
    headers = {name: value for name, value in answer.headers.items() if name not in mine}
    return answer.status, headers, text


def answers_of(kind, digests, *, hidden):
    with transaction.atomic():
        build(hidden)
        if hidden:
            keeper = agent("keeper", GROUP, "own").open()
            keeper.load(GROUP)
            given = keeper.call(TOOL, {"wrong": 1}, Idempotency_Key="taken")
            assert "quaggaparam" in given.bytes.decode()
            digests.append(Tool.objects.get(public_name=TOOL).approved.sha256)
        session, alone = viewer(kind)
        answers = list(ask_everything(session, digests, openings=alone))
        transaction.set_rollback(True)
    cache.clear()
    return [("opened", session.opened["stats"]), *((asked, same(got)) for asked, got in answers)]


VIEWERS = ["another group", "no group", "groups", "servers", "without_mcp"]


@pytest.mark.parametrize("kind", VIEWERS)
def test_every_answer_is_the_same_whether_a_hidden_group_exists_or_not(db, kind):
    digests = []
    hidden = answers_of(kind, digests, hidden=True)
    absent = answers_of(kind, digests, hidden=False)
    assert len(hidden) == len(absent) > 100
    for (asked, there), (_, not_there) in zip(hidden, absent, strict=True):
        assert there == not_there, asked
    for asked, got in hidden:
        # Only the timeline repeats what was asked for before.
        if CANARY not in asked.lower() and "/events" not in asked:
            assert CANARY not in str(got).lower(), asked


def test_the_hidden_group_is_there_for_who_may_see_it(db):
    """So that the test above can fail."""
    build(hidden=True)
    session = agent("keeper", GROUP, "quagga:own", *OPEN_GROUPS).open()
    assert CANARY in session.get("/catalog?format=text").bytes.decode()
    assert session.search(pattern="quagga")["total_matches"] > 3
    assert session.load(GROUP)["expanded"] is True
    assert "quaggareason" in session.call("quaggaheld").bytes.decode()


# --- A group that is taken away -----------------------------------------------------------------

# What was given when the session opened, and what it did since, is the session's own.
REPEATED = ("", "/catalog", "/tools", "/state", "/events", "/fork", "/close")


@pytest.fixture
def dropped(db):
    """A session that had loaded the vault when its agent lost the group."""
    build(hidden=True)
    session = agent("viewer", GROUP, *OPEN_GROUPS).open()
    assert session.load(GROUP)["expanded"]
    before = {what: session.get(what).bytes for what in ("/catalog?format=text", "/tools")}
    AgentGroup.objects.filter(agent=session.client.agent, group__group_id=GROUP).delete()
    return session, before


def test_a_group_taken_away_is_gone_from_the_next_request_on(dropped):
    session, before = dropped
    asked = 0
    for request, answer in ask_everything(session, [], openings=True):
        route = request.partition("{session_id}")[2].partition(" ")[0]
        if request.startswith("GET /sessions ") or (
            "{session_id}" in request and route in REPEATED
        ):
            continue
        if CANARY in request:
            # Named, so it is echoed; what stands behind the name is not told.
            told = answer.bytes.decode().lower()
            assert not any(word in told for word in ("quaggatext", "quaggatitle", "quaggareason"))
            assert "quaggadescription" not in told
            assert f'"expanded":true,"group_id":"{GROUP}"' not in told, request
            asked += 1
        else:
            assert CANARY not in answer.bytes.decode().lower(), request
    assert asked > 50
    stats = session.get("/stats").json
    assert stats["total_registered"] == 4
    assert not [name for name in stats["tool_names"] if CANARY in name]
    # What its model was shown is not shown otherwise afterwards, and nothing is added.
    assert {what: session.get(what).bytes for what in before} == before


def test_a_group_taken_away_and_one_that_never_was_are_refused_in_the_same_words(dropped):
    session, _ = dropped
    made_up = CANARY.replace("q", "z")
    for name in (name for name in NAMES if CANARY in name):
        for path, body in (
            ("/load", {"group_id": name}),
            ("/load", {"group_id": "own", "tool_names": [name]}),
            ("/search", {"name": name}),
            ("/call", {"tool_name": name, "arguments": {}}),
            ("/preload", {"tool_names": [name]}),
        ):
            real = session.post(path, body)
            other = session.post(path, json.loads(json.dumps(body).replace(CANARY, made_up)))
            wanted = told(other).replace(made_up, CANARY)
            assert told(real) == wanted, (path, body)


def told(answer):
    """Status and text, without the tokens of the text, which depend on the name given."""
    status, _, text = same(answer)
    return f"{status} " + re.sub(r'"tokens":\d+', "", text)


# --- Somebody else's session --------------------------------------------------------------------


def test_another_agents_session_is_as_unknown_as_one_that_never_was(db):
    build(hidden=True)
    theirs = agent("keeper", GROUP).open(metadata={"note": "quaggameta"})
    mine = agent("viewer", *OPEN_GROUPS)
    ids = (theirs.id, "ses_" + "0" * 32, f" {theirs.id}", f"{theirs.id}\0", theirs.id.upper())
    for route, sent in requests([]).items():
        if "{session_id}" not in route:
            continue
        method, _, path = route.partition(" ")
        ending, body, headers = sent[0]
        path = path.replace("{name}", "") + ending
        answers = [
            mine.send(method, path.replace("{session_id}", quote(id_)), body, **headers)
            for id_ in ids
        ]
        assert {answer.status for answer in answers} == {404}, route
        assert len({answer.bytes for answer in answers}) == 1, route
        assert answers[0]["error"]["code"] == "unknown_session"
    assert theirs.get("")["state"] == "open"
    assert theirs.state == {}


def test_an_agent_lists_its_own_sessions_only(db):
    build(hidden=True)
    agent("keeper", GROUP).open(metadata={"note": "quaggameta"})
    mine = agent("viewer", *OPEN_GROUPS)
    assert mine.send("GET", "/sessions").json == {"items": [], "next_cursor": None}
    session = mine.open()
    listed = mine.send("GET", "/sessions")["items"]
    assert [row["id"] for row in listed] == [session.id]


def test_a_renamed_group_is_not_found_by_an_id_that_another_group_has_now(db):
    """An old id in a session's catalog leads to the group it was, never to its new bearer."""
    build(hidden=True)
    session = agent("viewer", "mcp:slack").open()
    slack, vault = (Group.objects.get(group_id=name) for name in ("mcp:slack", GROUP))
    group_writes.edit(slack, group_id="mcp:chat", actor=SYSTEM)
    group_writes.edit(vault, group_id="mcp:slack", actor=SYSTEM)
    assert session.load("mcp:slack")["tool_names"] == ["slack__post_message"]
