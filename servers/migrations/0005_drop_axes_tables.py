"""Drop the tables of django-axes, which is no longer used: they hold names and addresses of failed
sign-ins. Nothing is lost in going back, since axes creates them empty."""

from django.db import migrations

TABLES = ("accessattemptexpiration", "accessattempt", "accessfailurelog", "accesslog")


class Migration(migrations.Migration):
    dependencies = [("servers", "0004_definition_bytes")]

    operations = [
        *(
            migrations.RunSQL(f"DROP TABLE IF EXISTS axes_{name}", migrations.RunSQL.noop)
            for name in TABLES
        ),
        migrations.RunSQL(
            "DELETE FROM django_migrations WHERE app = 'axes'", migrations.RunSQL.noop
        ),
    ]
