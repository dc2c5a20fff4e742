"""Export, plan and application of a configuration file."""

import re
from pathlib import Path

import pytest
from django.core.management import call_command

from catalog import cache
from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.groups.custom_tools import create_custom_tool
from catalog.models import AuditEntry, ExpectedMember, ExpectedTool, GoldenQuery, Group, Tool
from catalog.search import golden_queries
from catalog.tools import actions as tool_actions
from catalog.tools import overrides
from servers.models import Credential, Server
from servers.registration import actions as server_actions
from servers.registration.drafts import ServerDraft
from servers.secret import Secret
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Agent, Rule
from sessions_app.rules import actions as rule_actions
from sessions_app.rules.schemas import RuleIn
from tests.support.factories import ingest_tools, tool_object
from toolcrib.configuration import apply as configuration
from toolcrib.configuration import yaml_text
from toolcrib.configuration.document import parse_document
from toolcrib.configuration.export import export_yaml
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.roles import Actor

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.django_db
ACTOR = Actor.command("apply")
SECRETS = {"CRM_TOKEN": "token-of-the-crm", "WIKI_AUTHORIZATION": "Bearer of-the-wiki"}
MAIL = {"type": "object", "properties": {"to": {}, "sender": {}}, "required": ["to", "sender"]}
TOOLS = [
    tool_object("find"),
    tool_object("send", description="Send a mail", inputSchema=MAIL),
    tool_object("list"),
]


def plan(text, **options):
    options.setdefault("variables", {})
    return configuration.plan(parse_document(yaml_text.load(text)), **options)


def apply(text, **options):
    options.setdefault("variables", {})
    return configuration.apply(parse_document(yaml_text.load(text)), actor=ACTOR, **options)


def lines(text, **options):
    return plan(text, **options).text().splitlines()


@pytest.fixture
def filled():
    """An installation with every kind of object."""
    draft = ServerDraft("CRM", "crm", "stdio", command="crm-server", args=("--stdio",))
    draft = ServerDraft(**{**vars(draft), "env": {"CRM_TOKEN": Secret(SECRETS["CRM_TOKEN"])}})
    digest = server_actions.confirmation.draft_program(draft).digest
    crm = server_actions.add_server(draft, actor=SYSTEM, confirmed=digest)
    headers = {"Authorization": Secret(SECRETS["WIKI_AUTHORIZATION"])}
    wiki = ServerDraft("Wiki", "wiki", "http", url="https://wiki.example/mcp", headers=headers)
    server_actions.add_server(wiki, actor=SYSTEM)
    server_actions.change_settings(crm, {"trust": "strict", "concurrency": 3}, actor=SYSTEM)
    server_actions.change_settings(crm, {"trust": "auto"}, actor=SYSTEM)
    ingest_tools(crm, *TOOLS)
    create_custom_tool(tool_object("ask_user", description="Ask"), actor=SYSTEM)
    group_actions.create("mail", "Mail: \n and more", "no", actor=SYSTEM)
    mail = Group.objects.get(group_id="mail")
    names = {"crm__send": True, "ask_user": None, "crm__find": False}
    group_actions.set_members(mail, names, actor=SYSTEM)
    group_actions.set_preload(
        Group.objects.get(group_id="mcp:crm"),
        [Tool.objects.get(name="list")],
        True,
        actor=SYSTEM,
    )
    send = Tool.objects.get(name="send")
    tool_actions.override_description(send, "Send one mail.\nNever two.", actor=SYSTEM)
    overrides.set_alias(send, "send_mail", actor=SYSTEM)
    parameters = {"to": {"description": "Who gets it."}, "sender": {"hidden": True, "fixed": "us"}}
    overrides.override_parameters(send, parameters, actor=SYSTEM)
    tool_actions.hold(Tool.objects.get(name="list"), "Too slow", actor=SYSTEM)
    agent_actions.create("scout", groups=["mail", "mcp:crm"], actor=SYSTEM, budget=5_000)
    agent_actions.create("all", all_groups=True, actor=SYSTEM)
    match = {"agents": ["scout"], "groups": ["mail"], "arguments": [{"path": "/n", "op": "exists"}]}
    rule = {"name": "mails", "effect": "hold", "reason": "Read it first", "match": match}
    rule_actions.create(RuleIn.model_validate(rule), actor=SYSTEM)
    rule_actions.create(RuleIn(name="never", effect="deny"), actor=SYSTEM)
    golden_queries.set_expected_tools("post a mail", ["crm__send"], origin="api", actor=SYSTEM)
    return export_yaml()


def delete_everything():
    for model in (GoldenQuery, Rule, Agent, Group, Tool, Server):
        getattr(model, "with_deleted", model.objects).all().delete()
    cache.clear()


