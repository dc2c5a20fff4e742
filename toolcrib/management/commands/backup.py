"""Back up the database, and its encryption keys to a separate file."""

import argparse
import sys
from pathlib import Path
from typing import Any

from toolcrib import backup
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Write the database to FILE and the keys that decrypt its credentials to FILE.key."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", help="The file to write; - writes to standard output.")
        parser.add_argument("--force", action="store_true", help="Overwrite existing files.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["file"] == "-":
            header = backup.write(sys.stdout.buffer)
            sys.stdout.buffer.flush()
            self.stderr.write(f"{_total(header)} rows. {_key_location()}")
            return
        path = Path(options["file"])
        key_path = path.with_name(path.name + ".key") if backup.keys_are_files() else None
        header = self._write(path, key_path, force=options["force"])
        files = {"file": str(path), "key_file": str(key_path) if key_path else None}
        keys = _key_location()
        if key_path:
            keys = (
                f"{key_path}: the keys that decrypt its credentials.\n"
                "Store the two files separately: anyone with both can read every credential, and "
                "without the key file the credentials in the backup are lost."
            )
        self.report(
            files | {"key": header["key"], "rows": _total(header)},
            f"{path}: {_total(header)} rows.\n{keys}",
        )

    def _write(self, path: Path, key_path: Path | None, *, force: bool) -> dict[str, Any]:
        for target in filter(None, (path, key_path)):
            if target.exists() and not force:
                raise backup.file_exists(target)
        with backup.private_file(path, force=force) as file:
            header = backup.write(file)
        if key_path:
            with backup.private_file(key_path, force=force) as file:
                file.write(backup.key_document())
        return header


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
