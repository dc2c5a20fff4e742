"""The typed API of a session's tools, in Python or TypeScript: for a model, and for type checks."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

from sessions_app.scripts import python_stubs, typescript_declarations
from sessions_app.scripts.tool_names import ScriptTool, ToolNames
from sessions_app.sessions.scope import SessionScope

Language = Literal["python", "typescript"]
MAX_CHECKED_TOOLS = 200  # of the servers that a script names; of larger ones, the tools it names
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NOTES = {
    "python": "# Scripts call these functions with await. {errors}\n",
    "typescript": "// Scripts call these functions with await. {errors}\n",
}
ERRORS = (
    "A tool's error raises {error}, a call that is refused {refused}, a late one {late}. "
    "Without an output type, a result is the structured content of the tool, or else its text."
)
ERROR_NAMES = {
    "python": {"error": "RuntimeError", "refused": "PermissionError", "late": "TimeoutError"},
    "typescript": {"error": "ToolError", "refused": "PermissionError", "late": "TimeoutError"},
}
_names: WeakKeyDictionary[SessionScope, ToolNames] = WeakKeyDictionary()


def names_of(scope: SessionScope) -> ToolNames:
    """Return the names of a session's tools in scripts, the same for all sessions of a scope."""
    names = _names.get(scope)
    if names is None:
        names = _names[scope] = ToolNames(scope.offered)
    return names


def render(tools: Iterable[ScriptTool], language: Language) -> str:
    """Return the typed API of tools, with descriptions, as a model reads it."""
    modules = _by_module(tools)
    note = NOTES[language].format(errors=ERRORS.format(**ERROR_NAMES[language]))
    if language == "typescript":
        parts = [
            typescript_declarations.namespace(name, tools, docs=True)
            for name, tools in modules.items()
        ]
        return "\n".join([note + typescript_declarations.GLOBALS, *parts])
    header = python_stubs.HEADER
    parts = [
        f"# module {name}\n" + "\n".join(python_stubs.tool_stub(tool, docs=True) for tool in tools)
        for name, tools in modules.items()
    ]
    return "\n".join([note + header, *parts])


def signature(tool: ScriptTool, language: Language) -> str:
    """Return the typed function of one tool, as a load gives it."""
    if language == "typescript":
        return typescript_declarations.namespace(tool.module, [tool], docs=True)
    return f"# module {tool.module}\n{python_stubs.tool_stub(tool, docs=True)}"


def named_in(
    code: str, names: ToolNames, shown: Callable[[str], int | None] = lambda _: None
) -> dict[str, list[ScriptTool]]:
    """Return the tools that a script can reach by the words in it, by module.

    `shown` gives the definition of a tool that the session was last shown, if any.
    """
    words = set(WORD.findall(code))
    modules = {name: tools for name, tools in names.modules.items() if name in words}
    total = sum(map(len, modules.values()))
    return {
        name: [
            tool.as_defined(shown(tool.public_name))
            for tool in tools.values()
            if total <= MAX_CHECKED_TOOLS or tool.function in words
        ]
        for name, tools in modules.items()
    }


def _by_module(tools: Iterable[ScriptTool]) -> dict[str, Sequence[ScriptTool]]:
    modules: dict[str, list[ScriptTool]] = {}
    for tool in tools:
        modules.setdefault(tool.module, []).append(tool)
    return dict(modules.items())
