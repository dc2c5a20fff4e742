"""Print a link with which a person sets a new password."""

import argparse
import json
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from catalog.audit import Actor
from toolcrib.accounts import invitations
from toolcrib.lib.errors import ToolcribError


class Command(BaseCommand):
    help = "Print a link with which a person sets a new password."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            user = invitations.record_password_reset(
                options["name"], actor=Actor.command("reset_password")
            )
        except ToolcribError as error:
            self.stderr.write(error.sentence)
            sys.exit(1)
        link = settings.PUBLIC_URL + invitations.password_path(user)
        if options["json"]:
            self.stdout.write(json.dumps({"person": user.username, "link": link}))
        else:
            self.stdout.write(f"{link}\nThe link works once, within three days.")
