"""The Celery application: in-memory broker when embedded, Redis in production.

Messages are JSON and contain ids only: a worker reads everything else from the database.
"""

import os

from celery import Celery
from celery.signals import after_task_publish, beat_init, heartbeat_sent, setup_logging
from django.conf import settings
from kombu.transport import TRANSPORT_ALIASES

from toolcrib.lib.process_identity import touch_heartbeat
from toolcrib.lib.telemetry import exchange, metrics

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

TRANSPORT_ALIASES["memory"] = "toolcrib.runtime.memory_broker:Transport"

app = Celery("toolcrib")
app.conf.update(
    broker_url="memory://" if settings.EMBEDDED else settings.REDIS_URL,
    broker_connection_retry_on_startup=True,
    # Retry forever: Redis may be down for any length of time.
    broker_connection_max_retries=None,
    broker_transport_options={}
    if settings.EMBEDDED
    else {
        "visibility_timeout": 600,
        "socket_connect_timeout": 1,
        "socket_timeout": 5,
        # A request that sends a task must not wait for Redis: retry once, immediately. A task that
        # could not be sent stays due in the database. Workers retry forever on their own.
        "max_retries": 1,
        "interval_start": 0,
    },
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    task_default_queue="sync",
    # Declared here, so that a worker started without -Q serves both.
    task_queues={name: {"exchange": name, "routing_key": name} for name in ("sync", "index")},
    task_routes={
        "servers.tasks.*": {"queue": "sync"},
        "sessions_app.tasks.*": {"queue": "index"},
        "catalog.tasks.*": {"queue": "index"},
    },
    task_publish_retry=False,
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    worker_concurrency=settings.SYNC_WORKERS,
    worker_pool="threads",
    worker_hijack_root_logger=False,
    timezone="UTC",
    beat_schedule={
        "sync_due": {"task": "servers.tasks.sync_due", "schedule": 5.0},
        "tidy_sessions": {"task": "sessions_app.tasks.tidy_sessions", "schedule": 10.0},
        "embed": {"task": "catalog.tasks.embed", "schedule": 5.0, "options": {"expires": 5}},
        "write_hints": {
            "task": "catalog.tasks.write_hints",
            "schedule": 30.0,
            "options": {"expires": 30},
        },
        "notify": {
            "task": "sessions_app.tasks.notify",
            "schedule": 5.0,
            "options": {"expires": 5},
        },
        "run_golden": {
            "task": "sessions_app.tasks.run_golden",
            "schedule": 5.0,
            "options": {"expires": 5},
        },
    },
    # The database records what is due, so beat keeps no schedule file.
    beat_scheduler="celery.beat:Scheduler",
)
app.autodiscover_tasks(["servers", "sessions_app", "catalog"])


@setup_logging.connect  # type: ignore[untyped-decorator]
def keep_django_logging(**kwargs: object) -> None:
    """Keep Celery from replacing the log configuration, by being connected."""


@heartbeat_sent.connect  # type: ignore[untyped-decorator]
def record_heartbeat(**kwargs: object) -> None:
    touch_heartbeat()
    if metrics.enabled:
        exchange.publish()


@beat_init.connect  # type: ignore[untyped-decorator]
def connect_beat_heartbeat(**kwargs: object) -> None:
    after_task_publish.connect(record_heartbeat)
