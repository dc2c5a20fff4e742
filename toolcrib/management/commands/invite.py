"""Invite a person and print the link with which they set a password."""

import argparse
import json
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from catalog.audit import Actor
from toolcrib.accounts import invitations
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.roles import Role

ROLES = {role.label: role for role in (Role.ADMIN, Role.OPERATOR, Role.OUTSIDER)}


class Command(BaseCommand):
    help = "Invite a person and print the invitation link."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="Name or e-mail of the person.")
        parser.add_argument("--role", choices=list(ROLES), default="operator")
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            user = invitations.invite(
                options["name"], ROLES[options["role"]], actor=Actor.command("invite")
            )
        except ToolcribError as error:
            self.stderr.write(error.sentence)
            sys.exit(1)
        link = settings.PUBLIC_URL + invitations.password_path(user)
        if options["json"]:
            body = {"person": user.username, "role": options["role"], "link": link}
            self.stdout.write(json.dumps(body))
        else:
            self.stdout.write(f"{link}\nThe link works once, within three days.")
