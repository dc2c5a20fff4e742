"""Create a bearer token for the API."""

import argparse
import json
import sys
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from catalog.audit import Actor
from sessions_app.agents import api_keys
from sessions_app.models import KeyScope
from toolcrib.lib.errors import ToolcribError


class Command(BaseCommand):
    help = "Create a token and print its key once."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--scope", choices=KeyScope.values, required=True)
        parser.add_argument(
            "--days", type=int, help="Days until the token expires. Default: never."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        days = options["days"]
        expires = timezone.now() + timedelta(days=days) if days else None
        try:
            key, text = api_keys.create_key(
                options["name"],
                options["scope"],
                actor=Actor.command("create_token"),
                expires_at=expires,
            )
        except ToolcribError as error:
            self.stderr.write(error.sentence)
            sys.exit(1)
        if options["json"]:
            body = {"token": key.name, "scope": key.scope, "key": text}
            self.stdout.write(json.dumps(body))
        else:
            self.stdout.write(f"{text}\nStore this key now: it is not shown again.")
