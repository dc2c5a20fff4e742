"""Create an agent and its first key."""

import argparse
from typing import Any

from django.conf import settings

from catalog.audit import Actor
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Mode, Strategy
from toolcrib.management.json_command import JsonCommand

OPTIONS = ("strategy", "mode", "calls_per_minute", "calls_in_flight")


class Command(JsonCommand):
    help = "Create an agent and print its key once."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
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

    def handle(self, *args: Any, **options: Any) -> None:
        settings_ = {name: options[name] for name in OPTIONS if options[name] is not None}
        agent, key = agent_actions.create_with_key(
            options["name"],
            groups=options["group"],
            all_groups=options["all_groups"],
            actor=Actor.command("create_agent"),
            **settings_,
        )
        groups = "all" if agent.all_groups else ", ".join(agent_actions.group_ids(agent))
        note = f"Groups: {groups}." if groups else "It has no groups, so it has no tools yet."
        self.report(
            {"agent": agent.name, "key": key},
            f"Created agent {agent.name}. {note}\n\n  {key}\n\n"
            "Store this key now: it is not shown again. Test it:\n\n"
            f"  curl -sS -X POST {settings.PUBLIC_URL}/api/v1/sessions"
            f" -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{{}}'",
        )
