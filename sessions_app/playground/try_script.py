"""Trials of scripts: run by a person as an agent, in a test session, by the rules of that agent.

A script calls what its agent may call. It runs in any web process, is recorded as every script, and
its session is closed with it. The key of the session has no text, so nobody else can use it.
"""

from django.db import transaction

from catalog import audit
from catalog.audit import Actor
from sessions_app.agents import api_keys
from sessions_app.models import Agent, ScriptRun
from sessions_app.scripts import engines, runs, signatures
from sessions_app.scripts.engines import MAX_SECONDS
from sessions_app.scripts.runner import ScriptRequest
from sessions_app.scripts.runs import NewRun
from sessions_app.sessions import lifecycle
from sessions_app.sessions.schemas import OpenIn
from sessions_app.sessions.scope import scope_of_agent
from sessions_app.usage.searches import TEST_SESSION_KEY
from toolcrib.lib.errors import Conflict


def agents() -> list[Agent]:
    """Return the agents that may run scripts, by name."""
    return list(Agent.objects.filter(code_mode=True, enabled=True).order_by("name"))


def named_tools(agent: Agent, code: str) -> list[str]:
    """Return the public names of the tools that a script names and that may change something."""
    words = set(signatures.WORD.findall(code))
    modules = signatures.named_in(code, signatures.names_of(scope_of_agent(agent)))
    return [
        tool.public_name
        for tools in modules.values()
        for tool in tools
        if tool.function in words and not tool.tool.only_reads
    ]


@transaction.atomic
def start(agent: Agent, request: ScriptRequest, *, actor: Actor) -> ScriptRun:
    """Queue a script in a new test session of an agent, and return its run."""
    runs.check_permitted(agent)
    if not agent.enabled:
        raise Conflict(f"{agent.name} is disabled.", hint="Enable it, or choose another agent.")
    request.check()
    version = engines.find_engine(request.language).version
    new = NewRun(
        request.code, request.language, request.timeout or MAX_SECONDS, request.input, version
    )
    metadata = {TEST_SESSION_KEY: actor.label}
    session, _ = lifecycle.open_session(agent, OpenIn(metadata=metadata))
    run = runs.queue(session, api_keys.create_trial_key(agent, actor=actor), new)
    after = {"session": session.session_id, "script": run.run_id}
    audit.record(actor, "agent.script", agent, after=after)
    return run
