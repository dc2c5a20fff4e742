"""References such as ${NAME} in an mcp.json: read in every dialect, written in one.

Pure. Claude writes ${NAME} and ${NAME:-default}, Cursor ${env:NAME}, VS Code ${input:id}. All
become ${NAME} here, one name for one thing in a whole file.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from toolcrib.lib.errors import Invalid

MAX_REFERENCES = 1000

_REFERENCE = re.compile(r"\$\{([^{}\r\n]{1,300})\}")
# Filled in by an editor, from what it has open. Toolcrib has no such thing.
_EDITOR_ONLY = frozenset([
    "userHome", "workspaceFolder", "workspaceFolderBasename", "workspaceRoot", "file", "cwd",
    "fileDirname", "relativeFile", "selectedText", "lineNumber", "execPath",
])  # fmt: skip
_EDITOR_KINDS = frozenset(["config", "command", "workspaceFolder", "extension"])


def valid_name(text: str) -> str:
    """Make a name that a variable can have."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text)[:100]
    return f"_{name}" if not name or name[0].isdigit() else name


def written(name: str) -> str:
    """Write a reference as Toolcrib keeps it."""
    return f"${{{name}}}"


@dataclass(frozen=True)
class Reference:
    """One ${…} as it stood in the file."""

    name: str
    default: str | None
    editor_only: bool


class References:
    """The references of one file: gives each thing its name, and finds what a name stands for."""

    def __init__(self, variables: Mapping[str, str], input_defaults: Mapping[str, str]) -> None:
        self._variables = variables
        self._input_defaults = input_defaults
        self._names: dict[tuple[str, str], str] = {}
        self._keys: dict[str, str] = {}  # by name

    def name_of(self, kind: str, key: str) -> str:
        """Name a thing of the file. An input and a variable of one name stay two things."""
        if (kind, key) not in self._names:
            if len(self._names) >= MAX_REFERENCES:
                raise Invalid(
                    f"The text refers to more than {MAX_REFERENCES} variables.",
                    hint="Import its servers in parts.",
                    code="too_many",
                )
            name = unique(valid_name(key), self._keys)
            self._names[kind, key] = name
            self._keys[name] = key
        return self._names[kind, key]

    @property
    def names(self) -> set[str]:
        return set(self._keys)

    def read(self, inner: str) -> Reference:
        """Read what stands between ${ and }."""
        text, has_default, default = inner.partition(":-")
        kind, colon, key = text.partition(":")
        if not colon:
            kind, key = "env", text
        if kind == "input":
            name = self.name_of("input", key)
            return Reference(name, self._input_defaults.get(key), editor_only=False)
        if kind == "env":
            editor_only = not colon and key in _EDITOR_ONLY
            found = default if has_default else None
            return Reference(self.name_of("env", key), found, editor_only)
        return Reference(self.name_of(kind, text), None, editor_only=kind in _EDITOR_KINDS)

    def find(self, text: str) -> list[Reference]:
        return [self.read(found[1]) for found in _REFERENCE.finditer(text)]

    def replace(self, text: str, write: Callable[[Reference], str]) -> str:
        return _REFERENCE.sub(lambda found: write(self.read(found[1])), text)

    def value(self, name: str) -> str | None:
        """Find the value given under the file's own spelling, or under the name made of it."""
        value = self._variables.get(self._keys.get(name, name))
        return self._variables.get(name) if value is None else value


@dataclass
class Bindings:
    """What the references of one server stand for, gathered while it is read."""

    references: References
    defaults: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)  # what stays as ${NAME}, with its value
    missing: list[str] = field(default_factory=list)
    editor_only: list[str] = field(default_factory=list)
    conflicting: list[str] = field(default_factory=list)

    def learn_defaults(self, text: str) -> None:
        """Note the defaults first: a name has one value in a server, wherever it stands."""
        for reference in self.references.find(text):
            if reference.default is None:
                continue
            known = self.defaults.setdefault(reference.name, reference.default)
            if known != reference.default and reference.name not in self.conflicting:
                self.conflicting.append(reference.name)

    def value(self, reference: Reference) -> str | None:
        """Find the value, or note that it is missing."""
        value = self.references.value(reference.name)
        if value is None:
            value = self.defaults.get(reference.name)
        if value is None and reference.name not in self.missing:
            self.missing.append(reference.name)
            if reference.editor_only:
                self.editor_only.append(reference.name)
        return value

    def filled(self, text: str) -> str:
        """Write values in; what has none stays as ${NAME}. The result is a secret."""

        def write(reference: Reference) -> str:
            value = self.value(reference)
            return written(reference.name) if value is None else value

        return self.references.replace(text, write)

    def kept(self, text: str) -> str:
        """Write references as ${NAME}, and remember the values beside the text.

        A default stands in the text for all to read, and is written out: what is confirmed must
        not be hidden behind a name.
        """

        def write(reference: Reference) -> str:
            value = self.references.value(reference.name)
            if value is None and reference.name in self.defaults:
                return self.defaults[reference.name]
            value = self.value(reference)
            if value is not None:
                self.used[reference.name] = value
            return written(reference.name)

        return self.references.replace(text, write)

    def move(self, wanted: str, secret: str) -> str:
        """Take a plain secret out of a text: return the ${NAME} that replaces it."""
        for name, value in self.used.items():
            if value == secret and name.startswith(valid_name(wanted)):
                return written(name)
        taken = self.references.names | set(self.used)
        name = unique(valid_name(wanted), taken)
        self.used[name] = secret
        return written(name)


def unique(name: str, taken: Collection[str]) -> str:
    """Return the name, or the name with the first free number behind it."""
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate
