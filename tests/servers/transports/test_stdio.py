"""The stdio transport and its process supervisor."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop
from django.conf import settings

from servers.connections.connection import connect
from servers.errors import UpstreamError
from servers.secret import Secret
from servers.spec import ServerSpec
from servers.transports import process_supervisor, stdio
from servers.transports.process_supervisor import COUNT_EVERY, COUNT_EVERY_UNKNOWN
from servers.transports.sandbox import INHERITED
from servers.transports.stdio import StdioProcess, run_process
from tests.support.upstreams.running import ROOT, stdio_argv, stdio_spec
from tests.support.waiting import scaled, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OPTIONS = {"cwd": "", "redact": str}


def program(*argv, cwd=str(ROOT), env=None, hidden=()):
    return ServerSpec(
        server_id=1,
        slug="program",
        generation=1,
        transport="stdio",
        argv=tuple(Secret(text) for text in argv),
        cwd=cwd,
        env={name: Secret(value) for name, value in (env or {}).items()},
        hidden=tuple(Secret(text) for text in hidden),
    )


async def listed(spec):
    async with connect(spec) as connection:
        return await connection.list_tools()


def failure(spec) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        asyncio.run(listed(spec))
    return caught.value


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(*pids: int, seconds: float = 15) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while running := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        threading.Event().wait(0.02)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- Environment and arguments ----------------------------------------------------------------


def test_a_program_inherits_only_allowed_variables_and_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://hunter2")
    monkeypatch.setenv("TOOLCRIB_SECRET_KEY", "hunter2")
    monkeypatch.setenv("TZ", "UTC")
    note = tmp_path / "note"
    spec = stdio_spec(
        "raw_stdio", "--do", "show_env", "--note", str(note), env={"API_KEY": "its own"}
    )
    asyncio.run(listed(spec))

    reported = json.loads(note.read_text().splitlines()[1])
    assert reported["env"]["API_KEY"] == "its own"
    assert reported["env"]["TZ"] == "UTC"
    # LC_CTYPE is set by the Python that runs the program.
    assert set(reported["env"]) - {"LC_CTYPE"} <= {*INHERITED, "API_KEY"}
    assert "hunter2" not in note.read_text()
    assert reported["cwd"] == str(ROOT)


def test_the_supervisor_adds_nothing_to_the_environment(monkeypatch, settings):
    settings.STDIO_LANDLOCK = False  # with it, programs have a temporary folder of their own here
    for name in INHERITED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C")  # in which Python sets LC_CTYPE

    async def scenario():
        async with run_process(["/usr/bin/env"], env={"OWN": "1"}, **OPTIONS) as child:
            return [line async for line in child.messages()]

    assert sorted(asyncio.run(scenario())) == [b"LANG=C", b"OWN=1"]


def test_credentials_in_the_stderr_of_a_program_are_redacted():
    script = "import os, sys; sys.exit('bad key ' + os.environ['KEY'] + ' or ' + sys.argv[1])"
    secrets = ("hunter2-token", "hunter2-key")
    error = failure(
        program(
            *(sys.executable, "-c", script, "--token=hunter2-token"),
            env={"KEY": "hunter2-key"},
            hidden=secrets,
        )
    )
    assert error.code == "crashed"
    assert error.detail == "bad key *** or --token=***"


def test_arguments_do_not_appear_in_the_command_line_of_the_supervisor(tmp_path):
    note = tmp_path / "note"

    async def scenario():
        spec = stdio_spec("raw_stdio", "--secret", "hunter2", "--note", str(note))
        async with connect(spec) as connection:
            await connection.list_tools()
            pid = int(note.read_text().splitlines()[0])
            assert b"hunter2" in command_line(pid)
            supervisor = parent_of(pid)
            assert b"process_supervisor.py" in command_line(supervisor)
            assert b"hunter2" not in command_line(supervisor)

    asyncio.run(scenario())


def test_a_very_long_argument_is_passed_completely(tmp_path):
    note = tmp_path / "note"
    long = "x" * 100_000  # more than a pipe holds
    spec = stdio_spec("raw_stdio", "--do", "show_env", "--note", str(note), "--secret", long)
    asyncio.run(listed(spec))
    assert json.loads(note.read_text().splitlines()[1])["argv"][-1] == long


# --- Programs that misbehave ------------------------------------------------------------------


def test_a_banner_on_stdout_is_ignored():
    assert len(asyncio.run(listed(stdio_spec("raw_stdio", "--do", "banner"))).tools) == 1


def test_more_than_fifty_lines_that_are_not_messages_are_a_protocol_error():
    error = failure(stdio_spec("raw_stdio", "--do", "many_banners"))
    assert error.code == "protocol"
    assert "50 lines" in error.message


def test_a_flood_on_stderr_does_not_block_and_its_tail_is_available():
    async def scenario():
        async with connect(stdio_spec("raw_stdio", "--do", "stderr_flood")) as connection:
            assert len((await connection.list_tools()).tools) == 1
            return connection._state.stderr_tail()

    tail = asyncio.run(scenario())
    assert tail.endswith("the last line⟨U+001B⟩[31m⟨U+0007⟩")
    assert len(tail.splitlines()) == 20
    assert "\x1b" not in tail


@pytest.mark.parametrize("at", ["start", "list"])
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit_zero", "crashed", "exited with code 0"),
        ("crash", "crashed", "exited with code 3"),
        ("killed", "crashed", "killed by signal 11"),
        ("close_stdout", "closed", "closed its output"),
        ("endless_line", "too_large", "more than 10 MiB"),
    ],
)
def test_the_exit_of_a_program_is_reported_at_once_with_its_reason(what, code, words, at):
    started = time.monotonic()
    error = failure(stdio_spec("raw_stdio", "--do", what, "--at", at))
    assert error.code == code
    assert words in error.message
    assert time.monotonic() - started < 15  # of the 20 s for a handshake
    if what == "crash":
        assert error.detail == "Traceback: no API key⟨U+001B⟩[0m given"


def test_a_program_that_hangs_times_out(monkeypatch):
    monkeypatch.setattr(settings, "HANDSHAKE_TIMEOUT", 1)
    error = failure(stdio_spec("raw_stdio", "--do", "hang"))
    assert error.code == "timeout"
    assert "handshake within 1 s" in error.message


def test_a_killed_program_closes_the_connection_at_once(tmp_path):
    note = tmp_path / "note"

    async def scenario():
        async with connect(stdio_spec("raw_stdio", "--note", str(note))) as connection:
            await connection.list_tools()
            listening = asyncio.create_task(connection.listen())
            os.kill(int(note.read_text().splitlines()[0]), signal.SIGKILL)
            await asyncio.wait_for(connection.closed.wait(), scaled(5))
            with pytest.raises(UpstreamError) as caught:
                await listening
            assert caught.value.code == "closed"
            assert "killed by signal 9" in caught.value.message
            with pytest.raises(UpstreamError):
                await connection.list_tools()

    asyncio.run(scenario())


def test_reading_a_line_takes_linear_time(monkeypatch):
    # Many small chunks: copying the line at every chunk would dominate the time.
    monkeypatch.setattr(stdio, "READ_BYTES", 64)

    async def cost(size: int) -> float:
        child = StdioProcess(redact=str)
        child._stdout = asyncio.StreamReader()
        child._stdout.feed_data(b"x" * size + b"\n")
        child._stdout.feed_eof()
        started = time.process_time()  # of this process only
        assert [len(line) async for line in child.messages()] == [size]
        return time.process_time() - started

    def best(size: int) -> float:
        return min(asyncio.run(cost(size)) for _ in range(3))

    assert best(2_000_000) < 9 * best(500_000)  # quadratic would be 16


# --- Cleanup ----------------------------------------------------------------------------------

STUBBORN = ("--do", "ignore_term", "--do", "spawn_grandchild", "--stay")


def test_closing_kills_a_program_that_ignores_signals_and_its_descendants(tmp_path):
    note = tmp_path / "note"

    async def scenario():
        async with connect(stdio_spec("raw_stdio", *STUBBORN, "--note", str(note))) as connection:
            await connection.list_tools()
            pids = [int(line) for line in note.read_text().splitlines()]
            assert len(pids) == 2
            assert all(alive(pid) for pid in pids)
            supervisor = parent_of(pids[0])
        return [*pids, supervisor]

    wait_until_gone(*asyncio.run(scenario()), seconds=5)


def test_the_descendants_of_a_program_that_exits_are_killed(tmp_path):
    note = tmp_path / "note"
    spec = stdio_spec("raw_stdio", "--do", "spawn_grandchild", "--do", "crash", "--note", str(note))
    assert failure(spec).code == "crashed"
    wait_until_gone(*[int(line) for line in note.read_text().splitlines()], seconds=5)


OWNER = """
import asyncio, sys
from servers.connections.connection import connect
from tests.support.upstreams.running import stdio_spec

