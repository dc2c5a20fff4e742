"""Celery tasks of the catalog, on the queue `index`."""

from celery import shared_task

from catalog.hints import bundled, model_writer
from catalog.search.embeddings import store as vector_store
from servers.transports.json_post import PostFailed, post_json


@shared_task(name="catalog.tasks.embed")  # type: ignore[untyped-decorator]
def embed() -> None:
    """Apply the phrasebook to changed tools, and encode changed texts."""
    bundled.apply()
    vector_store.embed_missing()


@shared_task(name="catalog.tasks.write_hints")  # type: ignore[untyped-decorator]
def write_hints() -> None:
    """Have the configured language model write hints for new tools."""
    model_writer.write_missing(_post)


def _post(*request: object) -> object:
    try:
        return post_json(*request)  # type: ignore[arg-type]
    except PostFailed as error:
        raise model_writer.ModelFailed(str(error)) from error


def send_embedding() -> None:
    """Queue encoding of changed texts, for deployments without Celery beat."""
    if bundled.is_due() or vector_store.is_due():
        embed.apply_async(expires=5)
    if model_writer.is_due():
        write_hints.apply_async(expires=5)
