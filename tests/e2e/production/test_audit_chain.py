"""Audit chain with several web processes on PostgreSQL: one writes it, woken by notifications."""

import json
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.e2e.production.test_workers import start_two
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]


def verify(production):
    done = production.command("verify_audit", "--json")
    return json.loads(done.stdout)


def test_concurrent_writes_give_one_chain_and_each_line_once(production, tmp_path):
    sink = tmp_path / "audit.jsonl"
    production.env["TOOLCRIB_AUDIT_SINK"] = str(sink)
    start_two(production)
    token = production.token("admin")

    def add(number):
        return production.api("POST", "/agents", {"name": f"agent-{number}"}, token=token)[0]

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(add, range(24))) == {201}

    def is_complete():
        result = verify(production)
        assert result["holds"], result
        return result["pending"] == 0 and result["verified"] >= 24

    wait_for(is_complete, 60)
    positions = [json.loads(line)["position"] for line in sink.read_text().splitlines()]
    assert positions == list(range(1, len(positions) + 1))
    assert len(positions) >= 24

    with psycopg.connect(production.env["DATABASE_URL"], autocommit=True) as database:
        database.execute("DELETE FROM catalog_auditentry WHERE position = %s", [len(positions)])
    cut = verify(production)
    assert not cut["holds"]
    assert "missing at the end" in cut["problem"]
