"""Names of tools that no sync has brought yet: kept with their settings, claimed when they arrive.

A configuration file may name members and settings of tools before their server was reached.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction

from catalog.models import ExpectedMember, ExpectedTool, Group, Membership, Tool
from catalog.tools import settings as tool_settings
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.roles import SYSTEM

BATCH_SIZE = 500


def set_expected_members(group: Group, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the expected members of a group; rows have position and preload."""
    group.expected.all().delete()
    ExpectedMember.objects.bulk_create(
        [ExpectedMember(group=group, tool_name=name, **row) for name, row in rows.items()],
        batch_size=BATCH_SIZE,
    )


def claim(tools: Sequence[Tool]) -> None:
    """Give new tools the memberships and settings that were expected of them."""
    by_name = {tool.public_name: tool for tool in tools}
    names = list(by_name)
    for start in range(0, len(names), BATCH_SIZE):
        chunk = names[start : start + BATCH_SIZE]
        expected = ExpectedMember.objects.filter(tool_name__in=chunk)
        Membership.objects.bulk_create(
            [
                Membership(
                    group_id=row.group_id,
                    tool=by_name[row.tool_name],
                    position=row.position,
                    preload=row.preload,
                )
                for row in expected
            ],
            ignore_conflicts=True,
        )
        expected.delete()
        for row in ExpectedTool.objects.filter(tool_name__in=chunk):
            _apply_settings(by_name[row.tool_name], row.settings)
            row.delete()


def _apply_settings(tool: Tool, values: Mapping[str, Any]) -> None:
    """Apply each setting; one that no longer fits the tool is left out and not tried again."""
    for name, value in values.items():
        try:
            with transaction.atomic():
                tool_settings.change(tool, {name: value}, actor=SYSTEM)
        except ToolcribError:
            continue
    tool.refresh_from_db()
