"""One installation for the folder, with servers of both protocol eras."""

import pytest

from tests.support.agents import register_stdio
from tests.support.installation import Installation
from tests.support.mcp_clients import make_unique_agent
from tests.support.servers import register
from tests.support.upstreams.running import running_http


@pytest.fixture(scope="package")
def toolcrib(tmp_path_factory):
    """Toolcrib with four servers: `fixtures` and `workshop` of the newer era, `old`, `weather`."""
    with (
        Installation(
            tmp_path_factory.mktemp("mcp"),
            {"TOOLCRIB_BODY_TIMEOUT": "2", "TOOLCRIB_MAX_STREAMS": "4"},
        ) as running,
        running_http("conformance") as fixtures,
        running_http("workshop") as workshop,
    ):
        register(running, "fixtures", fixtures)
        register(running, "workshop", workshop)
        register_stdio(running, "old", "conformance", "--legacy")
        register_stdio(running, "weather", "healthy")
        yield running


@pytest.fixture
def agent(toolcrib):
    """A new agent in deferred mode, with its own key."""
    return make_unique_agent(toolcrib, mode="deferred")
