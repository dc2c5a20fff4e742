"""OpenTelemetry spans, and the W3C trace context of requests, which servers receive in `_meta`.

Spans are made if TOOLCRIB_TRACING enables them; callers test `enabled` first, so that they cost
nothing otherwise. The trace context of a request is passed on in any case, but never its baggage.
Arguments and results are never attributes.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from toolcrib.lib.errors import ToolcribError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

enabled = False  # set at startup

TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
MAX_STATE_LENGTH = 512
Carrier = Mapping[str, str]
NONE: Carrier = {}
# Of the current request: the context that it continues, and another one that it is linked with.
_parent: ContextVar[Carrier] = ContextVar("trace parent", default=NONE)
_link: ContextVar[Carrier] = ContextVar("trace link", default=NONE)


def accept(headers: Mapping[str, str], meta: Mapping[str, Any] | None = None) -> None:
    """Read the trace context of a request. That of `_meta` is the parent, if it has one."""
    in_headers = _read(headers)
    in_meta = _read(meta) if meta else NONE
    if in_meta or in_headers:
        _parent.set(in_meta or in_headers)
        _link.set(in_headers if in_meta else NONE)


def _read(source: Mapping[str, Any]) -> Carrier:
    traceparent = source.get("traceparent")
    if not isinstance(traceparent, str) or not TRACEPARENT.fullmatch(traceparent):
        return NONE
    state = source.get("tracestate")
    if isinstance(state, str) and state.isascii() and 0 < len(state) <= MAX_STATE_LENGTH:
        return {"traceparent": traceparent, "tracestate": state}
    return {"traceparent": traceparent}


def outgoing() -> dict[str, str]:
    """Return the trace context for a server: of the current span, or as the request had it."""
    if not enabled:
        return dict(_parent.get())
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier


@contextmanager
def server_span(name: str, attributes: Mapping[str, Any]) -> Iterator["Span"]:
    """Run a block in a span of kind SERVER, which continues the trace of the request."""
    from opentelemetry.trace import Link, SpanKind, get_current_span

    context = _propagator().extract(_parent.get())
    links = []
    if other := _link.get():
        linked = get_current_span(_propagator().extract(other)).get_span_context()
        links.append(Link(linked))
    with (
        _tracer().start_as_current_span(
            name, context, SpanKind.SERVER, dict(attributes), links, set_status_on_exception=False
        ) as span,
        _recording_errors(span),
    ):
        yield span


@contextmanager
def client_span(name: str, attributes: Mapping[str, Any]) -> Iterator["Span"]:
    """Run a block in a span of kind CLIENT, a child of the current one."""
    from opentelemetry.trace import SpanKind

    with (
        _tracer().start_as_current_span(
            name, None, SpanKind.CLIENT, dict(attributes), set_status_on_exception=False
        ) as span,
        _recording_errors(span),
    ):
        yield span


def annotate(attributes: Mapping[str, Any]) -> None:
    """Add attributes to the current span."""
    from opentelemetry.trace import get_current_span

    get_current_span().set_attributes(dict(attributes))


def set_error(span: "Span", error_type: str) -> None:
    """Mark a span as failed. The type is a code, never a message: that may quote a server."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


@contextmanager
def _recording_errors(span: "Span") -> Iterator[None]:
    try:
        yield
    except ToolcribError as error:
        set_error(span, error.code)
        raise
    except BaseException as error:
        set_error(span, type(error).__name__)
        raise


@lru_cache(maxsize=1)
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


@lru_cache(maxsize=1)
def _tracer() -> "Tracer":
    """Return the tracer; the first time, start the exporter unless a provider is installed."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Resource and exporter read the OTEL_ variables; this is the default of the name.
        resource = Resource({"service.name": "toolcrib"}).merge(Resource.create())
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("toolcrib")
