"""Hidden characters are removed from what agents read, and live sessions keep their bytes."""

import pytest

from catalog import cache
from catalog.approvals.actions import approve
from catalog.audit import SYSTEM
from catalog.definitions.parsing import without_hidden
from catalog.models import Definition, Tool
from catalog.tools.actions import save_custom_tool
from tests.support.agent_client import make_agent_client, make_group
from tests.support.factories import ingest_tools, make_server, tool_object
from tests.support.seeding import make_admin
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.text import hidden_characters, remove_hidden

pytestmark = pytest.mark.django_db
TAGS = "".join(chr(0xE0000 + ord(char)) for char in "obey")
HIDDEN = f"Read\u200b a\u202e file\x1b[31m.\x00{TAGS}\u2066\ufeff\x7f"
CLEAN = "Read a file [31m.  "


def poisoned(**fields):
    schema = {
        "type": "object",
        "description": HIDDEN,
        "properties": {
            "path": {"type": "string", "title": HIDDEN, "description": HIDDEN},
            "default": {"type": "string", "description": HIDDEN, "enum": ["a\u200bb"]},
        },
    }
    return tool_object(
        "read", title=HIDDEN, description=HIDDEN, inputSchema=schema, outputSchema=schema, **fields
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (HIDDEN, CLEAN),
        ("⚠️ 👩‍🚀 1️⃣ می‌خواهم a\nb", "⚠️ 👩‍🚀 1️⃣ می‌خواهم a\nb"),
        ("a\u200db\ufe0f", "ab"),
        ("line\u2028two", "line two"),
        ("plain", "plain"),
    ],
)
def test_hidden_characters_are_removed_and_emoji_stay(text, clean):
    assert remove_hidden(text) == clean
    assert hidden_characters(clean) == set()


def test_every_text_is_cleaned_and_names_and_values_stay():
    tool = poisoned()
    clean = without_hidden(tool, canonical(tool))

    assert clean["description"] == clean["title"] == CLEAN
    for schema in (clean["inputSchema"], clean["outputSchema"]):
        assert schema["description"] == CLEAN
        assert schema["properties"]["path"]["title"] == CLEAN
        assert schema["properties"]["default"]["description"] == CLEAN
        assert schema["properties"]["default"]["enum"] == ["a\u200bb"]
    assert without_hidden(clean, canonical(clean)) is None


def serve(server, *items):
    ingest_tools(server, *items)
    for tool in Tool.objects.filter(state="waiting"):
        approve(tool, actor=SYSTEM)
    cache.clear()


def everything_read(session):
    return "".join(
        canonical(response.json)
        for response in (
            session.load("mcp:files"),
            session.get("/tools/files__read"),
            session.search("read file", detail="full"),
            session.get("/catalog?format=mcp"),
            session.get("/tools"),
        )
    )


def test_agents_read_no_hidden_characters_and_people_see_the_original():
    serve(make_server(slug="files"), poisoned())
    session = make_agent_client().open(mode="deferred", preload=["files__read"])

    text = everything_read(session).replace("a\u200bb", "")

    assert "Read a file" in text
    assert hidden_characters(text) == set()
    assert "\\u00" not in text
    assert Tool.objects.get().approved.description == HIDDEN


def test_the_setting_turns_it_off(settings):
    settings.REMOVE_HIDDEN_CHARACTERS = False
    serve(make_server(slug="files"), poisoned())

    assert "\u202e" in everything_read(make_agent_client().open(mode="deferred"))
    assert Definition.objects.count() == 1


def test_a_session_from_before_keeps_its_bytes(settings):
    """As after an upgrade: the definition was stored without a readable copy."""
    settings.REMOVE_HIDDEN_CHARACTERS = False
    server = make_server(slug="files")
    serve(server, poisoned())
    client = make_agent_client()
    old = client.open(mode="deferred")
    before = old.load("mcp:files").json["schemas"]
    settings.REMOVE_HIDDEN_CHARACTERS = True

    serve(server, poisoned())

    assert old.load("mcp:files").json["schemas"] == before
    assert "\u202e" in canonical(before)
    assert Tool.objects.get().state == "available"
    new = client.open(mode="deferred").load("mcp:files").json["schemas"]
    assert "\u202e" not in canonical(new)


def test_results_are_data_and_reach_agents_unchanged_while_pages_show_what_is_hidden(client):
    text = HIDDEN.replace("\x00", "")
    make_group("own", save_custom_tool(tool_object("note"), actor=SYSTEM))
    session = make_agent_client("reader", mode="deferred").open()

    assert session.call("note", {"text": text})["structured_content"] == {"text": text}

    client.force_login(make_admin(), backend="django.contrib.auth.backends.ModelBackend")
    steps = [client.get(f"/sessions/{session.id}?step={step}").text for step in range(1, 4)]
    assert any("\\u202e" in page and "\\u200b" in page for page in steps)
    assert [hidden_characters(page) for page in steps] == [set()] * 3
