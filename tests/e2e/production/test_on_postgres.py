"""The apps' own tests, once more on PostgreSQL."""

import os
import subprocess
import sys

import pytest

from tests.support.installation import ROOT

pytestmark = [pytest.mark.needs_postgres, pytest.mark.xdist_group("production")]


CHOSEN = {
    "catalog": ["catalog/test_ingest.py", "catalog/test_tools.py"],
    "groups": ["catalog/test_groups.py"],
    "sessions": ["sessions_app/test_behaviours.py", "sessions_app/test_opening.py"],
    "calls": ["sessions_app/test_calls.py", "sessions_app/test_usage.py"],
    "short ways": [
        "sessions_app/test_call_path.py",
        "sessions_app/test_act_path.py",
        "sessions_app/test_standing.py",
        "toolcrib/test_prepared.py",
        "sessions_app/test_mcp_short.py",
        "sessions_app/test_mcp_sessions.py",
    ],
    "pages": ["sessions_app/test_usage_page.py", "catalog/test_calls_seen.py"],
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("subject", CHOSEN)
def test_the_tests_of_the_apps_pass_on_postgresql_too(subject, postgres):
    url = postgres.create(f"{subject.replace(' ', '_')}_tests")
    chosen = [f"tests/{name}" for name in CHOSEN[subject]]
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
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
