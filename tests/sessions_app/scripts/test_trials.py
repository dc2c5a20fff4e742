"""Trials of scripts by people: run as an agent, by its rules, in a test session of their own."""

import re
from html import unescape

import pytest

from catalog.models import AuditEntry
from sessions_app.held_calls import actions
from sessions_app.models import Agent, AgentSession, ApiKey, Call, ScriptRun
from sessions_app.scripts import runs
from sessions_app.usage import call_stats
from sessions_app.usage.filters import UsageFilter
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.sessions_app.scripts.test_held import SAY, decide, end
from tests.sessions_app.sessions.test_endpoint import in_database
from tests.support.people import make_person
from toolcrib.lib.roles import Role

CODE = f"print(input)\r\n{SAY}\r\n"


@pytest.fixture
def admin(agent, client):
    client.force_login(make_person("ada@example.org", Role.ADMIN))
    return client


def send(admin, code=CODE, **fields):
    """Send the form, confirm it if it asks, and return the run."""
    form = {"agent": "scout", "language": "python", "source": code, "input": "[4]", **fields}
    page = admin.post("/scripts/try", form)
    if page.status_code == 200:
        seen = re.search(r'name="seen" value="(\w+)"', page.content.decode())
        assert seen is not None, page.content.decode()
        page = admin.post("/scripts/try", form | {"seen": seen[1]})
    assert page.status_code == 302, page.content.decode()
    run = ScriptRun.objects.latest("id")
    assert page.url == f"/sessions/{run.session.session_id}/scripts/{run.run_id}"
    return run


def test_a_script_runs_as_the_agent_and_its_session_and_key_are_gone_afterwards(run, admin):
    async def scenario(web):
        started = await in_database(send, admin)
        await web.execute()
        return started.run_id

    row = ScriptRun.objects.get(run_id=run(scenario))
    assert (row.state, row.result, row.logs) == ("completed", '"told"', "[4]\n")
    assert (row.session.agent.name, row.session.state) == ("scout", "closed")
    assert (row.key, ApiKey.objects.count()) == (None, 1)
    call = Call.objects.get()
    assert (call.tool_name, call.path, call.agent.name) == ("raw__say", "script", "scout")
    entry = AuditEntry.objects.get(verb="agent.script")
    assert (entry.actor_label, entry.target_label) == ("ada@example.org", "scout")
    assert call_stats.scripts_by_agent(UsageFilter(start=row.session.created_at)) == []


def test_the_rules_of_the_agent_apply_and_a_held_call_is_decided_as_any_other(run, admin):
    add_rule("Ask first", effect="hold", tools=["raw__say"], origin="script")

    async def scenario(web):
        started = await in_database(send, admin)
        await web.execute()
        held = await in_database(lambda: ScriptRun.objects.get(pk=started.pk))
        assert (held.state, held.session_id) == ("held", started.session_id)
        await decide(actions.deny, comment="Not now.")
        await end(web, started.run_id)

    run(scenario)
    row = ScriptRun.objects.get()
    assert (row.state, row.error_type) == ("failed", "PermissionError")
    assert "Not now." in row.error
    assert ApiKey.objects.count() == 1


def test_a_script_that_names_a_changing_tool_is_confirmed_as_it_is(admin):
    form = {"agent": "scout", "language": "python", "source": SAY, "input": ""}
    asked = admin.post("/scripts/try", form).content.decode()
    assert "raw__say" in asked
    assert "Confirm run" in asked
    seen = re.search(r'name="seen" value="(\w+)"', asked)[1]
    other = admin.post("/scripts/try", form | {"source": SAY + "  # more", "seen": seen})
    assert other.status_code == 200
    assert ScriptRun.objects.count() == 0
    assert admin.post("/scripts/try", form | {"source": "1 + 1"}).status_code == 302


def test_a_run_is_edited_and_run_again_with_what_is_stored_of_it(run, admin):
    secret = "tcb_" + "x" * 43

    async def scenario(web):
        body = await web.script(f"# {secret}\n1 + input['n']", input={"n": 2})
        return body["run_id"]

    row = ScriptRun.objects.get(run_id=run(scenario))
    shown = admin.get(f"/sessions/{row.session.session_id}/scripts/{row.run_id}").content.decode()
    assert f'href="/scripts/try?run={row.run_id}"' in shown
    page = unescape(admin.get(f"/scripts/try?run={row.run_id}").content.decode())
    assert "1 + input['n']" in page
    assert '"n": 2' in page
    assert secret not in page
    assert "Enter masked values again" in page
    assert AuditEntry.objects.filter(verb="session.read").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": ""}, "This field is required"),
        ({"input": "{"}, "JSON"),
        ({"agent": "nobody"}, "Select a valid choice"),
        ({"language": "ruby"}, "Select a valid choice"),
        ({"source": "#" * 70_000}, "longer than"),
    ],
)
def test_what_cannot_be_run_is_explained_beside_the_form(admin, fields, words):
    form = {"agent": "scout", "language": "python", "source": "1", "input": ""} | fields
    page = admin.post("/scripts/try", form)
    assert page.status_code == 422
    assert words in unescape(page.content.decode())
    assert AgentSession.objects.count() == 0


def test_without_an_agent_that_runs_scripts_the_page_says_so(admin):
    Agent.objects.update(code_mode=False)
    assert "No enabled agent may run scripts" in admin.get("/scripts/try").content.decode()


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
def test_only_admins_try_scripts(agent, client, role):
    client.force_login(make_person("otto@example.org", role))
    assert client.get("/scripts/try").status_code == 403
    assert client.post("/scripts/try", {"agent": "scout", "source": "1"}).status_code == 403
    assert ScriptRun.objects.count() == 0


def test_a_trial_that_no_process_starts_has_failed_and_leaves_nothing(admin):
    row = send(admin, code="1")
    ApiKey.objects.get(pk=row.key_id)
    assert runs.recover(row.deadline + runs.QUEUED) == 1
    row.refresh_from_db()
    assert (row.state, row.session.state, row.key) == ("failed", "closed", None)
    assert runs.NOT_STARTED in row.error


def test_a_script_that_cannot_be_read_any_more_has_failed(run, admin):
    async def scenario(web):
        row = await in_database(send, admin, "1")
        await in_database(lambda: ScriptRun.objects.update(payload="", input="not JSON"))
        await web.execute()
        return row.run_id

    row = ScriptRun.objects.get(run_id=run(scenario))
    assert (row.state, row.error_type) == ("failed", "InternalError")


def test_its_key_opens_nothing_and_the_agents_other_keys_are_kept(run, admin):
    async def scenario(web):
        row = await in_database(send, admin, "1")
        key = await in_database(lambda: ApiKey.objects.get(pk=row.key_id))
        response = await web.get_run(row.run_id, key=key.prefix)
        await web.execute()
        assert (await web.script("2"))["result"] == 2  # with the agent's own key
        return response.status

    assert run(scenario) == 401
    assert [key.prefix[:4] for key in ApiKey.objects.all()] == ["tcb_"]
