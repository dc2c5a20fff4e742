"""Management command: list, approve, reject, hide and release tools."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from catalog.approvals import actions as approval_actions
from catalog.definitions.parsing import printable_name
from catalog.models import Tool, ToolState
from catalog.tools import actions as tool_actions
from catalog.tools.api import serialize_tool
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.roles import Actor
from toolcrib.management.json_command import JsonCommand

ACTS = ("approve", "keep-old", "hold", "release")


class Command(JsonCommand):
    help = (
        "List tools, or act on tools by public name: approve or reject (keep-old) a pending "
        "definition, hide (hold) or release tools."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("act", nargs="?", choices=("list", *ACTS), default="list")
        parser.add_argument("names", nargs="*", metavar="NAME", help="Public names of tools.")
        parser.add_argument(
            "--state", choices=ToolState.values, help="List only tools in this state."
        )
        parser.add_argument("--server", metavar="SLUG", help="List only tools of this server.")
        parser.add_argument("--reason", default="", help="Reason for hiding the tools.")

    def handle(self, *args: Any, **options: Any) -> None:
        act, names = options["act"], options["names"]
        if act == "list":
            if names:
                raise Invalid(
                    "Specify an action before the tool names: approve, keep-old, hold or release."
                )
            self._list(options)
            return
        if not names:
            raise Invalid(f"Specify at least one tool name for {act}.")
        results = [_act(act, name, options["reason"]) for name in dict.fromkeys(names)]
        self._report(results, [f"{result['name']}: {result['message']}" for result in results])
        failed = sum(not result["ok"] for result in results)
        if failed:
            sys.exit(3 if failed < len(results) else 1)

    def _report(self, tools: list[dict[str, Any]], lines: list[str]) -> None:
        json_format = {"ensure_ascii": False, "indent": 2, "cls": DjangoJSONEncoder}
        self.report({"tools": tools}, "\n".join(lines), **json_format)

    def _list(self, options: dict[str, Any]) -> None:
        rows = Tool.objects.with_definitions().prefetch_related("groups").order_by("public_name")
        rows = rows.filter(state=options["state"]) if options["state"] else rows.current()
        if options["server"]:
            rows = rows.filter(server__slug=options["server"])
        self._report([serialize_tool(tool) for tool in rows], [_line(tool) for tool in rows])


def _act(act: str, name: str, reason: str) -> dict[str, Any]:
    tool = Tool.objects.by_name([name]).get(name)
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
