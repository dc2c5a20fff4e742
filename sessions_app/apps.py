from django.apps import AppConfig
from django.db import connection
from django.db.models.signals import post_migrate


def _create_data_key(**_: object) -> None:
    """Create the data key once its table exists: writers find it before their first payload."""
    from sessions_app.models.encryption import DataKey, ensure_data_key

    if DataKey._meta.db_table in connection.introspection.table_names():
        ensure_data_key()


class SessionsAppConfig(AppConfig):
    name = "sessions_app"

    def ready(self) -> None:
        from servers.connections import coordination
        from sessions_app.sessions import lifecycle  # models can be read from now on

        post_migrate.connect(_create_data_key, sender=self)
        coordination.set_open_sessions_source(lifecycle.open_sessions)
