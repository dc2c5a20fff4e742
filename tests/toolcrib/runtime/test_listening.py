"""The port of `serve` is taken at once, and connections are refused until it can answer."""

import socket

import pytest

from tests.support.installation import free_port
from toolcrib.management.commands.serve import Command


def test_a_bound_port_refuses_connections_until_the_server_listens(capsys):
    port = free_port()
    with Command()._bind("127.0.0.1", port) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        listener.listen()
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(SystemExit):
            Command()._bind("127.0.0.1", port)
    assert f"Port {port} is in use." in capsys.readouterr().err
