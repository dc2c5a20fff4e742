"""Sums metrics over the processes of an installation, in Redis.

Counters: each process adds what it counted since the last time to one hash, so that the sums
survive its end and never fall. Gauges: each process stores its own with the time, and what is old
is ignored. An embedded installation is one process and needs no Redis.
"""

import json
import logging
import threading
import time
from typing import TYPE_CHECKING

from django.conf import settings

from toolcrib.lib.process_identity import this_process
from toolcrib.lib.protocols.redis_client import connect, redis_error
from toolcrib.lib.telemetry import metrics
from toolcrib.lib.telemetry.metrics import Series, Values

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between two publications of a process
MAX_AGE = 20.0  # seconds after which a process counts as ended
TIMEOUT = 1.0
COUNTERS, GAUGES = "toolcrib:metrics:{NAME}:counters", "toolcrib:metrics:{NAME}:gauges"

_embedded_totals: dict[Series, float] = {}
_lock = threading.Lock()


def publish(gauges: Values | None = None) -> None:
    """Add this process's counters to the sums, and replace its gauges if it has any."""
    if settings.EMBEDDED:
        return
    taken = metrics.recorder.take()
    if not taken and gauges is None:
        return
    try:
        with _client() as client, client.pipeline() as pipeline:
            for series, value in taken.items():
                pipeline.hincrbyfloat(_key(COUNTERS), json.dumps(series), value)
            if gauges is not None:
                values = [[*series, value] for series, value in gauges.items()]
                stored = json.dumps({"at": time.time(), "values": values})
                pipeline.hset(_key(GAUGES), this_process(), stored)
            pipeline.execute()
    except redis_error() as error:
        metrics.record(taken.items())  # once more with the next publication
        logger.warning("Metrics could not be published: %s", error)


def collect(gauges: Values) -> tuple[Values, Values]:
    """Return counters and gauges of all processes. `gauges` are those of this one.

    Without Redis these are the figures of this process.
    """
    if settings.EMBEDDED:
        with _lock:
            for series, value in metrics.recorder.take().items():
                _embedded_totals[series] = _embedded_totals.get(series, 0.0) + value
            return dict(_embedded_totals), {**gauges, ("toolcrib_processes",): 1}
    publish(gauges)
    try:
        with _client() as client:
            counters = client.hgetall(_key(COUNTERS))
            stored = client.hgetall(_key(GAUGES))
            totals = {tuple(json.loads(name)): float(value) for name, value in counters.items()}
            processes = {name: json.loads(value) for name, value in stored.items()}
            old = [name for name, each in processes.items() if each["at"] < time.time() - MAX_AGE]
            if old:
                client.hdel(_key(GAUGES), *old)
    except redis_error() as error:
        logger.warning("Metrics of other processes are not available: %s", error)
        return dict(metrics.recorder.values), {**gauges, ("toolcrib_processes",): 1}
    return totals, _merge([each["values"] for name, each in processes.items() if name not in old])


def _merge(processes: list[list[list[object]]]) -> Values:
    merged: dict[Series, float] = {("toolcrib_processes",): len(processes)}
    for values in processes:
        for *names, value in values:
            series, number = tuple(map(str, names)), float(str(value))
            known = merged.get(series, 0.0)
            is_sum = series[0] not in metrics.LARGEST
            merged[series] = known + number if is_sum else max(known, number)
    return merged


def _client() -> "Redis":
    return connect(settings.REDIS_URL, TIMEOUT, socket_timeout=TIMEOUT, decode_responses=True)


def _key(template: str) -> str:
    return template.format_map(settings.DATABASES["default"])
