"""Re-encrypt every credential with the first of TOOLCRIB_ENCRYPTION_KEYS."""

import sys
from typing import Any

from cryptography.fernet import InvalidToken
from django.db import transaction

from servers.models import Credential
from servers.registration.credentials import key_fingerprint, rotate
from toolcrib.lib.text import plural
from toolcrib.management.json_command import JsonCommand

BATCH = 200


class Command(JsonCommand):
    help = (
        "Re-encrypt every credential with the first key. To change the key, set "
        "TOOLCRIB_ENCRYPTION_KEYS=NEW,OLD, run this, then set it to NEW."
    )
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        rotated, unreadable, last = 0, [], 0
        while batch := _next_batch(last):
            last = batch[-1].pk
            with transaction.atomic():
                for row in batch:
                    try:
                        text = rotate(row.ciphertext)
                    except InvalidToken:
                        unreadable.append(f"{row.server.slug}: {row}")
                        continue
                    # Skip a credential that was entered again meanwhile, with the new key.
                    rows = Credential.objects.filter(pk=row.pk, ciphertext=row.ciphertext)
                    rotated += rows.update(ciphertext=text)
        self.report(
            {"key": key_fingerprint(), "rotated": rotated, "unreadable": unreadable},
            f"Re-encrypted {plural(rotated, 'credential')} with key {key_fingerprint()}.",
        )
        if unreadable:
            names = ", ".join(unreadable)
            self.stderr.write(
                f"No configured key decrypts these credentials; enter them again: {names}."
            )
            sys.exit(3)


def _next_batch(last: int) -> list[Credential]:
    rows = Credential.objects.filter(pk__gt=last).exclude(ciphertext="")
    return list(rows.select_related("server").order_by("pk")[:BATCH])
