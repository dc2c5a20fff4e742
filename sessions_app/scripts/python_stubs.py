"""Python stubs of tools: one module for each server, its tools as async functions.

Parameters are keywords. A name that Python cannot write as a keyword is passed as `**{"a-b": 1}`.
Objects are TypedDicts in the functional syntax, which takes any key.
"""

import keyword
from collections.abc import Iterator, Sequence

from sessions_app.scripts.shapes import (
    ANY,
    Array,
    Literals,
    Map,
    Object,
    Reference,
    Scalar,
    Shape,
    ShapeReader,
    Union,
    described,
    parameters,
    shorten,
)
from sessions_app.scripts.tool_names import ScriptTool

TYPES = {
    "any": "Any",
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
}
HEADER = "from typing import Any, Literal, NotRequired, TypedDict\n"
# What every script can use beside its tools. The engine's checker does not know PermissionError.
GLOBALS = (
    "from typing import Any, TypeVar\n"
    "T = TypeVar('T')\n"
    "input: Any\n"
    "class PermissionError(OSError): ...\n"
    "async def extract(value: Any, type: type[T] | str | dict[str, Any]) -> Any: ...\n"
)
MAX_DESCRIPTION, MAX_PARAMETER = 400, 120


def module_stub(tools: Sequence[ScriptTool], *, docs: bool) -> str:
    """Return the stub of one server's module; with `docs`, also the descriptions."""
    return HEADER + "".join(f"\n{tool_stub(tool, docs=docs)}" for tool in tools)


def tool_stub(tool: ScriptTool, *, docs: bool) -> str:
    """Return the function of a tool, after the types that it uses."""
    prefix = f"_{tool.function}"
    inputs, named = parameters(tool.input_schema, f"{prefix}_In")
    printer = _Printer(f"{prefix}_In", named)
    arguments = _arguments(inputs, printer)
    result = "Any"
    output = _Printer(f"{prefix}_Out", {})
    if tool.output_schema is not None:
        reader = ShapeReader(tool.output_schema, f"{prefix}_Out")
        shape = reader.read()
        output = _Printer(f"{prefix}_Out", reader.objects)
        result = output.type_of(shape)
    types = "".join([*printer.definitions(), *output.definitions()])
    body = _docstring(tool, inputs) if docs else " ..."
    return f"{types}async def {tool.function}({arguments}) -> {result}:{body}\n"


def _arguments(inputs: Object, printer: "_Printer") -> str:
    words, rest = [], inputs.is_open
    for one in inputs.fields:
        if _is_keyword(one.name):
            default = "" if one.is_required else " = ..."
            words.append(f"{one.name}: {printer.type_of(one.shape)}{default}")
        else:
            rest = True
    words = ["*", *words] if words else []
    return ", ".join([*words, *(["**more: Any"] if rest else [])])


def _is_keyword(name: str) -> bool:
    """Only ASCII: Python normalizes other letters, and the tool would get another name."""
    is_word = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return is_word and name not in ("more", "__debug__")


def _docstring(tool: ScriptTool, inputs: Object) -> str:
    lines = [shorten(tool.description, MAX_DESCRIPTION)]
    lines += [
        f"{one.name}: {shorten(one.description, MAX_PARAMETER)}" for one in described(inputs.fields)
    ]
    text = "\n    ".join(line for line in lines if line)
    if not text:
        return " ..."
    text = text.replace("\\", "\\\\").replace('"', "'")
    return f'\n    """{text}"""'


class _Printer:
    """Writes shapes as types; every object becomes a TypedDict with a name of its own."""

    def __init__(self, prefix: str, named: dict[str, Object]) -> None:
        self._prefix, self._named = prefix, named
        self._anonymous: dict[Object, str] = {}
        self._texts: dict[str, str] = {}

    def type_of(self, shape: Shape) -> str:
        match shape:
            case Scalar(kind):
                return TYPES[kind]
            case Literals(values):
                return f"Literal[{', '.join(map(repr, values))}]"
            case Union(variants):
                return " | ".join(dict.fromkeys(map(self.type_of, variants)))
            case Array(items):
                return f"list[{self.type_of(items)}]"
            case Map(values):
                return f"dict[str, {self.type_of(values)}]"
            case Reference(name):
                return name
            case Object(fields):
                return self._anonymous_type(shape) if fields else "dict[str, Any]"
        return TYPES[ANY.kind]

    def _anonymous_type(self, shape: Object) -> str:
        if shape not in self._anonymous:
            name = self._anonymous[shape] = f"{self._prefix}{len(self._anonymous) or ''}"
            self._texts[name] = self._typed_dict(name, shape)
        return self._anonymous[shape]

    def _typed_dict(self, name: str, shape: Object) -> str:
        fields = ", ".join(
            f"{one.name!r}: "
            + (
                self.type_of(one.shape)
                if one.is_required
                else f"NotRequired[{self.type_of(one.shape)}]"
            )
            for one in shape.fields
        )
        return f"{name} = TypedDict({name!r}, {{{fields}}})\n"

    def definitions(self) -> Iterator[str]:
        for name, shape in self._named.items():
            self._texts[name] = self._typed_dict(name, shape)
        return iter(self._texts.values())
