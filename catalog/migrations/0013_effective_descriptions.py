"""Store the definitions that agents get of tools whose description is overridden."""

import json

from django.db import migrations

from catalog.definitions.effective import derive
from catalog.definitions.parsing import search_text
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.token_counter import count_definition


def store(apps, schema_editor):
    definitions = apps.get_model("catalog", "Definition")
    tools = apps.get_model("catalog", "Tool").objects.exclude(description_override="")
    for tool in tools.exclude(approved=None).select_related("approved__readable"):
        origin = tool.approved.readable or tool.approved
        effective = derive(json.loads(origin.body), tool.description_override, {})
        body = canonical(effective)
        values = {
            "name": tool.approved.name,
            "body": body,
            "tokens": count_definition(effective),
            "search_text": search_text(effective).replace("\0", " "),
        }
        row, _ = definitions.objects.get_or_create(sha256=digest(body), defaults=values)
        tool.effective = row
        tool.save(update_fields=["effective"])


class Migration(migrations.Migration):
    dependencies = [("catalog", "0012_tool_overrides")]

    operations = [migrations.RunPython(store, migrations.RunPython.noop)]
