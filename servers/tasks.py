"""Celery tasks for syncs. The logic is in servers.sync."""

from celery import shared_task

from servers.sync import runner, scheduling


@shared_task(name="servers.tasks.sync_server")  # type: ignore[untyped-decorator]
def sync_server(server_id: int) -> None:
    runner.sync_if_due(server_id)


@shared_task(name="servers.tasks.sync_due")  # type: ignore[untyped-decorator]
def sync_due() -> None:
    scheduling.queue_due_syncs()
