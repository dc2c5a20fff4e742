from django.apps import AppConfig
from django.conf import settings


class ToolcribConfig(AppConfig):
    name = "toolcrib"

    def ready(self) -> None:
        # Bind tasks to our Celery application in every process, management commands included.
        from toolcrib import celery  # noqa: F401
        from toolcrib.lib.telemetry import metrics, tracing

        metrics.enabled = settings.METRICS
        tracing.enabled = settings.TRACING
