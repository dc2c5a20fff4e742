"""Selected tests of the apps, run on PostgreSQL."""

import os
import subprocess
import sys

import pytest

from tests.support.installation import ROOT

pytestmark = [pytest.mark.needs_postgres]


SELECTED = {
    "catalog": ["catalog/definitions/test_ingest.py", "catalog/tools/test_actions.py"],
    "audit": [
        "catalog/audit/test_chain.py",
        "sessions_app/sessions/test_definition_pruning.py",
        "sessions_app/sessions/test_deletion.py",
    ],
    "groups": ["catalog/groups/test_actions.py"],
    "sessions": [
        "sessions_app/sessions/test_behaviours.py",
        "sessions_app/sessions/test_lifecycle.py",
    ],
    "calls": ["sessions_app/dispatch/test_planner.py", "sessions_app/review/test_queries.py"],
    "agents": [
        "sessions_app/sessions/test_endpoint.py",
        "sessions_app/dispatch/test_authorization.py",
        "sessions_app/mcp/test_processes.py",
        "sessions_app/mcp/test_sessions.py",
    ],
    "pages": ["sessions_app/usage/test_views.py", "sessions_app/usage/test_call_stats.py"],
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("subject", SELECTED)
def test_the_tests_of_the_apps_pass_on_postgresql(subject, postgres, migrated):
    url = postgres.create(subject)
    postgres.create(f"test_{subject}", template=migrated)  # the database of its tests
    chosen = [f"tests/{name}" for name in SELECTED[subject]]
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--reuse-db"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *quiet, "--no-header", *chosen],
        cwd=ROOT,
        env={**os.environ, "TEST_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
