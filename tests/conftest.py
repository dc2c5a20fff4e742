"""Test tiers, scheduling over workers, and fixtures of people and tokens."""

import os
from pathlib import Path

import hypothesis
import pytest
from django.conf import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from catalog import cache
from catalog.audit import SYSTEM
from sessions_app.agents import api_keys, rate_limits
from sessions_app.ledger import calls as call_ledger
from sessions_app.rules import agent_rules
from tests.support import parts
from tests.support.people import make_person
from tests.support.waiting import scaled
from toolcrib.lib.roles import Role

E2E = Path(__file__).resolve().parent / "e2e"

# A busy machine may take long over an example, or to generate one.
hypothesis.settings.register_profile(
    "patient",
    parent=hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")


def pytest_itemcollected(item):
    """Mark end-to-end tests by their folder, and stretch time-outs by TEST_TIMEOUT_SCALE."""
    if item.path.is_relative_to(E2E):
        item.add_marker(pytest.mark.e2e)
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)


@pytest.hookimpl(trylast=True)  # after -m: only tests that are going to run need their parts
def pytest_collection_modifyitems(config, items):
    missing = parts.missing()
    for item in items:
        clients = [f"needs_client:{marker.args[0]}" for marker in item.iter_markers("needs_client")]
        for key, part in missing.items():
            if key in clients or item.get_closest_marker(key):
                if parts.IN_CI:
                    raise pytest.UsageError(
                        f"{part} is missing, and with CI=true nothing is skipped"
                    )
                item.add_marker(pytest.mark.skip(reason=f"{part} is not installed"))


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Keep the end-to-end tests of a file on one worker: they share running processes."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, _ = nodeid.partition("::")
        return path if path.startswith("tests/e2e/") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FileScheduling(config, log)


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix):
    """Keep the test database in a file: tables of SQLite's shared memory lock across threads."""
    test = settings.DATABASES["default"]["TEST"]
    if settings.EMBEDDED:
        name = f"test_{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.sqlite3"
        test["NAME"] = str(settings.DATA_DIR / name)


@pytest.fixture(autouse=True)
def fresh_memory():
    """Clear what outlives a test's database: caches of this process, the seal of the audit log."""
    cache.clear()
    agent_rules.clear()
    call_ledger.clear()
    rate_limits.clear()
    Path(settings.AUDIT_SEAL).unlink(missing_ok=True)
    yield
    cache.clear()


@pytest.fixture
def admin(db):
    return make_person("ada@example.org", Role.ADMIN)


@pytest.fixture
def operator(db):
    return make_person("otto@example.org", Role.OPERATOR)


@pytest.fixture
def outsider(db):
    return make_person("oda@example.org", Role.OUTSIDER)


@pytest.fixture
def admin_token(db):
    return api_keys.create_key("tests", "admin", actor=SYSTEM)[1]


@pytest.fixture
def operator_token(db):
    return api_keys.create_key("tests", "operator", actor=SYSTEM)[1]


@pytest.fixture
def page_of(client):
    """Fetch a page as somebody: page_of(admin, "/servers")."""

    def fetch(user, path, **extra):
        if user is not None:
            client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        return client.get(path, **extra)

    return fetch
