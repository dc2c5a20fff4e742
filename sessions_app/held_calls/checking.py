"""How a call stands, for the agent that made it: `GET /calls/{id}` and `check_call`."""

from sessions_app.agents import api_keys, rate_limits
from sessions_app.held_calls import answers
from sessions_app.held_calls.waiting import watch
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CallResponse
from sessions_app.models import UNFINISHED


async def check_call(key_digest: str, call_id: str, wait: float) -> CallResponse:
    """Return a call's result, or how it stands after at most `wait` seconds.

    Raises NotFound for a call of another agent.
    """
    run = ledger_writer.run_off_loop
    key = await run(api_keys.require_agent_key, key_digest)
    assert key.agent is not None  # noqa: S101 - ensured by require_agent_key
    await rate_limits.check_request(key.agent)
    call = await run(answers.find_own_call, key.agent, call_id)
    if wait and call.state in UNFINISHED:
        await watch.wait(call_id, wait)
    # The key may have been revoked while this waited.
    key = await run(api_keys.require_agent_key, key_digest) if wait else key
    assert key.agent is not None  # noqa: S101 - ensured by require_agent_key
    response = await run(answers.read_answer, key.agent, call_id)
    await rate_limits.add_bytes(key.agent, len(response.content))
    return response


async def confirm_arrival(held_call: int) -> None:
    """Delete an answer that was sent completely: from now on the same call is a new one."""
    await ledger_writer.run_off_loop(answers.confirm_arrival, held_call)
