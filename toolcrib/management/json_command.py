"""Base class of commands that report errors in one line and can print JSON."""

import argparse
import json
import sys
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DatabaseError

from toolcrib.lib.errors import ToolcribError


class JsonCommand(BaseCommand):
    """A command with the option --json, which decides what `report` prints."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def execute(self, *args: Any, **options: Any) -> str | None:
        self.as_json = bool(options["json"])
        try:
            return super().execute(*args, **options)
        except ToolcribError as error:
            self.stderr.write(error.sentence)
            sys.exit(1)
        except DatabaseError as error:  # away, not migrated, without a table
            if options.get("traceback"):
                raise
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            self.stderr.write(
                f"The database cannot be used: {reason}. Check that it is the right one, then run "
                "manage.py migrate, or restore a backup."
            )
            sys.exit(1)

    def report(self, body: dict[str, Any], text: str, **json_format: Any) -> None:
        output = json.dumps(body, **json_format) if self.as_json else text
        if output:
            self.stdout.write(output)
