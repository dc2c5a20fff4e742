"""Sync servers now."""

import argparse
import json
import sys
from typing import Any

from django.core.management.base import BaseCommand

from catalog.audit import Actor
from servers.models import Server, SyncRun, Trigger
from servers.sync import scheduling
from servers.sync.runner import sync_many
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.text import plural


class Command(BaseCommand):
    help = "Sync the named servers, or all enabled ones."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("slugs", nargs="*", metavar="SLUG")
        parser.add_argument(
            "--wait", action="store_true", help="Wait until the syncs have finished."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        servers = list(Server.objects.filter(enabled=True))
        if options["slugs"]:
            known = {server.slug: server for server in Server.objects.all()}
            unknown = [slug for slug in options["slugs"] if slug not in known]
            if unknown:
                self.stderr.write(
                    f"Server not found: {', '.join(unknown)}. Known: {', '.join(known) or 'none'}."
                )
                sys.exit(1)
            servers = [known[slug] for slug in options["slugs"]]
            disabled = [server.slug for server in servers if not server.enabled]
            if disabled:
                self.stderr.write(f"Disabled: {', '.join(disabled)}. Enable them first.")
                sys.exit(1)
        if not options["wait"]:
            for server in servers:
                scheduling.request_manual_sync(server, actor=Actor.command("sync"))
            if options["json"]:
                self.stdout.write(json.dumps({"asked": [server.slug for server in servers]}))
            else:
                self.stdout.write(f"Queued {plural(len(servers), 'sync')}.")
            return
        runs = sync_many(servers, Trigger.MANUAL)
        rows = [_row(server, runs[server.pk]) for server in servers]
        if options["json"]:
            self.stdout.write(json.dumps({"servers": rows}, ensure_ascii=False, indent=2))
        else:
            for row in rows:
                self.stdout.write(f"{row['slug']}: {row['outcome']} — {row['message']}")
        failed = [row for row in rows if row["outcome"] == "failed"]
        if failed:
            sys.exit(3 if len(failed) < len(rows) else 1)


def _row(server: Server, run: SyncRun | ToolcribError) -> dict[str, Any]:
    if isinstance(run, ToolcribError):
        return {"slug": server.slug, "outcome": "failed", "code": run.code, "message": run.message}
    counts = {
        key: getattr(run, key) for key in ("added", "changed", "removed", "unchanged", "rejected")
    }
    summary = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    return {
        "slug": server.slug,
        "outcome": run.outcome,
        "code": run.code,
        "message": run.error or summary or "no tools",
        **counts,
        "seconds": run.seconds,
    }
