"""URL patterns of the agent, session, usage, search and onboarding pages.

An agent can have almost any name, so no other page may use a path of one segment under agents/.
Pages that do not belong to an agent have two segments there, and the second is not the name of an
agent page.
"""

from django.urls import URLPattern, path

from sessions_app.agents import onboarding_views
from sessions_app.agents import views as agent_views
from sessions_app.held_calls import views as held_call_views
from sessions_app.playground import try_views
from sessions_app.playground import views as playground_views
from sessions_app.review import views as review_views
from sessions_app.rules import views as rule_views
from sessions_app.usage import optimize_views
from sessions_app.usage import views as usage_views

agent_pages: list[URLPattern] = [
    path("agents", agent_views.agents, name="agents"),
    path("agents/new/add", agent_views.add, name="agent-add"),
    path("agents/<str:name>", agent_views.groups, name="agent"),
    path("agents/<str:name>/activity", agent_views.activity, name="agent-activity"),
    path("agents/<str:name>/groups", agent_views.set_groups, name="agent-groups"),
    path("agents/<str:name>/keys", agent_views.keys, name="agent-keys"),
    path("agents/<str:name>/keys/<int:key_id>/rotate", agent_views.rotate, name="key-rotate"),
    path("agents/<str:name>/keys/<int:key_id>/revoke", agent_views.revoke, name="key-revoke"),
    path("agents/<str:name>/connect", agent_views.connect, name="agent-connect"),
    path("agents/<str:name>/settings", agent_views.settings, name="agent-settings"),
    path("agents/<str:name>/enable", agent_views.set_enabled, {"on": True}, name="agent-enable"),
    path("agents/<str:name>/disable", agent_views.set_enabled, {"on": False}, name="agent-disable"),
    path("agents/<str:name>/delete", agent_views.delete, name="agent-delete"),
]

session_pages: list[URLPattern] = [
    path("sessions", review_views.sessions, name="sessions"),
    path("sessions/new", review_views.newer, name="sessions-new"),
    path("sessions/export.jsonl", review_views.export_sessions, name="sessions-export"),
    path("sessions/views", review_views.save_view, name="sessions-views"),
    path("sessions/<str:session_id>.json", review_views.session_json, name="session-json"),
    path("sessions/<str:session_id>/delete", review_views.delete_session, name="session-delete"),
    path(
        "sessions/<str:session_id>/scripts/<str:run_id>",
        review_views.script_run,
        name="script-run",
    ),
    path("sessions/<str:session_id>", review_views.session, name="session"),
    path("scripts/try", try_views.try_script, name="script-try"),
    path("tools/<str:public_name>/try", try_views.try_tool, name="tool-try"),
    path("tools/<str:public_name>/use", review_views.tool_use, name="tool-use"),
]

rule_pages: list[URLPattern] = [
    path("rules", rule_views.rules, name="rules"),
    path("rules.json", rule_views.export, name="rule-export"),
    path("rules/new", rule_views.add, name="rule-add"),
    path("rules/new/preset", rule_views.add_preset, name="rule-preset"),
    path("rules/<str:rule_name>", rule_views.rule, name="rule"),
    path("rules/<str:rule_name>/move", rule_views.move, name="rule-move"),
    path("rules/<str:rule_name>/enable", rule_views.set_enabled, {"on": True}, name="rule-enable"),
    path(
        "rules/<str:rule_name>/disable", rule_views.set_enabled, {"on": False}, name="rule-disable"
    ),
    path("rules/<str:rule_name>/delete", rule_views.delete, name="rule-delete"),
]

urlpatterns: list[URLPattern] = [
    *agent_pages,
    *session_pages,
    *rule_pages,
    path("approvals/calls", held_call_views.held_calls, name="held-calls"),
    path("calls/decide", held_call_views.decide, name="held-calls-decide"),
    path("usage", usage_views.usage, name="usage"),
    path("usage/unload", usage_views.unload_unused, name="usage-unload"),
    path("usage/preload", usage_views.set_preload, name="usage-preload"),
    path("usage/undo/<int:entry_id>", usage_views.undo, name="usage-undo"),
    path("usage/optimize", optimize_views.page, name="optimize"),
    path("usage/optimize/apply", optimize_views.apply, name="optimize-apply"),
    path("usage/optimize/group", optimize_views.build_group, name="optimize-group"),
    path("usage/<str:table>.csv", usage_views.usage_csv, name="usage-csv"),
    path("search", playground_views.search, name="playground"),
    path("search/progress", playground_views.progress, name="search-progress"),
    path("search/mark", playground_views.mark, name="search-mark"),
    path("search/load", playground_views.load, name="search-load"),
    path("search/golden", playground_views.golden_queries, name="golden"),
    path("search/golden/run", playground_views.golden_run, name="golden-run"),
    path("search/golden/add", playground_views.golden_add, name="golden-add"),
    path("search/golden/export.csv", playground_views.golden_export, name="golden-export"),
    path(
        "search/golden/<int:golden_id>/accept", playground_views.golden_accept, name="golden-accept"
    ),
    path(
        "search/golden/<int:golden_id>/remove", playground_views.golden_remove, name="golden-remove"
    ),
    path("search/missed", playground_views.not_found, name="missed"),
    path("welcome/start", onboarding_views.start_onboarding, name="welcome-start"),
    path("welcome/group", onboarding_views.open_group, name="welcome-group"),
    path("welcome/agent", onboarding_views.connect_agent, name="welcome-agent"),
    path("welcome/agent/waiting", onboarding_views.first_request_status, name="welcome-waiting"),
    path("welcome/skip", onboarding_views.skip, name="welcome-skip"),
    path("welcome/dismiss", onboarding_views.dismiss, name="welcome-dismiss"),
]
