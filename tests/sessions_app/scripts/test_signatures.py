"""Stubs and declarations of tools: what they say, and that checkers accept them."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from deno import find_deno_bin
from hypothesis import given
from hypothesis import strategies as st

from catalog.cache import CachedDefinition
from sessions_app.scripts import python_stubs, signatures, typescript_declarations
from sessions_app.scripts.tool_names import ScriptTool, ToolNames

ISSUE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "Shown in lists"},
        "priority": {"enum": ["low", "high"]},
        "labels": {"type": "array", "items": {"type": "string"}},
        "author": {"type": "object", "properties": {"name": {"type": "string"}}},
        "parent": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["title"],
}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "required": ["root"],
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                "value": {"type": "number"},
            },
            "required": ["value"],
        }
    },
}
# Each of these has broken a generator of types somewhere.
STRANGE = {
    "odd keys": {
        "type": "object",
        "properties": {
            name: {"type": "string"}
            for name in ("a-b", "class", "1st", "", "ﬁ", 'a"b', "a\\b", "a\nb", "more", "*/")
        },
        "required": ["class", "a-b"],
    },
    "odd enums": {
        "type": "object",
        "properties": {
            "a": {"enum": ['"', "'", "\\", "*/", "`${x}`", '"""', None, True, 1, 0, -1]},
            "b": {"enum": [{"x": 1}, [2]]},
            "c": {"const": "\n"},
            "d": {"enum": []},
            "e": {"enum": [f"v{i}" for i in range(500)]},
            "f": {"enum": [1.5, "x"]},
        },
    },
    "itself": {"type": "object", "properties": {"me": {"$ref": "#"}, "n": {"type": "integer"}}},
    "mutual": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {
            "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}},
            "B": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}},
        },
    },
    "list of itself": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/J"}},
        "$defs": {"J": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/J"}},
                                  {"type": "string"}]}},
    },
    "reference to a reference": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
    },
    "nowhere": {"type": "object", "properties": {"x": {"$ref": "https://example.org/x.json"},
                                                 "y": {"$ref": "#/$defs/None"}}},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": ["integer", "null"]}}},
        ]
    },
    "union at the root": {"anyOf": [{"type": "object", "properties": {"a": {"type": "string"}}},
                                    {"type": "object", "properties": {"b": {"type": "string"}}}]},
    "true": {"type": "object", "properties": {"a": True, "b": False, "c": {}, "d": "no schema"}},
    "wrong": {"type": "object", "properties": {"a": {"type": 5}, "b": {"items": 3, "type": "array"},
                                               "c": {"enum": "x"}, "d": {"required": 1}},
              "required": "a"},
    "open": {"type": "object", "properties": {"a": {"type": "string"}},
             "additionalProperties": {"type": "integer"}},
    "map": {"type": "object", "properties": {
        "m": {"type": "object", "additionalProperties": {"type": "array", "items": {}}}}},
    "deep": json.loads('{"type":"object","properties":{"a":' * 40 + "{}" + "}}" * 40),
    "hostile text": {"type": "object", "properties": {
        "a": {"type": "string", "description": '"""\n*/ }\nimport os\\'}}},
    "nothing": {},
    "tuple": {"type": "object", "properties": {
        "t": {"type": "array", "prefixItems": [{"type": "string"}], "items": False}}},
    "words of the languages": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in (
            "self", "type", "str", "list", "constructor", "__proto__", "toString", "_", "名前")},
        "required": ["self", "str", "list"],
    },
    "object or null": {"type": "object", "properties": {"x": {
        "type": ["object", "null"],
        "properties": {"a": {"oneOf": [{"const": "a"}, {"const": "b"}]}},
        "patternProperties": {"^x": {}}, "not": {}, "if": {}, "nullable": True}}},
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(150)}},
}  # fmt: skip


def make_tool(name, schema, output=None, *, server="github", description="Does it."):
    body = {"name": name, "description": description, "inputSchema": schema}
    if output is not None:
        body["outputSchema"] = output
    definition = CachedDefinition(1, "", json.dumps(body), 0)
    full = f"{server}__{name}" if server else name
    return SimpleNamespace(
        name=full, server=server, approved=definition, description=description, offered=True
    )


def one(schema, output=None, **options):
    return ScriptTool("github", "run", make_tool("run", schema, output, **options))


# Tools with these names are next to others whose types have the same names.
STRANGE_NAMES = (
    *("list", "dict", "str", "bool", "int", "Any", "Literal", "TypedDict", "NotRequired", "print"),
    *("Promise", "Array", "Record", "constructor", "_list_In", "__proto__", "None", "self"),
)


def strange_tools():
    """Every strange schema, as input and as output, and every strange name."""
    schemas = {f"t{i}": schema for i, schema in enumerate(STRANGE.values())}
    tools = [
        make_tool(name, schema, schema, description='A "quoted" */ text\n\\')
        for name, schema in {**schemas, **dict.fromkeys(STRANGE_NAMES, ISSUE)}.items()
    ]
    return [*ToolNames(tools).modules["github"].values()]


def test_a_python_stub_has_keywords_types_and_descriptions():
    stub = python_stubs.tool_stub(one(ISSUE, TREE), docs=True)
    assert (
        "async def run(*, title: str, priority: Literal['low', 'high'] = ..., "
        "labels: list[str] = ..., author: _run_In = ..., parent: int | None = ...) -> _run_Out:"
    ) in stub
    assert "_run_In = TypedDict('_run_In', {'name': NotRequired[str]})" in stub
    assert (
        "_run_Out_Node_1 = TypedDict('_run_Out_Node_1', "
        "{'children': NotRequired[list[_run_Out_Node_1]], 'value': float})"
    ) in stub
    assert "title: Shown in lists" in stub


def test_a_declaration_has_an_input_object_types_and_descriptions():
    text = typescript_declarations.tool_declaration(one(ISSUE, TREE), docs=True)
    assert "interface run_Out_Node_1 { children?: Array<run_Out_Node_1>; value: number }" in text
    assert (
        "function run(input: { /** Shown in lists */ title: string; "
        'priority?: "low" | "high"; labels?: Array<string>; author?: { name?: string }; '
        "parent?: number | null }): Promise<{ root: run_Out_Node_1 }>;"
    ) in text


def test_a_tool_without_output_schema_gives_any():
    assert ") -> Any:" in python_stubs.tool_stub(one(ISSUE), docs=False)
    assert "Promise<any>" in typescript_declarations.tool_declaration(one(ISSUE), docs=False)


def test_a_parameter_that_is_no_keyword_is_passed_in_a_dictionary():
    stub = python_stubs.tool_stub(one(STRANGE["odd keys"]), docs=False)
    assert "async def run(**more: Any) -> Any" in stub


def test_names_are_words_of_both_languages_and_lead_back_to_their_tools():
    tools = [
        make_tool(name, {}, server=server)
        for server, name in [
            ("time", "now"), ("my-server", "a.b"), ("my-server", "a_b"), ("my-server", "delete"),
            ("my-server", "1x"), ("my-server", "import"), ("my_server", "x"), ("", "own"),
            ("json", "é"), ("input", "__init__"),
        ]
    ]  # fmt: skip
    names = ToolNames(tools)
    found = {tool.name: tool.public_name for m in names.modules.values() for tool in m.values()}
    assert found == {
        "time_.now": "time__now",
        "my_server.a_b": "my-server__a.b",
        "my_server.a_b_2": "my-server__a_b",
        "my_server.delete_": "my-server__delete",
        "my_server.t_1x": "my-server__1x",
        "my_server.import_": "my-server__import",
        "my_server_2.x": "my_server__x",
        "custom.own": "own",
        "json_.t__": "json__é",
        "input_.t___init__": "input____init__",
    }
    for name, public in found.items():
        tool = names.find(name)
        assert tool is not None
        assert tool.public_name == public
    assert names.find("github.nothing") is None
    assert names.find("nothing") is None


def test_a_script_is_checked_against_the_tools_that_it_names():
    small = [make_tool(f"t{i}", {}, server="small") for i in range(5)]
    large = [make_tool(f"l{i}", {}, server="large") for i in range(300)]
    names = ToolNames([*small, *large])
    assert [len(tools) for tools in signatures.named_in("small.t1()", names).values()] == [5]
    found = signatures.named_in("small.t1(); large.l7()", names)
    assert {name: [t.function for t in tools] for name, tools in found.items()} == {
        "small": ["t1"],
        "large": ["l7"],
    }
    assert signatures.named_in("x = 1", names) == {}


def test_the_whole_api_names_its_errors():
    tools = [one(ISSUE)]
    assert "RuntimeError" in signatures.render(tools, "python")
    assert "ToolError" in signatures.render(tools, "typescript")
    assert "declare namespace github {" in signatures.render(tools, "typescript")


def test_stubs_of_the_strangest_schemas_pass_mypy(tmp_path):
    tools = strange_tools()
    (tmp_path / "github.pyi").write_text(python_stubs.module_stub(tools, docs=True))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file="]
    done = subprocess.run(
        [*command, "github.pyi"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_stubs_of_the_strangest_schemas_pass_the_checker_of_the_engine():
    monty = pytest.importorskip("pydantic_monty")
    tools = strange_tools()
    stub = python_stubs.module_stub(tools, docs=True)
    module = monty.ExternalModule({tool.function: print for tool in tools}, stubs=stub)
    every_tool = "\n".join(f"github.{tool.function}" for tool in tools)
    options = {
        "external_modules": {"github": module},
        "type_check": True,
        "type_check_stubs": python_stubs.GLOBALS,
    }
    with monty.Monty(max_processes=1) as pool, pool.checkout(**options) as session:
        assert session.feed_run(f"import github\n{every_tool}\n1") == 1
        with pytest.raises(monty.MontyTypingError):
            session.feed_run("github.unknown")


def test_declarations_of_the_strangest_schemas_pass_typescript(tmp_path):
    text = typescript_declarations.namespace("github", strange_tools(), docs=True)
    (tmp_path / "github.ts").write_text(f"{text}\nexport {{}};\n")
    done = subprocess.run(
        [find_deno_bin(), "check", "--no-config", "--no-lock", "github.ts"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"DENO_DIR": str(tmp_path / "deno"), "HOME": str(tmp_path), "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


schemas = st.recursive(
    st.sampled_from([{}, True, {"type": "string"}, {"enum": ["a", 1, None]}, {"$ref": "#"}]),
    lambda inner: st.one_of(
        st.builds(lambda p: {"type": "object", "properties": p},
                  st.dictionaries(st.text(max_size=5), inner, max_size=4)),
        st.builds(lambda i: {"type": "array", "items": i}, inner),
        st.builds(lambda v: {"anyOf": v}, st.lists(inner, max_size=3)),
        st.builds(lambda v: {"allOf": v}, st.lists(inner, max_size=3)),
    ),
    max_leaves=20,
)  # fmt: skip


@given(schemas, st.text())
def test_a_stub_of_any_schema_is_python(schema, description):
    tool = one(schema, schema, description=description)
    compile(python_stubs.module_stub([tool], docs=True), "stub.pyi", "exec")
    assert typescript_declarations.tool_declaration(tool, docs=True).count("function run(") >= 1
