from django.apps import AppConfig


class ToolcribConfig(AppConfig):
    name = "toolcrib"

    def ready(self) -> None:
        # Bind tasks to our Celery application in every process, management commands included.
        from toolcrib import celery  # noqa: F401
