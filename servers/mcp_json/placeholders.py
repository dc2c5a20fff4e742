"""Variable references in an mcp.json: parse every dialect, normalize to ${NAME}.

Pure. Claude uses ${NAME} and ${NAME:-default}, Cursor ${env:NAME}, VS Code ${input:id}. Each
variable or input gets one name that is unique in the file.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from toolcrib.lib.errors import Invalid

MAX_REFERENCES = 1000

_REFERENCE = re.compile(r"\$\{([^{}\r\n]{1,300})\}")
# Set by an editor from its open workspace. Toolcrib has no values for these.
_EDITOR_ONLY = frozenset([
    "userHome", "workspaceFolder", "workspaceFolderBasename", "workspaceRoot", "file", "cwd",
    "fileDirname", "relativeFile", "selectedText", "lineNumber", "execPath",
])  # fmt: skip
_EDITOR_KINDS = frozenset(["config", "command", "workspaceFolder", "extension"])


def to_variable_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text)[:100]
    return f"_{name}" if not name or name[0].isdigit() else name


def format_reference(name: str) -> str:
    return f"${{{name}}}"


@dataclass(frozen=True)
class Reference:
    name: str
    default: str | None
    editor_only: bool


class References:
    """The variables and inputs of one file: assigns their names and looks up their values."""

    def __init__(self, variables: Mapping[str, str], input_defaults: Mapping[str, str]) -> None:
        self._variables = variables
        self._input_defaults = input_defaults
        self._names: dict[tuple[str, str], str] = {}
        self._keys: dict[str, str] = {}  # name -> the spelling in the file

    def assign_name(self, kind: str, key: str) -> str:
        """Return the unique name. An input and a variable with the same key get different names."""
        if (kind, key) not in self._names:
            if len(self._names) >= MAX_REFERENCES:
                raise Invalid(
                    f"The file references more than {MAX_REFERENCES} variables.",
                    hint="Split it into several imports.",
                    code="too_many",
                )
            name = make_unique(to_variable_name(key), self._keys)
            self._names[kind, key] = name
            self._keys[name] = key
        return self._names[kind, key]

    @property
    def names(self) -> set[str]:
        return set(self._keys)

    def parse(self, inner: str) -> Reference:
        text, has_default, default = inner.partition(":-")
        kind, colon, key = text.partition(":")
        if not colon:
            kind, key = "env", text
        if kind == "input":
            name = self.assign_name("input", key)
            return Reference(name, self._input_defaults.get(key), editor_only=False)
        if kind == "env":
            editor_only = not colon and key in _EDITOR_ONLY
            name = self.assign_name("env", key)
            return Reference(name, default if has_default else None, editor_only)
        return Reference(self.assign_name(kind, text), None, editor_only=kind in _EDITOR_KINDS)

    def find_all(self, text: str) -> list[Reference]:
        return [self.parse(match[1]) for match in _REFERENCE.finditer(text)]

    def replace(self, text: str, replacement: Callable[[Reference], str]) -> str:
        return _REFERENCE.sub(lambda match: replacement(self.parse(match[1])), text)

    def get_value(self, name: str) -> str | None:
        """Return the value provided under the file's spelling, else under the assigned name."""
        value = self._variables.get(self._keys.get(name, name))
        return self._variables.get(name) if value is None else value


@dataclass
class Bindings:
    """Variable values of one server, collected while its entry is parsed."""

    references: References
    defaults: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)  # values of the ${NAME}s that remain
    missing: list[str] = field(default_factory=list)
    editor_only: list[str] = field(default_factory=list)
    conflicting: list[str] = field(default_factory=list)

    def collect_defaults(self, text: str) -> None:
        """Record defaults. Call it for all fields first: a name has one value in a whole server."""
        for reference in self.references.find_all(text):
            if reference.default is None:
                continue
            first = self.defaults.setdefault(reference.name, reference.default)
            if first != reference.default and reference.name not in self.conflicting:
                self.conflicting.append(reference.name)

    def resolve(self, reference: Reference) -> str | None:
        value = self.references.get_value(reference.name)
        if value is None:
            value = self.defaults.get(reference.name)
        if value is None and reference.name not in self.missing:
            self.missing.append(reference.name)
            if reference.editor_only:
                self.editor_only.append(reference.name)
        return value

    def expand(self, text: str) -> str:
        """Replace references by values; those without one stay as ${NAME}. Returns a secret."""

        def replacement(reference: Reference) -> str:
            value = self.resolve(reference)
            return format_reference(reference.name) if value is None else value

        return self.references.replace(text, replacement)

    def normalize(self, text: str) -> str:
        """Rewrite references as ${NAME}, and record their values in `used`.

        A default is plain text in the file and is expanded: a variable must not hide what an
        admin confirms.
        """

        def replacement(reference: Reference) -> str:
            value = self.references.get_value(reference.name)
            if value is None and reference.name in self.defaults:
                return self.defaults[reference.name]
            value = self.resolve(reference)
            if value is not None:
                self.used[reference.name] = value
            return format_reference(reference.name)

        return self.references.replace(text, replacement)

    def extract(self, label: str, secret: str) -> str:
        """Record a plaintext secret as a variable, and return the ${NAME} that replaces it."""
        for name, value in self.used.items():
            if value == secret and name.startswith(to_variable_name(label)):
                return format_reference(name)
        taken = self.references.names | set(self.used)
        name = make_unique(to_variable_name(label), taken)
        self.used[name] = secret
        return format_reference(name)


def make_unique(name: str, taken: Collection[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate
