"""`manage.py create_agent`: an agent and its key, for scripts and for people."""

import json

import pytest
from django.core.management import CommandError, call_command

from catalog.models import AuditEntry
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ApiKey
from tests.support.factories import make_server
from tests.support.installation import Installation


@pytest.fixture
def groups(db):
    for slug in ("weather", "files"):
        make_server(slug=slug)


@pytest.fixture
def run(capsys):
    """Run the command and give its exit code and what it printed."""

    def create_agent(*arguments):
        code = 0
        try:
            call_command("create_agent", *arguments)
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return create_agent


def test_json_is_one_document_with_the_agent_and_its_key(run, groups):
    code, out, err = run("scout", "--group", "mcp:files", "--group", "mcp:weather", "--json")

    assert (code, err) == (0, "")
    made = json.loads(out)
    assert set(made) == {"agent", "key"}
    assert made["agent"] == "scout"
    agent = api_keys.find_key(made["key"]).agent
    assert agent_actions.group_ids(agent) == ["mcp:files", "mcp:weather"]
    assert made["key"] not in json.dumps(list(AuditEntry.objects.values()), default=str)


def test_people_read_the_key_once_and_a_line_to_try_it(run, groups, settings):
    settings.PUBLIC_URL = "https://crib.example.org"

    code, out, _ = run("scout", "--all-groups")

    key = ApiKey.objects.get()
    assert code == 0
    assert "It has all groups." in out
    assert "not shown again" in out
    text = next(line.strip() for line in out.splitlines() if line.startswith("  tcb_"))
    assert api_keys.find_key(text) == key
    assert f"https://crib.example.org/api/v1/sessions -H 'Authorization: Bearer {text}'" in out


def test_an_agent_without_groups_is_legal_and_said(run, groups):
    code, out, _ = run("drifter")

    assert code == 0
    assert "It has no groups, so it sees no tools yet." in out
    assert agent_actions.group_ids(agent_actions.find_agent("drifter")) == []


def test_settings_are_taken(run, groups):
    options = ["--strategy", "inject", "--mode", "full"]
    options += ["--calls-per-minute", "90000", "--calls-in-flight", "500"]

    assert run("bench", *options, "--json")[0] == 0

    agent = Agent.objects.get()
    assert (agent.strategy, agent.mode) == ("inject", "full")
    assert (agent.calls_per_minute, agent.calls_in_flight) == (90_000, 500)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scout", "--group", "mcp:nope"], "mcp:nope"),
        (["scout", "--calls-in-flight", "0"], "calls_in_flight"),
        ([""], "1 to 80 printable"),
        (["a/b"], "no /"),
    ],
)
def test_what_is_refused_is_told_on_standard_error_and_makes_nothing(arguments, words, run, groups):
    code, out, err = run(*arguments, "--json")

    assert (code, out) == (1, "")
    assert words in err
    assert not Agent.objects.exists()
    assert not ApiKey.objects.exists()


def test_a_second_agent_of_the_name_is_refused(run, groups):
    run("scout")

    code, _, err = run("scout", "--json")

    assert code == 1
    assert "already" in err
    assert ApiKey.objects.count() == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--mode", "fast"],
        ["x", "--group", "a", "--all-groups"],
        ["x", "--calls-in-flight", "a"],
    ],
)
def test_options_that_are_none_are_refused_before_anything(arguments, groups):
    with pytest.raises(CommandError):
        call_command("create_agent", *arguments)

    assert not Agent.objects.exists()


def test_it_works_where_nobody_has_started_anything_yet(tmp_path):
    new = Installation(tmp_path / "data")

    done = new.command("create_agent", "scout", "--all-groups", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["agent"] == "scout"
    again = new.command("create_agent", "scout", "--json")
    assert (again.returncode, again.stdout) == (1, "")
    assert "There is an agent called scout already." in again.stderr
