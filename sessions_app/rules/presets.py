"""Rules that people can switch on with one click, and rules made from a recorded call."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sessions_app.models import Call
from sessions_app.rules.schemas import RuleIn
from toolcrib.lib.errors import NotFound

MAX_PREFILLED = 6  # conditions made from a call's arguments
MAX_PREFILLED_TEXT = 200
MASK = "***"


@dataclass(frozen=True)
class Preset:
    """A rule by template; with `needs_server`, `{server}` stands for the chosen server's slug."""

    key: str
    title: str
    name: str
    effect: str
    reason: str
    match: Mapping[str, Any]
    needs_server: bool = False

    def rule(self, server: str = "") -> RuleIn:
        def fill(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace("{server}", server)
            return [fill(item) for item in value] if isinstance(value, list) else value

        return RuleIn.model_validate(
            {
                "name": fill(self.name),
                "effect": self.effect,
                "reason": fill(self.reason),
                "match": {key: fill(value) for key, value in self.match.items()},
            }
        )


PRESETS = {
    preset.key: preset
    for preset in (
        Preset(
            "destructive",
            "Ask before destructive tools",
            "Ask before destructive tools",
            "hold",
            "This tool may delete or overwrite data.",
            {"annotations": {"destructiveHint": True}},
        ),
        Preset(
            "leaving",
            "Ask before anything that leaves for another server after reading from a server",
            "Ask before data of {server} leaves",
            "hold",
            "Results of {server} could leave for another server.",
            {"after": ["{server}"], "not_servers": ["{server}"]},
            needs_server=True,
        ),
        Preset(
            "not-read-only",
            "Deny tools without a read-only claim",
            "Deny tools without a read-only claim",
            "deny",
            "Only tools that their server reports as read-only may be called.",
            {"annotations": {"readOnlyHint": False}},
        ),
        Preset(
            "first-use",
            "Ask on the first use of a tool by an agent",
            "Ask on the first use of a tool by an agent",
            "hold",
            "The agent has not used this tool before.",
            {"first_use": True},
        ),
    )
}


def find_preset(key: str) -> Preset:
    preset = PRESETS.get(key)
    if preset is None:
        raise NotFound("There is no such preset.", hint="GET /api/v1/rule-presets lists them.")
    return preset


def rule_from_call(call: Call) -> dict[str, Any]:
    """Return the fields of a rule that holds calls like this one."""
    return {
        "name": f"Ask before {call.tool_name}"[:80],
        "effect": "hold",
        "match": {"tools": [call.tool_name], "arguments": _conditions(call.arguments)},
    }


def _conditions(arguments: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(arguments)
    except ValueError:  # no longer stored
        return []
    if not isinstance(value, dict) or (value.get("cut") is True and "start" in value):
        return []
    conditions = []
    for name, sent in value.items():
        is_plain = isinstance(sent, str | int | float | bool)
        if isinstance(sent, str) and (len(sent) > MAX_PREFILLED_TEXT or MASK in sent):
            is_plain = False
        if is_plain:
            path = "/" + name.replace("~", "~0").replace("/", "~1")
            conditions.append({"path": path, "op": "eq", "value": sent})
    return conditions[:MAX_PREFILLED]
