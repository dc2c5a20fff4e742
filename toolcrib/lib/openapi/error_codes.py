"""Error codes of the REST API by status, as the OpenAPI document lists them.

A test compares the table with the errors in the code.
"""

UNREACHABLE = (  # an MCP server did not answer, or not as MCP
    "auth", "blocked", "closed", "command_not_found", "crashed", "cursor_invalid", "cursor_loop",
    "cursor_repeated", "definition_budget", "disabled", "http_status", "listing_too_large",
    "not_executable", "not_mcp", "page_limit", "protocol", "redirect", "refused", "resolve",
    "sandbox", "server_error", "timeout", "tls", "tool_limit", "unknown_outcome", "unreachable",
)  # fmt: skip
CODES = {
    400: (
        "bad_request", "busy", "cancelled", "custom_tool", "definition_changed", "denied",
        "denied_by_rule", "error", "input_required", "invalid_arguments", "invalid_pattern",
        "meta_tool", "model_unavailable", "not_read_only", "superseded",
    ),
    401: ("key_revoked", "unauthorized"),
    403: ("code_mode_off", "forbidden", "role_needed", "stdio_off", "wrong_origin"),
    404: (
        "disabled", "error", "held", "missing", "no_oauth", "not_found", "rejected",
        "server_disabled", "unknown_call", "unknown_feature", "unknown_grant", "unknown_group",
        "unknown_run", "unknown_session", "unknown_tool", "waiting",
    ),
    409: (
        "already_decided", "ambiguous_tool", "calls_in_flight", "changed", "changed_again",
        "changed_meanwhile", "confirm_argv", "confirmation_required", "conflict",
        "credentials_missing", "followed", "idempotency_conflict", "idempotency_in_progress",
        "last_admin", "name_taken", "none_picked", "not_a_client_call", "over_budget",
        "question_expired", "result_reported", "result_too_late", "session_closed",
        "session_expired", "slug_taken", "strategy_mismatch",
    ),
    413: ("too_large",),
    422: (
        "bad_argv", "bad_env", "bad_header", "bad_server", "bad_slug", "bad_transport", "bad_type",
        "bad_url", "bad_variable", "duplicate_key", "golden_line", "invalid", "invalid_arguments",
        "invalid_request_state", "invalid_rule", "invalid_session_name", "mode_not_allowed",
        "no_native_form", "no_servers", "no_target", "not_json", "not_servers", "not_yaml",
        "output_invalid", "too_many", "too_many_tools", "toolset_needs_https", "unknown_group",
        "unknown_mode", "unknown_search", "unknown_server", "unknown_tool",
        "variables_missing", "weak_password",
    ),
    429: (
        "rate_limited", "too_many_attempts", "too_many_calls", "too_many_connections",
        "too_many_held_calls", "too_many_runs", "too_many_sessions", "too_many_streams",
    ),
    501: ("engine_missing",),
    502: (*UNREACHABLE, "too_large"),
    503: (
        *UNREACHABLE, "audit_seal", "busy", "credential_unreadable", "error", "payload_unreadable",
        "stopping",
    ),
    504: ("timeout",),
}  # fmt: skip
