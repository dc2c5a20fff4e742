"""Management command: list, approve, reject, hide and release tools."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand
from django.core.serializers.json import DjangoJSONEncoder

from catalog.approvals import actions as approval_actions
from catalog.definitions.parsing import printable_name
from catalog.models import Tool, ToolState
from catalog.tools import actions as tool_actions
from catalog.tools.api import serialize_tool
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.roles import Actor

ACTS = ("approve", "keep-old", "hold", "release")


class Command(BaseCommand):
    help = (
        "List tools, or act on tools by public name: approve or reject (keep-old) a pending "
        "definition, hide (hold) or release tools."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("act", nargs="?", choices=("list", *ACTS), default="list")
        parser.add_argument("names", nargs="*", metavar="NAME", help="Public names of tools.")
        parser.add_argument(
            "--state", choices=ToolState.values, help="List only tools in this state."
        )
        parser.add_argument("--server", metavar="SLUG", help="List only tools of this server.")
        parser.add_argument("--reason", default="", help="Reason for hiding the tools.")
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        act, names = options["act"], options["names"]
        if act == "list":
            if names:
                self._stop(
                    "Specify an action before the tool names: approve, keep-old, hold or release."
                )
            self._list(options)
            return
        if not names:
            self._stop(f"Specify at least one tool name for {act}.")
        results = [self._act(act, name, options["reason"]) for name in dict.fromkeys(names)]
        if options["json"]:
            self._print({"tools": results})
        else:
            for result in results:
                self.stdout.write(f"{result['name']}: {result['message']}")
        failed = sum(not result["ok"] for result in results)
        if failed:
            sys.exit(3 if failed < len(results) else 1)

    def _stop(self, message: str) -> None:
        self.stderr.write(message)
        sys.exit(1)

    def _print(self, body: object) -> None:
        text = json.dumps(body, ensure_ascii=False, indent=2, cls=DjangoJSONEncoder)
        self.stdout.write(text)

    def _list(self, options: dict[str, Any]) -> None:
        rows = Tool.objects.with_definitions().prefetch_related("groups").order_by("public_name")
        rows = rows.filter(state=options["state"]) if options["state"] else rows.current()
        if options["server"]:
            rows = rows.filter(server__slug=options["server"])
        if options["json"]:
            self._print({"tools": [serialize_tool(tool) for tool in rows]})
            return
        for tool in rows:
            self.stdout.write(_line(tool))

    def _act(self, act: str, name: str, reason: str) -> dict[str, Any]:
        tool = Tool.objects.filter(public_name=name).first()
        # Escaped: the name is untrusted input.
        result: dict[str, Any] = {"name": printable_name(name), "act": act}
        if tool is None:
            return result | {"ok": False, "code": "not_found", "message": "Tool not found."}
        acts: dict[str, Callable[..., Tool]] = {
            "approve": approval_actions.approve,
            "keep-old": approval_actions.keep_old,
            "hold": partial(tool_actions.hold, reason=reason),
            "release": tool_actions.release,
        }
        try:
            updated = acts[act](tool, actor=Actor.command(f"tools {act}"))
        except ToolcribError as error:
            return result | {"ok": False, "code": error.code, "message": error.sentence}
        return result | {"ok": True, "state": updated.state, "message": f"now {updated.state}"}


def _line(tool: Tool) -> str:
    cost = "–" if tool.tokens is None else f"≈{tool.tokens:,}"
    reason = tool.held_reason if tool.held_at else tool.rejected_reason
    notes = [
        f"lint warnings: {len(tool.findings)}" if tool.findings else "",
        "calls denied" if tool.call_policy == "deny" else "",
        printable_name(reason) if reason else "",
    ]
    remarks = "; ".join(note for note in notes if note)
    return f"{tool.public_name:<48} {tool.state:<9} {cost:>8}  {remarks}".rstrip()
