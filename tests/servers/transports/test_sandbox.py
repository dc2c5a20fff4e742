"""The sandbox of stdio programs: no access to Toolcrib's keys and code, user and memory limits."""

import asyncio
import json
import os
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from catalog.audit import SYSTEM
from servers.models import Server
from servers.registration.validation import argv_digest
from servers.sync import connection_test
from servers.transports import landlock, sandbox, stdio
from servers.transports.stdio import run_process
from tests.support.factories import make_server
from tests.support.upstreams.running import ROOT

HAS_LANDLOCK = landlock.abi_version() >= landlock.MIN_ABI
with_landlock = pytest.mark.skipif(not HAS_LANDLOCK, reason="this kernel has no Landlock")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")

# Tries to get at a file in every way it knows, and prints what it read, or the error.
READ = r"""
import json, os, subprocess, sys
key, toolcrib = sys.argv[1], sys.argv[2]
def attempt(action):
    try:
        return str(action())
    except OSError as error:
        return type(error).__name__
def run(*argv):
    return subprocess.run(argv, capture_output=True, text=True).stdout or "PermissionError"
def link():
    os.link(key, "copy")
    return open("copy").read()
def move():
    os.rename(key, "moved")
    return open("moved").read()
def write():
    open(key, "a").close()
    return "written"
def create():
    open(os.path.join(os.path.dirname(key), "planted"), "w").close()
    return "created"
def symlink():
    os.symlink(os.path.dirname(key), "shortcut")
    return open("shortcut/" + os.path.basename(key)).read()
print(json.dumps({
    "read": attempt(lambda: open(key).read()),
    "child": run("cat", key),
    "orphan": run("setsid", "sh", "-c", "cat \"$0\"", key),
    "root": attempt(lambda: open("/proc/self/root" + key).read()),
    "root of Toolcrib": attempt(lambda: open(f"/proc/{toolcrib}/root" + key).read()),
    "relative": attempt(lambda: open(os.path.relpath(key)).read()),
    "symbolic link": attempt(symlink),
    "hard link": attempt(link),
    "move": attempt(move),
    "write": attempt(write),
    "create": attempt(create),
    "environment": attempt(lambda: open(f"/proc/{toolcrib}/environ").read()),
    "memory": attempt(lambda: open(f"/proc/{toolcrib}/mem", "rb").read(0)),
}), flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder beside the data folder's, where programs can work."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def key():
    """The installation's key, in the data folder."""
    path = django_settings.DATA_DIR / "encryption.key"
    if not path.exists():  # in production mode it is a variable
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("planted-key-of-the-test")
    return path


def output(argv, cwd="", **env):
    async def scenario():
        async with run_process(argv, cwd=str(cwd), env=env, redact=str) as child:
            lines = [line.decode() async for line in child.messages()]
            await asyncio.wait_for(child.exited.wait(), 30)
            return lines, child.stderr_tail()

    return asyncio.run(scenario())


def python(code, *args, cwd="", **env):
    lines, errors = output([sys.executable, "-c", code, *map(str, args)], cwd, **env)
    assert lines, errors
    return lines


def page_of_server(client, admin, server):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    return client.get(f"/servers/{server.slug}").content.decode()


def test_a_confirmed_program_cannot_read_the_keys(key, folder, client, admin):
    """D8. Without Landlock the server's page says that it can."""
    note = folder / "note"
    code = f"import sys; open({str(note)!r}, 'w').write(open(sys.argv[1]).read())"
    argv = [sys.executable, "-c", code, str(key)]
    server = make_server(
        transport="stdio",
        command=argv[0],
        args=argv[1:],
        cwd=str(folder),
        confirmed_argv=argv_digest(argv, str(folder)),
    )

    result = connection_test.test_server(server, actor=SYSTEM)

    page = page_of_server(client, admin, server)
    if HAS_LANDLOCK:
        assert "PermissionError" in result.detail
        assert not note.exists() or not note.read_text()
        assert "No access to Toolcrib&#x27;s data folder and keys (Landlock)." in page
        assert "not sandboxed" not in page
        assert ("This program runs as root." in page) is (os.geteuid() == 0)
    else:
        assert "This program is not sandboxed." in page


