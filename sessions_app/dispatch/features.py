"""Prompts, resources and completions of a session: found in its scope, sent, recorded.

The same way as calls (dispatcher.py): authorization, limits, rules and ledger. A rule that would
hold denies here, since nobody waits for a prompt or a resource. Completions and subscriptions are
not recorded as calls; rules decide them too, since their values reach a server.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from catalog.cache import CachedFeature, CachedServer, CachedTool
from catalog.definitions.resource_uris import public_uri, split_uri
from catalog.models import ASKS, CallPolicy, FeatureKind, ToolState
from servers.connections import calls as upstream_calls
from servers.connections.asking import AskingClient
from servers.connections.calls import CallOutcome, CallTarget
from servers.spec import COMPLETE, PROMPTS_GET, RESOURCES_READ, OnProgress
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization as authorizations
from sessions_app.dispatch import dispatcher, planner
from sessions_app.dispatch.authorization import SERVER_COLUMNS, Authorization, Caller, Outdated
from sessions_app.dispatch.planner import CallFinishedLocally, CallPlan, CallRejected
from sessions_app.held_calls.grants import GrantCheck
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import CallResponse
from sessions_app.ledger.writer import LedgerCursor
from sessions_app.models import CallPath, RuleEffect
from sessions_app.rules import agent_rules
from sessions_app.rules.evaluation import Decision
from sessions_app.sessions.scope import SessionScope
from toolcrib.lib.payloads import check_value, stored_arguments, strictest_storage

PATHS = {PROMPTS_GET: CallPath.PROMPT, RESOURCES_READ: CallPath.RESOURCE}
COMPLETION_SECONDS = 10.0


class UnknownFeature(CallRejected):
    code = "unknown_feature"
    status = 404


@dataclass(frozen=True)
class FeatureRequest:
    method: str
    name: str  # of a prompt, or a URI, as the client gave it
    arguments: dict[str, Any] = field(default_factory=dict)
    client: AskingClient | None = None


@dataclass(frozen=True)
class Target:
    """What a request is about: a server, and its own name for the prompt or resource."""

    server: CachedServer
    name: str  # public
    key: str


# --- Scope ----------------------------------------------------------------------------------------


def find_prompt(scope: SessionScope, name: str) -> Target:
    """Return the prompt with this public name, or with this name on one server only."""
    found = [
        (server, feature)
        for server in scope.feature_servers.values()
        for feature in server.features
        if feature.kind == FeatureKind.PROMPT and name in (feature.name, feature.key)
    ]
    exact = [pair for pair in found if pair[1].name == name]
    if len(exact or found) != 1:
        raise UnknownFeature(
            f"There is no prompt {name[:100]!r} in this session.",
            hint="List the prompts with prompts/list.",
        )
    server, feature = (exact or found)[0]
    return Target(server, feature.name, feature.key)


def find_resource(scope: SessionScope, uri: str) -> Target:
    """Return the server of a resource: by its public URI, or by its own if one server has it.

    Which URIs exist is for the server to say: results link to resources that no list has.
    """
    public = split_uri(uri)
    if public is not None:
        slug, original = public
        server = scope.feature_servers.get(slug)
        if server is None and public in scope.views:
            tool = next(tool for tool in scope.offered if tool.server == slug)
            server = CachedServer(tool.server_id or 0, slug, frozenset({"resources"}), ())
        candidates = [server] if server is not None else []
    else:
        original = uri
        having = [
            server
            for server in scope.feature_servers.values()
            if "resources" in server.capabilities
        ]
        listing = [server for server in having if any(uri == each.key for each in server.features)]
        candidates = listing or having
    if len(candidates) != 1 or "resources" not in candidates[0].capabilities:
        raise UnknownFeature(
            f"There is no resource {uri[:200]!r} in this session.",
            hint="List the resources with resources/list.",
        )
    return Target(candidates[0], public_uri(candidates[0].slug, original), original)


def find_template(scope: SessionScope, template: str) -> tuple[CachedServer, CachedFeature]:
    found = [
        (server, feature)
        for server in scope.feature_servers.values()
        for feature in server.features
        if feature.kind != FeatureKind.PROMPT and template in (feature.name, feature.key)
    ]
    if len(found) != 1:
        raise UnknownFeature(f"There is no resource template {template[:200]!r} in this session.")
    return found[0]


# --- Prompts and resources ------------------------------------------------------------------------


async def fetch(
    caller: Caller, request: FeatureRequest, on_progress: OnProgress | None = None
) -> CallResponse:
    """Get a prompt or read a resource; recorded as a call."""
    counted_limit = None  # that the request was counted against

    async def plan_and_accept(authorization: Authorization) -> CallPlan | CallResponse:
        nonlocal counted_limit
        check_value(request.arguments, "/arguments")
        check_value(request.name, "/name")
        counted_limit = await dispatcher.count_call(authorization, request.client, counted_limit)
        plan = await _plan(authorization, request)
        if isinstance(plan, CallFinishedLocally):
            return await dispatcher.record_local(authorization, plan)
        decision = await dispatcher.accept(authorization, plan)
        if decision is None:
            return plan
        denied = planner.plan_denied(plan.entry, decision)
        return await dispatcher.record_local(authorization, denied)

    plan = await authorizations.run_authorized(caller, plan_and_accept)
    return plan if isinstance(plan, CallResponse) else await dispatcher.execute(plan, on_progress)


async def _plan(
    authorization: Authorization, request: FeatureRequest
) -> CallPlan | CallFinishedLocally:
    entry = planner.new_row(request.name, str(PATHS[request.method]))
    entry.session_id, entry.agent_id = authorization.session_pk, authorization.agent.pk
    entry.storage = strictest_storage(authorization.agent.payload_storage)
    entry.arguments = stored_arguments(request.arguments, entry.storage)
    is_prompt = request.method == PROMPTS_GET
    try:
        find = find_prompt if is_prompt else find_resource
        found = find(authorization.scope, request.name)
        entry.tool_name = found.name[:200]
        entry.server_id, entry.server_slug = found.server.server_id, found.server.slug
        matches = _match_rules(authorization, found, request.arguments)
    except CallRejected as error:
        return planner.rejected(entry, error)
    target, row, timeout = await _upstream_target(
        authorization, found.server, asks=request.client is not None
    )
    asking = planner.ASKING_SECONDS if request.client is not None else 0.0
    entry.deadline = entry.accepted_at + timedelta(seconds=timeout + asking)
    key = "name" if is_prompt else "uri"
    params: dict[str, Any] = {key: found.key}
    if is_prompt and request.arguments:
        params["arguments"] = request.arguments
    plan = CallPlan(entry, _as_tool(found), params, target, row, timeout, None)
    plan.method, plan.client, plan.key = request.method, request.client, authorization.key_id
    plan.matches = matches
    return plan


def _match_rules(
    authorization: Authorization, found: Target, arguments: dict[str, Any]
) -> list[Any]:
    rules = authorization.rules
    if rules is None:
        return []
    groups = frozenset(
        group.pk for group in authorization.scope.groups if group.server is found.server
    )
    matches = rules.match_feature(found.name, found.server.slug, groups, arguments)
    if matches and matches[0].is_final:
        if matches[0].effect != RuleEffect.ALLOW:
            raise planner.denial(found.name, matches[0].decision)
        return []
    return matches


def _as_tool(found: Target) -> CachedTool:
    """Return a prompt or resource in the form that dispatch handles."""
    return CachedTool(
        tool_id=0,
        name=found.name,
        original_name=found.key,
        server_id=found.server.server_id,
        server=found.server.slug,
        trust="",
        server_enabled=True,
        state=ToolState.AVAILABLE,
        call_policy=CallPolicy.ALLOW,
        held_reason="",
        approved=None,
        latest=None,
        has_resources="resources" in found.server.capabilities,
    )


async def _upstream_target(
    authorization: Authorization, server: CachedServer, *, asks: bool = False
) -> tuple[CallTarget, tuple[Any, ...], float]:
    row = await authorizations.find_server(server.server_id)
    if row is None:  # deleted in between
        raise Outdated
    columns = dict(zip(SERVER_COLUMNS, row, strict=True))
    target = CallTarget(
        server_id=server.server_id,
        slug=columns["slug"],
        generation=columns["generation"],
        isolation=columns["isolation"],
        session=authorization.session_id,
        concurrency=columns["concurrency"],
        elicits=asks and (ASKS in server.capabilities or columns["isolation"] == "per_session"),
    )
    return target, row, columns["call_timeout"]


async def find_watched(caller: Caller, uri: str) -> tuple[CallTarget, str]:
    """Return where to watch a resource of a session, and its own URI."""

    async def attempt(authorization: Authorization) -> tuple[CallTarget, str]:
        check_value(uri, "/uri")
        found = find_resource(authorization.scope, uri)
        if "subscribe" not in found.server.capabilities:
            raise UnknownFeature("This server does not report changes of resources.")
        target, _, _ = await _upstream_target(authorization, found.server)
        await _permit(authorization, found, {"uri": uri})
        return target, found.key

    return await authorizations.run_authorized(caller, attempt)


async def _permit(
    authorization: Authorization,
    found: Target,
    arguments: dict[str, Any],
    *,
    returns_data: bool = False,
) -> None:
    """Commit a request that is not recorded as a call, if no rule denies or holds it.

    `returns_data`: the session counts as given results of the server, for rules on data flow.
    """
    matches = _match_rules(authorization, found, arguments)
    entry = planner.new_row(found.name, str(CallPath.RESOURCE))
    entry.session_id, entry.agent_id = authorization.session_pk, authorization.agent.pk
    entry.server_slug = found.server.slug

    def write(cursor: LedgerCursor) -> Decision | None:
        decision = agent_rules.decide(cursor, matches, entry, GrantCheck().covers)
        if decision is None and returns_data:
            call_ledger.record_use(cursor, entry, entry.accepted_at)
        return decision

    if (decision := await authorization.commit(write)) is not None:
        raise planner.denial(found.name, decision)


# --- Completion -----------------------------------------------------------------------------------


async def complete(caller: Caller, params: dict[str, Any]) -> CallOutcome:
    """Ask a server to complete an argument of a prompt or template. Limited, not recorded."""
    counted_limit = None

    async def attempt(authorization: Authorization) -> tuple[CallTarget, dict[str, Any]]:
        nonlocal counted_limit
        check_value(params, "")
        counted_limit = await rate_limits.count_once(authorization.agent, "searches", counted_limit)
        found, reference = _reference(authorization.scope, params.get("ref") or {})
        if "completions" not in found.server.capabilities:
            raise UnknownFeature("This server does not complete arguments.")
        target, _, _ = await _upstream_target(authorization, found.server)
        await _permit(authorization, found, _completed_arguments(params), returns_data=True)
        sent: dict[str, Any] = {
            name: params[name] for name in ("argument", "context") if name in params
        }
        return target, {"ref": reference, **sent}

    target, sent = await authorizations.run_authorized(caller, attempt)
    return await upstream_calls.call(target, "", sent, timeout=COMPLETION_SECONDS, method=COMPLETE)


def _reference(scope: SessionScope, reference: dict[str, Any]) -> tuple[Target, dict[str, Any]]:
    if reference.get("type") == "ref/prompt":
        found = find_prompt(scope, str(reference.get("name", "")))
        return found, {**reference, "name": found.key}
    server, feature = find_template(scope, str(reference.get("uri", "")))
    return Target(server, feature.name, feature.key), {**reference, "uri": feature.key}


def _completed_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a completion sends, as the request for the prompt would."""
    context, argument = params.get("context"), params.get("argument")
    known = context.get("arguments") if isinstance(context, dict) else None
    arguments = dict(known) if isinstance(known, dict) else {}
    if isinstance(argument, dict) and isinstance(argument.get("name"), str):
        arguments[argument["name"]] = argument.get("value")
    return arguments
