import django.db.models.deletion
from django.db import migrations, models

import sessions_app.models.sessions


class Migration(migrations.Migration):
    dependencies = [
        ("sessions_app", "0008_redundant_indexes"),
    ]

    operations = [
        migrations.CreateModel(
            name="McpConnection",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "connection_id",
                    models.CharField(
                        default=sessions_app.models.sessions.new_connection_id,
                        max_length=40,
                        unique=True,
                    ),
                ),
                ("protocol_version", models.CharField(max_length=20)),
                ("client", models.TextField(default="{}")),
                ("capabilities", models.TextField(default="{}")),
                (
                    "strategy",
                    models.CharField(
                        blank=True,
                        choices=[("dispatch", "Dispatch"), ("inject", "Inject")],
                        max_length=8,
                    ),
                ),
                ("cancelled", models.TextField(default="[]")),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "key",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="mcp_connections",
                        to="sessions_app.apikey",
                    ),
                ),
                (
                    "session",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="sessions_app.agentsession",
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
            },
        ),
    ]
