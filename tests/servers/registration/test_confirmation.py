"""Confirmation of programs: variables cannot decide what runs, and changed values are confirmed."""

import io
import json
import shutil
import subprocess
import sys

import pytest
from django.core.management import call_command

from catalog.audit import SYSTEM
from catalog.models import AuditEntry
from servers.models import Credential, Server
from servers.registration import actions as server_actions
from servers.registration import confirmation, validation
from servers.registration.credentials import encrypt, origin_digest
from servers.registration.variable_positions import find_misplaced_variables
from servers.secret import Secret
from servers.sync import connection_test
from tests.support.asgi_requests import send_api
from tests.support.factories import make_server
from toolcrib.lib.errors import Conflict, Invalid

SECRET = "s3cret-of-the-program"

# Each trick: arguments with the variable C, and the value that makes the program create the file
# ran. The program runs in a folder with go, a shell script, and go.py, a Python one, that create
# it, and tool, a link to sh.
CODE = "touch ran"
PYTHON = "open('ran', 'w')"
TRICKS = {
    # D3 of the security findings.
    "program": (["${C}", "-c", CODE], "/bin/sh"),
    "timeout sh -c": (["timeout", "5", "sh", "-c", "${C}"], CODE),
    "timeout": (["timeout", "5", "${C}"], "./go"),
    "env": (["env", "${C}"], "./go"),
    "awk": (["awk", "${C}"], 'BEGIN {system("touch ran")}'),
    "python script": (["python3", "${C}"], "go.py"),
    # Further ones.
    "sh -c": (["sh", "-c", "${C}"], CODE),
    "script of sh": (["sh", "${C}"], "go"),
    "renamed shell": (["./tool", "-c", "${C}"], CODE),
    "nice": (["nice", "-n", "5", "${C}"], "./go"),
    "value of nice": (["nice", "--adjustment=5", "sh", "--", "${C}"], "./go"),
    "xargs": (["xargs", "-a", "/etc/passwd", "-n", "1", "${C}"], "./go"),
    "find -exec": (["find", ".", "-maxdepth", "0", "-exec", "${C}", ";"], "./go"),
    "sed": (["sed", "-n", "${C}", "/etc/passwd"], "1e touch ran"),
    "tar": (
        ["tar", "-cf", "/dev/null", "--checkpoint=1", "--checkpoint-action=${C}", "/etc/passwd"],
        "exec=touch ran",
    ),
    "python -c behind an option": (["python3", "-W", "ignore", "-c", "${C}"], PYTHON),
    "python -c attached": (["python3", "-c${C}"], PYTHON),
    "module of Python": (["python3", "-m", "timeit", "-n", "1", "-s", "${C}"], PYTHON),
    "environment of a shell": (["env", "BASH_ENV=${C}", "bash", "-c", "true"], "./go"),
    "option of env": (["env", "-S${C}"], "touch ran"),
    "second option of env": (["env", "-C", ".", "-S", "${C}"], "touch ran"),
    "removed variable of env": (["env", "-u", "X", "-S", "${C}"], "touch ran"),
    "perl": (["perl", "-e", "${C}"], "system 'touch ran'"),
}  # fmt: skip
if shutil.which("node"):
    TRICKS["node --eval="] = (
        ["node", "--eval=${C}"],
        "require('fs').writeFileSync('ran', '')",
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "go").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "go").chmod(0o755)
    (tmp_path / "go.py").write_text(PYTHON)
    (tmp_path / "tool").symlink_to("/bin/sh")
    return tmp_path


@pytest.fixture
def api(admin_token):
    def send(method, path, body):
        response = send_api(
            method,
            f"/api/v1{path}",
            headers={"Authorization": f"Bearer {admin_token}"},
            body=json.dumps(body).encode(),
        )
        return response.status_code, json.loads(response.content)

    return send


def request(folder, argv, variables, **fields):
    return {
        "name": "trick",
        "slug": "trick",
        "transport": "stdio",
        "command": argv[0],
        "args": argv[1:],
        "cwd": str(folder),
        "variables": variables,
        **fields,
    }


def runs_it(folder, argv) -> bool:
    """Return whether this command line creates the file, and remove the file."""
    subprocess.run(argv, cwd=folder, timeout=30, stdin=subprocess.DEVNULL, capture_output=True)
    ran: bool = (folder / "ran").exists()
    (folder / "ran").unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize("trick", TRICKS)
