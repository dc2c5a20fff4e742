"""The gate in front of programs, where a draft meets it."""

import pytest

from catalog.audit import SYSTEM
from servers.mcp_json.parser import ServerDraft
from servers.models import Server
from servers.registration import actions as server_actions
from servers.registration import validation
from servers.secret import Secret
from toolcrib.lib.errors import Invalid


@pytest.mark.parametrize(("command", "cwd"), [("${PROGRAM}", ""), ("env", "/${FOLDER}")])
def test_a_program_that_is_a_variable_cannot_be_confirmed(db, command, cwd):
    draft = ServerDraft(
        name="hidden",
        slug="hidden",
        transport="stdio",
        command=command,
        cwd=cwd,
        variables={"PROGRAM": Secret("/bin/true"), "FOLDER": Secret("tmp")},
    )
    with pytest.raises(Invalid) as refused:
        server_actions.add_server(
            draft, actor=SYSTEM, confirmed=validation.argv_digest(draft.argv, draft.cwd)
        )
    assert refused.value.code == "bad_argv"
    assert not Server.objects.exists()


@pytest.mark.parametrize("slug", ["add", "export", "bulk", "import", "test", "-x", "X", "a_b", ""])
def test_a_slug_that_is_no_slug_or_an_address_of_ours_is_refused(db, slug):
    draft = ServerDraft(name="x", slug=slug, transport="http", url="https://a.example/mcp")
    with pytest.raises(Invalid) as refused:
        server_actions.add_server(draft, actor=SYSTEM)
    assert refused.value.code == "bad_slug"


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODE", "-copen('x','w')"), ("MODE", "a\nb"), ("a" * 201, "x"), ("a\0", "x"), ("1a", "x")],
)
def test_a_variable_fills_in_a_value_and_never_an_option_of_a_confirmed_program(db, name, value):
    draft = ServerDraft(
        name="mode",
        slug="mode",
        transport="stdio",
        command="python3",
        args=("${MODE}",),
        variables={"MODE": Secret("script.py")},
    )
    digest = validation.argv_digest(draft.argv, draft.cwd)
    server = server_actions.add_server(draft, actor=SYSTEM, confirmed=digest)

    with pytest.raises(Invalid) as refused:
        server_actions.set_credentials(server, "variable", {name: Secret(value)}, actor=SYSTEM)

    assert refused.value.code == "bad_variable"
    assert [part.reveal() for part in server_actions.spec_of(server).argv] == [
        "python3",
        "script.py",
    ]


def test_code_in_arguments_with_a_variable_passes_no_gate(db):
    argv = ["sh", "-c", "echo ${NAME}"]
    with pytest.raises(Invalid) as refused:
        server_actions.check_program(argv, "", confirmed=validation.argv_digest(argv, ""))
    assert refused.value.code == "bad_argv"
