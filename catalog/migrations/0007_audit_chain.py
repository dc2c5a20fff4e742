import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    """Existing entries get the position 0: they were recorded before the chain began."""

    dependencies = [
        ("catalog", "0006_tool_payload_storage"),
    ]

    operations = [
        migrations.AlterField(
            model_name="auditentry",
            name="at",
            field=models.DateTimeField(default=django.utils.timezone.now),
        ),
        migrations.AddField(
            model_name="auditentry",
            name="mac",
            field=models.CharField(blank=True, default="", max_length=100),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="auditentry",
            name="link",
            field=models.CharField(blank=True, default="", max_length=64),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="auditentry",
            name="position",
            field=models.BigIntegerField(blank=True, default=0, null=True),
            preserve_default=False,
        ),
        migrations.AddIndex(
            model_name="auditentry",
            index=models.Index(
                condition=models.Q(("position", None)), fields=["id"], name="audit_not_chained"
            ),
        ),
        migrations.AddConstraint(
            model_name="auditentry",
            constraint=models.UniqueConstraint(
                condition=models.Q(("mac", ""), _negated=True),
                fields=("mac",),
                name="audit_mac_used_once",
            ),
        ),
        migrations.AddConstraint(
            model_name="auditentry",
            constraint=models.UniqueConstraint(
                condition=models.Q(("position__gt", 0)),
                fields=("position",),
                name="audit_position_used_once",
            ),
        ),
    ]
