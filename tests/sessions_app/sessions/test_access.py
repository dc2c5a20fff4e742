"""Tools out of scope cannot be detected through any route of the API.

Each test sends every request twice: with a hidden group and without it. The two responses must be
identical except for ids and times. A new route must be added to `requests` to pass.
"""

import json
import re
from base64 import urlsafe_b64decode
from itertools import cycle
from urllib.parse import quote

import pytest
from django.db import transaction

from catalog import cache
from catalog.audit import SYSTEM
from catalog.groups import actions as group_writes
from catalog.models import Group, Tool
from catalog.tools.actions import hold, save_custom_tool
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import rate_limits
from sessions_app.models import Agent
from tests.support.agent_client import AgentClient, add_tools, make_agent_client, make_group
from tests.support.factories import ingest_tools, make_server, tool_object
from toolcrib.api import api
from toolcrib.lib.pagination import CURSOR_MARK

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
FORMATS = ("text", "json", "anthropic", "openai", "openai-responses", "gemini", "mcp")
CANARY = "quagga"
SLUG = "quaggaslug"
GROUP = "mcp:vault-quagga"
TOOL = "quaggaslug__quaggatool"
# Names of hidden objects and similar names.
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
    """Yield method, path and security scheme of every operation in the OpenAPI document."""
    for path, methods in api.get_openapi_schema()["paths"].items():
        for method, operation in methods.items():
            (scheme,) = (name for schemes in operation["security"] for name in schemes)
            yield method.upper(), path.removeprefix("/api/v1"), scheme


AGENT_ROUTES = {
    f"{method} {path}" for method, path, scheme in operations() if scheme == "AgentAuth"
}


def hide_a_vault():
    """Create a group that is likely to leak: first in order, with similar names and many words."""
    server = make_server(slug=SLUG, name="Quagganame", description="Quaggaserver.")
    names = ("quaggatool", "search_code", "create_issues", "quaggaheld")
    ingest_tools(
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
    make_group("quagga:own", custom("quagga_custom"))


def custom(name):
    return save_custom_tool(tool_object(name, description=f"Shout {name}."), actor=SYSTEM)


def build(hidden):
    """Create the same catalog with or without the hidden groups."""
    cache.clear()
    rate_limits.clear()
    if hidden:
        hide_a_vault()
    add_tools(
        "github", "create_issue", "list_issues", "search_code",
        create_issue="Create an issue in a repository.",
    )  # fmt: skip
    add_tools("slack", "post_message")
    make_group("own", custom("shout"))


MANY = dict.fromkeys(
    ("calls_per_minute", "searches_per_minute", "cost_per_minute", "max_sessions"), 100_000
)
OPEN_GROUPS = ("mcp:github", "own")


def agent(name, *groups):
    existing = [group for group in groups if Group.objects.filter(group_id=group).exists()]
    client = make_agent_client(name, *existing, mode="deferred", **MANY)
    Agent.objects.filter(pk=client.agent.pk).update(all_groups=False)
    client.agent.refresh_from_db()
    return client


def viewer(kind):
    """Return a session that cannot see the hidden groups, and whether the agent cannot either."""
    everything = (GROUP, "quagga:own", *OPEN_GROUPS)
    match kind:
        case "another group":
            client, options = agent("viewer", *OPEN_GROUPS), {}
        case "no group":
            client, options = AgentClient(Agent.objects.create(name="viewer", **MANY)), {}
        case "groups":
            client, options = agent("viewer", *everything), {"groups": list(OPEN_GROUPS)}
        case "servers":
            client, options = agent("viewer", GROUP, *OPEN_GROUPS), {"servers": ["github"]}
        case "without_mcp":
            client, options = agent("viewer", GROUP, *OPEN_GROUPS), {"without_mcp": True}
    return client.open(**options), not options


# --- All requests -------------------------------------------------------------------------------


def posts(route, *bodies):
    return {f"POST {route}": [("", body, {}) for body in bodies]}


def gets(route, *endings, **headers):
    return {f"GET {route}": [(ending, None, headers) for ending in endings]}


def requests(digests):
    """Return the requests of each route: path suffix, body, headers.

    Routes without a session (OPENINGS) use the agent's full scope, so they are sent only if the
    agent itself cannot see the hidden groups.
    """
    session = "/sessions/{session_id}"
    names = [*NAMES, *digests]
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
        **gets(f"{session}/servers", "", "?limit=1", f"?cursor={CANARY[:3]}"),
        **gets(
            f"{session}/sdk",
            *(f"?lang={lang}" for lang in ("python", "typescript", CANARY)),
            *(f"?tools={quote(name)}" for name in names),
        ),
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
            *({"name": name} for name in names),
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
            # The idempotency key and body of another agent's call.
            ("", {"tool_name": TOOL, "arguments": {"wrong": 1}}, {"Idempotency_Key": "taken"}),
            ("", {"tool_name": "shout", "arguments": {"word": 1}}, {"Idempotency_Key": "taken"}),
        ],
        **gets(f"{session}/state", ""),
        **gets(f"{session}/stats", ""),
        **gets(f"{session}/sdk", "?lang=python", f"?lang={CANARY}"),
        **posts(f"{session}/fork", None),
        **gets(f"{session}/events", "", "?limit=3", f"?cursor={CANARY}"),
        **gets(f"{session}/events/stream", "", LAST_EVENT_ID=CANARY),
        "GET /calls/{call_id}": [(name, None, {}) for name in ("call_1", CANARY)],
        "POST /calls/{call_id}/result": [
            (f"{name}/result", {"content": []}, {}) for name in ("call_1", CANARY)
        ],
        **posts(f"{session}/scripts", {"code": CANARY}, {"code": "1", "input": CANARY}),
        "GET /scripts/{run_id}": [(name, None, {}) for name in ("run_1", CANARY)],
        f"DELETE {session}": [("", None, {})],  # for admins
        **posts(f"{session}/close", None),
    }


