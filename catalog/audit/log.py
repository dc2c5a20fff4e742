"""Append-only audit log: records changes and renders entries as sentences."""

from collections.abc import Mapping

from django.db.models import Model

from catalog.models import AuditEntry
from toolcrib.lib.roles import Actor

SENTENCES = {
    "server.add": "added server {target}",
    "server.edit": "changed the connection of server {target}",
    "server.settings": "changed settings of server {target}",
    "server.enable": "enabled server {target}",
    "server.disable": "disabled server {target}",
    "server.delete": "deleted server {target}",
    "server.credentials": "set credentials of server {target}",
    "server.test": "tested the connection to server {target}",
    "server.sync": "queued a sync of server {target}",
    "server.protocol": "detected a new protocol version of server {target}",
    "tool.override": "changed the description of {target}",
    "tool.policy": "changed the call policy of {target}",
    "tool.approve": "approved the new definition of {target}",
    "tool.keep_old": "rejected the new definition of {target}",
    "tool.hold": "hid {target}",
    "tool.release": "made {target} available",
    "tool.custom.add": "added custom tool {target}",
    "tool.custom.edit": "edited custom tool {target}",
    "tool.custom.delete": "deleted custom tool {target}",
    "tool.hint.add": "added a search alias to {target}",
    "tool.hint.remove": "removed a search alias from {target}",
    "golden.mark": "set the expected tool for the query “{target}”",
    "golden.accept": "accepted the current rank for the query “{target}”",
    "golden.remove": "removed the golden query “{target}”",
    "group.add": "created group {target}",
    "group.rename": "renamed group {target}",
    "group.describe": "changed the description of group {target}",
    "group.settings": "changed settings of group {target}",
    "group.preload_default": "changed the default preload of group {target}",
    "group.deferred": "changed the deferral of group {target}",
    "group.follow": "set group {target} to mirror a server",
    "group.unfollow": "stopped group {target} from mirroring a server",
    "group.move": "changed the position of group {target}",
    "group.order": "reordered the groups, {target} first",
    "group.assign": "added tools to group {target}",
    "group.remove": "removed tools from group {target}",
    "group.order_members": "reordered the tools of group {target}",
    "group.preload": "changed the preloads of group {target}",
    "group.delete": "deleted group {target}",
    "group.undo": "undid a change of group {target}",
    "person.setup": "set up this installation as {target}",
    "person.invite": "invited {target}",
    "person.join": "accepted the invitation as {target}",
    "person.reset": "created a password reset link for {target}",
    "person.password": "set a new password for {target}",
    "person.role": "changed the role of {target}",
    "person.disable": "disabled {target}",
    "person.enable": "enabled {target}",
    "token.add": "created token {target}",
    "token.revoke": "revoked token {target}",
    "token.rotate": "rotated token {target}",
    "agent.add": "created agent {target}",
    "agent.edit": "changed settings of agent {target}",
    "agent.groups": "changed the groups of agent {target}",
    "agent.enable": "enabled agent {target}",
    "agent.disable": "disabled agent {target}",
    "agent.delete": "deleted agent {target}",
    "agent.test": "loaded a tool into a test session of agent {target}",
    "key.add": "created agent key {target}",
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
    """Append one entry. Call it in the transaction of the change, and never pass a secret."""
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
    """Render an entry as a sentence: actor, action, object."""
    return f"{entry.actor_label} " + SENTENCES[entry.verb].format(target=entry.target_label)
