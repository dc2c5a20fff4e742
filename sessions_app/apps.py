from django.apps import AppConfig


class SessionsAppConfig(AppConfig):
    name = "sessions_app"

    def ready(self) -> None:
        from servers.connections import coordination
        from sessions_app.sessions import lifecycle  # models can be read from now on

        coordination.set_open_sessions_source(lifecycle.open_sessions)
