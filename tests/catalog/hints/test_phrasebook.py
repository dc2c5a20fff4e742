"""The bundled phrasebook: its format, which tools it fits, and how a worker applies it."""

from pathlib import Path

import numpy as np
import pytest

from catalog.hints import bundled, phrasebook
from catalog.hints.phrasebook import DescribedTool
from catalog.models import Revision, ToolHint
from catalog.search.embeddings import store as vector_store
from catalog.tasks import embed
from sessions_app.sessions import scope
from tests.support.factories import ingest_tools, make_agent, make_server, make_tool, tool_object
from toolcrib.lib.errors import Invalid

SAMPLE = (Path(__file__).parent / "sample_phrasebook.txt").read_text()
FORECAST = "Return the weather forecast of a city for the next days."
UMBRELLA = "do I need an umbrella tomorrow"


@pytest.fixture
def book():
    return phrasebook.parse(SAMPLE)


def test_a_phrasebook_lists_servers_tools_and_requests(book):
    assert len(book) == 4
    [forecast] = book.by_name["get_forecast"]
    assert (forecast.server, forecast.requests[0]) == ("weather-mcp", UMBRELLA)
    assert [entry.server for entry in book.by_name["search"]] == ["files-mcp", "files-mcp"]


@pytest.mark.parametrize("text", ["  a request\n", "# s\nno tab\n", "# s\n\tno name\n"])
def test_a_malformed_phrasebook_is_rejected_with_its_line(text):
    with pytest.raises(Invalid, match="Line"):
        phrasebook.parse(text)


@pytest.mark.parametrize(
    ("name", "description", "expected"),
    [
        ("get_forecast", f"  {FORECAST.upper()}\n", UMBRELLA),
        ("get_forecast", "Return the price forecast of a share.", None),
        ("get_forecast", "", None),
        ("forecast", FORECAST, None),
        # A stored start of 160 characters stands for longer descriptions, a short text does not.
        (
            "search",
            "Search the files of a folder by their name, recursively, and return the paths of "
            "those that match the pattern, relative to the folder in which the search was "
            "started. Hidden files are left out.",
            "where did I save that document",
        ),
        ("get_alerts", "Get weather alerts for a US state. And more.", None),
    ],
)
def test_without_a_model_name_and_start_of_the_description_must_be_equal(
    book, name, description, expected
):
    [found] = book.find([DescribedTool(name, description)], None)
    assert (found[0] if found else None) == expected


def test_with_a_model_the_most_similar_description_counts_from_080_on(book):
    def encode(texts):
        angles = {"search the web and return pages with a summary.": 0.0, "near": 0.64, "far": 0.65}
        return np.array([[np.cos(a), np.sin(a)] for a in (angles.get(t, 2.0) for t in texts)])

    tools = [DescribedTool("search", "near"), DescribedTool("search", "far")]

    assert book.find(tools, encode) == [("look it up on the internet",), ()]


def other_version(*names, server="notes"):
    return [DescribedTool(name, f"{name} in other words", server) for name in names]


def encode_as(similarity):
    """Return an encoder by which descriptions in other words have this cosine to those listed."""

    def encode(texts):
        angle = np.arccos(similarity)
        angles = [angle if text.endswith("in other words") else 0.0 for text in texts]
        return np.array([[np.cos(a), np.sin(a)] for a in angles])

    return encode


LISTED = ("list_notes", "read_note", "add_note", "delete_note")
NOTES = "# notes-mcp\n" + "".join(f"{name}\t{name} as listed\n  {name}?\n" for name in LISTED)


@pytest.mark.parametrize(
    ("tools", "similarity", "recognized"),
    [
        (other_version(*LISTED), 0.3, True),
        (other_version(*LISTED, "a", "b", "c", "d"), 0.3, True),
        (other_version(*LISTED, "a", "b", "c", "d", "e"), 0.3, False),  # less than half
        (other_version(*LISTED[:3]), 0.3, False),  # too few to tell
        (other_version(*LISTED), 0.1, False),  # about something else
        (other_version(*LISTED, server=""), 0.3, False),  # custom tools are of no server
        (
            other_version(*LISTED[:2]) + other_version(*LISTED[2:], server="tasks"),
            0.3,
            False,  # two servers
        ),
    ],
)
def test_another_version_of_a_server_is_recognized_by_the_names_of_its_tools(
    tools, similarity, recognized
):
    found = phrasebook.parse(NOTES).find(tools, encode_as(similarity))

    expected = [(f"{tool.name}?",) if tool.name in LISTED else () for tool in tools]
    assert found == (expected if recognized else [()] * len(tools))


# --- In an installation ---------------------------------------------------------------------------


@pytest.fixture
def installed(book, monkeypatch):
    monkeypatch.setattr(phrasebook, "bundled", lambda: book)
    monkeypatch.setattr(bundled, "_applied_revision", -1)
    monkeypatch.setattr(bundled, "_applied", None)


def search_hits(query):
    agent = make_agent()
    return [hit.name for hit in _search(agent, query).hits]


def _search(agent, query):
    from catalog.search.engine import search

    return search(scope.scope_of_agent(agent).index, query=query, strategy="bm25")


@pytest.mark.django_db
def test_a_worker_gives_a_synced_tool_its_requests(installed):
    server = make_server(slug="weather", trust="auto")
    make_tool(server, "get_forecast", description=FORECAST)
    assert search_hits("umbrella") == []
    before = Revision.current()

    embed()

    assert search_hits("umbrella") == ["weather__get_forecast"]
    assert set(ToolHint.objects.values_list("source", flat=True)) == {"bundled"}
    assert Revision.current() == before + 1
    embed()
    assert Revision.current() == before + 1, "a second run changes nothing"


@pytest.mark.django_db
def test_requests_leave_with_the_description_they_fit(installed):
    server = make_server(slug="weather", trust="auto")
    make_tool(server, "get_forecast", description=FORECAST)
    embed()

    ingest_tools(server, tool_object("get_forecast", description="Forecasts the price of a share."))
    embed()

    assert not ToolHint.objects.exists()


@pytest.mark.django_db
def test_a_description_that_is_not_approved_counts_for_nothing(installed):
    server = make_server(slug="weather", trust="strict")
    make_tool(server, "get_forecast", description=FORECAST)

    embed()

    assert not ToolHint.objects.exists()


@pytest.mark.django_db
def test_a_description_in_other_words_is_recognized_by_the_model(installed, settings, monkeypatch):
    settings.EMBEDDINGS = True
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    server = make_server(slug="weather", trust="auto")
    make_tool(server, "get_forecast", description="Get a city's weather forecast, several days.")
    make_tool(server, "get_alerts", description="Lists warnings about the stock of parts.")

    bundled.apply()

    assert {hint.tool.name for hint in ToolHint.objects.all()} == {"get_forecast"}


def test_the_bundled_phrasebook_is_well_formed():
    book = phrasebook.bundled()
    for entries in book.by_name.values():
        for entry in entries:
            assert entry.server
            assert entry.description
            assert 1 <= len(entry.requests) <= 8
