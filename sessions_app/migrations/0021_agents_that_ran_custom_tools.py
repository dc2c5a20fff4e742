"""Agents that have called custom tools keep getting them over MCP."""

from typing import Any

from django.db import migrations


def set_for_callers(apps: Any, schema_editor: Any) -> None:
    Call, Agent = (apps.get_model("sessions_app", name) for name in ("Call", "Agent"))
    callers = Call.objects.filter(state="client", agent__isnull=False).order_by()
    agents = set(callers.values_list("agent", flat=True).distinct())
    Agent.objects.filter(pk__in=agents).update(runs_custom_tools=True)


class Migration(migrations.Migration):
    dependencies = [("sessions_app", "0020_custom_tools_over_mcp")]

    operations = [migrations.RunPython(set_for_callers, migrations.RunPython.noop)]
