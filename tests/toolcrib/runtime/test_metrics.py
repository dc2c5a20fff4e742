"""The endpoint /metrics, read by the parser of Prometheus's own client."""

import json
import re
from pathlib import Path

import pytest
import yaml
from django.db import connection
from prometheus_client.parser import text_string_to_metric_families

from catalog.audit import SYSTEM
from catalog.tools.actions import save_custom_tool
from sessions_app.ledger.writer import LedgerCursor, write_event
from sessions_app.models import AgentSession, EventKind
from tests.support.agent_client import make_agent_client, make_group
from tests.support.factories import make_run, make_server, make_session, tool_object
from toolcrib.lib.telemetry import exchange, metrics
from toolcrib.lib.telemetry.metrics import counted, observed

pytestmark = pytest.mark.django_db
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def enabled(monkeypatch):
    monkeypatch.setattr(metrics, "enabled", True)
    metrics.recorder.take()
    exchange._embedded_totals.clear()


def read(client, **headers):
    response = client.get("/metrics", **headers)
    assert response.status_code == 200, response.content
    assert response.headers["Content-Type"].startswith("text/plain")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.content.decode())
        for sample in family.samples
    }


def test_metrics_count_what_agents_do(client, enabled, django_capture_on_commit_callbacks):
    make_server(slug="weather")
    make_group("own", save_custom_tool(tool_object("count", inputSchema=NUMBER), actor=SYSTEM))
    with django_capture_on_commit_callbacks(execute=True):
        session = make_agent_client("scout", mode="deferred").open()
        session.search("count something")
        session.call("count", {"n": 5})
        session.call("count", {"n": "five"})
    values, tokens = read(client), AgentSession.objects.get().token_figures
    assert values["toolcrib_calls_total", "client", ""] == 1
    assert values["toolcrib_calls_total", "refused", ""] == 1
    assert values["toolcrib_searches_total", "found"] == 1
    assert values["toolcrib_search_duration_seconds_count",] == 1
    assert values["toolcrib_search_duration_seconds_bucket", "+Inf"] == 1
    assert values["toolcrib_sessions_opened_total",] == values["toolcrib_sessions_open",] == 1
    assert values["toolcrib_servers", "new"] == values["toolcrib_processes",] == 1
    for part in ("baseline", "catalog", "searches", "definitions", "results"):
        assert values.get(("toolcrib_tokens_total", part), 0) == getattr(tokens, part), part
    assert values["toolcrib_tokens_saved",] == tokens.saved
    assert read(client) == values  # reading changes nothing


def test_scripts_are_counted_when_they_end(client, enabled, django_capture_on_commit_callbacks):
    session = make_session()
    make_run(session, state="held", finished_at=None)
    ends = (("completed", 3, 900), ("failed", 1, 0), ("completed", 2, 50))
    with django_capture_on_commit_callbacks(execute=True):
        for state, calls, spared in ends:
            details = {"state": state, "calls": calls, "spared": spared}
            write_event(LedgerCursor(connection), session.pk, EventKind.SCRIPT, details=details)
    values = read(client)
    assert values["toolcrib_scripts_total", "completed"] == 2
    assert values["toolcrib_scripts_total", "failed"] == 1
    assert values["toolcrib_script_calls_total",] == 6
    assert values["toolcrib_script_tokens_spared_total",] == 950
    assert values["toolcrib_scripts_held",] == 1


def test_nothing_is_counted_while_metrics_are_disabled(client):
    metrics.recorder.take()
    make_agent_client("scout", mode="deferred").open().search("count something")
    assert not metrics.recorder.values
    assert client.get("/metrics").status_code == 404


def test_without_a_token_only_this_machine_reads_metrics(client, enabled, settings):
    assert client.get("/metrics", REMOTE_ADDR="192.0.2.7").status_code == 403
    assert client.get("/metrics", headers={"X-Forwarded-For": "192.0.2.7"}).status_code == 403
    settings.METRICS_TOKEN = "s3cret-token"
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    read(client, REMOTE_ADDR="192.0.2.7", headers={"Authorization": "Bearer s3cret-token"})


def test_gauges_of_processes_are_summed_and_of_the_lag_the_largest_counts():
    lag = ["toolcrib_event_loop_lag_seconds", "max"]
    first = [["toolcrib_calls_in_flight", "weather", 2], [*lag, 0.1]]
    second = [["toolcrib_calls_in_flight", "weather", 3], [*lag, 0.05]]
    merged = exchange._merge([first, second])
    assert merged["toolcrib_calls_in_flight", "weather"] == 5
    assert merged[tuple(lag)] == 0.1
    assert merged["toolcrib_processes",] == 2


def test_histograms_are_cumulative():
    name = "toolcrib_call_duration_seconds"
    changes = [change for value in (0.004, 0.2, 1000) for change in observed(name, value, "crm")]
    totals = {}
    for series, value in [*changes, counted("toolcrib_calls", "crm", "succeeded")]:
        totals[series] = totals.get(series, 0) + value
    text = metrics.render(totals, {}).decode()
    values = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("server") == "crm"
    }
    assert [values[f"{name}_bucket", le] for le in ("0.005", "0.1", "0.25", "300.0", "+Inf")] == [
        *(1, 1, 2, 2, 3)
    ]
    assert values[f"{name}_count", None] == 3
    assert values[f"{name}_sum", None] == pytest.approx(1000.204)


def test_the_dashboard_and_the_rules_use_metrics_that_exist(client, enabled):
    folder = Path(__file__).resolve().parents[3] / "docs" / "monitoring"
    dashboard = json.loads((folder / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((folder / "prometheus-rules.yml").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    text = client.get("/metrics").content.decode()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    known = {name + suffix for name, kind in families.items() for suffix in suffixes[kind]}
    used = {name for query in queries for name in re.findall(r"toolcrib_\w+", query)}
    assert used <= known
    documented = (folder.parent / "operations.md").read_text()
    for name, kind in families.items():
        assert f"`{name}{'_total' if kind == 'counter' else ''}`" in documented
        assert {name + suffix for suffix in suffixes[kind]} & used, name  # the dashboard shows all
    labels = {label for query in queries for label in re.findall(r"by \(([\w, ]+)\)", query)}
    specs = (metrics.COUNTERS, metrics.HISTOGRAMS, metrics.GAUGES)
    declared = {name for spec in specs for each in spec.values() for name in each.labels} | {"le"}
    assert {name for each in labels for name in each.split(", ")} <= declared
