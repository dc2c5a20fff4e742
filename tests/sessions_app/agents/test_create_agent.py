"""`manage.py create_agent`: creates an agent with a key, with text or JSON output."""

import json

import pytest
from django.core.management import CommandError, call_command

from catalog.models import AuditEntry
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.agents.queries import find_agent
from sessions_app.models import Agent, ApiKey
from tests.support.factories import make_server
from tests.support.installation import Installation


@pytest.fixture
def groups(db):
    for slug in ("weather", "files"):
        make_server(slug=slug)


@pytest.fixture
def run(capsys):
    """Run the command and return its exit code, stdout and stderr."""

    def create_agent(*arguments):
        code = 0
        try:
            call_command("create_agent", *arguments)
        except SystemExit as stop:
            code = stop.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return create_agent


def test_json_output_is_one_document_with_the_agent_and_its_key(run, groups):
    code, out, err = run("scout", "--group", "mcp:files", "--group", "mcp:weather", "--json")

    assert (code, err) == (0, "")
    body = json.loads(out)
    assert set(body) == {"agent", "key"}
    assert body["agent"] == "scout"
    agent = api_keys.find_key(body["key"]).agent
    assert agent_actions.group_ids(agent) == ["mcp:files", "mcp:weather"]
    assert body["key"] not in json.dumps(list(AuditEntry.objects.values()), default=str)


def test_text_output_has_the_key_and_a_command_to_test_it(run, groups, settings):
    settings.PUBLIC_URL = "https://crib.example.org"

    code, out, _ = run("scout", "--all-groups")

    key = ApiKey.objects.get()
    assert code == 0
    assert "Created agent scout. Groups: all." in out
    assert "not shown again" in out
    text = next(line.strip() for line in out.splitlines() if line.startswith("  tcb_"))
    assert api_keys.find_key(text) == key
    assert f"https://crib.example.org/api/v1/sessions -H 'Authorization: Bearer {text}'" in out


def test_an_agent_without_groups_is_allowed_and_reported(run, groups):
    code, out, _ = run("drifter")

    assert code == 0
    assert "It has no groups, so it has no tools yet." in out
    assert agent_actions.group_ids(find_agent("drifter")) == []


def test_options_set_the_settings(run, groups):
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
        (["a/b"], 'cannot contain "/"'),
    ],
)
def test_errors_are_written_to_stderr_and_nothing_is_created(arguments, words, run, groups):
    code, out, err = run(*arguments, "--json")

    assert (code, out) == (1, "")
    assert words in err
    assert not Agent.objects.exists()
    assert not ApiKey.objects.exists()


def test_a_duplicate_name_is_rejected(run, groups):
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
def test_invalid_options_are_rejected_by_the_parser(arguments, groups):
    with pytest.raises(CommandError):
        call_command("create_agent", *arguments)

    assert not Agent.objects.exists()


def test_the_command_works_on_a_new_installation(tmp_path):
    new = Installation(tmp_path / "data")

    done = new.command("create_agent", "scout", "--all-groups", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["agent"] == "scout"
    again = new.command("create_agent", "scout", "--json")
    assert (again.returncode, again.stdout) == (1, "")
    assert "An agent named scout already exists." in again.stderr