def test_a_variable_cannot_decide_what_runs(trick, folder, api):
    argv, value = TRICKS[trick]
    filled = [arg.replace("${C}", value) for arg in argv]
    assert runs_it(folder, filled), "the trick itself does not work"

    for path in ("/servers/test", "/servers"):
        status, response = api("POST", path, request(folder, argv, {"C": value}, confirm_argv=argv))
        assert status in (409, 422), response
    text = json.dumps({"trick": {"command": argv[0], "args": argv[1:], "cwd": str(folder)}})
    _, response = api("POST", "/servers/import", {"text": text, "variables": {"C": value}})
    assert response["saved"] == []
    if trick != "program":  # a path as the command is written out, and confirmed as such
        status, response = api(
            "POST", "/servers/test", request(folder, argv, {"C": value}, confirm_argv=filled)
        )
        assert (status, response["error"]["code"]) == (422, "bad_argv")

    assert not (folder / "ran").exists()
    assert not Server.objects.exists()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_stored_program_with_such_a_variable_does_not_start(trick, folder, db):
    """Also one that an earlier version accepted."""
    argv, value = TRICKS[trick]
    server = make_program_row(folder, argv, {"C": value})

    result = connection_test.test_server(server, actor=SYSTEM)

    assert result.code == "bad_argv"
    assert not (folder / "ran").exists()


def make_program_row(folder, argv, variables, env=None):
    """Create a server as earlier versions did, which recorded no values."""
    digest = validation.argv_digest(argv, str(folder))
    server = make_server(
        transport="stdio",
        command=argv[0],
        args=argv[1:],
        cwd=str(folder),
        confirmed_argv=digest,
    )
    for kind, values in (("variable", variables), ("env", env or {})):
        for name, value in values.items():
            Credential.objects.create(
                server=server,
                kind=kind,
                name=name,
                ciphertext=encrypt(Secret(value)),
                origin_sha256=origin_digest(server.origin),
            )
    return server


# A program that runs its option's value as code: nobody can know that from its arguments.
RUNS_ITS_OPTION = "import sys, subprocess; subprocess.run(sys.argv[2], shell=True)"


@pytest.fixture
def program(folder):
    path = folder / "server.py"
    path.write_text(RUNS_ITS_OPTION)
    return [sys.executable, str(path), "--after", "${C}"]


def test_a_changed_variable_is_confirmed_before_it_is_used(folder, program, api):
    """The second step of D3: register a harmless value, then replace it."""
    filled = [*program[:-1], "true"]
    status, response = api(
        "POST", "/servers", request(folder, program, {"C": "true"}, confirm_argv=filled)
    )
    assert status == 201, response
    change = {"kind": "variable", "values": {"C": CODE}}

    status, response = api("PUT", "/servers/trick/credentials", change)
    assert (status, response["error"]["code"]) == (409, "confirm_argv")
    details = response["error"]["details"]
    assert details["argv"] == program
    assert details["variables"] == ["C"]
    assert CODE not in json.dumps(response)
    for wrong in ({"confirm_argv": program}, {"confirm_argv": filled}, {"confirm": "0" * 64}):
        assert api("PUT", "/servers/trick/credentials", change | wrong)[0] == 409
    connection_test.test_server(Server.objects.get(), actor=SYSTEM)
    assert not (folder / "ran").exists()

    confirmed = change | {"confirm_argv": [*program[:-1], CODE]}
    assert api("PUT", "/servers/trick/credentials", confirmed)[0] == 200
    connection_test.test_server(Server.objects.get(), actor=SYSTEM)
    assert (folder / "ran").exists()


def test_the_digest_in_the_response_confirms_too(folder, program, api):
    body = request(folder, program, {"C": SECRET})
    status, response = api("POST", "/servers", body)
    assert status == 409
    assert SECRET not in json.dumps(response)

    digest = response["error"]["details"]["digest"]
    other = request(folder, program, {"C": SECRET + "!"}, confirm=digest)
    assert api("POST", "/servers", other)[0] == 409
    assert api("POST", "/servers", body | {"confirm": digest})[0] == 201


def test_an_edit_of_the_environment_alone_is_confirmed(folder, program, api):
    argv = [*program[:-1], "true"]
    body = request(folder, argv, {}, env={"MODE": "one"}, confirm_argv=argv)
    assert api("POST", "/servers", body)[0] == 201
    fields = ("transport", "command", "args", "cwd")
    connection = {name: body[name] for name in fields}

    assert api("PATCH", "/servers/trick", {"connection": connection})[0] == 200  # nothing changed
    changed = connection | {"env": {"MODE": "two"}}
    status, response = api("PATCH", "/servers/trick", {"connection": changed})
    assert (status, response["error"]["code"]) == (409, "confirm_argv")
    assert response["error"]["details"]["env"] == ["MODE"]
    for values in ({"MODE": "two"}, {"OTHER": "x"}, {"MODE": None}):
        body = {"kind": "env", "values": values}
        assert api("PUT", "/servers/trick/credentials", body)[0] == 409
    assert server_actions.build_spec(Server.objects.get()).env == {"MODE": Secret("one")}

    changed |= {"confirm_argv": argv}
    assert api("PATCH", "/servers/trick", {"connection": changed})[0] == 200
    assert server_actions.build_spec(Server.objects.get()).env == {"MODE": Secret("two")}


