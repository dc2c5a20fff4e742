"""Shell commands of README.md and docs/*.md: fenced blocks, and commands in inline code.

A block that a test cannot run names what it needs: ```` ```sh needs=publication ````.
"""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# What a block may need, and the programs that it then may call.
NEEDS = {
    "clone": {"make"},
    "publication": {"pip"},
    "terminal": {"toolcrib"},  # runs until it is stopped
    "client": {"claude"},  # an agent program with an account
    "session": {"curl"},  # a stream of a session that has no end
}
# Its snippets are generated, and run by tests/e2e/live/test_snippets.py.
GENERATED = {"connect.md"}
FENCE = re.compile(r"^( *)```sh(?: needs=(\w+))?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"(?:manage\.py|(?<!-A )(?<!http )\btoolcrib) +([a-z][a-z_-]+)((?:[ \w./=@…-]|\[[^\]]*\])*)"
)


@dataclass(frozen=True)
class Block:
    path: Path
    needs: str
    text: str

    @property
    def lines(self) -> list[list[str]]:
        """The words of each command, without those of a shell's own syntax."""
        joined = self.text.replace("\\\n", " ")
        return [shlex.split(line, comments=True) for line in joined.splitlines() if line.strip()]


def documents() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in found if path.name not in GENERATED]


@lru_cache
def shell_blocks(path: Path) -> tuple[Block, ...]:
    return tuple(
        Block(path, needs or "", textwrap.dedent(text))
        for _, needs, text in FENCE.findall(path.read_text())
    )


def our_commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield name and options of each command of ours in inline code and in shell blocks."""
    text = path.read_text()
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    blocks = [block.text for block in shell_blocks(path)]
    for span in (*spans, *blocks):
        for name, rest in COMMAND.findall(span):
            yield name.replace("-", "_"), re.findall(r"(?<!\S)--[a-z-]+", rest)
