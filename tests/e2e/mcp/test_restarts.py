"""Clients that never initialize again go on after Toolcrib was killed and started again."""

import pytest

from tests.support.agents import register_stdio
from tests.support.installation import Installation
from tests.support.mcp_clients import make_unique_agent
from tests.support.restart_clients import (
    CLIENTS,
    FORECAST,
    ConnectedClient,
    check_one_session,
)

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_handshake_client_continues_its_session_after_kill_9(kind, tmp_path):
    with Installation(tmp_path / "data") as toolcrib:
        register_stdio(toolcrib, "weather", "healthy")
        agent = make_unique_agent(toolcrib, mode="deferred")
        with ConnectedClient(kind, agent, tmp_path) as client:
            assert client.call() == FORECAST
            for restarts in (1, 2):
                toolcrib.kill()
                toolcrib.start()
                assert client.call() == FORECAST
                check_one_session(toolcrib, agent, calls=1 + restarts)
