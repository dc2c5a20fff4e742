"""Append-only audit log: records changes and renders entries as sentences."""

from collections.abc import Mapping
from datetime import timedelta

from django.db import connection
from django.db.models import Model
from django.utils import timezone

from catalog.audit.signing import sign
from catalog.models import AuditEntry, Revision
from toolcrib.lib.roles import Actor

READ_INTERVAL = timedelta(hours=1)
CHANNEL = "toolcrib_audit"  # of PostgreSQL's NOTIFY
SENTENCES = {
    "server.add": "added server {target}",
    "server.edit": "changed the connection of server {target}",
    "server.settings": "changed settings of server {target}",
    "server.enable": "enabled server {target}",
    "server.disable": "disabled server {target}",
    "server.delete": "deleted server {target}",
    "server.remove_tools": "removed the tools of server {target} until its next sync",
    "server.credentials": "set credentials of server {target}",
    "server.test": "tested the connection to server {target}",
    "server.export": "exported all servers at revision {target}",
    "server.sync": "queued a sync of server {target}",
    "server.protocol": "detected a new protocol version of server {target}",
    "tool.override": "changed the description of {target}",
    "tool.override.drop": "dropped overrides of {target}, whose parameters changed",
    "tool.rename": "renamed {target} for agents",
    "tool.parameters": "changed the parameter overrides of {target}",
    "tool.policy": "changed the call policy of {target}",
    "tool.storage": "changed what is stored of calls to {target}",
    "tool.examples": "changed the input examples of {target}",
    "tool.expect": "set what is expected of {target} before it is synced",
    "tool.read_only": "changed whether {target} counts as only reading",
    "tool.approve": "approved the new definition of {target}",
    "tool.keep_old": "rejected the new definition of {target}",
    "tool.undo_approval": "undid the approval of {target}",
    "tool.hold": "hid {target}",
    "tool.release": "made {target} available",
    "tool.custom.add": "added custom tool {target}",
    "tool.custom.edit": "edited custom tool {target}",
    "tool.custom.delete": "deleted custom tool {target}",
    "tool.hint.add": "added a search alias to {target}",
    "tool.hint.remove": "removed a search alias from {target}",
    "call.hold": "held the call {target}",
    "call.allow": "allowed the call {target}",
    "call.deny": "denied the call {target}",
    "call.expire": "expired the held call {target}",
    "call.refuse": "refused the allowed call {target}",
    "call.fetch": "fetched the result of the call {target}",
    "grant.delete": "ended the grant {target}",
    "tool.hint.accept": "accepted a search hint from use of {target} for all agents",
    "tool.hint.import": "imported search hints of {target}",
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
    "group.members": "set the tools of group {target}",
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
    "person.sign_in": "signed in as {target}",
    "person.sign_in_failed": "failed to sign in as {target}",
    "person.sign_out": "signed out as {target}",
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
    "agent.script": "ran a script as agent {target} in a test session",
    "session.read": "read arguments or results of session {target}",
    "sessions.export": "exported sessions",
    "session.export": "exported session {target}",
    "session.delete": "deleted session {target}",
    "key.add": "created agent key {target}",
    "key.rotate": "rotated agent key {target}",
    "key.revoke": "revoked agent key {target}",
    "rule.create": "created the rule {target}",
    "rule.update": "changed the rule {target}",
    "rule.delete": "deleted the rule {target}",
    "rule.export": "exported all rules at revision {target}",
    "rule.reorder": "reordered the rules, {target} first",
    "webhook.create": "created the webhook {target}",
    "webhook.update": "changed the webhook {target}",
    "webhook.delete": "deleted the webhook {target}",
    "webhook.test": "tested the webhook {target}",
    "usage.export": "exported usage at revision {target}",
    "settings.change": "changed the setting {target}",
    "installation.restore": "restored a backup of revision {target}",
    "installation.backup": "created a backup of revision {target}",
    "installation.export": "exported the configuration at revision {target}",
    "installation.rotate_key": "rotated the encryption key at revision {target}",
    "audit.export": "exported the audit log at revision {target}",
    "audit.restart": "started a new chain of the audit log at revision {target}",
    "audit.reseal": "replaced the missing seal of the audit log after {target}",
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
    entry = AuditEntry(
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
    entry.mac = sign(entry)
    entry.save()
    _notify()
    return entry


def record_installation(actor: Actor, verb: str, **states: Mapping[str, object]) -> AuditEntry:
    """Append an entry about the whole installation; its target is the revision."""
    row, _ = Revision.objects.get_or_create(id=1)
    return record(actor, verb, row, **states)


def record_read(actor: Actor, verb: str, *targets: Model) -> None:
    """Append entries for a read, once per hour and reader: pages are reloaded and polled."""
    by_key = {target.pk: target for target in targets}
    if not by_key:
        return
    recent = AuditEntry.objects.filter(
        target_kind=targets[0]._meta.model_name,
        target_id__in=by_key,
        verb=verb,
        actor_kind=actor.kind,
        actor_id=actor.id,
        actor_label=actor.label[:200],
        at__gt=timezone.now() - READ_INTERVAL,
    )
    for key in sorted(by_key.keys() - set(recent.values_list("target_id", flat=True))):
        record(actor, verb, by_key[key])


def _notify() -> None:
    """Wake the processes that chain entries (chain.py) when the transaction commits."""
    if connection.vendor == "postgresql":  # with SQLite they watch for commits
        with connection.cursor() as cursor:
            cursor.execute(f"NOTIFY {CHANNEL}")


def sentence(entry: AuditEntry) -> str:
    """Render an entry as a sentence: actor, action, object."""
    return f"{entry.actor_label} {wording(entry.verb).format(target=entry.target_label)}"


def wording(verb: str) -> str:
    """Return the sentence of a verb. One that is unknown, or was edited by SQL, stays as it is."""
    return SENTENCES.get(verb) or verb.replace("{", "{{").replace("}", "}}") + " {target}"


def as_record(entry: AuditEntry) -> dict[str, object]:
    """Return an entry as the API, exports and the sink show it."""
    return {
        "id": entry.pk,
        "position": entry.position,
        "at": entry.at,
        "actor_kind": entry.actor_kind,
        "actor": entry.actor_label,
        "verb": entry.verb,
        "target_kind": entry.target_kind,
        "target": entry.target_label,
        "sentence": sentence(entry),
        "before": entry.before,
        "after": entry.after,
    }
