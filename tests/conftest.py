"""The cast: people, tokens, and a whole installation run as real processes."""

import os

import hypothesis
import pytest
from django.conf import settings
from django.contrib.auth.models import User
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from catalog import cache
from catalog.audit import SYSTEM
from sessions_app.agents import api_keys, rate_limits
from tests.support import parts
from toolcrib.lib.roles import Role, give_role

PASSWORD = "a long and quiet river"

# How long an example takes, or to think of one, is the machine's affair.
hypothesis.settings.register_profile(
    "patient",
    parent=hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")


def pytest_collection_modifyitems(config, items):
    gone = parts.missing()
    for item in items:
        for marker, what in gone.items():
            if item.get_closest_marker(marker):
                if parts.IN_CI:
                    raise pytest.UsageError(
                        f"{what} is missing, and with CI=true nothing is skipped"
                    )
                item.add_marker(pytest.mark.skip(reason=f"left out: {what} is not installed"))


class _Grouping(LoadScopeScheduling):  # type: ignore[misc]
    """Give each folder of real processes to one worker.

    What `xdist_group` marks are for; pytest 9.2 lost them (pytest-dev/pytest-xdist issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        path, _, _ = nodeid.partition("::")
        together = (
            "tests/e2e/browser/",
            "tests/e2e/live/",
            "tests/e2e/mcp/",
            "tests/e2e/production/",
            "tests/e2e/live/",
        )
        return next((start for start in together if path.startswith(start)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return _Grouping(config, log)


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix):
    """Keep the test database in a file: tables of SQLite's shared memory lock across threads."""
    test = settings.DATABASES["default"]["TEST"]
    if settings.EMBEDDED:
        name = f"test_{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.sqlite3"
        test["NAME"] = str(settings.DATA_DIR / name)


def make_person(name: str, role: Role) -> User:
    user = User(username=name)
    give_role(user, role)
    user.set_password(PASSWORD)
    user.save()
    return user


@pytest.fixture(autouse=True)
def fresh_memory():
    """Forget what a process keeps: revisions and ids begin anew with every test's database."""
    cache.clear()
    rate_limits.clear()
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
