"""YAML of configuration files: the JSON subset with comments. Pure.

Aliases, tags, duplicate keys and the implicit types of YAML 1.1 (`no`, dates, `1_000`) are
rejected or read as text, so that a file has one meaning and cannot expand when it is read.
"""

import re
from typing import Any

import yaml

from toolcrib.lib.errors import Invalid

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 60


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deep", problem_mark=self.mark())
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem = "anchors and aliases are not supported"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def mark(self) -> Any:
        return self.get_mark()

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or key.tag != "tag:yaml.org,2002:str" or name in keys:
                problem = "a key is not text" if name is None else f"the key {name!r:.60} is wrong"
                hint = "is there twice, or is not text"
                raise yaml.MarkedYAMLError(
                    problem=f"{problem}: it {hint}", problem_mark=key.start_mark
                )
            keys.add(name)
        return super().construct_mapping(node, deep=deep)


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("bool", r"^(?:true|false)$", "tf")
_resolve("null", r"^(?:null|~|)$", "n~")
_Loader.yaml_implicit_resolvers.setdefault("", []).append(
    ("tag:yaml.org,2002:null", re.compile(r"^$"))
)
_resolve("int", r"^-?(?:0|[1-9][0-9]{0,17})$", "-0123456789")
_resolve("float", r"^-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]{1,3})?$", "-0123456789")


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_block = "\n" in text and not re.search(r"[ \t]\n|^\s|[^\n\x20-\x7e\xa1-\ud7ff]", text)
    style = "|" if is_block else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def load(text: str) -> Any:
    """Parse a file; errors name the line and column, and repeat no value."""
    if len(text.encode()) > MAX_BYTES:
        raise Invalid(f"The file is larger than {MAX_BYTES // 1024 // 1024} MiB.")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"Line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = str(error.problem or "the text is not YAML")
        raise Invalid(f"{where}{problem}.", hint="Correct the file.", code="not_yaml") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = "The file is not YAML text."
        raise Invalid(message, hint="Correct the file.", code="not_yaml") from error


def dump(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text
