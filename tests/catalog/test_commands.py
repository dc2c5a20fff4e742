"""`manage.py tools`: list tools and decide on them."""

import json

import pytest
from django.core.management import call_command
from django.urls import reverse

from catalog.models import AuditEntry, Tool
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object


@pytest.fixture
def weather(db):
    server = make_server(slug="weather")
    ingest_tools(server, tool_object("a", description="Old."), tool_object("b", description="Old."))
    ingest_tools(server, tool_object("a", description="New."), tool_object("b", description="Old."))
    return server


@pytest.fixture
def run(capsys):
    """Run the command and return its exit code and output."""

    def tools(*arguments):
        code = 0
        try:
            call_command("tools", *arguments)
        except SystemExit as stop:
            code = stop.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return tools


def state(name):
    tool = Tool.objects.get(public_name=name)
    return tool.state, tool.description


def test_tools_are_listed_by_state(run, weather):
    code, out, _ = run("--state", "waiting")

    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [["weather__a", "waiting"]]


def test_the_json_list_has_the_format_of_the_api(run, weather):
    make_tool(make_server(slug="other"), "c")

    _, out, _ = run("--server", "weather", "--json")

    listed = json.loads(out)["tools"]
    assert [tool["name"] for tool in listed] == ["weather__a", "weather__b"]
    assert listed[0]["state"] == "waiting"
    assert listed[0]["mcpServer"] == "weather"


def test_missing_tools_are_listed_only_on_request(run, weather):
    ingest_tools(weather, tool_object("a", description="New."))

    assert "weather__b" not in run()[1]
    assert "weather__b" in run("--state", "missing")[1]


def test_a_hostile_reason_is_escaped(run, weather):
    run("hold", "weather__b", "--reason", "x\n\x1b[2Jweather__z available")

    out = run("--state", "held")[1]

    assert len(out.splitlines()) == 1
    assert "\x1b" not in out


def test_approve_activates_the_new_definition(run, weather):
    code, out, _ = run("approve", "weather__a")

    assert (code, out) == (0, "weather__a: now available\n")
    assert state("weather__a") == ("available", "New.")
    entry = AuditEntry.objects.first()
    assert (entry.actor_kind, entry.actor_label) == ("command", "manage.py tools approve")


def test_keep_old_rejects_the_change(run, weather):
    assert run("keep-old", "weather__a")[0] == 0
    assert state("weather__a") == ("available", "Old.")


def test_several_tools_can_be_hidden_and_released(run, weather):
    assert run("hold", "weather__a", "weather__b", "--reason", "Odd.")[0] == 0
    assert {tool.held_reason for tool in Tool.objects.all()} == {"Odd."}
    assert run("release", "weather__a", "weather__b")[0] == 0
    assert state("weather__b")[0] == "available"
    assert state("weather__a")[0] == "waiting"


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["weather__a", "weather__b"], 3),  # b has no pending review
        (["weather__a", "nowhere"], 3),
        (["nowhere"], 1),
        (["weather__b"], 1),
        ([], 1),
    ],
)
def test_the_exit_code_tells_whether_some_or_all_failed(names, code, run, weather):
    assert run("approve", *names)[0] == code


def test_json_has_the_result_for_each_tool(run, weather):
    code, out, _ = run("approve", "weather__a", "weather__b", "no\x1bwhere", "--json")

    assert code == 3
    results = json.loads(out)["tools"]
    assert [(result["ok"], result.get("code")) for result in results] == [
        (True, None),
        (False, "already_decided"),
        (False, "not_found"),
    ]
    assert "\x1b" not in results[2]["name"]


def test_names_without_an_action_are_an_error(run, weather):
    code, _, err = run("list", "weather__a")

    assert code == 1
    assert "Specify an action" in err


@pytest.mark.parametrize("act", ["approve", "keep-old", "hold"])
def test_page_api_and_command_have_the_same_result(act, run, client, admin, admin_token):
    """Make the same decision on the same change by page, API and command."""
    for slug in ("page", "api", "command"):
        server = make_server(slug=slug)
        make_tool(server, "a", description="Old.")
        ingest_tools(server, tool_object("a", description="New."))
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")

    client.post(reverse(f"tool-{act}", args=["page__a"]))
    client.post(
        f"/api/v1/tools/api__a/{act}",
        b"{}",
        content_type="application/json",
        headers={"Authorization": f"Bearer {admin_token}"},
    )
    run(act, "command__a")

    results = {
        (
            tool.state,
            tool.description,
            bool(tool.kept_against_id),
            tool.changes.first().outcome,
            AuditEntry.objects.filter(target_id=tool.pk).first().verb,
        )
        for tool in Tool.objects.all()
    }
    assert len(results) == 1
    assert next(iter(results))[0] == ("held" if act == "hold" else "available")
