"""Apply a configuration file, or show what it would change."""

import argparse
import sys
from typing import Any

from catalog.audit import Actor
from servers.mcp_json import importer
from toolcrib.configuration import apply as configuration
from toolcrib.configuration import yaml_text
from toolcrib.configuration.document import parse_document
from toolcrib.management.json_command import JsonCommand

PLAN_HAS_CHANGES = 2


class Command(JsonCommand):
    help = "Apply a configuration that export-config wrote, in one transaction."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", help="The YAML file; - reads standard input.")
        parser.add_argument(
            "--plan",
            action="store_true",
            help="Only show what would change; exit with 0 for nothing, 2 for changes.",
        )
        parser.add_argument(
            "--prune", action="store_true", help="Remove objects that the file does not name."
        )
        parser.add_argument(
            "--confirm",
            action="append",
            default=[],
            metavar="DIGEST",
            help="Confirm a program to run on this machine, by the digest that the plan prints.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        document = parse_document(yaml_text.load(importer.read_text(options["file"])))
        choices = {
            "variables": importer.environment_variables(),
            "prune": options["prune"],
            "confirmed": options["confirm"],
        }
        if options["plan"]:
            plan = configuration.plan(document, **choices)
        else:
            plan = configuration.apply(document, actor=Actor.command("apply"), **choices)
        self.report(plan.as_json(), plan.text(), ensure_ascii=False, indent=2)
        if options["plan"] and plan.changes:
            sys.exit(PLAN_HAS_CHANGES)
