"""Verify the chain of the audit log."""

import argparse
import sys
from typing import Any

from catalog import audit
from catalog.audit import Actor, chain
from toolcrib.lib.text import plural
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Verify that no entry of the audit log was changed, added, removed or moved."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--restart",
            action="store_true",
            help="Start a new chain; existing entries count as recorded before it.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["restart"]:
            count = chain.restart()
            actor = Actor.command("verify_audit")
            audit.record_installation(actor, "audit.restart", before={"entries": count})
        result = chain.verify()
        body = {
            "holds": result.holds,
            "verified": result.verified,
            "last_entry": result.last.pk if result.last else None,
            "pending": result.pending,
            "unchained": result.unchained,
            "problem": result.problem,
            "entry": result.entry,
        }
        text = result.summary
        if result.unchained:
            text += f" {plural(result.unchained, 'entry', 'entries')} from before the chain."
        self.report(body, text)
        if not result.holds:
            sys.exit(1)
