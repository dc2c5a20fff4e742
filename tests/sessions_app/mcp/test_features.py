"""Prompts, resources and completions over MCP, of both eras, against real servers of both."""

import asyncio
import json
from typing import Any

import pytest

from catalog import cache
from catalog.models import Feature, Group, Revision, Tool
from servers.connections import calls as upstream_calls
from servers.models import Server, SyncRun
from servers.sync import runner
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import sessions as mcp_sessions
from sessions_app.models import Call, SessionRead
from sessions_app.sessions.search import MAX_DEFAULT_TOKENS
from tests.sessions_app.mcp.test_tool_calls import ACCEPT, LEGACY, META, MODERN, Door, result_of
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.agent_client import make_agent_client
from tests.support.asgi_requests import bearer_headers, make_scope
from tests.support.factories import make_program
from tests.support.waiting import scaled
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

TEXT = "crib://fixtures/test%3A%2F%2Fstatic-text"
VIEW = "ui://fixtures/ui%3A%2F%2Ffixtures%2Fview.html"
NAMED = {"prompts/get": "name", "resources/read": "uri", "tools/call": "name"}


class FeatureDoor(Door):
    capabilities: dict[str, Any] = {}

    async def request(self, method: str, **params: Any) -> Any:
        headers = {"mcp-protocol-version": self.era}
        if self.era == MODERN:
            capabilities = {"io.modelcontextprotocol/clientCapabilities": self.capabilities}
            params["_meta"] = {**META, **capabilities, **params.pop("meta", {})}
            headers["mcp-method"] = method
            if method in NAMED:
                headers["mcp-name"] = params[NAMED[method]]
        else:
            headers["mcp-session-id"] = await self.connect()
        message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        return await self.send(message, headers)

    async def result(self, method: str, **params: Any) -> Any:
        return result_of(await self.request(method, **params))

    async def error(self, method: str, **params: Any) -> Any:
        return (await self.request(method, **params)).json["error"]


def add_fixtures(*args: str) -> None:
    server = make_program("conformance", *args, slug="fixtures", trust="auto")
    assert runner.sync_now(server.pk, "manual").outcome == "ok"


@pytest.fixture(params=[MODERN, LEGACY])
def era(request):
    return request.param


@pytest.fixture
def agent(transactional_db):
    add_fixtures()
    cache.clear()
    authorization.clear()
    rate_limits.clear()
    yield make_agent_client("scout", mode="deferred")
    authorization.clear()


def run_scenario(agent: Any, era: str, scenario: Any, kind: type[Door] = FeatureDoor) -> Any:
    async def inside() -> Any:
        door = kind(agent.key, era, cached=True)
        async with (
            asyncio.timeout(scaled(60)),
            ledger_writer.run_writer(),
            upstream_calls.call_pool(),
            door.endpoint.run(),
        ):
            return await scenario(door)

    mcp_sessions.clear_caches()
    return asyncio.run(inside())


