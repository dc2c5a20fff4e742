"""What agents ask of a session by id, with the body of a request: load and search.

Every way in (REST, fast path) calls these functions.
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
    """Load a group's tools, all or by name."""
    check_value({"group_id": body.group_id, "tool_names": body.tool_names}, "")
    session = lifecycle.find_session(agent, session_id)
    return loading.load(session, body.group_id, body.tool_names).as_json()


def search(agent: Agent, session_id: str, body: SearchIn, wanted: FoundIn) -> dict[str, Any]:
    """Find tools by words, by pattern, or one by its exact name."""
    check_value(wanted.call_id, "/call_id")
    check_value(body.dict(include={"query", "pattern", "name", "server", "server_hint"}), "")
    session = lifecycle.find_session(agent, session_id)
    rate_limits.check_rate(session.agent, "searches", session.agent.searches_per_minute)
    most = native_formats.MOST_REFERENCES if wanted.format == "anthropic" else MAX_HITS
    asked = session_search.parse_body(body, most=most, full=wanted.format != "json")
    if wanted.format == "json":
        return session_search.search_session(session, asked)
    return catalog.found(session, asked, wanted.format, wanted.call_id)
