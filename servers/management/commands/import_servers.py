"""Import the servers of an mcp.json file."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand

from catalog.audit import Actor
from servers.mcp_json import importer
from servers.models import SyncRun, Trigger
from servers.registration import validation
from servers.sync import scheduling
from servers.sync.runner import sync_many
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.text import escape_ambiguous

# Toolcrib's own environment variables, never available to the file.
PRIVATE_VARIABLES = ("TOOLCRIB_", "DATABASE_URL", "REDIS_URL")


class Command(BaseCommand):
    help = "Register the servers of an mcp.json (Claude, VS Code and Cursor formats)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help="The mcp.json file; - reads standard input.")
        parser.add_argument(
            "--allow-stdio",
            action="store_true",
            help="Allow stdio servers to run their programs on this machine.",
        )
        parser.add_argument(
            "--wait", action="store_true", help="Wait until the servers are synced."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        text = self._read(options["file"])
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(PRIVATE_VARIABLES)
        }
        check = importer.check_import(text, variables)
        results = importer.save_drafts(
            check, actor=Actor.command("import_servers"), allow_programs=options["allow_stdio"]
        )
        saved = [item.server for item in results if item.server]
        runs = sync_many(saved, Trigger.ADDED) if options["wait"] else {}
        if not options["wait"]:
            for server in saved:
                scheduling.request_sync(server.pk, Trigger.ADDED)
        warnings = {draft.slug: list(draft.warnings) for draft in check.drafts}
        rows = [_row(item, runs, warnings) for item in results]
        failed = [row for row in rows if row["status"] == "failed"]
        if options["json"]:
            body = {
                "shape": check.shape,
                "servers": rows,
                "saved": len(saved),
                "failed": len(failed),
            }
            self.stdout.write(json.dumps(body, ensure_ascii=False, indent=2))
        else:
            self._print(rows)
        if failed or not rows:
            sys.exit(3 if len(failed) < len(rows) else 1)

    def _read(self, name: str) -> str:
        try:
            raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            return raw.decode("utf-8-sig")
        except OSError as error:
            self.stderr.write(f"{name} cannot be read: {error.strerror}.")
        except UnicodeDecodeError:
            self.stderr.write(f"{name} is not UTF-8 text.")
        sys.exit(1)

    def _print(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            mark = "✕" if row["status"] == "failed" else "✓"
            message = row["message"] or "registered"
            self.stdout.write(f"{mark} {row['slug'] or row['name'] or 'file'}: {message}")
            if row["argv"]:
                self.stdout.write(f"    runs: {row['argv']}")
            if row["hint"]:
                self.stdout.write(f"    {row['hint']}")
            for warning in row["warnings"]:
                self.stdout.write(f"    note: {warning}")


def _row(
    item: importer.ImportResult,
    runs: dict[int, SyncRun | ToolcribError],
    warnings: dict[str, list[str]],
) -> dict[str, Any]:
    server = item.server or item.known
    row: dict[str, Any] = {
        "name": escape_ambiguous(item.name),
        "slug": server.slug if server else None,
        "status": "saved" if item.server else "known" if item.known else "failed",
        "code": item.code,
        "message": item.message,
        "hint": item.hint,
        "argv": "",
        "tools": None,
        "warnings": warnings.get(item.server.slug, []) if item.server else [],
    }
    if item.server is None:
        return row
    if item.server.command:
        row["argv"] = validation.format_argv(item.server.argv)
    run = runs.get(item.server.pk)
    if isinstance(run, ToolcribError):
        row |= {"status": "failed", "code": run.code, "message": run.message, "hint": run.hint}
    elif run is not None and run.outcome == SyncRun.Outcome.FAILED:
        row |= {"status": "failed", "code": run.code, "message": run.error}
        row["hint"] = (
            f"The server stays registered. Fix it and run: manage.py sync {item.server.slug}"
        )
    elif run is not None:
        row |= {"status": "synced", "tools": run.added + run.unchanged + run.changed}
        row["message"] = f"{row['tools']} tools"
        if run.rejected:
            row["message"] += f", {run.rejected} rejected"
    return row
