"""The catalog's own tests, once more on PostgreSQL."""

import os
import subprocess
import sys

import pytest

from tests.installation import ROOT

pytestmark = [pytest.mark.needs_postgres, pytest.mark.xdist_group("production")]


def test_the_tests_of_the_catalog_pass_on_postgresql_too(postgres):
    url = postgres.create("catalog_tests")
    chosen = ["tests/catalog/test_ingest.py", "tests/catalog/test_tools.py"]
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
