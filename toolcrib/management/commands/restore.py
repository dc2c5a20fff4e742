"""Restore the database from a backup."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management import call_command

from catalog.audit import chain
from servers.registration.credentials import key_fingerprint
from toolcrib import backup
from toolcrib.backup_encryption import VARIABLE, decrypted_reader, is_encrypted, read_passphrase
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import plural
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Restore this installation from a backup in one transaction."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", help="A file written by `backup`; - reads standard input.")
        parser.add_argument("--key", metavar="FILE.key", help="Install the keys in this file.")
        parser.add_argument(
            "--passphrase-file",
            metavar="FILE",
            help=f"Decrypt with the first line of FILE; default: {VARIABLE}.",
        )
        parser.add_argument("--replace", action="store_true", help="Delete existing data first.")

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        passphrase = read_passphrase(options["passphrase_file"])
        with _open(options["file"]) as file:
            stream = backup.seekable(file)
            if is_encrypted(stream):
                stream = decrypted_reader(stream, passphrase)
            header, rows = backup.read_header(stream)
            files = {}
            if options["key"]:
                files = backup.read_keys(Path(options["key"]), header["key"], passphrase)
            keys = [files["encryption.key"]] if files else settings.ENCRYPTION_KEYS
            result = backup.restore(header, rows, replace=options["replace"], keys=keys)
        # Last: until the rows are committed, the old keys belong to the old data.
        replaced = backup.install_keys(files)
        chain.adopt(keys)
        body = {
            "rows": result.rows,
            "key": result.key,
            "keys_replaced": replaced,
            "unreadable_credentials": result.unreadable,
            "servers": result.servers,
            "unreadable_data_keys": result.unreadable_data_keys,
        }
        text = f"Restored {result.rows} rows. Restart Toolcrib if it is running."
        if replaced:
            names = ", ".join(f"{name}.old" for name in replaced)
            text += f"\nReplaced keys were renamed to: {names}"
        self.report(body, text)
        if result.unreadable or result.unreadable_data_keys:
            self.stderr.write(_unreadable_message(result))
            sys.exit(3)


def _open(name: str) -> Any:
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        file: IO[bytes] = Path(name).open("rb")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise Invalid(f"{name} cannot be read: {error.strerror}.") from error
    return file


def _unreadable_message(result: backup.RestoreResult) -> str:
    option = "--key FILE.key --replace" if backup.keys_are_files() else "TOOLCRIB_ENCRYPTION_KEYS"
    lost = []
    if result.unreadable:
        servers = ", ".join(result.servers)
        lost.append(f"{plural(result.unreadable, 'credential')} of {servers}")
    if result.unreadable_data_keys:
        lost.append("the stored arguments and results of calls")
    return (
        f"The backup was encrypted with key {result.key}; this installation has "
        f"{key_fingerprint()}. Without that key {' and '.join(lost)} cannot be read. If "
        f"you have it, restore again with {option}; if it is lost, "
        "enter the credentials again. Everything else is restored."
    )
