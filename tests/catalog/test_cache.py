"""Cached catalog: what definitions keep in memory, and lookups of group members."""

from catalog import cache
from catalog.cache import CachedDefinition, CachedGroup, CachedMember, CachedTool
from toolcrib.lib.json_codec import canonical


def definition(name="echo", **fields):
    tool = {"name": name, "inputSchema": {"type": "object"}, **fields}
    return CachedDefinition(1, "0" * 64, canonical(tool), 7)


def member(name, original_name, state="available"):
    approved = definition(original_name)
    tool = CachedTool(
        1, name, original_name, 1, "files", "trusted", True, state, "allow", "", approved, None
    )
    return CachedMember(tool, 0, False)


def group(*members):
    return CachedGroup(1, "mcp:files", "Files", "", 0, members)


def test_a_definition_reads_its_fields_from_its_text():
    one = definition(
        title="Echo",
        description="Say it again.",
        annotations={"readOnlyHint": True, "idempotentHint": False},
        outputSchema={"type": "array"},
    )
    assert one.search_fields == ("Echo", "Say it again.", "")
    assert one.description == "Say it again."
    assert one.true_annotations == {"readOnlyHint"}
    assert one.input_schema == {"type": "object"}
    assert one.output_schema == {"type": "array"}
    assert definition(description=None).description == ""


def test_few_definitions_are_kept_parsed():
    cache._parse.cache_clear()
    for number in range(cache.MAX_PARSED_DEFINITIONS + 10):
        assert definition(f"echo_{number}").tool["name"] == f"echo_{number}"
    assert cache._parse.cache_info().currsize == cache.MAX_PARSED_DEFINITIONS
    kept = definition("echo")
    assert kept.tool is kept.tool


def test_members_are_found_by_public_and_bare_names():
    files = group(
        member("files__read_file", "read file"),
        member("files__read", "read"),
        member("files__read_2", "read"),
        member("custom", "custom"),
        member("files__gone", "gone", state="missing"),
    )
    assert list(files.offered_by_name) == [
        *("files__read_file", "files__read", "files__read_2", "custom")
    ]
    assert files.offered_by_other_name == {
        "read file": ["files__read_file"],
        "read_file": ["files__read_file"],
        "read": ["files__read", "files__read_2"],
        "read_2": ["files__read_2"],
    }
