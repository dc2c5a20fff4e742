"""Append-only audit log: records changes and renders entries as sentences.

Actors are plain values (`toolcrib.lib.roles.Actor`), so users, tokens, commands and the system
are all recorded in the same way.
"""

from collections.abc import Mapping

from django.db.models import Model

from catalog.models import AuditEntry
from toolcrib.lib.roles import Actor

SENTENCES = {
    "server.add": "added server {target}",
    "server.edit": "changed how server {target} is reached",
    "server.settings": "changed settings of server {target}",
    "server.enable": "enabled server {target}",
    "server.disable": "disabled server {target}",
    "server.delete": "deleted server {target}",
    "server.credentials": "set credentials of server {target}",
    "server.test": "tested the connection to server {target}",
    "server.sync": "asked for a sync of server {target}",
    "server.protocol": "saw server {target} change its protocol version",
    "tool.override": "rewrote the description of {target}",
    "tool.policy": "changed whether {target} may be called",
    "tool.approve": "approved the new definition of {target}",
    "tool.keep_old": "kept the old definition of {target}",
    "tool.hold": "held {target}",
    "tool.release": "released {target}",
    "tool.custom.add": "added custom tool {target}",
    "tool.custom.edit": "changed custom tool {target}",
    "tool.custom.delete": "deleted custom tool {target}",
    "tool.hint.add": "gave {target} a hint for search",
    "tool.hint.remove": "took a hint for search from {target}",
    "golden.mark": "marked the right answer to the query “{target}”",
    "golden.accept": "accepted where the answer to the query “{target}” stands",
    "golden.remove": "removed the golden query “{target}”",
    "group.add": "made group {target}",
    "group.rename": "renamed group {target}",
    "group.describe": "described group {target}",
    "group.settings": "changed settings of group {target}",
    "group.preload_default": "changed whether {target} preloads its tools",
    "group.deferred": "changed whether {target} may be deferred",
    "group.follow": "let group {target} follow a server",
    "group.unfollow": "let group {target} stop following a server",
    "group.move": "moved group {target} among the groups",
    "group.order": "put the groups in another order, {target} first",
    "group.assign": "added tools to group {target}",
    "group.remove": "took tools out of group {target}",
    "group.order_members": "put the tools of group {target} in another order",
    "group.preload": "changed which tools {target} preloads",
    "group.delete": "deleted group {target}",
    "group.undo": "undid a change of group {target}",
    "person.setup": "set up this installation as {target}",
    "person.invite": "invited {target}",
    "person.join": "joined as {target}",
    "person.reset": "made a password link for {target}",
    "person.password": "set a new password for {target}",
    "person.role": "changed the role of {target}",
    "person.disable": "disabled {target}",
    "person.enable": "enabled {target}",
    "token.add": "made token {target}",
    "token.revoke": "revoked token {target}",
    "token.rotate": "rotated token {target}",
    "agent.add": "made agent {target}",
    "agent.edit": "changed settings of agent {target}",
    "agent.groups": "changed the groups of agent {target}",
    "agent.enable": "enabled agent {target}",
    "agent.disable": "disabled agent {target}",
    "agent.delete": "deleted agent {target}",
    "agent.test": "loaded a tool into a test session of agent {target}",
    "key.add": "made agent key {target}",
    "key.rotate": "rotated agent key {target}",
    "key.revoke": "revoked agent key {target}",
    "settings.change": "changed the setting {target}",
    "installation.restore": "restored a backup of revision {target}",
}


def record(
    actor: Actor,
    verb: str,
    target: Model,
    *,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
) -> AuditEntry:
    """Append one entry. Call it in the transaction of the change; never pass a secret."""
    if verb not in SENTENCES:
        raise ValueError(f"{verb} has no sentence in catalog/audit/log.py")
    return AuditEntry.objects.create(
        actor_kind=actor.kind,
        actor_id=actor.id,
        actor_label=actor.label[:200],
        verb=verb,
        target_kind=target._meta.model_name or "",
        target_id=target.pk,
        target_label=str(target)[:200],
        before=dict(before or {}),
        after=dict(after or {}),
    )


def sentence(entry: AuditEntry) -> str:
    return f"{entry.actor_label} " + SENTENCES[entry.verb].format(target=entry.target_label)
