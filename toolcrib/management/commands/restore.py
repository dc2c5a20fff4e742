"""Fill an empty installation from a backup."""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand

from servers.registration.credentials import key_fingerprint
from toolcrib import backup
from toolcrib.lib.errors import Invalid, ToolcribError


class Command(BaseCommand):
    help = "Fill this installation from a backup, all of it or nothing."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", help="What `backup` wrote; - reads standard input.")
        parser.add_argument("--key", metavar="FILE.key", help="Install the keys kept in it.")
        parser.add_argument(
            "--replace", action="store_true", help="Delete the data that is here first."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        replaced: list[str] = []
        try:
            with _opened(options["file"]) as file:
                header, rows = backup.read_header(file)
                files = {}
                if options["key"]:
                    files = backup.read_keys(Path(options["key"]), header["key"])
                keys = [files["encryption.key"]] if files else settings.ENCRYPTION_KEYS
                done = backup.restore(header, rows, replace=options["replace"], keys=keys)
            # Last: until the rows are in, the old keys belong to the old data.
            replaced = backup.install_keys(files)
        except ToolcribError as error:
            self.stderr.write(error.sentence)
            sys.exit(1)
        if options["json"]:
            shown = {"rows": done.rows, "key": done.key, "keys_replaced": replaced}
            body = shown | {"unreadable_credentials": done.unreadable, "servers": done.servers}
            self.stdout.write(json.dumps(body))
        else:
            self.stdout.write(f"Restored {done.rows} rows. Start Toolcrib again if it runs.")
            if replaced:
                self.stdout.write(f"Replaced keys are kept as: {', '.join(replaced)} + .old")
        if done.unreadable:
            self.stderr.write(_what_is_lost(done))
            sys.exit(3)


def _opened(name: str) -> Any:
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        file: IO[bytes] = Path(name).open("rb")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise Invalid(f"{name} cannot be read: {error.strerror}.") from error
    return file


def _what_is_lost(done: backup.RestoreResult) -> str:
    way = "--key FILE.key --replace" if backup.keys_are_files() else "TOOLCRIB_ENCRYPTION_KEYS"
    return (
        f"The backup was made under key {done.key}; this installation has {key_fingerprint()}. "
        f"Without that key {done.unreadable} credentials of {', '.join(done.servers)} cannot be "
        f"read. If you have it, restore again with {way}; if it is lost, enter those credentials "
        "again. Everything else is restored."
    )
