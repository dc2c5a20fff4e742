from django.apps import AppConfig


class ToolcribConfig(AppConfig):
    name = "toolcrib"

    def ready(self) -> None:
        # Tasks belong to our Celery application in every process, commands included.
        from toolcrib import celery  # noqa: F401
