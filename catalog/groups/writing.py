"""What every write to a group shares: the transaction, the locks, the entry, the checks of texts.

Used by `catalog.groups` alone.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import IntegrityError, transaction

from catalog import audit
from catalog.audit import Actor
from catalog.groups import state as states
from catalog.groups.state import State
from catalog.models import AuditEntry, Group, Revision
from catalog.tools.actions import UNKEEPABLE
from toolcrib.lib.errors import Conflict, Invalid, NotFound

GROUP_ID = re.compile(r"[a-z0-9][a-z0-9:._-]{0,79}")
LONGEST = {"display_name": 120, "description": 500}
WHAT = {"display_name": "display name", "description": "description"}


@dataclass(frozen=True)
class Done:
    """A group after a write, with the entry to undo it by; no entry where it stood so already."""

    group: Group
    entry: AuditEntry | None


@contextmanager
def writing() -> Iterator[None]:
    try:
        with transaction.atomic():
            yield
    except IntegrityError as error:
        raise Conflict(
            "Somebody changed the same group at the same moment.", hint="Reload and try again."
        ) from error


def write(group: Group, verb: str, wanted: State, actor: Actor, mark: State | None = None) -> Done:
    before, after = states.difference(states.read(group, wanted), wanted)
    if not after:
        return Done(group, None)
    states.write(group, after)
    entry = audit.record(actor, verb, group, before=before, after={**after, **(mark or {})})
    Revision.bump()
    return Done(group, entry)


def locked(group: Group) -> Group:
    found = (
        Group.objects.select_for_update(of=("self",))
        .select_related("follows")
        .filter(pk=group.pk)
        .first()
    )
    if found is None:
        raise gone(group)
    return found


def all_locked() -> list[Group]:
    """Lock every group, always in the order of their keys, and return them in canonical order."""
    rows = list(Group.objects.select_for_update().order_by("pk"))
    return sorted(rows, key=lambda group: (group.position, group.group_id))


def check_unchanged(group: Group, names: Collection[str], seen: int, *, actor: Actor) -> None:
    """Lock a group and refuse what somebody else decided about these tools after entry `seen`."""
    group = locked(group)
    acts = AuditEntry.objects.filter(target_kind="group", target_id=group.pk, pk__gt=seen)
    for entry in acts.exclude(actor_kind=actor.kind, actor_id=actor.id)[:200]:
        both = sorted(states.touched(entry.after) & set(names))
        if both:
            raise Conflict(
                f"{entry.actor_label} changed {listed(both)} meanwhile.",
                hint="Look at what stands now, and do it again if you still want it.",
                code="changed_meanwhile",
            )


def gone(group: Group) -> NotFound:
    return NotFound(f"{group.group_id} was deleted meanwhile.", hint="Its deletion can be undone.")


def in_order(chosen: Sequence[str], standing: Sequence[str], what: str) -> list[str]:
    if len(set(chosen)) != len(chosen):
        raise Invalid("A name stands twice in the order.", hint="Send each once.")
    unknown = [name for name in chosen if name not in standing]
    if unknown:
        raise Invalid(f"{listed(unknown)} is no {what}.", hint="Send names that are listed.")
    return [*chosen, *(name for name in standing if name not in set(chosen))]


def new_id(text: str) -> str:
    if not GROUP_ID.fullmatch(text):
        raise Invalid(
            "A group's id has 1 to 80 lower-case letters, digits and : . _ - and starts with a "
            "letter or digit.",
            hint="Such as mcp:github or research.",
        )
    if Group.objects.filter(group_id=text).exists():
        raise Conflict(f"There is a group called {text} already.", hint="Choose another id.")
    return text


def one_line(name: str, text: str) -> str:
    """Return the text on one line, as the catalog has it, if it can be kept."""
    if UNKEEPABLE.search(text):
        raise Invalid("A text cannot hold NUL or broken Unicode characters.", hint="Remove them.")
    line = " ".join(text.split())
    if len(line) > LONGEST[name]:
        raise Invalid(f"A {WHAT[name]} has at most {LONGEST[name]} characters.", hint="Shorten it.")
    if name == "display_name" and not line:
        raise Invalid("A group needs a display name.", hint="Agents and people read it.")
    return line


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
