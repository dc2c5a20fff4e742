"""What others see of a running installation: spans at an OTLP receiver, alerts at a webhook."""

import gzip
import json

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.agents import make_agent
from tests.support.installation import Installation, free_port
from tests.support.receiver import running_receiver
from tests.support.servers import register
from tests.support.upstreams.running import running_http

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def receiver():
    with running_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def toolcrib(tmp_path_factory, receiver):
    env = {
        "TOOLCRIB_TRACING": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with Installation(tmp_path_factory.mktemp("installation"), env) as running:
        yield running


def read_spans(posted):
    """Return the spans by name: (trace, id, parent, kind, attributes)."""
    spans = {}
    for each in posted:
        if each.path != "/v1/traces":
            continue
        is_zipped = each.headers.get("content-encoding") == "gzip"
        body = gzip.decompress(each.body) if is_zipped else each.body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {item.key: item.value.string_value for item in span.attributes}
                    ids = [getattr(span, name).hex() for name in ("trace_id", "span_id")]
                    key = span.name, span.kind
                    spans[key] = (*ids, span.parent_span_id.hex(), values)
    return spans


def test_spans_continue_the_trace_of_an_agent_and_the_server_continues_them(toolcrib, receiver):
    server, client = 2, 3  # kinds
    with running_http("raw_calls", "--era", "modern", "--http") as url:
        register(toolcrib, "raw", f"{url}/mcp")
        session = make_agent(toolcrib, "tracer").open(mode="deferred")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "baggage": "user=secret"}
        post = session.agent.send
        assert post("POST", f"{session.path}/search", {"query": "ping"}, headers).status == 200
        body = {"tool_name": "raw__ping", "arguments": {}}
        answer = post("POST", f"{session.path}/call", body, headers).json
        assert answer["state"] == "succeeded", answer
    wanted = {
        ("tools/call raw__ping", server),
        ("tools/call ping", client),
        ("tools/call search_tools", server),
        ("tools/list raw", client),
    }
    receiver.wait_for(lambda posted: wanted <= read_spans(posted).keys())
    spans = read_spans(receiver.posted)
    trace, span_id, parent, values = spans["tools/call raw__ping", server]
    assert (trace, parent) == (TRACE, PARENT)
    assert values["toolcrib.session.id"] == session.id
    assert values["toolcrib.agent"] == "tracer"
    assert (values["toolcrib.outcome"], values["toolcrib.call.id"]) == (
        *("succeeded", answer["call_id"]),
    )
    sent = spans["tools/call ping", client]
    assert sent[:1] + sent[2:3] == (TRACE, span_id)
    assert sent[3]["toolcrib.server"] == "raw"
    assert spans["tools/call search_tools", server][0] == TRACE
    assert spans["tools/list raw", client][3]["toolcrib.outcome"] == "ok"

    received = json.loads(answer["content"][0]["text"])[-1]["params"]["_meta"]
    assert received["traceparent"] == f"00-{TRACE}-{sent[1]}-01"
    assert "baggage" not in received


def test_a_webhook_receives_the_alert_about_a_failing_server(toolcrib, receiver):
    values = {"values": {"alert_failing_seconds": 0}}
    assert toolcrib.api("PATCH", "/settings", values)[0] == 200
    hook = {
        "name": "ops",
        "address": f"{receiver.url}/hook",
        "events": ["alert.raised", "call.finished"],
    }
    status, created = toolcrib.api("POST", "/webhooks", hook)
    assert status == 201, created
    server = {
        "name": "CRM",
        "slug": "crm",
        "transport": "http",
        "url": f"http://127.0.0.1:{free_port()}/mcp",
    }
    assert toolcrib.api("POST", "/servers", server)[0] == 201

    def find(posted):
        bodies = [json.loads(each.body) for each in posted if each.path == "/hook"]
        return [body for body in bodies if body["data"].get("key") == "crm"]

    (alert,) = receiver.wait_for(find, 60)
    assert (alert["type"], alert["data"]["kind"]) == ("alert.raised", "server_failing")
    assert "CRM is failing" in alert["data"]["message"]
    (firing,) = toolcrib.api("GET", "/alerts?firing=true")[1]["items"]
    assert firing["id"] == alert["data"]["id"]