def test_an_export_changes_nothing_and_has_no_secret(filled):
    assert lines(filled) == ["Nothing to change."]
    assert lines(filled, prune=True, variables=SECRETS) == ["Nothing to change."]
    assert not any(value in filled for value in SECRETS.values())
    assert "CRM_TOKEN: ${CRM_TOKEN}" in filled
    entries = AuditEntry.objects.count()
    apply(filled)
    assert AuditEntry.objects.count() == entries


def test_an_export_is_applied_to_an_empty_installation(filled):
    delete_everything()
    before = plan(filled, variables=SECRETS)
    [(slug, command, digest)] = before.programs
    assert (slug, command) == ("crm", "crm-server --stdio")
    assert not Server.objects.exists()  # a plan is rolled back
    with pytest.raises(ToolcribError) as refused:
        apply(filled, variables=SECRETS)
    assert refused.value.code == "confirm_argv"
    assert not Server.objects.exists()  # one transaction
    apply(filled, variables=SECRETS, confirmed=[digest])
    assert lines(filled) == ["Nothing to change."]
    assert lines(filled, prune=True) == ["Nothing to change."]
    assert export_yaml() == filled

    # The tools arrive later, with what was expected of them.
    assert ExpectedMember.objects.count() == 3
    ingest_tools(Server.objects.get(slug="crm"), *TOOLS)
    assert not ExpectedMember.objects.exists()
    assert not ExpectedTool.objects.exists()
    assert export_yaml() == filled
    assert Tool.objects.get(name="list").state == "held"
    targets = set(
        AuditEntry.objects.filter(actor_label="manage.py apply").values_list("verb", flat=True)
    )
    assert {"server.add", "group.add", "agent.add", "rule.create", "golden.mark"} <= targets


def test_a_plan_reads_like_a_diff(filled):
    changed = filled.replace("description: 'no'", "description: Mail ⟨and⟩ letters")
    changed = changed.replace("effect: deny", "effect: hold")
    changed = changed.replace(
        "      - ask_user\n      - tool: crm__find", "      - tool: crm__find"
    )
    assert lines(changed) == [
        "~ group mail",
        "-     description: no",
        "+     description: Mail ⟨U+27E8⟩and⟩ letters",
        "-     members: ask_user",
        "~ rule never",
        "-     effect: deny",
        "+     effect: hold",
        "0 to add, 2 to change, 0 to remove.",
    ]
    apply(changed)
    assert lines(changed) == ["Nothing to change."]
    assert {row.verb for row in AuditEntry.objects.order_by("-pk")[:3]} == {
        "group.describe",
        "group.members",
        "rule.update",
    }


def test_only_prune_removes_what_a_file_does_not_name(filled):
    file = "version: 1\nagents: []\nrules:\n  - name: never\n    effect: deny\n"
    assert lines(file) == ["Nothing to change."]
    assert lines(file, prune=True) == [
        "- rule mails",
        "- agent all",
        "- agent scout",
        "0 to add, 0 to change, 3 to remove.",
    ]
    apply(file, prune=True)
    assert not Agent.objects.exists()
    assert Server.objects.count() == 2  # a section that the file does not have is not touched
    apply(filled, variables=SECRETS)
    apply("servers: []\ngroups: []\ntools: []\nrules: []", prune=True)
    assert not Server.objects.exists()
    assert not Group.objects.exists()


def test_the_order_of_rules_and_members_counts(filled):
    document = yaml_text.load(filled)
    document["rules"].reverse()
    next(row for row in document["groups"] if row["group_id"] == "mail")["members"].reverse()
    text = yaml_text.dump(document)
    assert [line for line in lines(text) if "order" in line] == [
        "~     members, in this order: crm__find (no preload), ask_user, crm__send (preload)",
        "~ order of rules ",
        "~     order, in this order: never, mails",
    ]
    apply(text)
    assert list(Rule.objects.values_list("name", flat=True)) == ["never", "mails"]
    assert lines(text) == ["Nothing to change."]


def test_a_new_value_of_a_secret_is_a_change_that_a_program_must_confirm(filled):
    new = {**SECRETS, "CRM_TOKEN": "another-token"}
    result = plan(filled, variables=new)
    assert result.text().splitlines()[:3] == [
        "~ server crm",
        "-     env.CRM_TOKEN: another value",
        "+     env.CRM_TOKEN: ${CRM_TOKEN}",
    ]
    assert "another-token" not in result.text()
    [(_, _, digest)] = result.programs
    with pytest.raises(ToolcribError, match="runs a command"):
        apply(filled, variables=new)
    apply(filled, variables=new, confirmed=[digest])
    assert lines(filled, variables=new) == ["Nothing to change."]
    without = filled.replace("    env:\n      CRM_TOKEN: ${CRM_TOKEN}\n", "    env: {}\n")
    [(_, _, digest)] = plan(without).programs
    apply(without, confirmed=[digest])
    assert not Credential.objects.filter(kind="env").exists()


