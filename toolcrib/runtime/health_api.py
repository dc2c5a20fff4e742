"""Health endpoint of the API: event-loop lag, search vectors and server concurrency."""

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema

from catalog.search.embeddings import store as vector_store
from servers.connections import metrics
from sessions_app.ledger.calls import THIS_PROCESS
from toolcrib.lib.api_schemas import ERRORS, choices
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
    """State of the search vectors: ready, working, or unavailable with a reason."""

    state: Annotated[str, choices(("ready", "working", "unavailable"))]
    reason: str
    total: int
    embedded: int


class HealthOut(Schema):
    process: str
    event_loop: LoopOut
    search: VectorsOut
    servers: list[TurnsOut]


@router.get("/health", response={200: HealthOut, **ERRORS})
def get_health(request: HttpRequest) -> dict[str, Any]:
    """Return this process's event-loop lag in the last minute and each server's concurrent calls,
    and the state of the search vectors."""
    return {
        "process": THIS_PROCESS,
        "event_loop": runtime.loop_monitor.lag(),
        "search": vector_store.progress(),
        "servers": metrics.all_server_metrics(),
    }