def test_every_agent_route_is_tested():
    schemes = {scheme for _, _, scheme in operations()}
    assert schemes == {"AgentAuth", "DecisionAuth", "KeyAuth"}
    assert requests([]).keys() == AGENT_ROUTES


OPENINGS = ("POST /sessions", "GET /catalog", "GET /sessions")


def send_all(session, digests, *, openings):
    """Send all requests in a fixed order; yield a description and the response of each."""
    for route, variants in requests(digests).items():
        if route in OPENINGS and not openings:
            continue
        method, _, path = route.partition(" ")
        path = (
            path.replace("{session_id}", session.id)
            .replace("/{name}", "/")
            .replace("/{call_id}/result", "/")
            .replace("/{call_id}", "/")
            .replace("/{run_id}", "/")
        )
        for ending, body, headers in variants:
            yield (
                f"{route} {ending} {body} {headers}",
                session.client.send(method, path + ending, body, **headers),
            )
        for other in METHODS:
            if f"{other} {route.partition(' ')[2]}" not in AGENT_ROUTES:
                yield f"{other} {path}", session.client.send(other, f"{path}{CANARY}", {})


# --- Identical responses ------------------------------------------------------------------------

VOLATILE = [
    (re.compile(r"\b(ses|call)_[0-9a-f]+"), r"\1_…"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)"), "then"),
    (re.compile(r'("duration_ms"|"revision"|"id"): ?("?)\d+\2'), r"\1:0"),
    (re.compile(r'"next_cursor": ?"([\w-]+)"'), lambda match: f'"next_cursor":{opened(match[1])}'),
]


def opened(cursor):
    """Return what a cursor stands for, without ids."""
    value = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()[CURSOR_MARK:]
    return "0" if value.isdecimal() else value


def normalize(answer):
    """Return status, headers and body without ids, times and the catalog's revision."""
    # What remains of a limit grows with the seconds that the test takes.
    volatile = {
        *("X-Request-Id", "Content-Length", "ETag"),
        *("Ratelimit-Reset", "Ratelimit-Remaining"),
    }
    headers = {
        name: _without_ids(value) for name, value in answer.headers.items() if name not in volatile
    }
    return answer.status, headers, _without_ids(answer.bytes.decode())


def _without_ids(text):
    for pattern, replacement in VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def answers_of(kind, digests, *, hidden):
    with transaction.atomic():
        build(hidden)
        if hidden:
            keeper = agent("keeper", GROUP, "own").open()
            keeper.load(GROUP)
            answer = keeper.call(TOOL, {"wrong": 1}, Idempotency_Key="taken")
            assert "quaggaparam" in answer.bytes.decode()
            digests.append(Tool.objects.get(public_name=TOOL).approved.sha256)
        session, openings = viewer(kind)
        answers = list(send_all(session, digests, openings=openings))
        transaction.set_rollback(True)
    cache.clear()
    return [
        ("opened", session.opened["stats"]),
        *((request, normalize(answer)) for request, answer in answers),
    ]


VIEWERS = ["another group", "no group", "groups", "servers", "without_mcp"]


@pytest.mark.parametrize("kind", VIEWERS)
def test_responses_do_not_depend_on_hidden_groups(db, kind):
    digests = []
    hidden = answers_of(kind, digests, hidden=True)
    absent = answers_of(kind, digests, hidden=False)
    assert len(hidden) == len(absent) > 100
    for (request, with_group), (_, without_group) in zip(hidden, absent, strict=True):
        assert with_group == without_group, request
    for request, answer in hidden:
        # Only the timeline repeats earlier requests.
        if CANARY not in request.lower() and "/events" not in request:
            assert CANARY not in str(answer).lower(), request


