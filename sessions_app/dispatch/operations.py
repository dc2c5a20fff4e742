"""Session operations by id and request body: load and search.

REST and the fast path both call these functions.
"""

from typing import Any

from sessions_app.agents import rate_limits
from sessions_app.formats import catalog
from sessions_app.formats import native as native_formats
from sessions_app.ledger.payloads import check_value
from sessions_app.models import Agent
from sessions_app.sessions import lifecycle, loading
from sessions_app.sessions import search as session_search
from sessions_app.sessions.schemas import FoundIn, LoadIn, SearchIn

MAX_HITS = 50


def load(agent: Agent, session_id: str, body: LoadIn) -> dict[str, Any]:
    """Load tools of a group, all or by name."""
    check_value({"group_id": body.group_id, "tool_names": body.tool_names}, "")
    session = lifecycle.find_session(agent, session_id)
    return loading.load(session, body.group_id, body.tool_names).as_json()


def search(agent: Agent, session_id: str, body: SearchIn, output: FoundIn) -> dict[str, Any]:
    """Search tools by query, by pattern or by exact name."""
    check_value(output.call_id, "/call_id")
    check_value(body.dict(include={"query", "pattern", "name", "server", "server_hint"}), "")
    session = lifecycle.find_session(agent, session_id)
    rate_limits.check_rate(session.agent, "searches", session.agent.searches_per_minute)
    max_hits = native_formats.MAX_REFERENCES if output.format == "anthropic" else MAX_HITS
    query = session_search.parse_body(body, max_limit=max_hits, full=output.format != "json")
    if output.format == "json":
        return session_search.search_session(session, query)
    return catalog.search_response(session, query, output.format, output.call_id)
