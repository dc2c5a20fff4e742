"""Back up the database, and its encryption keys to a separate file."""

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from catalog import audit
from catalog.audit import Actor
from toolcrib import backup
from toolcrib.backup_encryption import (
    VARIABLE,
    check_new_passphrase,
    encrypted_writer,
    read_passphrase,
)
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Write the database to FILE, and its keys to FILE.key, encrypted with a passphrase."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", help="The file to write; - writes to standard output.")
        parser.add_argument("--force", action="store_true", help="Overwrite existing files.")
        parser.add_argument(
            "--passphrase-file",
            metavar="FILE",
            help=f"Encrypt with the first line of FILE; default: {VARIABLE}.",
        )
        parser.add_argument("--plain", action="store_true", help="Do not encrypt the files.")

    def handle(self, *args: Any, **options: Any) -> None:
        passphrase = ""
        if not options["plain"]:
            passphrase = read_passphrase(options["passphrase_file"])
            check_new_passphrase(passphrase)
        if options["file"] == "-":
            with _encrypted(sys.stdout.buffer, passphrase) as stream:
                header = backup.write(stream)
            sys.stdout.buffer.flush()
            audit.record_installation(Actor.command("backup"), "installation.backup")
            self.stderr.write(f"{_total(header)} rows. {_key_location()}")
            return
        path = Path(options["file"])
        key_path = path.with_name(path.name + ".key") if backup.keys_are_files() else None
        header = self._write(path, key_path, passphrase, force=options["force"])
        audit.record_installation(Actor.command("backup"), "installation.backup")
        files = {"file": str(path), "key_file": str(key_path) if key_path else None}
        keys = _key_location()
        if key_path:
            keys = (
                f"{key_path}: the keys that decrypt its credentials.\n"
                "Store the two files separately: anyone with both can read every credential, and "
                "without the key file the credentials in the backup are lost."
            )
        how = "encrypted" if passphrase else "not encrypted"
        self.report(
            files | {"key": header["key"], "rows": _total(header), "encrypted": bool(passphrase)},
            f"{path}: {_total(header)} rows, {how}.\n{keys}",
        )

    def _write(
        self, path: Path, key_path: Path | None, passphrase: str, *, force: bool
    ) -> dict[str, Any]:
        for target in filter(None, (path, key_path)):
            if target.exists() and not force:
                raise backup.file_exists(target)
        with backup.private_file(path, force=force) as file, _encrypted(file, passphrase) as stream:
            header = backup.write(stream)
        if key_path:
            private = backup.private_file(key_path, force=force)
            with private as file, _encrypted(file, passphrase) as stream:
                stream.write(backup.key_document())
        return header


def _encrypted(stream: IO[bytes], passphrase: str) -> AbstractContextManager[IO[bytes]]:
    return encrypted_writer(stream, passphrase) if passphrase else nullcontext(stream)


def _total(header: dict[str, Any]) -> int:
    return sum(header["rows"].values())


def _key_location() -> str:
    if backup.keys_are_files():
        return (
            "The keys that decrypt its credentials are secret.key and encryption.key in the data "
            "directory; store a copy of them separately."
        )
    return (
        "TOOLCRIB_ENCRYPTION_KEYS decrypts its credentials and is not in the backup; store it and "
        "TOOLCRIB_SECRET_KEY separately."
    )
