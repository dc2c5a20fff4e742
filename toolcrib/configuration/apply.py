"""Plan and apply a configuration: compare a file with the database, and write the differences.

Everything is written in one transaction by the actions that pages and API use, so each object has
its audit entry. A plan runs the same writes and rolls them back: what it does not report, applying
does not find either.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from django.db import transaction

from catalog import audit
from catalog.audit import Actor
from catalog.groups import actions as group_actions
from catalog.groups.custom_tools import create_custom_tool
from catalog.models import ExpectedTool, GoldenQuery, Group, Tool
from catalog.search import golden_queries
from catalog.tools import actions as tool_actions
from catalog.tools import settings as tool_settings
from servers.models import Server
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Agent, Rule
from sessions_app.rules import actions as rule_actions
from sessions_app.rules.schemas import RuleEdit, RuleIn
from toolcrib.configuration.changes import Change, FieldChange, Plan, added, compare
from toolcrib.configuration.document import KEYS, Document, object_fields
from toolcrib.configuration.export import export_document, mirrored_members
from toolcrib.configuration.server_changes import ServerChanges
from toolcrib.lib.errors import Invalid

ORDER = {"groups": "group_id", "rules": "name"}  # sections whose order counts
Write = Callable[[Actor], None]


class MissingVariables(Invalid):
    code = "variables_missing"


def plan(
    document: Document,
    *,
    variables: Mapping[str, str],
    prune: bool = False,
    confirmed: Collection[str] = (),
) -> Plan:
    """Return what applying would change, after trying it in a transaction that is rolled back."""
    with transaction.atomic():
        result = _Planner(document, variables, prune, confirmed, confirm_all=True).make()
        if not result.missing:
            _write(result, Actor.command("apply --plan"))
        transaction.set_rollback(True)
    return result


def apply(
    document: Document,
    *,
    variables: Mapping[str, str],
    actor: Actor,
    prune: bool = False,
    confirmed: Collection[str] = (),
) -> Plan:
    """Write every difference in one transaction."""
    with transaction.atomic():
        result = _Planner(document, variables, prune, confirmed, confirm_all=False).make()
        if result.missing:
            names = sorted({name for _, names in result.missing for name in names})
            raise MissingVariables(
                f"Missing values for variables: {', '.join(names[:20])}.",
                hint="Set them in the environment of this command. Nothing was changed.",
                details={"missing": names},
            )
        _write(result, actor)
    return result


def _write(result: Plan, actor: Actor) -> None:
    for change in result.changes:
        change.write(actor)


class _Planner:
    def __init__(
        self,
        document: Document,
        variables: Mapping[str, str],
        prune: bool,
        confirmed: Collection[str],
        *,
        confirm_all: bool,
    ) -> None:
        self.document = document
        self.prune = prune
        self.plan = Plan()
        self.servers = ServerChanges(self.plan, variables, confirmed, confirm_all)
        self.current = export_document()

    def make(self) -> Plan:
        for row in self.document.servers:
            self.servers.add(row)
        self._compare("custom_tools", "custom tool", _write_custom_tool)
        self._compare("tools", "tool", _write_tool, self._tool_defaults)
        self._compare("groups", "group", _write_group, self._group_values)
        self._reorder("groups", "order of groups", _order_groups)
        self._compare("agents", "agent", _write_agent)
        self._compare("rules", "rule", _write_rule)
        self._reorder("rules", "order of rules", _order_rules)
        self._compare("golden_queries", "golden query", _write_golden_query, self._golden_values)
        if self.prune:
            self._prune()
        return self.plan

    def _compare(
        self,
        section: str,
        kind: str,
        write: Callable[[str, dict[str, Any], Actor], None],
        prepare: Callable[[str, dict[str, Any], dict[str, Any]], None] | None = None,
    ) -> None:
        existing = self._existing(section)
        for row in getattr(self.document, section):
            name = getattr(row, KEYS[section])
            wanted, current = object_fields(section, row), existing.get(name)
            if prepare is not None:
                prepare(name, current or {}, wanted)
            fields = added(wanted) if current is None else compare(current, wanted)
            if section == "custom_tools" and current is not None:
                gone = current.keys() - wanted.keys()
                fields += [FieldChange(key, current[key], None) for key in sorted(gone)]
            if current is not None and not fields:
                continue
            values = wanted if current is None else {item.name: item.after for item in fields}
            if section == "custom_tools":
                values = {"name": name, **wanted}
            self.plan.changes.append(
                Change(
                    "+" if current is None else "~", kind, name, _bind(write, name, values), fields
                )
            )

    def _existing(self, section: str) -> dict[str, dict[str, Any]]:
        rows = {}
        for row in self.current[section]:
            values = dict(row)
            name = values.pop(KEYS[section])
            if section == "groups":
                values["members"] = [
                    {"tool": item, "preload": None} if isinstance(item, str) else item
                    for item in values["members"]
                ]
            rows[name] = values
        if section == "tools":
            rows = {name: tool_settings.DEFAULTS | values for name, values in rows.items()}
            names = [row.name for row in self.document.tools if row.name not in rows]
            for name, tool in tool_settings.find_by_name(names).items():
                rows[name] = tool_settings.read(tool)
        return rows

    def _tool_defaults(self, name: str, current: dict[str, Any], wanted: dict[str, Any]) -> None:
        """With --prune, settings that the file does not name are reset."""
        if self.prune:
            for key, value in tool_settings.DEFAULTS.items():
                if current.get(key, value) != value:
                    wanted.setdefault(key, value)

    def _group_values(self, name: str, current: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Leave members out of the comparison that are there because of a mirrored server.

        A member may be named by an alias.
        """
        if "members" in wanted:
            tools = tool_settings.find_by_name([row["tool"] for row in wanted["members"]])
            assigned = {name: tool.assigned_name or name for name, tool in tools.items()}
            wanted["members"] = [
                {**row, "tool": assigned.get(row["tool"], row["tool"])} for row in wanted["members"]
            ]
        if "members" in wanted and current:
            named = {row["tool"] for row in wanted["members"]}
            mirrored = mirrored_members().get(name, set())
            current["members"] = [
                row
                for row in current["members"]
                if row["tool"] in named or row["tool"] not in mirrored
            ]

    def _golden_values(self, name: str, current: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Tools of golden queries have the names that agents see."""
        if "tools" in wanted:
            tools = tool_settings.find_by_name(wanted["tools"])
            wanted["tools"] = sorted(
                tools[one].public_name if one in tools else one for one in wanted["tools"]
            )

    def _reorder(self, section: str, kind: str, write: Callable[[list[str], Actor], None]) -> None:
        """Put the objects of the file in its order, at the places that they have now."""
        key = ORDER[section]
        now = [row[key] for row in self.current[section]]
        wanted = [getattr(row, key) for row in getattr(self.document, section)]
        present = [name for name in now if name in set(wanted)]
        in_order = iter([name for name in wanted if name in set(present)])
        target = [next(in_order) if name in set(present) else name for name in now]
        if target == now:
            return
        change = FieldChange("order", now, target)
        self.plan.changes.append(
            Change("~", kind, "", lambda actor: write(target, actor), [change])
        )

    def _prune(self) -> None:
        """Remove what the file does not name, dependents first."""
        removals: list[tuple[str, str, Callable[[str, Actor], None]]] = [
            ("golden_queries", "golden query", _remove_golden_query),
            ("rules", "rule", _remove_rule),
            ("agents", "agent", _remove_agent),
            ("groups", "group", _remove_group),
            ("tools", "tool", _reset_tool),
            ("custom_tools", "custom tool", _remove_custom_tool),
        ]
        sections = self.document.model_fields_set
        for section, kind, remove in removals:
            if section not in sections:
                continue
            for name in self._unnamed(section):
                if section == "groups" and self._is_group_of_named_server(name):
                    continue
                self.plan.changes.append(Change("-", kind, name, _bind_remove(remove, name)))
        if "servers" in sections:
            for slug in self._unnamed("servers"):
                self.servers.remove(Server.objects.get(slug=slug))

    def _unnamed(self, section: str) -> list[str]:
        named = {getattr(row, KEYS[section]) for row in getattr(self.document, section)}
        names = [row[KEYS[section]] for row in self.current[section]]
        return [name for name in names if name not in named]

    def _is_group_of_named_server(self, group_id: str) -> bool:
        """The group that a server brings is removed with it, not without."""
        return group_id.removeprefix("mcp:") in {row.slug for row in self.document.servers}


def _bind(
    write: Callable[[str, dict[str, Any], Actor], None], name: str, values: dict[str, Any]
) -> Write:
    return lambda actor: write(name, values, actor)


def _bind_remove(remove: Callable[[str, Actor], None], name: str) -> Write:
    return lambda actor: remove(name, actor)


# --- Writes ---------------------------------------------------------------------------------------


def _write_custom_tool(name: str, values: dict[str, Any], actor: Actor) -> None:
    tool = Tool.objects.filter(server=None, name=name).first()
    if tool is None:
        create_custom_tool(values, actor=actor, group_id="")
    else:
        tool_actions.save_custom_tool(values, actor=actor, tool=tool)


def _remove_custom_tool(name: str, actor: Actor) -> None:
    tool_actions.delete_custom_tool(Tool.objects.get(server=None, name=name), actor=actor)


def _write_tool(name: str, values: dict[str, Any], actor: Actor) -> None:
    tool = tool_settings.find_by_name([name]).get(name)
    if tool is not None:
        tool_settings.change(tool, values, actor=actor)
        return
    row, _ = ExpectedTool.objects.get_or_create(tool_name=name[:64])
    before, row.settings = row.settings, {**row.settings, **values}
    row.save()
    audit.record(actor, "tool.expect", row, before=before, after=row.settings)


def _reset_tool(name: str, actor: Actor) -> None:
    tool = tool_settings.find_by_name([name]).get(name)
    if tool is not None:
        tool_settings.change(tool, tool_settings.DEFAULTS, actor=actor)
    for row in ExpectedTool.objects.filter(tool_name=name):
        audit.record(actor, "tool.expect", row, before=row.settings)
        row.delete()


def _write_group(group_id: str, values: dict[str, Any], actor: Actor) -> None:
    members = values.pop("members", None)
    group = Group.objects.filter(group_id=group_id).first() if group_id.isascii() else None
    if group is None:
        display_name = values.pop("display_name", group_id)
        group = group_actions.create(group_id, display_name, actor=actor).group
    if values:
        group_actions.edit(group, actor=actor, **values)
    if members is not None:
        group = Group.objects.get(pk=group.pk)
        flags = {row["tool"]: row["preload"] for row in members}
        group_actions.set_members(group, flags, actor=actor)


def _remove_group(group_id: str, actor: Actor) -> None:
    group = Group.objects.filter(group_id=group_id).first()
    if group is not None:
        group_actions.delete(group, actor=actor)


def _order_groups(group_ids: list[str], actor: Actor) -> None:
    group_actions.order(group_ids, actor=actor)


def _write_agent(name: str, values: dict[str, Any], actor: Actor) -> None:
    groups, enabled = values.pop("groups", None), values.pop("enabled", None)
    agent = Agent.objects.filter(name=name).first() if name.isprintable() else None
    if agent is None:
        agent = agent_actions.create(name, actor=actor, **values)
    elif values:
        agent_actions.change(agent, actor=actor, **values)
    if groups is not None:
        ids: Sequence[str] = () if groups == "all" else groups
        agent_actions.set_groups(agent, ids, all_groups=groups == "all", actor=actor)
    if enabled is not None:
        agent_actions.set_enabled(agent, enabled, actor=actor)


def _remove_agent(name: str, actor: Actor) -> None:
    agent_actions.delete(Agent.objects.get(name=name), actor=actor)


def _write_rule(name: str, values: dict[str, Any], actor: Actor) -> None:
    rule = Rule.objects.filter(name=name).first() if name.isprintable() else None
    if rule is not None:
        rule_actions.edit(rule, RuleEdit.model_validate(values), actor=actor)
        return
    if "effect" not in values:
        raise Invalid(f"The rule {name[:80]!r} has no effect.", hint="Use allow, hold or deny.")
    rule_actions.create(RuleIn.model_validate({"name": name, **values}), actor=actor)


def _remove_rule(name: str, actor: Actor) -> None:
    rule_actions.delete(Rule.objects.get(name=name), actor=actor)


def _order_rules(names: list[str], actor: Actor) -> None:
    others = [
        name
        for name in Rule.objects.order_by("position", "pk").values_list("name", flat=True)
        if name not in set(names)
    ]
    rule_actions.reorder([*names, *others], actor=actor)


def _write_golden_query(query: str, values: dict[str, Any], actor: Actor) -> None:
    golden_queries.set_expected_tools(
        query,
        values["tools"],
        origin=GoldenQuery.Origin.API,
        actor=actor,
        allow_unknown=True,
    )


def _remove_golden_query(query: str, actor: Actor) -> None:
    golden_queries.remove(GoldenQuery.objects.get(query=query), actor=actor)
