"""Operator API: export a session, call a tool outside a session."""

from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import StrictBool

from catalog import audit
from catalog.tools.queries import find_defined_tool
from sessions_app.dispatch import dispatcher
from sessions_app.review import queries as review_queries
from sessions_app.sessions import lifecycle
from sessions_app.sessions.schemas import CallOut
from toolcrib.lib.api_schemas import CONFLICTS, ERRORS, Strict
from toolcrib.lib.payloads import check_value
from toolcrib.lib.roles import key_actor

router = Router()


class TryIn(Strict):
    arguments: dict[str, Any] = {}
    confirm: StrictBool = False  # call the tool although a rule holds the call


@router.get(
    "/sessions/{session_id}/export", response={200: dict[str, Any], **ERRORS}, tags=["sessions"]
)
def export_session(request: HttpRequest, session_id: str) -> dict[str, Any]:
    """Export one session: its metadata, timeline and calls."""
    session = lifecycle.find_session(None, session_id)
    audit.record(key_actor(request), "session.export", session)
    return review_queries.export_session(session)


@router.post(
    "/tools/{name}/try",
    response={200: CallOut, **ERRORS, **CONFLICTS},
    by_alias=True,
    tags=["tools"],
)
async def try_tool(request: HttpRequest, name: str, body: TryIn) -> HttpResponse:
    """Call a tool outside any session, as an admin. The call is recorded as a trial."""
    check_value(body.arguments, "/arguments")
    tool = await sync_to_async(find_defined_tool)(name)
    response = await dispatcher.try_tool(
        tool, body.arguments, actor=key_actor(request), is_confirmed=body.confirm
    )
    return HttpResponse(response.as_json(), content_type="application/json")