def test_prompts_and_resources_are_offered_listed_got_and_recorded(agent, era):
    async def scenario(door):
        if era == MODERN:
            declared = (await door.result("server/discover"))["capabilities"]
        else:
            hello = {"protocolVersion": LEGACY, "capabilities": {}}
            hello["clientInfo"] = {"name": "tests", "version": "1"}
            message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            declared = result_of(await door.send(message, {}))["capabilities"]
        offered = {"tools", "prompts", "resources", "completions", "extensions"}
        assert offered == declared.keys()
        assert declared["extensions"] == {"io.modelcontextprotocol/ui": {}}
        assert declared["resources"]["subscribe"] is True
        prompts = (await door.result("prompts/list"))["prompts"]
        assert prompts[0]["name"] == "fixtures__test_simple_prompt"
        resources = (await door.result("resources/list"))["resources"]
        assert [each["uri"] for each in resources] == [
            TEXT, "crib://fixtures/test%3A%2F%2Fstatic-binary", VIEW,
        ]  # fmt: skip
        templates = (await door.result("resources/templates/list"))["resourceTemplates"]
        assert templates[0]["uriTemplate"] == "crib://fixtures/test%3A%2F%2Ftemplate%2F{id}%2Fdata"

        values = {"arg1": "one", "arg2": "two"}
        name = "fixtures__test_prompt_with_arguments"
        got = await door.result("prompts/get", name=name, arguments=values)
        assert got["description"] == "Given."
        assert got["messages"][0]["content"]["text"] == (
            "Prompt with arguments: arg1='one', arg2='two'"
        )
        embedded = {"resourceUri": "test://static-text"}
        name = "test_prompt_with_embedded_resource"  # a bare name that one server has
        got = await door.result("prompts/get", name=name, arguments=embedded)
        assert got["messages"][0]["content"]["resource"]["uri"] == TEXT

        read = await door.result("resources/read", uri=TEXT)
        assert read["contents"] == [{"uri": TEXT, "mimeType": "text/plain", "text": "The content."}]
        assert (await door.result("resources/read", uri="test://static-text")) == read
        assert (await door.result("resources/read", uri=VIEW))["contents"][0]["uri"] == VIEW
        filled = templates[0]["uriTemplate"].replace("{id}", "a%20b")
        data = (await door.result("resources/read", uri=filled))["contents"][0]["text"]
        assert json.loads(data)["id"] == "a%20b"

        reference = {"type": "ref/prompt", "name": "fixtures__test_prompt_with_arguments"}
        argument = {"name": "arg1", "value": "p"}
        completed = await door.result("completion/complete", ref=reference, argument=argument)
        assert completed["completion"]["values"] == ["paris", "park", "party"]
        reference = {"type": "ref/resource", "uri": templates[0]["uriTemplate"]}
        completed = await door.result("completion/complete", ref=reference, argument=argument)
        assert completed["completion"]["values"] == ["paris", "park", "party"]

    run_scenario(agent, era, scenario)
    rows = Call.objects.order_by("pk").values_list("path", "tool_name", "state", "server_slug")
    assert [row[0] for row in rows] == ["prompt"] * 2 + ["resource"] * 4
    assert rows[0][1:] == ("fixtures__test_prompt_with_arguments", "succeeded", "fixtures")
    assert rows[2][1:] == (TEXT, "succeeded", "fixtures")
    assert SessionRead.objects.filter(server_slug="fixtures").count() == 1


def test_what_does_not_exist_is_an_error_of_the_protocol(agent, era):
    async def scenario(door):
        missing = -32602 if era == MODERN else -32002
        for uri in ("crib://fixtures/test%3A%2F%2Fnone", "crib://other/test%3A%2F%2Fstatic-text"):
            error = await door.error("resources/read", uri=uri)
            assert (error["code"], error["data"]) == (missing, {"uri": uri})
        error = await door.error("prompts/get", name="fixtures__none")
        assert error["code"] == -32602
        add = {"effect": "deny", "servers": ["fixtures"]}
        await in_database(lambda: add_rule("No fixtures", **add))
        error = await door.error("resources/read", uri=TEXT)
        assert "No fixtures" in error["message"]

    run_scenario(agent, era, scenario)


PROMPT = "fixtures__test_prompt_with_arguments"
REFERENCE = {"type": "ref/prompt", "name": PROMPT}


def test_rules_decide_completions_and_subscriptions_whose_values_reach_a_server(agent, era):
    argument = {"name": "arg1", "value": "the secret"}
    context = {"arguments": {"arg2": "paris"}}

    async def scenario(door):
        async def complete():
            return await door.request(
                "completion/complete", ref=REFERENCE, argument=argument, context=context
            )

        assert result_of(await complete())["completion"]["values"]
        for path in ("/arg1", "/arg2"):
            condition = {"path": path, "op": "exists"}
            rule = await in_database(
                lambda condition=condition: add_rule("Hold", "hold", arguments=[condition])
            )
            assert "Hold" in (await complete()).json["error"]["message"]
            await in_database(lambda rule=rule: (rule.delete(), Revision.bump()))
        await in_database(lambda: add_rule("No resources", tools=["crib://*"]))
        assert result_of(await complete())["completion"]["values"]
        if era == LEGACY:
            error = await door.error("resources/subscribe", uri=TEXT)
            assert "No resources" in error["message"]

    run_scenario(agent, era, scenario)


