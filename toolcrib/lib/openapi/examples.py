"""Examples of bodies and answers by operation, and of parameters by name, in the OpenAPI document.

A test sends each body and parameter. The examples of fields are the values that these bodies give
them. The answers in answers.json are those that the test got, shortened, with fixed ids and times.
"""

import json
from importlib import resources
from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "description": "What to shout"}},
    "required": ["word"],
}
_SHOUT = {"name": "shout", "description": "Shout a word.", "inputSchema": _SCHEMA}
_SERVER = {
    "name": "CRM",
    "slug": "crm",
    "description": "Customers and their orders",
    "transport": "http",
    "url": "http://127.0.0.1:8765/mcp",
    "headers": {"Authorization": "Bearer ${CRM_TOKEN}"},
    "variables": {"CRM_TOKEN": "not-a-secret"},
}
_GITHUB = ["github__create_issue", "github__list"]

BODIES: dict[str, dict[str, Any]] = {
    # Servers
    "create_server": _SERVER,
    "test_server_draft": _SERVER,
    "import_servers": {
        "text": '{"mcpServers": {"crm": {"url": "http://127.0.0.1:8765/mcp"}}}',
        "variables": {},
        "confirm": [],
        "check_only": True,
    },
    "edit_server": {
        "name": "GitHub",
        "description": "Issues and code",
        "connection_policy": "on_demand",
        "isolation": "shared",
        "trust": "strict",
        "call_timeout": 60,
        "concurrency": 8,
        "poll_seconds": 900,
        "enabled": True,
    },
    "set_server_credentials": {"kind": "header", "values": {"X-Api-Key": "not-a-secret"}},
    # Groups
    "create_group": {
        "group_id": "support",
        "display_name": "Support",
        "description": "What support works with",
        "preload_default": False,
    },
    "order_groups": {"group_ids": ["own", "mcp:github"]},
    "edit_group": {
        "group_id": "house",
        "display_name": "House tools",
        "description": "Tools of our own",
        "preload_default": True,
        "deferred": True,
        "position": 0,
    },
    "add_group_members": {"tool_names": _GITHUB, "position": 0},
    "order_group_members": {"tool_names": ["shout"]},
    "edit_group_members": {"tool_names": ["shout"], "preload": True},
    # Tools
    "create_custom_tool": {
        "name": "whisper",
        "description": "Whisper a word.",
        "inputSchema": _SCHEMA,
        "preload": False,
        "group_id": "own",
    },
    "edit_tool": {
        "alias": "shout_out",
        "parameters": {"word": {"description": "What to shout, in one word"}},
        "description_override": "Shout a word at everybody.",
        "call_policy": "allow",
        "payload_storage": "masked",
        "read_only": "yes",
        "input_examples": [{"word": "hey"}],
    },
    "replace_custom_tool": _SHOUT,
    "hold_tool": {"reason": "Too loud"},
    "try_tool": {"arguments": {"word": "hey"}, "confirm": True},
    # Search
    "create_tool_hint": {"kind": "example", "text": "tell everybody"},
    "edit_tool_hint": {"text": "tell everybody loudly"},
    "import_hints": {"items": [{"name": "shout", "hints": ["announce something"]}]},
    "create_golden_query": {"query": "file a bug", "tools": ["github__create_issue"]},
    # Agents and keys
    "create_agent": {
        "name": "reviewer",
        "description": "Reviews pull requests",
        "groups": ["mcp:github"],
        "strategy": "dispatch",
        "mode": "auto",
        "tool_threshold": 15,
        "threshold_tokens": 10_000,
        "threshold_percent": 5,
        "catalog_budget": 2_000,
        "budget": 20_000,
        "calls_in_flight": 20,
        "calls_per_minute": 600,
        "searches_per_minute": 120,
        "cost_per_minute": 3_000,
        "max_sessions": 100,
        "payload_storage": "masked",
        "code_mode": False,
        "runs_custom_tools": True,
    },
    "edit_agent": {"all_groups": True, "catalog_header": "Your tools:", "enabled": True},
    "create_agent_key": {"name": "laptop", "days": 90},
    # Rules and held calls
    "create_rule": {
        "name": "Ask before writing",
        "effect": "hold",
        "reason": "A person looks at every write",
        "enabled": True,
        "position": 0,
        "match": {
            "agents": ["scout"],
            "tools": ["github__create_*"],
            "servers": ["github"],
            "annotations": {"readOnlyHint": False},
            "origin": "any",
            "arguments": [{"path": "/word", "op": "contains", "value": "!"}],
        },
        "approver": "operator",
    },
    "order_rules": {"names": ["Ask first"]},
    "test_rule": {"effect": "deny", "match": {"tools": ["shout"]}, "days": 7},
    "edit_rule": {"effect": "deny", "reason": "Not today", "enabled": False},
    "create_preset_rule": {},
    "decide_call": {
        "decision": "allow",
        "scope": "session",
        "comment": "Fine for this task",
        "grant": {"tools": ["shout"], "count": 5, "expires_in": 3600},
    },
    "decide_calls": {"decision": "deny", "comment": "Too many", "call_ids": ["call_0"]},
    # Settings and notifications
    "replace_prices": {"currency": "USD", "prices": [{"model": "large-*", "per_million": 3}]},
    "edit_settings": {"values": {"keep_payloads_days": 30}},
    "replace_masking": {"patterns": [r"\bACME-\d{6}\b"]},
    "create_webhook": {
        "name": "on-call",
        "kind": "json",
        "address": "http://127.0.0.1:8123/hook",
        "events": ["alert.raised", "call.held"],
    },
    "edit_webhook": {"name": "night-shift", "events": ["alert.raised"], "enabled": False},
    # Sessions
    "open_session": {
        "strategy": "dispatch",
        "mode": "deferred",
        "context_window": 200_000,
        "tool_threshold": 15,
        "threshold_tokens": 10_000,
        "threshold_percent": 5,
        "model": "large-1",
        "groups": ["mcp:github"],
        "servers": ["github"],
        "preload": ["github__list"],
        "metadata": {"ticket": 7},
    },
    "close_session": {},
    "fork_session": {},
    "load_tools": {"group_id": "mcp:github", "tool_names": ["github__create_issue"]},
    "preload_tools": {"tool_names": _GITHUB},
    "search_tools": {"query": "create an issue", "server": "github", "limit": 5},
    "call_tool": {"tool_name": "shout", "arguments": {"word": "hey"}, "timeout": 30},
    "report_result": {"content": [{"type": "text", "text": "HEY"}], "is_error": False},
    "run_script": {
        "code": "await github.create_issue(title=input)",
        "language": "python",
        "timeout": 30,
        "input": "It is loud",
    },
}
PARAMETERS: dict[str, Any] = {  # of query strings
    "limit": 20,
    "tool_names": ["shout"],
    "include": "catalog,tools",
    "format": "anthropic",
    "detail": "summary",
    "wait": 0,
    "lang": "python",
    "days": 30,
    "range": "30d",
    "within": "30d",
    "query": "create an issue",
    "server": "github",
    "agent": "scout",
    "group": "own",
    "q": "issue",
}


