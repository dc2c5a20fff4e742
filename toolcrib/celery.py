"""The Celery application: in-process without services, on Redis in production.

Messages are JSON and carry ids only: a worker reads and judges everything from the database.
"""

import os

from celery import Celery
from celery.signals import after_task_publish, beat_init, heartbeat_sent, setup_logging
from django.conf import settings

from toolcrib import health

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

app = Celery("toolcrib")
app.conf.update(
    broker_url="memory://" if settings.EMBEDDED else settings.REDIS_URL,
    broker_connection_retry_on_startup=True,
    # Redis may be away for as long as it likes.
    broker_connection_max_retries=None,
    broker_transport_options={"polling_interval": 0.05}
    if settings.EMBEDDED
    else {
        "visibility_timeout": 600,
        "socket_connect_timeout": 1,
        "socket_timeout": 5,
        # A request that sends a task must not wait for Redis: one more try, at once. What could
        # not be sent stays due in the database. Workers have their own, endless patience.
        "max_retries": 1,
        "interval_start": 0,
    },
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    task_default_queue="sync",
    # Named here, so that a worker told nothing serves both.
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
        "run_golden": {
            "task": "sessions_app.tasks.run_golden",
            "schedule": 5.0,
            "options": {"expires": 5},
        },
    },
    # What is due stands in the database; beat has nothing of its own to remember.
    beat_scheduler="celery.beat:Scheduler",
)
app.autodiscover_tasks(["servers", "sessions_app", "catalog"])


@setup_logging.connect  # type: ignore[untyped-decorator]
def keep_django_logging(**kwargs: object) -> None:
    """Being connected is what keeps Celery from replacing the log configuration."""


@heartbeat_sent.connect  # type: ignore[untyped-decorator]
def worker_lives(**kwargs: object) -> None:
    health.touch()


@beat_init.connect  # type: ignore[untyped-decorator]
def watch_beat(**kwargs: object) -> None:
    after_task_publish.connect(beat_lives)


def beat_lives(**kwargs: object) -> None:
    health.touch()