def test_an_agent_with_the_hidden_group_can_use_it(db):
    """Otherwise the test above could not fail."""
    build(hidden=True)
    session = agent("keeper", GROUP, "quagga:own", *OPEN_GROUPS).open()
    assert CANARY in session.get("/catalog?format=text").bytes.decode()
    assert session.search(pattern="quagga")["total_matches"] > 3
    assert session.load(GROUP)["expanded"] is True
    assert "quaggareason" in session.call("quaggaheld").bytes.decode()


# --- Revoked groups -----------------------------------------------------------------------------

# Routes that may repeat what the session received earlier.
REPEATED = ("", "/catalog", "/tools", "/state", "/events", "/fork", "/close")


@pytest.fixture
def dropped(db):
    """A session that loaded the hidden group before its agent lost it."""
    build(hidden=True)
    session = agent("viewer", GROUP, *OPEN_GROUPS).open()
    assert session.load(GROUP)["expanded"]
    before = {path: session.get(path).bytes for path in ("/catalog?format=text", "/tools")}
    agent_actions.set_groups(session.client.agent, OPEN_GROUPS, actor=SYSTEM)
    return session, before


def test_a_revoked_group_is_unavailable_from_the_next_request_on(dropped):
    session, before = dropped
    checked = 0
    for request, answer in send_all(session, [], openings=True):
        route = request.partition("{session_id}")[2].partition(" ")[0]
        if request.startswith("GET /sessions ") or (
            "{session_id}" in request and route in REPEATED
        ):
            continue
        if CANARY in request:
            # The requested name is echoed; the definition is not disclosed.
            text = answer.bytes.decode().lower()
            assert not any(word in text for word in ("quaggatext", "quaggatitle", "quaggareason"))
            assert "quaggadescription" not in text
            assert f'"expanded":true,"group_id":"{GROUP}"' not in text, request
            checked += 1
        else:
            assert CANARY not in answer.bytes.decode().lower(), request
    assert checked > 50
    stats = session.get("/stats").json
    assert stats["total_registered"] == 4
    assert not [name for name in stats["tool_names"] if CANARY in name]
    # The catalog and the tools array of the open session are unchanged.
    assert {path: session.get(path).bytes for path in before} == before


def test_a_revoked_group_and_an_unknown_group_give_the_same_error(dropped):
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
            expected = without_tokens(other).replace(made_up, CANARY)
            assert without_tokens(real) == expected, (path, body)


def without_tokens(answer):
    """Return status and text without the token counts, which depend on the requested name."""
    status, _, text = normalize(answer)
    return f"{status} " + re.sub(r'"tokens":\d+', "", text)


# --- Other agents' sessions ---------------------------------------------------------------------


def test_another_agents_session_and_an_unknown_session_give_the_same_error(db):
    build(hidden=True)
    theirs = agent("keeper", GROUP).open(metadata={"note": "quaggameta"})
    mine = agent("viewer", *OPEN_GROUPS)
    ids = (theirs.id, "ses_" + "0" * 32, f" {theirs.id}", f"{theirs.id}\0", theirs.id.upper())
    for route, variants in requests([]).items():
        if "{session_id}" not in route:
            continue
        method, _, path = route.partition(" ")
        ending, body, headers = variants[0]
        path = path.replace("{name}", "") + ending
        answers = [
            mine.send(method, path.replace("{session_id}", quote(id_)), body, **headers)
            for id_ in ids
        ]
        is_of_admins = method == "DELETE"
        assert {answer.status for answer in answers} == {403 if is_of_admins else 404}, route
        assert len({answer.bytes for answer in answers}) == 1, route
        code = "forbidden" if is_of_admins else "unknown_session"
        assert answers[0]["error"]["code"] == code
    assert theirs.get("")["state"] == "open"
    assert theirs.state == {}


def test_an_agent_lists_only_its_own_sessions(db):
    build(hidden=True)
    agent("keeper", GROUP).open(metadata={"note": "quaggameta"})
    mine = agent("viewer", *OPEN_GROUPS)
    assert mine.send("GET", "/sessions").json == {"items": [], "next_cursor": None}
    session = mine.open()
    rows = mine.send("GET", "/sessions")["items"]
    assert [row["id"] for row in rows] == [session.id]


def test_an_old_group_id_never_resolves_to_another_group_that_reuses_it(db):
    """An id in a session's catalog refers to the group that had it when the session opened."""
    build(hidden=True)
    session = agent("viewer", "mcp:slack").open()
    slack, vault = (Group.objects.get(group_id=name) for name in ("mcp:slack", GROUP))
    group_writes.edit(slack, group_id="mcp:chat", actor=SYSTEM)
    group_writes.edit(vault, group_id="mcp:slack", actor=SYSTEM)
    assert session.load("mcp:slack")["tool_names"] == ["slack__post_message"]
