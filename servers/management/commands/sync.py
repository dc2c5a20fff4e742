"""Sync servers now."""

import argparse
import sys
from typing import Any

from catalog.audit import Actor
from servers.models import Server, SyncRun, Trigger
from servers.sync import scheduling
from servers.sync.runner import sync_many
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.text import plural
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Sync the named servers, or all enabled ones."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("slugs", nargs="*", metavar="SLUG")
        parser.add_argument(
            "--wait", action="store_true", help="Wait until the syncs have finished."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        servers = list(Server.objects.filter(enabled=True))
        if options["slugs"]:
            known = {server.slug: server for server in Server.objects.all()}
            unknown = [slug for slug in options["slugs"] if slug not in known]
            if unknown:
                raise Invalid(
                    f"Server not found: {', '.join(unknown)}. Known: {', '.join(known) or 'none'}."
                )
            servers = [known[slug] for slug in options["slugs"]]
            disabled = [server.slug for server in servers if not server.enabled]
            if disabled:
                raise Invalid(f"Disabled: {', '.join(disabled)}. Enable them first.")
        if not options["wait"]:
            for server in servers:
                scheduling.request_manual_sync(server, actor=Actor.command("sync"))
            asked = [server.slug for server in servers]
            self.report({"asked": asked}, f"Queued {plural(len(servers), 'sync')}.")
            return
        runs = sync_many(servers, Trigger.MANUAL)
        rows = [_row(server, runs[server.pk]) for server in servers]
        text = "\n".join(f"{row['slug']}: {row['outcome']} — {row['message']}" for row in rows)
        self.report({"servers": rows}, text, ensure_ascii=False, indent=2)
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