def test_values_that_a_server_completes_count_as_read_from_it(agent, era):
    async def scenario(door):
        await in_database(lambda: add_rule("Flow", "hold", after=["fixtures"]))
        argument = {"name": "arg1", "value": "p"}
        complete = {"ref": REFERENCE, "argument": argument}
        assert (await door.result("completion/complete", **complete))["completion"]["values"]
        assert "Flow" in (await door.error("completion/complete", **complete))["message"]
        held = result_of(await door.call("fixtures__touch", {}))
        assert "holds this call" in held["content"][0]["text"]

    run_scenario(agent, era, scenario)


def test_the_first_use_of_a_tool_is_not_that_of_a_prompt_or_resource(agent, era):
    async def scenario(door):
        await in_database(lambda: add_rule("First", "hold", first_use=True))
        assert (await door.result("resources/read", uri=TEXT))["contents"]
        held = result_of(await door.call("fixtures__touch", {}))
        assert "holds this call" in held["content"][0]["text"]

    run_scenario(agent, era, scenario)


def test_links_in_results_and_views_of_tools_are_public(agent, era):
    async def scenario(door):
        result = result_of(await door.call("fixtures__test_embedded_resource", {}))
        uri = result["content"][0]["resource"]["uri"]
        assert uri == "crib://fixtures/test%3A%2F%2Fembedded-resource"
        assert (await door.result("resources/read", uri=uri))["contents"]

    run_scenario(agent, era, scenario)


def test_a_group_of_chosen_tools_gives_nothing_but_these(agent, era):
    group = Group.objects.create(group_id="chosen", display_name="Chosen")
    group.memberships.create(tool=Group.objects.get(group_id="mcp:fixtures").tools.get(name="view"))
    chosen = make_agent_client("chosen", "chosen", mode="full")

    async def scenario(door):
        assert (await door.result("prompts/list"))["prompts"] == []
        assert (await door.result("resources/list"))["resources"] == []
        assert (await door.error("resources/read", uri=TEXT))["code"] in (-32602, -32002)
        (tool,) = (await door.result("tools/list"))["tools"]
        assert tool["_meta"]["ui"]["resourceUri"] == VIEW
        assert (await door.result("resources/read", uri=VIEW))["contents"][0]["uri"] == VIEW

    run_scenario(chosen, era, scenario)


async def open_stream(door: FeatureDoor) -> tuple[asyncio.Task[None], list[str]]:
    """Subscribe to TEXT and open the client's stream; return it and what arrives on it."""
    message, headers, method = None, {"accept": "text/event-stream"}, "GET"
    if door.era == MODERN:
        method, headers = "POST", {**ACCEPT, "mcp-protocol-version": MODERN}
        headers["mcp-method"] = "subscriptions/listen"
        wanted = {"resourceSubscriptions": [TEXT], "promptsListChanged": True}
        params = {"_meta": META, "notifications": wanted}
        message = {"jsonrpc": "2.0", "id": 9, "method": "subscriptions/listen", "params": params}
    else:
        await door.result("resources/subscribe", uri=TEXT)
        headers |= {"mcp-protocol-version": LEGACY, "mcp-session-id": door.connection}
    arrived: list[str] = []

    async def send(sent: Any) -> None:
        lines = sent.get("body", b"").decode().splitlines()
        arrived.extend(line[5:] for line in lines if line.startswith("data:"))

    data = b"" if message is None else json.dumps(message).encode()
    scope = make_scope(method, "/mcp", bearer_headers(door.key, data, headers))
    incoming = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await door.left.wait()
        return {"type": "http.disconnect"}

    return asyncio.create_task(door.endpoint(scope, receive, send)), arrived


