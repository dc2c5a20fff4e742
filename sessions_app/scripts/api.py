"""Script API: the typed functions of a session's tools, and runs of scripts.

Runs are served by sessions/endpoint.py, and declared here for the API's schema.
"""

from itertools import islice
from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router

from sessions_app.agents.rate_limits import CATALOG_COST
from sessions_app.scripts import signatures
from sessions_app.scripts.schemas import MAX_SDK_TOOLS, ScriptIn, ScriptRunOut, SdkIn, SdkOut
from sessions_app.sessions.api import (
    AGENT_ERRORS,
    CALL_ERRORS,
    KEY_PARAMETER,
    charged,
    readable_session,
    served_by_endpoint,
)
from sessions_app.sessions.loading import SessionLoads
from sessions_app.sessions.schemas import WaitIn
from sessions_app.sessions.scope import scope_of_session
from sessions_app.sessions.surface import context_of
from toolcrib.lib.api_schemas import CONFLICTS, ERROR_BODIES
from toolcrib.lib.errors import NotFound
from toolcrib.lib.payloads import check_value
from toolcrib.lib.token_counter import count

router = Router(tags=["scripts"])


@router.get("/sessions/{session_id}/sdk", response={200: SdkOut, **AGENT_ERRORS, **CONFLICTS})
@charged(CATALOG_COST)
def get_sdk(request: HttpRequest, session_id: str, options: Query[SdkIn]) -> dict[str, Any]:
    """Get the session's tools as typed functions, in Python or TypeScript."""
    check_value({"tools": options.tools, "group_id": options.group_id}, "")
    session = readable_session(request, session_id)
    scope = scope_of_session(session)
    names = signatures.names_of(scope)
    wanted = [name.strip() for name in options.tools.split(",") if name.strip()]
    if wanted:
        tools = [names.by_public_name[scope.find_tool(name).name] for name in wanted]
    else:
        tools = [tool for module in names.modules.values() for tool in module.values()]
    if options.group_id:
        group = scope.by_id.get(options.group_id)
        if group is None:
            raise NotFound(
                f"{options.group_id[:80]!r} is not available in this session.",
                hint=f"Its groups: {', '.join(islice(scope.by_id, 50)) or 'none'}.",
                code="unknown_group",
            )
        members = {member.tool.name for member in group.members}
        tools = [tool for tool in tools if tool.public_name in members]
    shown = SessionLoads(context_of(session)).shown_definitions
    listed = [tool.as_defined(shown.get(tool.public_name)) for tool in tools[:MAX_SDK_TOOLS]]
    text = signatures.render(listed, options.lang)
    return {
        "lang": options.lang,
        "text": text,
        "tokens": count(text),
        "names": {tool.name: tool.public_name for tool in tools[:MAX_SDK_TOOLS]},
        "left_out": max(0, len(tools) - MAX_SDK_TOOLS),
    }


@router.post(
    "/sessions/{session_id}/scripts",
    response={200: ScriptRunOut, **CALL_ERRORS, **CONFLICTS, 501: ERROR_BODIES[501]},
    openapi_extra={"parameters": [KEY_PARAMETER]},
)
def run_script(request: HttpRequest, session_id: str, body: ScriptIn) -> HttpResponse:
    """Run a script that calls the session's tools. Answers when it ended, is held, or after 20 s.

    An error that the script does not catch is its result, with the calls that were made.
    """
    return served_by_endpoint()


@router.get("/scripts/{run_id}", response={200: ScriptRunOut, **AGENT_ERRORS})
def get_script(request: HttpRequest, run_id: str, options: Query[WaitIn]) -> HttpResponse:
    """Get a script of this agent: how it stands, or its result. May wait for its end."""
    return served_by_endpoint()
