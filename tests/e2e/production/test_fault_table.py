"""The rows of bench/faults.py in their shortest form, on real processes.

Only checks that do not depend on the speed of the machine; the bench evaluates the others. R22, the
session model, is tests/sessions_app/sessions/test_session_model.py.
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
    """The shared installation; restarted if a failed test has stopped it."""
    if not shared.running:
        shared.toolcrib.start()
    return shared


@pytest.fixture(scope="module")
def parts():
    with fault_services.running_services() as running:
        yield running


@pytest.mark.parametrize("number", [name for name in faults.EMBEDDED if name != "R22"])
@pytest.mark.timeout(400)
def test_an_installation_stays_within_its_limits_under(number, bed, capsys):
    row = faults.EMBEDDED[number](bed, "tiny")
    faults.print_row(row, 0.0)
    assert row.failed_checks() == [], f"{row.procedure}; {row.figures}\n{bed.toolcrib.log[-3000:]}"
    output = capsys.readouterr().out
    assert output.startswith(number)
    assert output.count("\n") == 3 + len(row.checks)


@pytest.mark.needs_postgres
@pytest.mark.needs_redis
@pytest.mark.parametrize("number", [*faults.PRODUCTION])
@pytest.mark.timeout(400)
def test_production_stays_within_its_limits_under(number, parts):
    row = faults.PRODUCTION[number](parts, "tiny")
    assert row.failed_checks() == [], (
        f"{row.procedure}; {row.figures}\n{parts.toolcrib.log[-3000:]}"
    )


def test_an_unknown_row_is_reported_with_the_known_rows():
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
    assert "unknown row: R99" in done.stderr
    assert "R19p" in done.stderr
