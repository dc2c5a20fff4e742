"""Print a link with which a person sets a new password."""

import argparse
from typing import Any

from catalog.audit import Actor
from toolcrib.accounts import invitations
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Print a link with which a person sets a new password."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        actor = Actor.command("reset_password")
        user = invitations.record_password_reset(options["name"], actor=actor)
        link = invitations.password_link(user)
        body = {"person": user.username, "link": link}
        self.report(body, f"{link}\nThe link works once, within three days.")
