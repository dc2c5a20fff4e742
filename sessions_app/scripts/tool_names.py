"""Names of tools in scripts: `server.function`, the same in every language, mapped back to tools.

Names are words of Python and of TypeScript. A server that is named like something a script needs
(`time`, `json`) gets an underscore; tools whose names become equal get a number.
"""

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from catalog.cache import CachedDefinition, CachedTool, cached_definition
from catalog.models import JsonSchema

CUSTOM = "custom"  # the module of tools without a server
UNSAFE = re.compile(r"[^A-Za-z0-9_]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


JAVASCRIPT_WORDS = _words(
    "abstract arguments await boolean break byte case catch char class const continue debugger "
    "default delete do double else enum eval export extends false final finally float for function "
    "goto if implements import in instanceof int interface let long native new null package "
    "private protected public return short static super switch synchronized this throw throws "
    "transient true try typeof undefined var void volatile while with yield namespace module "
    "declare type any unknown never object string number symbol bigint require async of"
)
MODULES = _words(
    "asyncio base64 collections copy csv dataclasses datetime decimal functools hashlib itertools "
    "json math os pathlib random re sys time tomllib typing unicodedata"
)
JAVASCRIPT_GLOBALS = _words(
    "Array Boolean Date Deno Error Function JSON Map Math Number Object Promise Proxy Reflect "
    "RegExp Set String Symbol console crypto fetch globalThis performance process queueMicrotask "
    "self setInterval setTimeout structuredClone window"
)
# What Python stubs name in annotations: a function of that name would hide the type.
STUB_TYPES = _words("Any Literal NotRequired TypedDict bool dict list str")
WORDS = frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | JAVASCRIPT_WORDS | STUB_TYPES
RESERVED = WORDS | MODULES | JAVASCRIPT_GLOBALS | frozenset(dir(builtins)) | {"extract", "input"}


@dataclass(frozen=True, slots=True)
class ScriptTool:
    """A tool as scripts see it. Its definition is parsed when it is needed."""

    module: str
    function: str
    tool: CachedTool

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}"

    @property
    def public_name(self) -> str:
        return self.tool.name

    @property
    def description(self) -> str:
        return self.tool.description

    @property
    def input_schema(self) -> JsonSchema:
        return self._definition.input_schema

    @property
    def output_schema(self) -> JsonSchema | None:
        return self._definition.output_schema

    def as_defined(self, definition: int | None) -> "ScriptTool":
        """Return the tool with an earlier definition, which its calls are validated by."""
        if definition is None or definition == self._definition.pk:
            return self
        return replace(self, tool=replace(self.tool, approved=cached_definition(definition)))

    @property
    def _definition(self) -> CachedDefinition:
        assert self.tool.approved is not None  # noqa: S101 - ToolNames has no others
        return self.tool.approved


def safe_word(name: str, reserved: Iterable[str] = WORDS) -> str:
    """Return a word of both languages that looks like a name.

    Modules of the Python engine have no names that begin with an underscore.
    """
    word = UNSAFE.sub("_", name)
    if not word or word[0].isdigit() or word[0] == "_":
        word = f"t_{word}"
    return f"{word}_" if word in reserved else word


class ToolNames:
    """The tools of a session by their names in scripts. Immutable."""

    def __init__(self, tools: Iterable[CachedTool]) -> None:
        modules: dict[str, str] = {}  # by server
        self.modules: dict[str, dict[str, ScriptTool]] = {}
        for tool in tools:
            if tool.approved is None:
                continue
            server = tool.server
            if server not in modules:
                wanted = safe_word(server.replace("-", "_") or CUSTOM, RESERVED)
                modules[server] = _unused(wanted, self.modules)
                self.modules[modules[server]] = {}
            functions = self.modules[modules[server]]
            bare = tool.name.removeprefix(f"{server}__") if server else tool.name
            function = _unused(safe_word(bare), functions)
            functions[function] = ScriptTool(modules[server], function, tool)

    @cached_property
    def by_public_name(self) -> Mapping[str, ScriptTool]:
        return {
            tool.public_name: tool
            for functions in self.modules.values()
            for tool in functions.values()
        }

    def find(self, name: str) -> ScriptTool | None:
        """Return the tool with a name in scripts."""
        module, _, function = name.partition(".")
        return self.modules.get(module, {}).get(function)


def _unused(wanted: str, taken: Mapping[str, object]) -> str:
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    return name