@with_landlock
def test_the_log_says_once_that_programs_run_as_root(folder, caplog):
    """Landlock does not confine root: it can change what Toolcrib's own processes load."""
    sandbox.warn_once.cache_clear()
    for _ in range(2):
        python("print(1, flush=True)", cwd=folder)
    warnings = [each for each in caplog.messages if "Runs as root" in each]
    assert len(warnings) == (os.geteuid() == 0)


@with_landlock
def test_no_way_leads_to_the_keys(key, folder):
    before = key.read_text()
    (line,) = python(READ, key, os.getpid(), cwd=folder)
    tried = json.loads(line)
    denied = {"PermissionError", "OSError"}  # OSError: a move to another folder (EXDEV)
    assert {name: outcome for name, outcome in tried.items() if outcome not in denied} == {}
    assert len(tried) == 13
    assert key.read_text() == before
    assert not (key.parent / "planted").exists()


def test_without_landlock_the_same_program_reads_the_keys(key, folder, settings):
    """Verifies that the attempts above would succeed."""
    settings.STDIO_LANDLOCK = False
    copy = folder / "data"
    copy.mkdir()
    (copy / "encryption.key").write_text(key.read_text())
    (line,) = python(READ, copy / "encryption.key", os.getpid(), cwd=folder)
    tried = json.loads(line)
    assert {
        tried[name].strip() for name in ("read", "child", "orphan", "root", "symbolic link")
    } == {key.read_text().strip()}
    assert (tried["create"], tried["environment"] != "PermissionError") == ("created", True)


@with_landlock
def test_files_with_secrets_elsewhere_cannot_be_read(folder, settings):
    (folder / "secrets").mkdir()
    secret, other = folder / "secrets" / "key", folder / "secrets" / "other"
    secret.write_text("hunter2")
    other.write_text("harmless")
    settings.SECRET_FILES = [secret]
    read = "import sys; print(open(sys.argv[1]).read(), flush=True)"
    assert python(read, other) == ["harmless"]
    lines, errors = output([sys.executable, "-c", read, str(secret)])
    assert lines == []
    assert "PermissionError" in errors


@with_landlock
def test_the_code_of_toolcrib_cannot_be_changed(folder):
    code = "import sys; print(open(sys.argv[1]).readline(), flush=True); open(sys.argv[1], 'a')"
    for path in (ROOT / "servers" / "models.py", Path(sys.prefix, "pyvenv.cfg").resolve()):
        lines, errors = output([sys.executable, "-c", code, str(path)])
        assert lines
        assert "PermissionError" in errors


WORK = r"""
import os, sys, tempfile, subprocess
with tempfile.TemporaryDirectory() as temporary:
    open(os.path.join(temporary, "file"), "w").write("x")
    os.mkdir("there")
    os.rename(os.path.join(temporary, "file"), "there/file")
    os.link("there/file", "linked")
    os.truncate("linked", 0)
open("tool", "w").write("#!/bin/sh\necho ran\n")
os.chmod("tool", 0o755)
print(subprocess.run(["./tool"], capture_output=True, text=True).stdout.strip())
child = subprocess.Popen(["sleep", "60"]); child.kill(); child.wait()
print("null", open(os.devnull, "w").write(""), len(os.urandom(2)), bool(os.listdir(sys.argv[1])))
"""


@with_landlock
def test_programs_work_beside_the_data_folder(folder, settings, key):
    """Temporary files, moves between folders, programs of their own, devices, listing folders."""
    settings.DATA_DIR = folder / "data"
    settings.DATA_DIR.mkdir()
    beside = folder / "beside"
    beside.mkdir()
    assert python(WORK, folder, cwd=beside) == ["ran", "null 0 2 True"]


