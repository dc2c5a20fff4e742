"""Drop the indexes of foreign keys that are the first column of another index.

With SQL, since Django would copy the table of calls three times on SQLite.
"""

import django.db.models.deletion
from django.db import migrations, models

CASCADE = django.db.models.deletion.CASCADE
SET_NULL = django.db.models.deletion.SET_NULL
OPTIONAL = {"blank": True, "null": True}
# Model, field, its target and options, and the index as Django named it.
FIELDS = (
    ("agentsession", "agent", "sessions_app.agent", CASCADE, {"related_name": "sessions"}, "8203cd7a"),
    ("call", "agent", "sessions_app.agent", CASCADE, {"related_name": "calls", **OPTIONAL}, "ad6d7bac"),
    ("call", "session", "sessions_app.agentsession", CASCADE, {"related_name": "call_rows", **OPTIONAL}, "b90e5223"),
    ("call", "tool", "catalog.tool", SET_NULL, OPTIONAL, "da9e864a"),
    ("event", "session", "sessions_app.agentsession", CASCADE, {"related_name": "events"}, "c115b7c5"),
    ("expansion", "session", "sessions_app.agentsession", CASCADE, {"related_name": "expansions"}, "19eab86f"),
    ("showndefinition", "session", "sessions_app.agentsession", CASCADE, {"related_name": "shown_definitions"}, "2a329c39"),
)  # fmt: skip


def drop_index(model, field, target, on_delete, options, suffix):
    table, column = f"sessions_app_{model}", f"{field}_id"
    index = f"{table}_{column}_{suffix}"
    altered = models.ForeignKey(target, on_delete, db_index=False, **options)
    return migrations.SeparateDatabaseAndState(
        database_operations=[
            migrations.RunSQL(
                f'DROP INDEX IF EXISTS "{index}"',
                f'CREATE INDEX IF NOT EXISTS "{index}" ON "{table}" ("{column}")',
            )
        ],
        state_operations=[migrations.AlterField(model, field, altered)],
    )


class Migration(migrations.Migration):
    dependencies = [
        ("catalog", "0005_golden_queries"),
        ("sessions_app", "0007_loads_version"),
    ]

    operations = [drop_index(*field) for field in FIELDS]