def read_answers() -> dict[str, Any]:
    """Return the answer of each operation that answers with JSON, by operation id."""
    text = resources.files(__package__).joinpath("answers.json").read_text("utf-8")
    answers: dict[str, Any] = json.loads(text)
    return answers


_ERRORS = (
    (400, "bad_request", "The request body could not be parsed.", "Send valid JSON in UTF-8."),
    (401, "unauthorized", "A valid API key is required.", "Send `Authorization: Bearer tcb_…`."),
    (403, "forbidden", "This key is read-only.", "Use a key with the scope admin."),
    (404, "not_found", "Tool not found.", "Check the name."),
    (409, "session_closed", "This session is closed.", "Open a new session."),
    (413, "too_large", "The request body exceeds 1024 KB.", "Send a smaller request."),
    (
        422,
        "invalid",
        "The request does not match the schema of this endpoint: query.limit: Input should be less "
        "than or equal to 200.",
        "See details and /api/v1/docs.",
    ),
    (429, "rate_limited", "scout is limited to 600 calls a minute.", "Retry in 3 s."),
    (501, "engine_missing", "TypeScript is not installed.", "An operator installs it."),
    (
        502,
        "unknown_outcome",
        "The call was sent, but its result could not be recorded.",
        "Check whether the tool ran before retrying.",
    ),
    (503, "busy", "Database unavailable.", "Try again."),
    (504, "timeout", "The call took longer than 30 s.", "Check whether the tool ran."),
)
_DETAILS: dict[int, dict[str, Any]] = {
    422: {
        "problems": [
            {"at": "query.limit", "problem": "Input should be less than or equal to 200"},
        ]
    },
    429: {"retry_after": 3},
    503: {"retry_after": 2},
}
ERRORS = {  # by status
    status: {
        "error": {"code": code, "message": message, "hint": hint}
        | ({"details": _DETAILS[status]} if status in _DETAILS else {})
    }
    for status, code, message, hint in _ERRORS
}
