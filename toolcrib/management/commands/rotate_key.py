"""Re-encrypt every credential and the data keys with the first of TOOLCRIB_ENCRYPTION_KEYS."""

import sys
from typing import Any

from cryptography.fernet import InvalidToken
from django.db import transaction

from catalog import audit
from catalog.audit import Actor, chain
from servers.models import Credential, Server
from servers.registration import confirmation
from servers.registration.credentials import key_fingerprint, rotate
from sessions_app.models.encryption import rotate_data_keys
from toolcrib.lib.text import plural
from toolcrib.management.json_command import JsonCommand

BATCH = 200


class Command(JsonCommand):
    help = (
        "Re-encrypt every credential, and the keys of stored payloads, with the first key. To "
        "change the key, set TOOLCRIB_ENCRYPTION_KEYS=NEW,OLD, run this, then set it to NEW."
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
        data_keys = rotate_data_keys()
        _sign_confirmations()
        audit_log = chain.verify()
        if audit_log.holds:  # otherwise its evidence is kept
            chain.sign_again()
        else:
            self.stderr.write(f"The audit log keeps its old key. {audit_log.summary}")
        actor, after = Actor.command("rotate_key"), {"key": key_fingerprint(), "rotated": rotated}
        audit.record_installation(actor, "installation.rotate_key", after=after)
        self.report(
            {
                "key": key_fingerprint(),
                "rotated": rotated,
                "data_keys": data_keys,
                "unreadable": unreadable,
            },
            f"Re-encrypted {plural(rotated, 'credential')} and {plural(data_keys, 'data key')} "
            f"with key {key_fingerprint()}.",
        )
        if unreadable:
            names = ", ".join(unreadable)
            self.stderr.write(
                f"No configured key decrypts these credentials; enter them again: {names}."
            )
            sys.exit(3)


def _sign_confirmations() -> None:
    """Renew the confirmations of programs, whose digests depend on the key."""
    with transaction.atomic():
        for server in Server.objects.select_for_update().exclude(confirmed_values=None):
            if server.confirmed_values:
                program = confirmation.stored_program(server)
                if confirmation.is_confirmed(server, program):
                    confirmation.set_confirmed(server, program)
                    server.save(update_fields=["confirmed_argv", "confirmed_values"])


def _next_batch(last: int) -> list[Credential]:
    rows = Credential.objects.filter(pk__gt=last).exclude(ciphertext="")
    return list(rows.select_related("server").order_by("pk")[:BATCH])
