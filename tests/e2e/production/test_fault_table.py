"""The fault table of bench/faults.py in its shortest form, on real processes.

Counts and states only: what depends on the machine's speed is for the bench. R22, the model of
sessions, is tests/sessions_app/test_session_model.py.
"""

import subprocess
import sys

import pytest

from bench import fault_services, faults
from bench.fault_bed import Bed
from tests.support.installation import ROOT, clean_environment
from tests.support.waiting import scaled


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Bed(tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest.fixture
def bed(shared):
    """An installation that all of them hurt, one after the other; a test that failed may leave
    it stopped."""
    if not shared.running:
        shared.toolcrib.start()
    return shared


@pytest.fixture(scope="module")
def parts():
    with fault_services.services() as running:
        yield running


@pytest.mark.parametrize("number", [name for name in faults.EMBEDDED if name != "R22"])
@pytest.mark.timeout(400)
def test_an_installation_keeps_its_bounds_under(number, bed, capsys):
    row = faults.EMBEDDED[number](bed, "tiny")
    faults.tell(row, 0.0)
    assert row.failed() == [], f"{row.done}; {row.figures}\n{bed.toolcrib.log[-3000:]}"
    told = capsys.readouterr().out
    assert told.startswith(number)
    assert told.count("\n") == 3 + len(row.checks)


@pytest.mark.needs_postgres
@pytest.mark.needs_redis
@pytest.mark.parametrize("number", [*faults.PRODUCTION])
@pytest.mark.timeout(400)
def test_production_keeps_its_bounds_under(number, parts):
    row = faults.PRODUCTION[number](parts, "tiny")
    assert row.failed() == [], f"{row.done}; {row.figures}\n{parts.toolcrib.log[-3000:]}"


def test_a_row_that_is_not_there_is_named_with_those_that_are():
    done = subprocess.run(
        [sys.executable, "bench/faults.py", "--only", "R3,R99"],
        cwd=ROOT,
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == 2
    assert "no such row: R99" in done.stderr
    assert "R19p" in done.stderr
