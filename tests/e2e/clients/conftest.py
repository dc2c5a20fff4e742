"""An installation that tests may kill, with servers of every kind of result."""

import pytest

from tests.support.agents import register_stdio
from tests.support.installation import Installation
from tests.support.servers import register
from tests.support.upstreams.running import running_http


@pytest.fixture(scope="module")
def toolcrib(tmp_path_factory):
    with (
        Installation(tmp_path_factory.mktemp("clients")) as running,
        # One process, also for sessions whose programs are their own: tests ask it what it runs.
        running_http("workshop") as workshop,
    ):
        register(running, "workshop", workshop)
        register_stdio(running, "weather", "healthy")
        register_stdio(running, "fixtures", "conformance")
        yield running
