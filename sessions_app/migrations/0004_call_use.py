"""Let use be counted from an index alone; it begins with the time, so the one of times goes."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("sessions_app", "0003_rolling_session"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="call",
            index=models.Index(
                fields=[
                    "accepted_at",
                    "tool_name",
                    "agent",
                    "path",
                    "state",
                    "is_error",
                    "tokens",
                    "tool",
                ],
                name="call_use",
            ),
        ),
        migrations.RemoveIndex(model_name="call", name="call_by_time"),
    ]
