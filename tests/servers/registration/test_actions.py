"""Server actions: command confirmation, slugs and variables."""

import pytest

from catalog.audit import SYSTEM
from servers.models import Server
from servers.registration import actions as server_actions
from servers.registration import confirmation, validation
from servers.registration.drafts import ServerDraft
from servers.secret import Secret
from toolcrib.lib.errors import Invalid


@pytest.mark.parametrize(("command", "cwd"), [("${PROGRAM}", ""), ("env", "/${FOLDER}")])
def test_a_command_or_working_directory_with_a_variable_cannot_be_confirmed(db, command, cwd):
    draft = ServerDraft(
        name="hidden",
        slug="hidden",
        transport="stdio",
        command=command,
        cwd=cwd,
        variables={"PROGRAM": Secret("/bin/true"), "FOLDER": Secret("tmp")},
    )
    with pytest.raises(Invalid) as error:
        server_actions.add_server(
            draft, actor=SYSTEM, confirmed=validation.argv_digest(draft.argv, draft.cwd)
        )
    assert error.value.code == "bad_argv"
    assert not Server.objects.exists()


@pytest.mark.parametrize("slug", ["add", "export", "bulk", "import", "test", "-x", "X", "a_b", ""])
def test_an_invalid_or_reserved_slug_is_rejected(db, slug):
    draft = ServerDraft(name="x", slug=slug, transport="http", url="https://a.example/mcp")
    with pytest.raises(Invalid) as error:
        server_actions.add_server(draft, actor=SYSTEM)
    assert error.value.code == "bad_slug"


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODE", "-copen('x','w')"), ("MODE", "a\nb"), ("a" * 201, "x"), ("a\0", "x"), ("1a", "x")],
)
def test_a_variable_cannot_become_an_option_of_a_confirmed_command(db, name, value):
    draft = ServerDraft(
        name="mode",
        slug="mode",
        transport="stdio",
        command="/opt/tool",
        args=("--mode", "${MODE}"),
        variables={"MODE": Secret("fast")},
    )
    digest = confirmation.draft_program(draft).digest
    server = server_actions.add_server(draft, actor=SYSTEM, confirmed=digest)

    with pytest.raises(Invalid) as error:
        server_actions.set_credentials(server, "variable", {name: Secret(value)}, actor=SYSTEM)

    assert error.value.code == "bad_variable"
    assert [arg.reveal() for arg in server_actions.build_spec(server).argv] == [
        "/opt/tool",
        "--mode",
        "fast",
    ]


def test_inline_code_with_a_variable_is_rejected(db):
    argv = ["sh", "-c", "echo ${NAME}"]
    with pytest.raises(Invalid) as error:
        server_actions.check_program(argv, "")
    assert error.value.code == "bad_argv"
