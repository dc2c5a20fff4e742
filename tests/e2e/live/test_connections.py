"""Connections of strangers that would take every descriptor do not keep agents from calling."""

import socket
from contextlib import ExitStack

import pytest

from tests.support.agents import make_agent, register_stdio
from tests.support.installation import Installation

DESCRIPTORS = 256
STRANGERS = 400


class FewDescriptors(Installation):
    def _argv(self, *args: str) -> list[str]:
        script = f'ulimit -n {DESCRIPTORS} && exec "$@"'
        return ["sh", "-c", script, "sh", *super()._argv(*args)]


def test_more_idle_connections_than_descriptors_do_not_starve_agents(tmp_path):
    with FewDescriptors(tmp_path / "data") as toolcrib, ExitStack() as stack:
        register_stdio(toolcrib, "healthy", "healthy")
        session = make_agent(toolcrib, "caller").open(groups=["mcp:healthy"])
        kept = session.agent.connect()
        for number in range(STRANGERS):
            stranger = socket.create_connection(("127.0.0.1", toolcrib.port))
            stack.enter_context(stranger)
            if number % 3 == 0:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: loc")
            if number % 20 == 0:  # agents keep and open connections meanwhile
                kept.request("GET", f"/api/v1{session.path}", headers=session.agent.headers())
                assert kept.getresponse().read()
                called = session.call("healthy__get_temperature", {"city": "Oslo"})
                assert called["state"] == "succeeded", called
        assert toolcrib.get("/livez") == (200, b"ok\n")
        kept.close()
    assert "Too many open files" not in toolcrib.log


@pytest.mark.parametrize("path", ["/sign-in", "/api/v1/servers", "/api/v1/sessions/ses_1/call"])
def test_a_client_that_sends_five_megabytes_can_read_the_413(toolcrib, path):
    for _ in range(10):  # a reset loses the response only now and then
        status, body = toolcrib.get(path, method="POST", data=b"x" * 5_000_000)
        assert (status, b"exceeds 1024 KB" in body) == (413, True)
