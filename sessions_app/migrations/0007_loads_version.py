from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sessions_app", "0006_agent_cost_per_minute")]

    operations = [
        migrations.AddField(
            model_name="agentsession",
            name="loads_version",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.RemoveField(model_name="showndefinition", name="version"),
    ]
