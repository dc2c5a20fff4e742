"""How this web process is doing, for operators and what watches for them."""

from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema

from catalog.search.embeddings import store as vector_store
from servers.connections import metrics
from sessions_app.ledger.calls import THIS_PROCESS
from toolcrib.lib.api_schemas import ERRORS
from toolcrib.runtime.lifespan import runtime

router = Router(tags=["health"])


class LoopOut(Schema):
    longest_ms: float
    p99_ms: float
    seconds: int


class TurnsOut(Schema):
    server: str
    in_flight: int
    at_once: int
    waiting: int
    may_wait: int
    refused: int
    connection: str
    retry_in: int | None
    sentence: str


class VectorsOut(Schema):
    """How far the tools' vectors are: ready, working, or unavailable and why."""

    state: str
    reason: str
    total: int
    embedded: int


class HealthOut(Schema):
    process: str
    event_loop: LoopOut
    search: VectorsOut
    servers: list[TurnsOut]


@router.get("/health", response={200: HealthOut, **ERRORS})
def health(request: HttpRequest) -> dict[str, Any]:
    """Stalls of the event loop in the last minute and each server's turns, in this process; and
    how far the vectors for search are."""
    return {
        "process": THIS_PROCESS,
        "event_loop": runtime.pulse.stalls(),
        "search": vector_store.progress(),
        "servers": metrics.all_server_metrics(),
    }