def test_subscribers_learn_of_changed_resources_and_lists(agent, era):
    async def scenario(door):
        stream, arrived = await open_stream(door)
        while not any("notifications/resources/updated" in each for each in arrived):
            result_of(await door.call("fixtures__touch", {}))
        updated = next(json.loads(each) for each in arrived if "resources/updated" in each)
        assert updated["params"]["uri"] == TEXT
        await door.endpoint.server.compare_features()
        prompts = Feature.objects.filter(kind="prompt")

        def remove() -> None:
            prompts.filter(key="test_simple_prompt").delete()
            Revision.bump()

        await in_database(remove)
        while not any("notifications/prompts/list_changed" in each for each in arrived):
            result_of(await door.call("fixtures__touch", {}))
        door.left.set()
        await stream
        if era == LEGACY:
            await door.result("resources/unsubscribe", uri=TEXT)

    run_scenario(agent, era, scenario)


def test_search_finds_prompts_and_resources_where_the_session_has_them(agent, era):
    async def scenario(door):
        found = result_of(await door.call("search_tools", {"query": "simple prompt"}))
        body = json.loads(found["content"][0]["text"])
        assert body["features"][0] == {
            "kind": "prompt",
            "name": "fixtures__test_simple_prompt",
            "description": "The prompt test_simple_prompt.",
        }
        for means in ("prompts/get", "resources/read", "name them to the user"):
            assert means in body["features_message"]
        assert count(canonical(body)) <= MAX_DEFAULT_TOKENS

    run_scenario(agent, era, scenario)
    Group.objects.create(group_id="empty", display_name="Empty")
    chosen = make_agent_client("chosen", "empty", mode="deferred")

    async def without(door):
        found = result_of(await door.call("search_tools", {"query": "simple prompt"}))
        assert "features" not in json.loads(found["content"][0]["text"])

    run_scenario(chosen, era, without)


def test_a_tool_for_asking_clients_is_there_for_their_sessions_alone(agent, era):
    assert Tool.objects.get(name="only_asking").needs == "elicitation"

    async def find(door):
        details = {"name": "fixtures__only_asking"}
        return result_of(await door.call("get_tool_details", details))["isError"]

    assert run_scenario(agent, era, find) is True
    assert run_scenario(agent, era, find, AskingFeatureDoor) is False
    server = Server.objects.get()
    runner.sync_now(server.pk, "schedule")
    assert Tool.objects.get(name="only_asking").state == "available"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("args", [(), ("--legacy",)])
def test_tools_with_views_are_offered_and_others_that_are_not_are_named(args):
    """Tools that a server lists only to clients with a capability."""
    add_fixtures(*args)
    names = set(Tool.objects.values_list("name", flat=True))
    assert {"only_with_views", "only_asking"} <= names
    assert "only_sampling" not in names
    warnings = SyncRun.objects.get().warnings
    if not args:  # an older server would have to be asked on another connection
        assert [text for text in warnings if text.endswith("does not pass on: only_sampling.")]


class AskingFeatureDoor(FeatureDoor):
    capabilities = {"elicitation": {}}

    async def call(self, *args: Any, **fields: Any) -> Any:
        declared = {"io.modelcontextprotocol/clientCapabilities": self.capabilities}
        meta = declared if self.era == MODERN else {}
        return await super().call(*args, meta=meta, **fields)

    async def connect(self) -> str:
        if not self.connection:
            hello = {"protocolVersion": LEGACY, "capabilities": self.capabilities}
            hello["clientInfo"] = {"name": "tests", "version": "1"}
            message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            self.connection = (await self.send(message, {})).headers["mcp-session-id"]
        return self.connection


def test_a_sync_replaces_what_the_server_no_longer_lists(agent):
    assert Feature.objects.count() == 9
    Feature.objects.filter(kind="prompt").update(body='{"name":"old"}')
    row = Feature.objects.filter(kind="resource").first()
    assert row is not None
    row.pk, row.key, row.key_sha256 = None, "test://gone", "0" * 64
    row.save()
    server = row.server
    assert runner.sync_now(server.pk, "manual").outcome == "ok"
    assert Feature.objects.count() == 9
    assert not Feature.objects.filter(body='{"name":"old"}').exists()