async def main():
    async with connect(stdio_spec(*sys.argv[1:])) as connection:
        await connection.list_tools()
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_sigkill_of_the_parent_leaves_no_descendant_of_a_program_that_ignores_signals(tmp_path):
    note = tmp_path / "note"
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "toolcrib.settings"}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, "raw_stdio", *STUBBORN, "--note", str(note)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
    )
    try:
        assert owner.stdout.readline() == b"ready\n"
        pids = [int(line) for line in note.read_text().splitlines()]
        assert len(pids) == 2
        supervisor = parent_of(pids[0])
        assert all(alive(pid) for pid in (*pids, supervisor))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    wait_until_gone(*pids, supervisor)


def test_sigkill_of_the_supervisor_kills_the_program(tmp_path):
    note = tmp_path / "note"

    async def scenario():
        spec = stdio_spec("raw_stdio", "--do", "ignore_term", "--stay", "--note", str(note))
        async with connect(spec) as connection:
            await connection.list_tools()
            pid = int(note.read_text().splitlines()[0])
            os.kill(parent_of(pid), signal.SIGKILL)
            await asyncio.wait_for(connection.closed.wait(), scaled(5))
        return pid

    wait_until_gone(asyncio.run(scenario()), seconds=5)


def test_many_connections_leave_no_open_files_or_processes(tmp_path):
    note = tmp_path / "note"

    async def scenario():
        for _ in range(3):
            await asyncio.gather(
                *(listed(stdio_spec("raw_stdio", "--note", str(note))) for _ in range(5))
            )

    asyncio.run(listed(stdio_spec("raw_stdio")))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    asyncio.run(scenario())
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    pids = [int(line) for line in note.read_text().splitlines()]
    assert len(pids) == 15
    wait_until_gone(*pids, seconds=5)


