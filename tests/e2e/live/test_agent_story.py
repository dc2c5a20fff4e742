"""A scripted agent that uses five third-party servers, and its session timeline."""

import base64
import json
import subprocess
from collections import Counter

import pytest

from tests.e2e.live.test_real_servers import real_servers
from tests.support.agents import make_agent
from tests.support.installation import Installation

pytestmark = [
    pytest.mark.needs_npm,
    pytest.mark.needs_pyservers,
    pytest.mark.timeout(240),
]
STATS = {
    "total_registered",
    "loaded",
    "deferred",
    "deferred_mode",
    "auto_deferred",
    "threshold",
    "tool_names",
    "tokens",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """An installation with the five servers, and a folder and a repository to work on."""
    folder = tmp_path_factory.mktemp("desk").resolve()
    files, repository = folder / "files", folder / "repository"
    files.mkdir()
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    (repository / "plan.txt").write_text("Not committed yet.\n")
    config = folder / "mcp.json"
    config.write_text(json.dumps({"mcpServers": real_servers(files)}))
    with Installation(folder / "data") as toolcrib:
        done = toolcrib.command("import_servers", str(config), "--allow-stdio", "--wait", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        yield toolcrib, files, repository


class ScriptedAgent:
    """An agent that only uses tools that it found by search."""

    def __init__(self, agent):
        self.session = agent.open(model="scripted")

    def do(self, query, tool, arguments):
        """Search for a tool, load it through its group, call it and return the result."""
        response = self.session.search(query=query, limit=3)
        hit = next(match for match in response["tools"] if match["name"] == tool)
        loaded = json.loads(self.session.load(hit["group_id"], [tool]))
        (schema,) = [item for item in loaded["schemas"] if item["name"] == tool]
        unknown = arguments.keys() - schema["parameters"]["properties"].keys()
        assert not unknown, f"{tool} takes no {unknown}"
        result = self.session.call(tool, arguments)
        assert (result["state"], result["implicit_load"]) == ("succeeded", False), result
        return result


def text(result):
    return "\n".join(part["text"] for part in result["content"] if part["type"] == "text")


def test_an_agent_finds_loads_and_calls_tools_of_five_servers_as_its_timeline_shows(desk):
    toolcrib, files, repository = desk
    agent = ScriptedAgent(make_agent(toolcrib, "scripted"))
    session = agent.session
    assert (session.opened["mode"], session.opened["decided_by"]) == ("deferred", "count")
    before = session.surface()
    assert (
        text(
            agent.do(
                "convert a time between time zones",
                "time__convert_time",
                {
                    "source_timezone": "Europe/Oslo",
                    "time": "12:00",
                    "target_timezone": "Asia/Tokyo",
                },
            )
        ).count("T")
        >= 2
    )
    note = {"path": str(files / "note.txt"), "content": "Call the harbour.\n"}
    agent.do("write a file", "filesystem__write_file", note)
    assert (files / "note.txt").read_text() == "Call the harbour.\n"
    read = agent.do("read a text file", "filesystem__read_text_file", {"path": note["path"]})
    assert "Call the harbour." in text(read)
    entity = {"name": "Harbour", "entityType": "place", "observations": ["Answers on channel 12"]}
    agent.do(
        "remember entities in the knowledge graph",
        "memory__create_entities",
        {"entities": [entity]},
    )
    remembered = agent.do("search nodes of the graph", "memory__search_nodes", {"query": "Harbour"})
    assert "channel 12" in text(remembered)
    status = agent.do("git status", "git__git_status", {"repo_path": str(repository)})
    assert "plan.txt" in text(status)
    echoed = agent.do("echo a message back", "everything__echo", {"message": "over and out"})
    assert "over and out" in text(echoed)
    shaped = agent.do(
        "structured content weather",
        "everything__get-structured-content",
        {"location": "New York"},
    )
    assert shaped["structured_content"].keys() >= {"temperature", "conditions"}
    image = agent.do("tiny image", "everything__get-tiny-image", {})
    (picture,) = [part for part in image["content"] if part["type"] == "image"]
    assert picture["mimeType"] == "image/png"
    assert base64.b64decode(picture["data"]).startswith(b"\x89PNG")

    # The model makes an error, reads the schema in the response, and corrects the call.
    wrong = session.call("everything__get-sum", {"a": 2, "b": "three"})
    assert (wrong["state"], wrong["error"]["code"]) == ("refused", "invalid_arguments")
    assert '"properties"' in text(wrong)
    assert "5" in text(session.call("everything__get-sum", {"a": 2, "b": 3}))
    assert session.surface() == before

    check_story(session, session.events())


def test_a_typical_task_costs_less_than_half_of_all_schemas(desk):
    toolcrib, files, _ = desk
    (files / "typical").mkdir()
    session = make_agent(toolcrib, "typical").open()
    names = ["create_directory", "write_file", "list_directory"]
    matches = session.search_names(query="create a directory and write a file in it")
    assert f"filesystem__{names[0]}" in matches
    session.load("mcp:filesystem", names)
    path = str(files / "typical" / "new")
    for name, extra in zip(names, ({}, {"path": f"{path}/a.txt", "content": "a"}, {}), strict=True):
        result = session.call(name, {"path": path} | extra)
        assert (result["state"], result["implicit_load"]) == ("succeeded", False), result
    assert "a.txt" in text(result)
    tokens = session.get("/stats")["tokens"]
    print(f"tokens: {json.dumps(tokens)}")  # noqa: T201
    assert tokens["delivered"] == sum(tokens["by"].values())
    assert tokens["delivered"] < tokens["all_schemas"] / 2, tokens


def check_story(session, events):
    steps = [event for event in events if event["kind"] != "catalog"]
    story = [(event["kind"], event["tool_name"] or event["group_id"]) for event in steps]
    print_story(steps)
    tasks = [
        ("mcp:time", "time__convert_time"),
        ("mcp:filesystem", "filesystem__write_file"),
        ("mcp:filesystem", "filesystem__read_text_file"),
        ("mcp:memory", "memory__create_entities"),
        ("mcp:memory", "memory__search_nodes"),
        ("mcp:git", "git__git_status"),
        ("mcp:everything", "everything__echo"),
        ("mcp:everything", "everything__get-structured-content"),
        ("mcp:everything", "everything__get-tiny-image"),
    ]
    expected = [("opened", "")]
    for group, tool in tasks:
        expected += [("searched", ""), ("loaded", group), ("called", tool)]
    expected += [
        ("refused", "everything__get-sum"),
        ("implicit_load", "everything__get-sum"),
        ("called", "everything__get-sum"),
    ]
    assert story == expected
    assert events[0]["details"]["tools"] == session.get("/stats")["total_registered"]
    searches = [event["details"] for event in steps if event["kind"] == "searched"]
    assert all(tool in search["hits"] for search, (_, tool) in zip(searches, tasks, strict=True))
    assert searches[5]["query"] == "git status"
    assert all(event["call_id"] for event in steps if event["kind"] in ("called", "refused"))
    times = [event["at"] for event in events]
    assert times == sorted(times)
    check_tokens(session, steps)


def check_tokens(session, steps):
    """The ledger equals the sum of the events, and less than the cost of all schemas."""
    spent = Counter()
    for event in steps:
        spent[event["kind"]] += event["tokens"]
    stats = session.get("/stats")
    assert stats.keys() == STATS
    assert (stats["deferred_mode"], stats["auto_deferred"], stats["threshold"]) == (True, True, 15)
    assert stats["loaded"] == 9
    assert len(stats["tool_names"]) == stats["total_registered"], "every tool, loaded or not"
    assert stats["deferred"] == stats["total_registered"] - 9
    tokens = stats["tokens"]
    assert tokens.keys() == {"all_schemas", "delivered", "by", "given", "saved", "saved_percent"}
    assert tokens["by"] == {
        "catalog": spent["opened"],
        "search": spent["searched"],
        "load": spent["loaded"] + spent["refused"],  # the refusal contained the schema
        "call": spent["called"],
    }
    assert all(amount > 0 for amount in tokens["by"].values())
    assert tokens["delivered"] == sum(tokens["by"].values())
    print(f"tokens: {json.dumps(tokens)}")  # noqa: T201
    assert tokens["delivered"] < tokens["all_schemas"], tokens


def print_story(steps):
    for event in steps:
        subject = event["tool_name"] or event["group_id"] or event["details"].get("query", "")
        print(f"{event['kind']:14}{subject:40}{event['tokens']:6} tokens")  # noqa: T201
