"""Audit chain of a running installation: entries of any process, kill -9, sink."""

import json

from tests.support.installation import Installation
from tests.support.waiting import wait_for


def verified(toolcrib):
    done = toolcrib.command("verify_audit", "--json")
    return json.loads(done.stdout), done.returncode


def is_chained(toolcrib, at_least):
    body, code = verified(toolcrib)
    assert code == 0, body
    return body["pending"] == 0 and body["verified"] >= at_least


def test_entries_of_every_process_are_chained_sealed_and_delivered_once(tmp_path):
    sink = tmp_path / "audit.jsonl"
    toolcrib = Installation(tmp_path / "data", {"TOOLCRIB_AUDIT_SINK": str(sink)})
    with toolcrib:
        for name in ("one", "two", "three"):  # each records two entries, beside the server
            assert toolcrib.command("create_agent", name).returncode == 0
        wait_for(lambda: is_chained(toolcrib, 6), 30)
        toolcrib.process.kill()
    assert toolcrib.command("create_agent", "while-stopped").returncode == 0
    assert verified(toolcrib)[0]["pending"] > 0
    with toolcrib:
        wait_for(lambda: is_chained(toolcrib, 8), 30)

    positions = [json.loads(line)["position"] for line in sink.read_text().splitlines()]
    assert positions == list(range(1, verified(toolcrib)[0]["verified"] + 1))