# --- Event loops and threads ------------------------------------------------------------------


def test_programs_run_on_uvloop():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert len(runner.run(listed(stdio_spec("raw_stdio"))).tools) == 1
        with pytest.raises(UpstreamError) as caught:
            runner.run(listed(stdio_spec("raw_stdio", "--do", "crash")))
    assert caught.value.code == "crashed"


def test_programs_run_in_several_threads_at_once():
    counts: list[int] = []

    def work():
        counts.append(len(asyncio.run(listed(stdio_spec("raw_stdio"))).tools))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))
    assert counts == [1, 1, 1, 1]


# --- Programs that cannot be executed ---------------------------------------------------------


def test_no_program_runs_if_stdio_is_not_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "ALLOW_STDIO", False)
    note = tmp_path / "note"
    error = failure(stdio_spec("raw_stdio", "--note", str(note)))
    assert (error.code, error.parked) == ("blocked", True)
    assert "TOOLCRIB_ALLOW_STDIO" in error.hint
    assert not note.exists()


@pytest.mark.parametrize("command", ["no-such-command-here", "/no/such/file", "", "./missing"])
def test_a_command_that_does_not_exist_is_not_found(command):
    error = failure(program(command, "--token", "hunter2"))
    assert (error.code, error.parked) == ("command_not_found", True)
    assert "hunter2" not in error.message + error.hint + error.detail


def test_a_missing_working_directory_is_reported_as_the_cause(tmp_path):
    error = failure(program(*stdio_argv("raw_stdio"), cwd=str(tmp_path / "missing")))
    assert error.code == "command_not_found"
    assert "working directory" in error.message


