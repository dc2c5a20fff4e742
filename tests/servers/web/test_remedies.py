"""The cause of a failing server and the action that fixes it, wherever the server appears."""

import pytest

from servers.errors import SEE_STDERR
from servers.models import Credential
from servers.web import remedies
from tests.support.factories import make_server
from toolcrib.lib.roles import Role
from toolcrib.pages import attention

pytestmark = pytest.mark.django_db


def failing_program(output="crm: CRM_TOKEN is not set", **fields):
    return make_server(
        slug="crm",
        name="CRM",
        transport="stdio",
        command="/bin/crm",
        state="failing",
        state_code="exited",
        state_reason=f"The program exited with code 1. {SEE_STDERR}",
        state_detail=output,
        **fields,
    )


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("starting\nCRM_TOKEN is not set", "CRM_TOKEN"),
        ("Error: missing required environment variable GITHUB_TOKEN", "GITHUB_TOKEN"),
        ("Please set API_KEY_2 in the environment", "API_KEY_2"),
        ("KeyError: something else", ""),
        ("HELLO_WORLD", ""),
        ('<b>EVIL_NAME" onclick=x</b> went away', ""),
        ("", ""),
    ],
)
def test_only_a_variable_that_is_said_to_be_missing_is_suggested(output, name):
    assert remedies.missing_variable(failing_program(output)) == name


def test_a_missing_variable_can_be_added_from_every_place(page_of, admin):
    failing_program()
    link = "/servers/crm/settings?credential=CRM_TOKEN#credentials"
    for path in ("/", "/servers", "/servers/crm"):
        page = page_of(admin, path).content.decode()
        assert f'href="{link}"' in page, path
        assert "Add CRM_TOKEN" in page, path
    form = page_of(admin, link).content.decode()
    assert 'value="CRM_TOKEN"' in form
    invented = page_of(admin, "/servers/crm/settings?credential=PATH_X").content.decode()
    assert 'value="PATH_X"' not in invented


def test_a_stored_variable_is_replaced_and_a_voided_one_entered():
    server = failing_program()
    credential = Credential(server=server, kind="env", name="CRM_TOKEN", ciphertext="x")
    assert remedies.find_remedy(server, [credential]).label == "Replace CRM_TOKEN"
    voided = Credential(server=server, kind="env", name="OTHER", ciphertext="")
    assert voided.voided
    assert remedies.find_remedy(server, [voided]).label == "Enter OTHER"


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("auth", "Enter credentials"),
        ("tls", "Edit connection"),
        ("command_not_found", "Edit connection"),
        ("refused", "Reconnect"),
    ],
)
def test_the_action_depends_on_the_kind_of_failure(code, label):
    server = make_server(slug="web", state="failing", state_code=code, state_reason="No.")
    assert remedies.find_remedies([server])[server.pk].label == label


def test_an_operator_sees_the_cause_without_an_action(page_of, operator):
    failing_program()
    [item] = attention.items(Role.OPERATOR)
    assert (item.action, item.post) == ("View server", False)
    for path in ("/", "/servers", "/servers/crm"):
        page = page_of(operator, path).content.decode()
        assert "It said: “crm: CRM_TOKEN is not set”" in page, path
        assert "Add CRM_TOKEN" not in page, path
        assert "Reconnect" not in page, path
