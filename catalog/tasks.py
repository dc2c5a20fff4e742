"""Celery shells of the catalog, for the queue `index`. The work is in vectors.py."""

from celery import shared_task

from catalog.search.embeddings import store as vector_store


@shared_task(name="catalog.tasks.embed")  # type: ignore[untyped-decorator]
def embed() -> None:
    vector_store.embed_missing()


def send_embedding() -> None:
    """Have a worker encode what changed; where there is no beat."""
    if vector_store.is_due():
        embed.apply_async(expires=5)
