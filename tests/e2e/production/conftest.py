"""Production deployments: the commands of docker-compose.yml with a real PostgreSQL and Redis."""

import itertools
import sys
from collections.abc import Iterator

import pytest

from tests.support.installation import PostgresServer, RedisServer, postgres_server, redis_server
from tests.support.production import SERVICES, Production

_databases = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgres, shared_redis, tmp_path_factory) -> str:
    """The name of a migrated, empty template database."""
    url = postgres.create("migrated")
    first = Production(url, shared_redis.create(), tmp_path_factory.mktemp("migrated"))
    done = first.run(*SERVICES["migrate"]["command"])
    assert done.returncode == 0, done.stderr
    return "migrated"


@pytest.fixture
def database_url(postgres, migrated) -> str:
    """A migrated database for one test."""
    url: str = postgres.create(f"test_{next(_databases)}", template=migrated)
    return url


@pytest.fixture
def production(database_url, shared_redis, tmp_path) -> Iterator[Production]:
    """A deployment without running processes: an empty database and its own Redis database."""
    running = Production(database_url, shared_redis.create(), tmp_path)
    try:
        yield running
    finally:
        running.stop()
        sys.stdout.write(running.log)  # pytest prints it if the test fails


@pytest.fixture(scope="session")
def everything(postgres, migrated, shared_redis, tmp_path_factory) -> Iterator[Production]:
    """A deployment with all services and two web processes. Tests use their own slugs."""
    url = postgres.create("everything", template=migrated)
    running = Production(url, shared_redis.url, tmp_path_factory.mktemp("everything"))
    try:
        running.start_all("web", "web", "worker", "beat", "listener")
        yield running
    finally:
        running.stop()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that a test may stop and restart."""
    with redis_server() as server:
        yield server