@with_landlock
def test_a_home_folder_with_the_data_folder_has_caches(folder, settings, monkeypatch):
    settings.DATA_DIR = folder / "toolcrib" / "var"
    settings.DATA_DIR.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    store = (
        "import os; from pathlib import Path\n"
        "for name in ('.npm/x', '.cache/uv', '.local/share/uv'):\n"
        "    (Path.home() / name).mkdir(parents=True); (Path.home() / name / 'a').write_text('a')\n"
        "print('stored', flush=True)"
    )
    assert python(store) == ["stored"]


@with_landlock
def test_a_command_in_the_data_folder_is_reported(key):
    with pytest.raises(stdio.ParkedError) as caught:
        output(["/bin/true"], cwd=key.parent)
    assert caught.value.code == "sandbox"


@as_root
@pytest.mark.parametrize("fenced", [True, False])
def test_programs_run_as_another_user_with_a_home_of_their_own(key, settings, fenced):
    settings.STDIO_USER, settings.STDIO_LANDLOCK = "nobody", fenced
    script = 'id -u; id -G; echo "$HOME"; touch "$HOME/x" && cat "$1" || echo failed'
    lines, errors = output(["/bin/sh", "-c", script, "sh", str(key)], cwd="/")
    user = pwd.getpwnam("nobody")
    assert lines[0] == str(user.pw_uid)
    assert str(os.getgid()) not in lines[1].split()
    assert lines[2] != os.environ.get("HOME")
    assert Path(lines[2]).stat().st_uid == user.pw_uid
    assert lines[3] == "failed"
    assert "denied" in errors


@as_root
def test_a_folder_that_somebody_else_prepared_is_not_used_as_home(tmp_path):
    (tmp_path / "home").mkdir()
    with pytest.raises(stdio.ParkedError):
        sandbox._private_folder(tmp_path / "home", 65534)
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(stdio.ParkedError):
        sandbox._private_folder(tmp_path / "link", 0)


def test_memory_is_limited(settings):
    settings.MAX_PROGRAM_MEMORY = 256
    code = (
        "try:\n    bytearray(300 * 1024 * 1024); print('allocated', flush=True)\n"
        "except MemoryError:\n    print('refused', flush=True)"
    )
    assert python(code) == ["refused"]
    settings.MAX_PROGRAM_MEMORY = 0
    assert python(code) == ["allocated"]


def test_a_program_that_cannot_be_restricted_does_not_start(folder, monkeypatch):
    monkeypatch.setattr(
        sandbox, "instructions", lambda plan: {**INSTRUCTIONS, "user": ["nobody", -5, -5]}
    )

    async def scenario():
        script = "open('ran', 'w')"
        argv = [sys.executable, "-c", script]
        async with run_process(argv, cwd=str(folder), env={}, redact=str) as child:
            assert [line async for line in child.messages()] == []
            return await child.exit_error("at start")

    error = asyncio.run(scenario())
    assert (type(error), error.code) == (stdio.ParkedError, "sandbox")
    assert not (folder / "ran").exists()


INSTRUCTIONS: dict[str, Any] = {
    "denied": None,
    "read_only": [],
    "user": None,
    "memory": 0,
    "processes": 0,
}


def test_a_machine_without_landlock_is_reported_on_the_page_and_once_in_the_log(
    client, admin, monkeypatch, caplog
):
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    sandbox.warn_once.cache_clear()
    server = make_server(transport="stdio", command="/bin/true", confirmed_argv="x")
    for _ in range(2):
        output(["/bin/true"])
    warnings = [text for text in caplog.messages if "Toolcrib's rights" in text]
    assert len(warnings) == 1
    assert "Linux 5.19" in warnings[0]
    page = page_of_server(client, admin, server)
    assert "This program is not sandboxed." in page
    assert "can read Toolcrib&#x27;s keys and database" in page
    assert Server.objects.count() == 1
