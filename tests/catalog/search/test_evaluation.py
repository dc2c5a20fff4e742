"""The evaluate_search command: metrics, output and errors."""

import json
from io import StringIO
from math import log2

import pytest
from django.core.management import CommandError, call_command

from catalog.hints import phrasebook
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
METRICS = [
    *("hit_at_1", "recall_at_5", "recall_at_10", "recall_at_15", "mrr", "ndcg_at_5", "tokens"),
    *("p50_ms", "p95_ms"),
]
KEYS = ["set", "strategy", "kind", "queries", *METRICS]


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
    assert 40 < bm25["tokens"] <= 300


def test_a_table_is_printed_for_selected_strategies_and_a_query_limit(folder):
    lines = run(folder, "--strategy", "bm25", "--strategy", "regex", "--limit", 1).splitlines()

    assert lines[0].split() == ["set", "strategy", "queries", *METRICS]
    assert [line.split()[:2] for line in lines[1:]] == [["small", "bm25"], ["small", "regex"]]


def test_kinds_have_rows_of_their_own(folder):
    kinds = ["agent", "agent", "sentence"]
    rows = [{**query, "kind": kind} for query, kind in zip(QUERIES, kinds, strict=True)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, rows)))

    results = json.loads(run(folder, "--strategy", "bm25", "--json"))["rows"]

    assert [(row["kind"], row["queries"]) for row in results] == [
        ("", 3),
        ("agent", 2),
        ("sentence", 1),
    ]
    assert results[1]["recall_at_15"] == 0.75
    assert "small · agent" in run(folder, "--strategy", "bm25")


def test_hints_of_a_set_and_of_the_phrasebook_count_unless_left_out(folder, monkeypatch):
    text = "# w\nforecast\tWeather of a day.\n  do I need an umbrella\n"
    monkeypatch.setattr(phrasebook, "bundled", lambda: phrasebook.parse(text))
    hinted = [{**tool, "hints": ["yell at the devs"]} for tool in TOOLS[1:2]]
    lines = [json.dumps(tool) for tool in (TOOLS[0], *hinted, TOOLS[2])]
    (folder / "tools.jsonl").write_text("\n".join(lines))
    queries = [
        {"id": "1", "query": "umbrella", "relevant": ["w__forecast"]},
        {"id": "2", "query": "yell at devs", "relevant": ["g__issue"]},
    ]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))

    def recall_at_5(*options):
        return json.loads(run(folder, "--strategy", "bm25", "--json", *options))["rows"][0]

    assert recall_at_5()["recall_at_5"] == 1
    assert recall_at_5("--without-hints")["recall_at_5"] == 0


def test_the_gold_set_of_toolcrib_is_the_default():
    rows = json.loads(run("--strategy", "bm25", "--json"))["rows"]

    assert rows[0]["set"] == "gold"
    by_kind = {row["kind"]: row for row in rows}
    assert by_kind["agent"]["recall_at_5"] >= 0.9
    assert {"sentence", "vague", "typo", "German", "Korean"} <= by_kind.keys()
    assert all(row["tokens"] <= 300 for row in rows)


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
