"""Management command: export tools for a language model, and import the hints that it wrote."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from catalog.hints import exchange
from toolcrib.lib.errors import Invalid
from toolcrib.lib.roles import Actor
from toolcrib.lib.text import plural
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = (
        "Export the tools without search hints as JSON lines, the first of which is the prompt for "
        "a language model, or import the JSON lines that it wrote."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        action = parser.add_mutually_exclusive_group(required=True)
        action.add_argument("--export", action="store_true", help="Print tools and the prompt.")
        action.add_argument("--import", dest="file", type=Path, metavar="FILE", help="- for stdin.")
        parser.add_argument("--server", default="", metavar="SLUG", help="Export one server only.")
        parser.add_argument("--all", action="store_true", help="Also export tools that have hints.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["export"]:
            tools = exchange.tools_to_describe(server=options["server"], everything=options["all"])
            for line in exchange.export_lines(tools):
                self.stdout.write(line)
            return
        rows = exchange.parse_lines(_read(options["file"]))
        result = exchange.import_hints(rows, actor=Actor.command("hints"))
        text = f"Changed the hints of {plural(result.changed, 'tool')}."
        if result.rejected:
            text += f" Rejected {plural(result.rejected, 'hint')}."
        if result.unknown:
            text += f" Unknown tools: {', '.join(result.unknown)}."
        self.report(asdict(result), text)


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} cannot be read: {error}.") from error
