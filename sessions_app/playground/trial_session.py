"""Test sessions: what a model would be given, tried by a person under an agent's rights."""

from django.db import transaction

from catalog import audit
from catalog.audit import Actor
from sessions_app.models import Agent, AgentSession
from sessions_app.sessions import lifecycle, loading, scope
from sessions_app.sessions.lifecycle import Opening
from sessions_app.usage.searches import TEST
from toolcrib.lib.errors import NotFound


@transaction.atomic
def try_load(agent: Agent, name: str, *, actor: Actor) -> AgentSession:
    """Open a session of the agent, load one tool and close it: it is there to be looked at.

    Closed at once, it takes none of the agent's places and nobody can go on with it.
    """
    item = scope.of(agent).lookup(name)
    if item is None or not item.offered:
        raise NotFound(
            f"{agent.name} does not get {name[:80]!r}.", hint="Search as this agent to see why."
        )
    metadata = {TEST: actor.label}
    session = lifecycle.open_session(agent, Opening(mode="deferred", metadata=metadata)).session
    loading.preload(session, [item.name])
    audit.record(actor, "agent.test", agent, after={"session": session.session_id, "tool": name})
    return lifecycle.close(session)
