"""`manage.py serve` as a real process with an empty data folder: start, stop and errors."""

import signal
import socket

import pytest

from tests.support.installation import READY, ROOT, Installation, Process, is_alive
from tests.support.upstreams.running import stdio_argv
from tests.support.waiting import wait_for

# Real processes: one at a time, for machines with two cores.


def add_program(toolcrib: Installation, *argv: str) -> None:
    status, body = toolcrib.api(
        "POST",
        "/servers",
        {
            "name": "Program",
            "transport": "stdio",
            "command": argv[0],
            "args": argv[1:],
            "cwd": str(ROOT),
            "confirm_argv": argv,
        },
    )
    assert status == 201, body
    wait_for(lambda: toolcrib.tool_names("program"), what="the program's tools in the catalog")


def test_the_first_start_prints_one_line_with_a_working_setup_link(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    with Installation(folder, migrated=False) as toolcrib:
        path = toolcrib.setup_url.removeprefix(toolcrib.url)
        assert path.startswith("/setup/")
        assert toolcrib.process.lines == [f"{READY}http://localhost:{toolcrib.port}{path}"]
        status, page = toolcrib.get(path)
        assert status == 200
        assert b"password" in page
        assert toolcrib.get("/livez") == (200, b"ok\n")
        assert toolcrib.readiness()["status"] == "ok"

        # PORT and TOOLCRIB_DATA are respected, and only the owner can read the files.
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {"toolcrib.sqlite3", "toolcrib.sqlite3-wal", "secret.key", "encryption.key"}
    assert files <= modes.keys()
    assert set(modes.values()) == {0o600}, modes


def test_the_setup_link_is_printed_until_there_is_an_admin(tmp_path):
    toolcrib = Installation(tmp_path / "data", migrated=False)
    invited = toolcrib.command("invite", "otto@example.org", "--role", "operator")
    assert invited.returncode == 0, "a command makes the tables of a new installation"
    with toolcrib:
        assert "/setup/" in toolcrib.ready_line
    join = "from toolcrib.accounts.invitations import set_up; set_up('a@b.org', 'a quiet river')"
    assert toolcrib.command("shell", "-c", join).returncode == 0
    with toolcrib:
        assert toolcrib.process.lines == [f"{READY}http://localhost:{toolcrib.port}/"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_with_its_children(tmp_path, number):
    with Installation(tmp_path / "data") as toolcrib:
        add_program(toolcrib, *stdio_argv("healthy"))
        children = toolcrib.children()
        assert children
        toolcrib.stop(number)
        assert toolcrib.process.code == 0, toolcrib.log
        wait_for(lambda: not any(is_alive(pid) for pid in children), 5, what="no child is alive")


def test_a_child_that_ignores_signals_does_not_delay_the_stop(tmp_path):
    with Installation(tmp_path / "data") as toolcrib:
        add_program(toolcrib, *stdio_argv("raw_stdio", "--do", "ignore_term", "--stay"))
        children = toolcrib.children()
        assert toolcrib.stop() < 5
        wait_for(lambda: not any(is_alive(pid) for pid in children), 15, what="no child is alive")


def test_kill_9_leaves_no_child(tmp_path):
    note = tmp_path / "program" / "pids"  # programs may not write beside the data folder
    note.parent.mkdir()
    with Installation(tmp_path / "data") as toolcrib:
        add_program(
            toolcrib,
            *stdio_argv(
                "raw_stdio", "--do", "spawn_grandchild", "--do", "ignore_term", "--stay", "--note"
            ),
            str(note),
        )
        children = {*toolcrib.children(), *map(int, note.read_text().split())}
        toolcrib.kill()
        wait_for(lambda: not any(is_alive(pid) for pid in children), 15, what="no child is alive")


def test_a_hanging_request_does_not_delay_the_stop(tmp_path):
    request = b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with Installation(tmp_path / "data") as toolcrib:
        half_sent = socket.create_connection(("127.0.0.1", toolcrib.port))
        with half_sent:
            half_sent.sendall(request)
            assert toolcrib.stop() < 5


def test_a_port_in_use_is_reported_in_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = Installation(tmp_path / "data").command("serve", env={"PORT": str(port)})
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"Port {port} is in use.")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--web-only"], "--web-only needs DATABASE_URL and REDIS_URL."),
        (["--host", "0.0.0.0"], "set TOOLCRIB_BIND=0.0.0.0 instead of --host"),  # noqa: S104
    ],
)
def test_conflicting_options_are_rejected(tmp_path, arguments, sentence):
    done = Installation(tmp_path / "data").command("serve", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_stdio_servers_are_disabled_when_bound_to_the_network(tmp_path):
    argv = stdio_argv("healthy")
    with Installation(tmp_path / "data", {"TOOLCRIB_BIND": "0.0.0.0"}) as toolcrib:  # noqa: S104
        status, body = toolcrib.api(
            "POST",
            "/servers",
            {
                "name": "Program",
                "transport": "stdio",
                "command": argv[0],
                "args": argv[1:],
                "confirm_argv": argv,
            },
        )
    assert (status, body["error"]["code"]) == (403, "stdio_off")


def test_two_concurrent_starts_create_one_key(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    argv = [
        *toolcrib._argv("shell", "-c"),
        "from django.conf import settings; print(settings.SECRET_KEY)",
    ]
    with Process(argv, toolcrib.env) as first, Process(argv, toolcrib.env) as second:
        assert first.wait() == second.wait() == 0
        assert first.lines[-1] == second.lines[-1]
