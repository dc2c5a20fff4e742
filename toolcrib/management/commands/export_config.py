"""Print the configuration of this installation as YAML."""

import argparse
from pathlib import Path
from typing import Any

from catalog import audit
from catalog.audit import Actor
from toolcrib.configuration.export import export_document, export_yaml
from toolcrib.lib.errors import Invalid
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = (
        "Print servers, groups, tools, agents, rules and golden queries as YAML, without secrets."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--output", default="", help="Write to this file instead.")

    def handle(self, *args: Any, **options: Any) -> None:
        text = export_yaml()
        audit.record_installation(Actor.command("export_config"), "installation.export")
        if options["output"]:
            try:
                Path(options["output"]).write_text(text, encoding="utf-8")
            except OSError as error:
                raise Invalid(
                    f"{options['output']} cannot be written: {error.strerror}."
                ) from error
            return
        self.report(export_document(), text.rstrip("\n"), ensure_ascii=False, indent=2)