def test_a_value_replaced_in_the_database_does_not_run(folder, program, api):
    filled = [*program[:-1], "true"]
    api("POST", "/servers", request(folder, program, {"C": "true"}, confirm_argv=filled))
    Credential.objects.update(ciphertext=encrypt(Secret(CODE)))

    result = connection_test.test_server(Server.objects.get(), actor=SYSTEM)

    assert result.code == "confirm_argv"
    assert not (folder / "ran").exists()


def test_an_import_confirms_the_values_too(folder, program, api):
    text = json.dumps({"trick": {"command": program[0], "args": program[1:], "env": {"A": "b"}}})
    body = {"text": text, "variables": {"C": SECRET}}
    _, checked = api("POST", "/servers/import", body | {"check_only": True})
    assert SECRET not in json.dumps(checked)
    (draft,) = checked["drafts"]

    changed = body | {"variables": {"C": CODE}, "confirm": [draft["confirm"]]}
    assert api("POST", "/servers/import", changed)[1]["saved"] == []
    assert api("POST", "/servers/import", body | {"confirm": [draft["confirm"]]})[1]["saved"]


def test_a_confirmation_of_an_earlier_version_holds_until_a_value_changes(folder, program, db):
    server = make_program_row(folder, program, {"C": "true"}, env={"MODE": "one"})
    assert server_actions.build_spec(server).env == {"MODE": Secret("one")}

    with pytest.raises(Conflict):
        server_actions.set_credentials(server, "env", {"MODE": Secret("two")}, actor=SYSTEM)


def test_a_rotated_key_keeps_confirmations(folder, program, settings, db):
    server = make_program_row(folder, program, {"C": "true"})
    changed = confirmation.stored_program(server, "variable", {"C": Secret(SECRET)})
    server_actions.set_credentials(
        server, "variable", {"C": Secret(SECRET)}, actor=SYSTEM, confirmed=changed.digest
    )
    old, new = settings.ENCRYPTION_KEYS[0], "n" * 48
    settings.ENCRYPTION_KEYS = [new, old]
    assert server_actions.build_spec(Server.objects.get())

    call_command("rotate_key", stdout=io.StringIO())

    settings.ENCRYPTION_KEYS = [new]
    assert server_actions.build_spec(Server.objects.get()).argv[-1] == Secret(SECRET)


def test_the_digest_cannot_be_computed_from_guessed_values(program, settings):
    """Without the installation's key nobody can test guesses of a secret against the digest."""
    guessed = confirmation.Program(tuple(program), variables={"C": Secret("1234")})
    digest = guessed.digest
    settings.ENCRYPTION_KEYS = ["another key" * 5]
    assert guessed.digest != digest


def test_every_part_of_a_program_changes_its_digest():
    one, two = Secret("1"), Secret("2")
    programs = [
        confirmation.Program(("a", "--b=${C}")),
        confirmation.Program(("a", "--b=${C}"), variables={"C": one}),
        confirmation.Program(("a", "--b=${C}"), variables={"C": two}),
        confirmation.Program(("a", "--b=${D}"), variables={"D": one}),
        confirmation.Program(("a", "--b=${C}"), "/", variables={"C": one}),
        confirmation.Program(("a", "--b=${C}"), env={"C": one}),
        confirmation.Program(("a", "--b=${C}"), env={"C": one}, variables={"C": one}),
        confirmation.Program(("a", "--b=${C}"), env={"D": one}, variables={"C": one}),
    ]
    assert len({program.digest for program in programs}) == len(programs)


def test_no_value_is_recorded_in_the_audit_log(folder, program, api):
    filled = [*program[:-1], SECRET]
    api("POST", "/servers", request(folder, program, {"C": SECRET}, confirm_argv=filled))
    entries = json.dumps(list(AuditEntry.objects.values("before", "after")))
    assert "server.py" in entries
    assert SECRET not in entries


