"""Patterns of operators for secrets that Toolcrib does not know, such as customer numbers.

They are RE2 expressions. Every process applies them when it loads a new revision of the catalog.
"""

import json
from collections.abc import Sequence

from django.db import transaction

from catalog import audit
from catalog.models import Preference, Revision
from toolcrib.lib.redaction.patterns import compile_patterns
from toolcrib.lib.redaction.redactor import set_operator_patterns
from toolcrib.lib.roles import Actor

NAME = "redaction_patterns"


def read() -> list[str]:
    row = Preference.objects.filter(name=NAME).first()
    patterns: list[str] = json.loads(row.value) if row else []
    return patterns


def apply() -> None:
    """Redact what the stored patterns match, in this process."""
    set_operator_patterns(read())


@transaction.atomic
def change(patterns: Sequence[str], *, actor: Actor) -> bool:
    """Store the patterns and return whether they changed. Raises Invalid for a bad one."""
    compile_patterns(patterns)
    before, after = read(), list(dict.fromkeys(patterns))
    if before == after:
        return False
    row, _ = Preference.objects.update_or_create(name=NAME, defaults={"value": json.dumps(after)})
    audit.record(actor, "settings.change", row, before={"value": before}, after={"value": after})
    Revision.bump()
    return True
