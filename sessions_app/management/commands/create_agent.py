"""Create an agent and its first key."""

import argparse
import json
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from catalog.audit import Actor
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Mode, Strategy
from toolcrib.lib.errors import ToolcribError

OPTIONS = ("strategy", "mode", "calls_per_minute", "calls_in_flight")


class Command(BaseCommand):
    help = "Create an agent and print its key once."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")
        groups = parser.add_mutually_exclusive_group()
        groups.add_argument(
            "--group",
            action="append",
            default=[],
            metavar="ID",
            help="A group the agent can use, for example mcp:github. Repeatable; order is kept.",
        )
        groups.add_argument(
            "--all-groups", action="store_true", help="Grant all current and future groups."
        )
        parser.add_argument("--strategy", choices=Strategy.values)
        parser.add_argument("--mode", choices=Mode.values)
        parser.add_argument("--calls-per-minute", type=int, metavar="N")
        parser.add_argument("--calls-in-flight", type=int, metavar="N")
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        settings_ = {name: options[name] for name in OPTIONS if options[name] is not None}
        try:
            agent, key = agent_actions.create_with_key(
                options["name"],
                groups=options["group"],
                all_groups=options["all_groups"],
                actor=Actor.command("create_agent"),
                **settings_,
            )
        except ToolcribError as error:
            self.stderr.write(error.sentence)
            sys.exit(1)
        if options["json"]:
            self.stdout.write(json.dumps({"agent": agent.name, "key": key}))
            return
        groups = "all" if agent.all_groups else ", ".join(agent_actions.group_ids(agent))
        self.stdout.write(
            f"Created agent {agent.name}. Groups: {groups}."
            if groups
            else f"Created agent {agent.name}. It has no groups, so it has no tools yet."
        )
        self.stdout.write(f"\n  {key}\n\nStore this key now: it is not shown again. Test it:\n")
        self.stdout.write(
            f"  curl -sS -X POST {settings.PUBLIC_URL}/api/v1/sessions"
            f" -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{{}}'"
        )
