"""The trace context of requests, which is passed on also without spans."""

import json

import pytest

from tests.support.upstream_calls import TRANSPORTS, call_tool, run_scenario, running_upstream
from toolcrib.lib.telemetry import tracing

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("how", TRANSPORTS)
def test_a_server_receives_the_trace_context_of_a_request_in_meta(how):
    async def scenario(server):
        await call_tool(server, "seen")
        meta = {"traceparent": CONTEXT, "tracestate": "vendor=1", "baggage": "user=x"}
        tracing.accept({"traceparent": OTHER}, meta)
        return await call_tool(server, "seen")

    with running_upstream(how) as server:
        outcome = run_scenario(lambda: scenario(server))
    calls = [
        message["params"].get("_meta", {})
        for message in json.loads(outcome.content[0]["text"])
        if message.get("method") == "tools/call"
    ]
    assert "traceparent" not in calls[0]
    assert (calls[1]["traceparent"], calls[1]["tracestate"]) == (CONTEXT, "vendor=1")
    assert "baggage" not in calls[1]


@pytest.mark.parametrize(
    "value",
    [
        *("", "00-1-2-01", CONTEXT.upper(), f"{CONTEXT}\n", f"ff{CONTEXT[2:]}", 5),
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
    ],
)
def test_an_invalid_trace_context_is_ignored(value):
    assert tracing._read({"traceparent": value}) == {}
