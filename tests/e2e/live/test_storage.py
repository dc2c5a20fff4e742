"""A data folder that is in use, damaged, read-only or full: a sentence, and an honest /readyz."""

import resource
import sys

import pytest

from tests.support.agents import make_agent, read_ledger, register_stdio
from tests.support.installation import Installation
from tests.support.waiting import wait_for


def refusal(done):
    """Return the one line with which a command ended."""
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_second_server_on_a_data_folder_is_refused_and_commands_still_run(tmp_path):
    with Installation(tmp_path / "data") as toolcrib:
        second = Installation(tmp_path / "data")
        sentence = f"Another Toolcrib (pid {toolcrib.pid}) uses the data folder"
        assert refusal(second.command("serve")).startswith(sentence)
        assert second.command("invite", "otto@example.org").returncode == 0
        assert toolcrib.get("/livez") == (200, b"ok\n")
        toolcrib.kill()
        with second:
            assert second.readiness()["status"] == "ok"


def test_a_damaged_database_is_reported_in_a_sentence(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    assert toolcrib.command("invite", "otto@example.org").returncode == 0
    (toolcrib.data_dir / "toolcrib.sqlite3").write_bytes(b"not a database" * 1000)
    for name in ("-wal", "-shm"):
        (toolcrib.data_dir / f"toolcrib.sqlite3{name}").unlink(missing_ok=True)
    assert refusal(toolcrib.command("serve")).startswith("The database file is damaged. Move ")


# Root may write everywhere, unless it gives up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
WITHOUT_OVERRIDE = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Unprivileged(Installation):
    def _argv(self, *args: str) -> list[str]:
        return [sys.executable, "-c", WITHOUT_OVERRIDE, *super()._argv(*args)]


@pytest.mark.parametrize("filled", [False, True])
def test_a_read_only_data_folder_is_reported_in_a_sentence(tmp_path, filled):
    toolcrib = Unprivileged(tmp_path / "data", migrated=filled)
    if filled:
        assert toolcrib.command("invite", "otto@example.org").returncode == 0
    else:
        toolcrib.data_dir.mkdir()
    for path in toolcrib.data_dir.iterdir():
        path.chmod(0o444)
    toolcrib.data_dir.chmod(0o555)
    sentence = f"Cannot write to the data folder {toolcrib.data_dir}: Permission denied. Make it"
    assert refusal(toolcrib.command("serve")).startswith(sentence)


def limit_file_size(toolcrib, size):
    """Let writes beyond this size fail, as on a full disk."""
    _, hard = resource.prlimit(toolcrib.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(toolcrib.pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_disk_that_fills_up_stops_calls_with_a_reason_and_recovers(tmp_path):
    journal = tmp_path / "program" / "journal"  # programs may not write beside the data folder
    journal.parent.mkdir()
    with Installation(tmp_path / "data") as toolcrib:
        register_stdio(toolcrib, "counting", "counting", "--journal", str(journal))
        session = make_agent(toolcrib, "caller").open(groups=["mcp:counting"])
        assert toolcrib.get("/readyz")[0] == 200
        assert session.call("stamp", {"paper": "before"})["state"] == "succeeded"
        logged = len(toolcrib.log)
        limit_file_size(toolcrib, 256 * 1024)  # the database is larger, the log is smaller

        def call():
            return session.post_call("stamp", {"paper": "x" * 2000})

        wait_for(lambda: call().status == 503, 60, what="a call is rejected")
        executed = len(journal.read_text().splitlines())
        for _ in range(30):
            rejected = call()
            assert (rejected.status, rejected.code) == (503, "busy")
            assert rejected.json["error"]["message"] == "The disk reports errors."
        assert len(journal.read_text().splitlines()) == executed, "executed without a row"
        wait_for(lambda: toolcrib.get("/readyz")[0] == 503, 30, what="it is not ready")
        body = toolcrib.readiness()
        assert (body["status"], body["reason"]) == ("down", "The disk reports errors.")
        assert toolcrib.get("/livez")[0] == 200
        log = toolcrib.log[logged:]
        assert "Traceback" not in log
        assert len(log.splitlines()) < 60, log

        limit_file_size(toolcrib, resource.RLIM_INFINITY)
        wait_for(lambda: toolcrib.get("/readyz")[0] == 200, 30, what="it is ready again")
        assert session.call("stamp", {"paper": "after"})["state"] == "succeeded"
        rows = [row for row in read_ledger(toolcrib.data_dir, session) if row["sent_at"]]
        assert len(rows) == len(journal.read_text().splitlines())
