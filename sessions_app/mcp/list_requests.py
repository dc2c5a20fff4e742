"""`tools/list` and the lists of prompts, resources and templates at `/mcp`, as their text.

Each entry is encoded by itself, in a thread: a list has megabytes in full mode, and one call of the
encoder would block the event loop and all other threads. Entries are sent as they are; the SDK's
models would drop unknown fields.
"""

from collections.abc import Iterable
from functools import partial

import mcp_types as types
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from catalog.models import FeatureKind
from sessions_app.agents.rate_limits import CATALOG_COST, REQUEST_COST
from sessions_app.dispatch.authorization import Caller
from sessions_app.ledger import writer as ledger_writer
from sessions_app.mcp import feature_list, tool_list
from sessions_app.mcp.errors import SERVER_ERROR, ProtocolError
from sessions_app.mcp.tool_calls import HTTP_ERRORS, Result, ToolCall
from sessions_app.mcp.tool_list import Object
from sessions_app.models import Agent
from sessions_app.sessions import lifecycle
from sessions_app.sessions.scope import scope_of_session
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical, join_items

TOOLS = "tools/list"
# By method: the member of the result, and the kind of its items.
FEATURES = {
    "prompts/list": ("prompts", FeatureKind.PROMPT),
    "resources/list": ("resources", FeatureKind.RESOURCE),
    "resources/templates/list": ("resourceTemplates", FeatureKind.TEMPLATE),
}
METHODS = frozenset({TOOLS, *FEATURES})
TOOLS_TTL_MS = 300_000  # the tool list of a session does not change
_RESULT_FIELDS = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}


def cost_of(method: str) -> float:
    return CATALOG_COST if method == TOOLS else REQUEST_COST


async def run(caller: Caller, call: ToolCall, agent: Agent, version: str) -> Result:
    """Answer a request. Raises ProtocolError for every error except HTTP errors."""
    if call.params.get("cursor") is not None:
        raise ProtocolError(200, types.INVALID_PARAMS, "Invalid cursor: the list has one page.", "")
    try:
        session_id = await caller.find_session(renew=True)
        if call.method == TOOLS:
            member, ttl = "tools", TOOLS_TTL_MS
            read = partial(_tools_text, agent, session_id, version)
        else:
            (member, kind), ttl = FEATURES[call.method], 0
            read = partial(_features_text, agent, session_id, kind)
        members = {member: await ledger_writer.run_off_loop(read)}
    except ToolcribError as error:
        if error.code in HTTP_ERRORS:
            raise
        data = error.as_json()["error"]
        raise ProtocolError(200, SERVER_ERROR, error.sentence, data) from None
    if call.is_modern:
        members |= {"ttlMs": canonical(ttl), "cacheScope": '"private"'}
    return Result(members)


def _tools_text(agent: Agent, session_id: str, version: str) -> str:
    session = lifecycle.find_session(agent, session_id)
    fixed = version in MODERN_PROTOCOL_VERSIONS  # they forbid a list that changes
    fits = partial(_is_representable, version)
    return _encode(tool_list.list_tools(session, fixed=fixed, fits=fits))


def _features_text(agent: Agent, session_id: str, kind: str) -> str:
    session = lifecycle.find_session(agent, session_id)
    return _encode(feature_list.list_features(scope_of_session(session), kind))


def _encode(entries: Iterable[Object]) -> str:
    return join_items(canonical(entry) for entry in entries)


def _is_representable(version: str, tool: Object) -> bool:
    try:
        serialize_server_result(TOOLS, version, {"tools": [tool], **_RESULT_FIELDS})
    except ValidationError:
        return False
    return True
