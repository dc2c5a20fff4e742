"""The bundled phrasebook: its format, its size, and what no request may be."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from catalog import search

PHRASEBOOK = Path(search.__file__).parent / "phrasebook.txt"
MAX_REQUEST_LENGTH = 80
MAX_DESCRIPTION_LENGTH = 160


@dataclass
class Tool:
    name: str
    description: str
    requests: list[str] = field(default_factory=list)


def read_servers():
    servers = {}
    tools = None
    for number, line in enumerate(PHRASEBOOK.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("# "):
            assert line[2:] not in servers, f"line {number}: the server {line[2:]} is there twice"
            tools = servers[line[2:]] = []
        elif line.startswith("  "):
            assert tools, f"line {number}: a request without a tool"
            tools[-1].requests.append(line[2:])
        else:
            assert tools is not None, f"line {number}: a tool without a server"
            assert line.count("\t") == 1, f"line {number}: expected a name, a tab and a description"
            tools.append(Tool(*line.split("\t")))
    return servers


@pytest.fixture(scope="module")
def servers():
    return read_servers()


@pytest.fixture(scope="module")
def tools(servers):
    return [(server, tool) for server, tools in servers.items() for tool in tools]


@pytest.fixture(scope="module")
def requests(tools):
    return [(server, tool.name, request) for server, tool in tools for request in tool.requests]


def test_many_servers_and_tools_are_covered(servers, tools):
    assert len(servers) >= 60
    assert len(tools) >= 1_500


def test_servers_are_sorted_and_none_is_empty(servers):
    assert list(servers) == sorted(servers, key=lambda name: (name.casefold(), name))
    assert not [server for server, tools in servers.items() if not tools]


def test_a_tool_has_a_name_of_one_word(tools):
    assert not [(server, tool) for server, tool in tools if tool.name.split() != [tool.name]]


def test_no_tool_is_twice_in_a_server(tools):
    counts = Counter((server, tool.name) for server, tool in tools)
    assert not [found for found, count in counts.items() if count > 1]


def test_a_description_is_short(tools):
    long = [tool for _, tool in tools if len(tool.description) > MAX_DESCRIPTION_LENGTH]
    assert not long


def test_every_tool_has_three_requests(tools):
    assert not [(server, tool) for server, tool in tools if len(tool.requests) != 3]


def test_requests_are_a_situation_a_goal_and_a_question(tools):
    asked = [(tool.name, [request.endswith("?") for request in tool.requests]) for _, tool in tools]
    assert not [found for found in asked if found[1] != [False, False, True]]


def test_a_request_is_one_short_line(requests):
    assert not [found for found in requests if not 0 < len(found[2]) <= MAX_REQUEST_LENGTH]
    assert not [found for found in requests if "\t" in found[2]]
    assert not [found for found in requests if found[2] != " ".join(found[2].split())]


def test_no_request_is_twice_in_a_server(requests):
    counts = Counter((server, request.casefold()) for server, _, request in requests)
    assert not [found for found, count in counts.items() if count > 1]


def test_no_request_holds_the_name_of_its_tool(requests):
    """Names of several words: a single word, such as `query`, may be the everyday word."""
    named = [found for found in requests if not found[1].isalpha()]
    assert not [found for found in named if found[1].casefold() in found[2].casefold()]
