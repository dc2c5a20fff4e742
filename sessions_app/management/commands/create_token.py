"""Create a bearer token for the API."""

import argparse
from datetime import timedelta
from typing import Any

from django.utils import timezone

from catalog.audit import Actor
from sessions_app.agents import api_keys
from sessions_app.models import KeyScope
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Create a token and print its key once."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("name")
        parser.add_argument("--scope", choices=KeyScope.values, required=True)
        parser.add_argument(
            "--days", type=int, help="Days until the token expires. Default: never."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        days = options["days"]
        expires = timezone.now() + timedelta(days=days) if days else None
        actor = Actor.command("create_token")
        key, text = api_keys.create_key(
            options["name"], options["scope"], actor=actor, expires_at=expires
        )
        body = {"token": key.name, "scope": key.scope, "key": text}
        self.report(body, f"{text}\nStore this key now: it is not shown again.")
