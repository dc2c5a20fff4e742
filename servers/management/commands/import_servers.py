"""Import the servers of an mcp.json file."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from catalog.audit import Actor
from servers.mcp_json import importer
from servers.models import SyncRun, Trigger
from servers.registration import validation
from servers.sync import scheduling
from servers.sync.runner import sync_many
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.text import escape_ambiguous
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Register the servers of an mcp.json (Claude, VS Code and Cursor formats)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", help="The mcp.json file; - reads standard input.")
        parser.add_argument(
            "--allow-stdio",
            action="store_true",
            help="Allow stdio servers to run their programs on this machine.",
        )
        parser.add_argument(
            "--wait", action="store_true", help="Wait until the servers are synced."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        text = importer.read_text(options["file"])
        check = importer.check_import(text, importer.environment_variables())
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
        body = {
            "shape": check.shape,
            "servers": rows,
            "saved": len(saved),
            "failed": len(failed),
        }
        text = "\n".join(line for row in rows for line in _lines(row))
        self.report(body, text, ensure_ascii=False, indent=2)
        if failed or not rows:
            sys.exit(3 if len(failed) < len(rows) else 1)


def _lines(row: dict[str, Any]) -> Iterator[str]:
    mark = "✕" if row["status"] == "failed" else "✓"
    yield f"{mark} {row['slug'] or row['name'] or 'file'}: {row['message'] or 'registered'}"
    if row["argv"]:
        yield f"    runs: {row['argv']}"
    if row["hint"]:
        yield f"    {row['hint']}"
    yield from (f"    note: {warning}" for warning in row["warnings"])


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