def test_a_command_is_looked_up_in_the_path_of_the_server(tmp_path):
    script = tmp_path / "my-server"
    script.write_text(f"#!/bin/sh\nexec {' '.join(stdio_argv('raw_stdio'))}\n")
    script.chmod(0o755)
    spec = program("my-server", env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert len(asyncio.run(listed(spec)).tools) == 1
    assert failure(program("my-server")).code == "command_not_found"


def test_a_file_without_execute_permission_is_not_executable(tmp_path):
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\n")
    script.chmod(stat.S_IRUSR)
    assert failure(program(str(script))).code == "not_executable"


@pytest.mark.parametrize("content", ["#!/no/such/interpreter\n", "\x7fELF nonsense"])
def test_a_file_this_machine_cannot_run_is_not_executable(tmp_path, content):
    script = tmp_path / "server"
    script.write_text(content)
    script.chmod(0o755)
    error = failure(program(str(script)))
    assert (error.code, error.parked) == ("not_executable", True)


def test_invalid_arguments_and_variables_are_rejected_before_anything_runs():
    argv = stdio_argv("raw_stdio")
    assert failure(program(*argv, "a\0b")).code == "not_executable"
    for env in ({"A": "a\0b"}, {"A=B": "c"}, {"": "c"}):
        assert failure(program(*argv, env=env)).code == "not_executable"


def test_no_process_of_a_program_that_forks_is_left_when_it_is_stopped(tmp_path):
    """Hostile input 26: its children are killed too, even in their own sessions."""
    note = tmp_path / "pids"
    script = (
        "import os, subprocess, sys, time\n"
        "many = [subprocess.Popen(['sleep', '600'], start_new_session=True) for _ in range(60)]\n"
        f"open({str(note)!r}, 'w').write(' '.join(str(one.pid) for one in many))\n"
        "time.sleep(600)\n"
    )

    def pids():
        return [int(pid) for pid in note.read_text().split()] if note.exists() else []

    async def scenario():
        async with run_process([sys.executable, "-c", script], env={}, **OPTIONS):
            await asyncio.to_thread(wait_for, lambda: len(pids()) == 60)
            return pids()

    started = asyncio.run(scenario())
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), 15)


MULTIPLIES = """
import os, sys, threading, time
for _ in range({doublings}):
    parent = os.fork()
    {apart}
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
os.write(1, b"x\\n")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("doublings", "threads", "apart"),
    [(7, 0, "pass"), (7, 0, "parent or os.setsid()"), (2, 40, "pass")],
    ids=["processes", "processes apart", "threads"],
)
def test_a_fork_bomb_is_killed_with_all_its_processes(doublings, threads, apart, settings):
    """Hostile input 26: 128 processes, or 4 with 41 threads each; the limit is 100."""
    settings.MAX_PROCESSES = 100
    script = MULTIPLIES.format(doublings=doublings, threads=threads, apart=apart)

    async def scenario():
        async with run_process([sys.executable, "-c", script], env={}, **OPTIONS) as child:
            async for _ in child.messages():
                pass
            await child.exited.wait()
            return await child.exit_error("during the test")

    error = asyncio.run(scenario())
    assert (error.code, error.parked) == ("crashed", False)
    assert "more than 100 processes and threads at once" in error.message
    assert "TOOLCRIB_MAX_PROCESSES" in error.hint


def test_a_program_that_exits_with_status_125_by_itself_is_not_reported_as_killed():
    error = failure(program(sys.executable, "-c", "import sys; sys.exit(125)"))
    assert "exited with code 125" in error.message
    assert "TOOLCRIB_MAX_PROCESSES" not in error.hint


@pytest.mark.parametrize(("on_machine", "checks"), [(0, COUNT_EVERY_UNKNOWN), (1_000, COUNT_EVERY)])
def test_processes_are_counted_regularly_whatever_the_machine_reports(
    monkeypatch, on_machine, checks
):
    counted = []
    monkeypatch.setattr(
        process_supervisor.ProcessCount, "count_on_machine", lambda self: on_machine
    )
    monkeypatch.setattr(process_supervisor, "descendants", lambda: counted.append(1) or {1: 5})
    count = process_supervisor.ProcessCount(100)
    for _ in range(2 * checks):
        assert not count.is_exceeded()
    assert len(counted) == 2


COUNTS = """
import os, sys, threading, time
from servers.transports.process_supervisor import ProcessCount
counts = [ProcessCount(limit) for limit in (8, 9)]
if os.fork() == 0:  # a process with six threads
    for _ in range(6):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if os.fork() == 0 and os.fork() == 0:  # two below it: nine in all
        os.write(1, b".")
    time.sleep(600)
def check():
    for count in counts:
        count.baseline = 0  # so that it counts in any case
    return [count.is_exceeded() for count in counts]
while True not in (exceeded := check()):
    pass
print(exceeded, flush=True)
"""


def test_a_program_within_the_limit_is_not_killed():
    """Nine processes and threads exceed a limit of eight, and not one of nine."""
    argv = [sys.executable, "-c", COUNTS]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    ) as counting:
        try:
            assert counting.stdout.read(1) == b"."
            assert counting.stdout.readline() == b"[True, False]\n"
        finally:
            os.killpg(counting.pid, signal.SIGKILL)
