"""Invite a person and print the link with which they set a password."""

import argparse
from typing import Any

from catalog.audit import Actor
from toolcrib.accounts import invitations
from toolcrib.lib.roles import Role
from toolcrib.management.json_command import JsonCommand

ROLES = {role.label: role for role in (Role.ADMIN, Role.OPERATOR, Role.VIEWER, Role.OUTSIDER)}


class Command(JsonCommand):
    help = "Invite a person and print the invitation link."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("name", help="Name or e-mail of the person.")
        parser.add_argument("--role", choices=list(ROLES), default="operator")

    def handle(self, *args: Any, **options: Any) -> None:
        role = options["role"]
        user = invitations.invite(options["name"], ROLES[role], actor=Actor.command("invite"))
        link = invitations.password_link(user)
        body = {"person": user.username, "role": role, "link": link}
        self.report(body, f"{link}\nThe link works once, within three days.")
