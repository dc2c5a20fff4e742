"""Write the audit log, and say its entries in sentences.

The actor is a value, so that agents, commands and the system itself can be one, and a deleted
user stays readable.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import Model

from catalog.models import AuditEntry


@dataclass(frozen=True)
class Actor:
    kind: str  # user, token, command, system
    label: str
    id: int | None = None

    @classmethod
    def user(cls, user: AbstractBaseUser) -> "Actor":
        return cls("user", user.get_username(), user.pk)

    @classmethod
    def command(cls, name: str) -> "Actor":
        return cls("command", f"manage.py {name}")


SYSTEM = Actor("system", "Toolcrib")

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
    "group.add": "made group {target}",
    "person.setup": "set up this installation as {target}",
    "person.invite": "invited {target}",
    "person.join": "joined as {target}",
    "person.reset": "made a password link for {target}",
    "person.password": "set a new password for {target}",
    "token.add": "made token {target}",
    "token.revoke": "revoked token {target}",
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
        raise ValueError(f"{verb} has no sentence in catalog/audit.py")
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
