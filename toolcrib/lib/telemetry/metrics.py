"""Counters and histograms for Prometheus, kept in this process, and their text format.

Nothing is counted unless TOOLCRIB_METRICS enables it: callers test `enabled` first. `exchange.py`
sums the processes of one installation. Labels are servers, outcomes and parts, never tools.
"""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest
from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_PLAIN_1_0_0
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BUCKETS = (*map(str, SECONDS), "+Inf")
SUM = "sum"  # instead of a bucket

Series = tuple[str, ...]  # name, labels, and of a histogram the bucket or SUM
Values = Mapping[Series, float]

enabled = False  # set at startup


@dataclass(frozen=True)
class Spec:
    help: str
    labels: tuple[str, ...] = ()


COUNTERS = {
    "toolcrib_calls": Spec("Calls that ended, by server and outcome.", ("server", "outcome")),
    "toolcrib_searches": Spec("Searches of agents.", ("outcome",)),
    "toolcrib_syncs": Spec("Syncs that ended.", ("server", "outcome")),
    "toolcrib_sessions_opened": Spec("Sessions that were opened."),
    "toolcrib_tokens": Spec(
        "Tokens of sessions: their baseline, and what they received. Given for tools are catalog, "
        "searches and definitions.",
        ("part",),
    ),
    "toolcrib_scripts": Spec("Scripts that ended, by outcome.", ("outcome",)),
    "toolcrib_script_calls": Spec("Calls that ended scripts had made."),
    "toolcrib_script_tokens_spared": Spec(
        "Tokens of results that ended scripts read and the model did not receive."
    ),
    "toolcrib_webhook_deliveries": Spec("Attempts to deliver a notification.", ("outcome",)),
}
HISTOGRAMS = {
    "toolcrib_call_duration_seconds": Spec(
        "From accepting a call that was sent to its recorded end.", ("server",)
    ),
    "toolcrib_search_duration_seconds": Spec("Searches, including their commit."),
    "toolcrib_sync_duration_seconds": Spec("Syncs, from their start to their end."),
}
GAUGES = {
    "toolcrib_calls_in_flight": Spec("Calls being executed.", ("server",)),
    "toolcrib_calls_queued": Spec("Calls that wait for a slot of their server.", ("server",)),
    "toolcrib_connections": Spec("Connections for calls, by state.", ("server", "state")),
    "toolcrib_event_loop_lag_seconds": Spec(
        "Event-loop lag in the last minute; of several processes the largest.", ("statistic",)
    ),
    "toolcrib_processes": Spec("Processes whose figures are included."),
    "toolcrib_sessions_open": Spec("Open sessions."),
    "toolcrib_servers": Spec("Servers by state.", ("state",)),
    "toolcrib_calls_held": Spec("Calls that wait for a person."),
    "toolcrib_scripts_held": Spec("Scripts that wait for a person."),
    "toolcrib_tools_pending_review": Spec("Definitions that wait for a person."),
    "toolcrib_tokens_saved": Spec("Baseline minus tokens given for tools; may fall."),
    "toolcrib_alerts_firing": Spec("Alerts that are not resolved."),
}
LARGEST = {"toolcrib_event_loop_lag_seconds"}  # gauges that are not summed over processes
# The columns of a session in which tokens are counted, and their part.
TOKEN_PARTS = {
    "tokens_all": "baseline",
    "tokens_catalog": "catalog",
    "tokens_search": "searches",
    "tokens_load": "definitions",
    "tokens_call": "results",
}


@dataclass
class Recorder:
    """Totals of this process since its last publication. Threads may share it."""

    values: defaultdict[Series, float] = field(default_factory=lambda: defaultdict(float))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, changes: Iterable[tuple[Series, float]]) -> None:
        with self.lock:
            for series, value in changes:
                self.values[series] += value

    def take(self) -> dict[Series, float]:
        """Return the totals and start again at zero."""
        with self.lock:
            taken, self.values = dict(self.values), defaultdict(float)
        return taken


recorder = Recorder()


def counted(name: str, *labels: str, by: float = 1) -> tuple[Series, float]:
    return (name, *labels), by


def observed(name: str, seconds: float, *labels: str) -> tuple[tuple[Series, float], ...]:
    """Return the changes of a histogram: the bucket of a value, and its sum."""
    bucket = BUCKETS[bisect_left(SECONDS, seconds)]
    return ((name, *labels, bucket), 1), ((name, *labels, SUM), seconds)


def record(changes: Iterable[tuple[Series, float]]) -> None:
    recorder.add(changes)


def render(totals: Values, gauges: Values) -> bytes:
    """Return all metrics in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Collector(totals, gauges))
    return generate_latest(registry)


class _Collector:
    def __init__(self, totals: Values, gauges: Values) -> None:
        self._totals, self._gauges = totals, gauges

    def collect(self) -> Iterator[Metric]:
        for name, spec in COUNTERS.items():
            counter = CounterMetricFamily(name, spec.help, labels=spec.labels)
            for labels, value in _of(self._totals, name, spec):
                counter.add_metric(labels, value)
            yield counter
        for name, spec in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, spec.help, labels=spec.labels)
            by_labels: dict[tuple[str, ...], dict[str, float]] = {}
            for (*labels, bucket), value in _of(self._totals, name, spec, more=1):
                by_labels.setdefault(tuple(labels), {})[bucket] = value
            for labels, values in sorted(by_labels.items()):
                histogram.add_metric(labels, list(_cumulate(values)), values.get(SUM, 0.0))
            yield histogram
        for name, spec in GAUGES.items():
            gauge = GaugeMetricFamily(name, spec.help, labels=spec.labels)
            for labels, value in _of(self._gauges, name, spec):
                gauge.add_metric(labels, value)
            yield gauge


def _of(
    values: Values, name: str, spec: Spec, more: int = 0
) -> Iterator[tuple[Sequence[str], float]]:
    """Yield the labels and values of one metric; without labels at least a zero."""
    found = sorted((series[1:], value) for series, value in values.items() if series[0] == name)
    size = len(spec.labels) + more
    yield from (each for each in found if len(each[0]) == size)
    if not found and not size:
        yield (), 0.0


def _cumulate(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    total = 0.0
    for bucket in BUCKETS:
        total += values.get(bucket, 0.0)
        yield bucket, total
