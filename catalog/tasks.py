"""Celery tasks of the catalog, on the queue `index`."""

from celery import shared_task

from catalog.search.embeddings import store as vector_store


@shared_task(name="catalog.tasks.embed")  # type: ignore[untyped-decorator]
def embed() -> None:
    vector_store.embed_missing()


def send_embedding() -> None:
    """Queue encoding of changed texts, for deployments without Celery beat."""
    if vector_store.is_due():
        embed.apply_async(expires=5)
