"""The evaluate_search command: metrics, output and errors."""

import json
from io import StringIO
from math import log2

import pytest
from django.core.management import CommandError, call_command

from catalog.search.evaluation import ndcg, recall, reciprocal_rank

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
TOOLS = [
    {"id": "w__forecast", "server": "w", "name": "forecast", "description": "Weather of a day."},
    {"id": "g__issue", "server": "g", "name": "create_issue", "description": "Open an issue."},
    {"id": "m__mail", "server": "m", "name": "send_mail", "description": "Send mail to a person."},
]
QUERIES = [
    {"id": "1", "query": "weather of a day", "relevant": ["w__forecast"]},
    {"id": "2", "query": "open an issue", "relevant": ["g__issue", "m__mail"]},
    {"id": "3", "query": "mail " * 200, "relevant": ["m__mail"], "server_hint": "m"},
]
KEYS = [
    *("set", "strategy", "hit_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg_at_5"),
    *("p50_ms", "p95_ms"),
]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    lines = [json.dumps({**tool, "input_schema": SCHEMA}) for tool in TOOLS]
    (folder / "tools.jsonl").write_text("\n".join(lines))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, QUERIES)) + "\n")
    return folder


def run(*arguments):
    output, errors = StringIO(), StringIO()
    call_command("evaluate_search", *map(str, arguments), stdout=output, stderr=errors)
    return output.getvalue()


def test_json_output_has_a_row_per_set_and_strategy(folder):
    rows = json.loads(run(folder, "--json"))["rows"]

    assert [row["strategy"] for row in rows] == ["hybrid", "bm25", "embedding"]
    assert all(list(row) == KEYS for row in rows)
    assert {row["set"] for row in rows} == {"small"}
    bm25 = rows[1]
    assert bm25["hit_at_1"] == 1
    assert bm25["mrr"] == 1
    assert bm25["recall_at_5"] == pytest.approx((1 + 0.5 + 1) / 3, abs=1e-4)
    assert 0 < bm25["p50_ms"] <= bm25["p95_ms"]


def test_a_table_is_printed_for_selected_strategies_and_a_query_limit(folder):
    lines = run(folder, "--strategy", "bm25", "--strategy", "regex", "--limit", 1).splitlines()

    assert lines[0].split() == KEYS
    assert [line.split()[:2] for line in lines[1:]] == [["small", "bm25"], ["small", "regex"]]


def test_unreadable_input_is_reported(folder, tmp_path):
    with pytest.raises(CommandError, match="cannot be read"):
        run(tmp_path / "nowhere")
    with pytest.raises(CommandError, match="--limit"):
        run(folder, "--limit", 0)
    (folder / "queries.jsonl").write_text('{"query": "x", "relevant": ["a"]}\n{"query"')
    with pytest.raises(CommandError, match="line 2 is not JSON"):
        run(folder, "--strategy", "bm25")


def test_metrics_follow_their_standard_definitions():
    assert ndcg(["a", "x", "b"], {"a", "b"}) == pytest.approx((1 + 1 / 2) / (1 + 1 / log2(3)))
    assert ndcg(list("xxxxxa"), {"a"}) == 0
    assert ndcg(list("abcde"), set("abcdefgh")) == 1
    assert recall(["a", "x"], {"a", "b"}) == 0.5
    assert reciprocal_rank(["x", "a"], {"a"}) == 0.5
    assert reciprocal_rank([], {"a"}) == 0