def test_a_changed_address_needs_its_secrets_again(filled):
    moved = filled.replace("https://wiki.example/mcp", "https://evil.example/mcp")
    result = plan(moved)
    assert result.missing == [("wiki", ("WIKI_AUTHORIZATION",))]
    with pytest.raises(ToolcribError, match="Missing values for variables: WIKI_AUTHORIZATION"):
        apply(moved)
    apply(moved, variables=SECRETS)
    assert Server.objects.get(slug="wiki").url == "https://evil.example/mcp"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n- b", "not a configuration"),
        ("servers: [", "Line 1"),
        ("a: &x [1]\nb: [*x, *x]", "anchors and aliases"),
        ("groups: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("groups: []\ngroups: []", "twice"),
        ("[" * 5_000, "nested too deep"),
        ("version: 2", "version"),
        ("surprise: 1", "surprise"),
        ("rules:\n  - name: x\n    surprise: 1", "rules.0.surprise"),
        ("rules:\n  - name: x", "no effect"),
        ("rules:\n  - name: x\n    effect: no", "rules.0.effect"),
        ("agents:\n  - name: x\n    groups: [nowhere]", "nowhere"),
        ("agents:\n  - name: x\n  - name: x", "twice"),
        ("agents:\n  - name: a/b", "URL"),
        ("agents:\n  - name: x\n    mode: 1", "agents.0.mode"),
        ("groups:\n  - group_id: Not valid", "group id"),
        ("groups:\n  - group_id: x\n    follows: nothing", "not found"),
        ("servers:\n  - slug: x", "neither command nor url"),
        ("servers:\n  - slug: ../x\n    url: https://x.example/", "slug"),
        ("servers:\n  - slug: x\n    url: file:///etc/passwd", "https"),
        ("servers:\n  - slug: x\n    url: https://x.example/\n    trust: all", "trust"),
        ("tools:\n  - name: x\n    access: open", "tools.0.access"),
        ("custom_tools:\n  - name: x", "no input schema"),
        ("golden_queries:\n  - query: x\n    tools: []", "golden_queries.0.tools"),
    ],
)
def test_a_hostile_or_wrong_file_is_refused_and_changes_nothing(text, problem):
    before = AuditEntry.objects.count()
    for attempt in (plan, apply):
        with pytest.raises(ToolcribError) as refused:
            attempt(text)
        assert problem in refused.value.sentence
    assert AuditEntry.objects.count() == before


def test_a_file_reads_no_setting_of_toolcrib(monkeypatch):
    from servers.mcp_json.importer import environment_variables

    monkeypatch.setenv("TOOLCRIB_SECRET_KEY", "x")
    assert not {"TOOLCRIB_SECRET_KEY", "DATABASE_URL"} & environment_variables().keys()


def test_yaml_has_one_meaning():
    text = "a: no\nb: 2026-11-18\nc: 1_000\nd: 0x10\ne: ~\nf: true\ng: 7\nh: 1.5\ni:\n"
    assert yaml_text.load(text) == {
        "a": "no", "b": "2026-11-18", "c": "1_000", "d": "0x10", "e": None, "f": True, "g": 7,
        "h": 1.5, "i": None,
    }  # fmt: skip
    texts = ["no", "~", "", " x", "1", "1.5", "a\nb", "a \nb", "x: y", "# x", "\u2028", "☃", "\x7f"]
    assert yaml_text.load(yaml_text.dump(texts)) == texts


def test_the_commands_exit_with_what_the_plan_found(filled, tmp_path, capsys):
    file = tmp_path / "crib.yaml"
    call_command("export_config", "--output", str(file))
    assert file.read_text() == filled
    call_command("apply", str(file), "--plan")  # exits with 0
    file.write_text(filled.replace("effect: deny", "effect: hold"))
    with pytest.raises(SystemExit) as exited:
        call_command("apply", str(file), "--plan", "--json")
    assert exited.value.code == 2
    call_command("apply", str(file))
    assert Rule.objects.get(name="never").effect == "hold"
    with pytest.raises(SystemExit) as exited:
        call_command("apply", str(tmp_path / "nothing.yaml"))
    assert exited.value.code == 1
    assert "nothing.yaml cannot be read" in capsys.readouterr().err


def test_the_documented_file_is_valid():
    text = (ROOT / "docs" / "configuration.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    apply(example, variables={"CRM_AUTHORIZATION": "Bearer of-the-crm"})
    assert lines(example) == ["Nothing to change."]
