"""Entry point of all commands: console script `toolcrib`, manage.py, `python -m toolcrib`."""

import os
import sys

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line
from django.db import DatabaseError


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    arguments = command_arguments(sys.argv)
    try:
        django.setup()
        from toolcrib.config.databases import explain_failure, make_tables_if_new
    except ImproperlyConfigured as error:
        sys.exit(str(error))
    try:
        make_tables_if_new(arguments[1:2])
        execute_from_command_line(arguments)
    except DatabaseError as error:
        if not (sentence := explain_failure(error)):
            raise
        sys.exit(sentence)


def command_arguments(argv: list[str]) -> list[str]:
    """Accept `import-servers` for `import_servers`: names of modules have no hyphens."""
    if len(argv) < 2 or argv[1].startswith("-"):
        return argv
    return [argv[0], argv[1].replace("-", "_"), *argv[2:]]