@pytest.mark.parametrize(
    "argv",
    [
        ["x", "--token=${T}"],
        ["x", "--token", "${T}"],
        ["x", "start", "--header", "Authorization: Bearer ${T}"],
        ["x", "postgresql://bob:${T}@db/x"],
        ["x", "https://x.example/mcp?key=${T}"],
        ["npx", "-y", "pkg@1.0.0", "--api-key", "${T}"],
        ["npx", "-y", "mcp-remote@1.0.0", "https://x.example", "--header", "X-Key: ${T}"],
        ["uvx", "--from", "pkg==1.0", "server", "--key=${T}"],
        ["uv", "--directory", "/srv", "run", "server.py", "--key", "${T}"],
        ["python3", "-u", "server.py", "--key", "${T}"],
        ["python3", "-m", "my_server", "--key", "${T}"],
        ["node", "dist/index.js", "--key", "${T}"],
        ["deno", "run", "-A", "server.ts", "--key", "${T}"],
        ["java", "-jar", "server.jar", "--key=${T}"],
        ["docker", "run", "-i", "--rm", "-e", "KEY=${T}", "image"],
        ["docker", "run", "-i", "image", "--key", "${T}"],
        ["env", "KEY=${T}", "npx", "-y", "pkg@1.0.0"],
        ["bash", "start.sh", "--key", "${T}"],
    ],
)
def test_a_variable_may_be_a_value(argv):
    assert find_misplaced_variables(argv) == []
    assert find_misplaced_variables(tuple(argv)) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["x", "${T}"],
        ["x", "a${T}"],
        ["x", "--${T}=a"],
        ["x", "--a${T}"],
        ["x", "--", "${T}"],
        ["x", "KEY=${T}"],
        ["x", "https://${T}/mcp"],
        ["x", "https://a.${T}.example/mcp"],
        ["x", "--exec", "${T}"],
        ["npx", "${T}"],
        ["npx", "-y", "--package", "${T}", "x"],
        ["npx", "-y", "node@20", "-e", "${T}"],
        ["npx", "--registry", "${T}", "pkg"],
        ["uvx", "--from", "${T}", "server"],
        ["uvx", "--index-url=${T}", "server"],
        ["uv", "run", "--with", "${T}", "server"],
        ["uv", "run", "python", "-c", "${T}"],
        ["python3.12", "--check-hash-based-pycs", "${T}", "server.py"],
        ["python3", "-m", "pip", "install", "--index-url", "${T}"],
        ["node", "--require", "${T}", "index.js"],
        ["node", "--import=${T}", "index.js"],
        ["deno", "eval", "--ext", "${T}"],
        ["java", "-cp", "${T}", "Main"],
        ["java", "-Dagent=${T}", "-jar", "server.jar"],
        ["docker", "run", "${T}"],
        ["docker", "run", "--entrypoint", "${T}", "image"],
        ["docker", "run", "-v", "${T}:/data", "image"],
        ["docker", "run", "-e", "NODE_OPTIONS=${T}", "image"],
        ["docker", "run", "-e", "${T}", "image"],
        ["docker", "run", "image", "sh", "-c", "${T}"],
        ["docker", "exec", "--user", "${T}", "x"],
        ["env", "LD_PRELOAD=${T}", "x"],
        ["ssh", "-o", "ProxyCommand=${T}", "host"],
        ["/usr/bin/GAWK", "--assign", "${T}"],
        ["env", "--ignore-environment", "--split-string", "${T}"],
        ["env", "--", "x", "${T}"],
        ["/lib64/ld-linux-x86-64.so.2", "--library-path", "${T}", "/bin/true"],
        ["/lib/ld-musl-x86_64.so.1", "--argv0", "${T}", "/bin/true"],
        ["start-stop-daemon", "--start", "--startas", "${T}"],
        ["x", "--start", "ld.so", "--argv0", "${T}"],
        ["x", "--node_options=${T}"],
        ["x", "--library-path", "${T}"],
        ["x", "--javaagent=${T}"],
        ["x", "--pager", "${T}"],
        ["osqueryi", "--any", "${T}"],
    ],
)  # fmt: skip
def test_a_variable_may_not_be_a_program_an_option_or_code(argv):
    assert find_misplaced_variables(argv)


def test_a_variable_value_that_is_an_option_is_rejected(folder, program, api):
    filled = [*program[:-1], "--exec"]
    status, response = api(
        "POST", "/servers", request(folder, program, {"C": "--exec"}, confirm_argv=filled)
    )
    assert (status, response["error"]["code"]) == (422, "bad_variable")


def test_misplaced_variables_are_named_with_what_to_do(db):
    with pytest.raises(Invalid) as caught:
        server_actions.check_program(["awk", "${PROGRAM}"], "")
    assert "PROGRAM" in caught.value.message
    assert "env" in caught.value.hint
