"""Servers that die, forget or take nothing more once a call was sent."""

import asyncio
import json
from contextlib import ExitStack

import pytest

from servers.connections import calls as upstream_calls
from servers.connections import connection_state, streams
from tests.support.upstream_calls import HTTP, ask, begun, let_go, run, until, upstream

pytestmark = pytest.mark.django_db(transaction=True)

# --- After it was sent ------------------------------------------------------------------------


def test_a_program_that_dies_leaves_the_outcome_unknown_and_is_started_anew_without_the_call():
    async def scenario():
        outcome = await ask(server, "die")
        assert (outcome.state, outcome.code) == ("unknown", "crashed")
        assert outcome.message.endswith("Whether the tool ran is not known.")
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        assert "die" not in [each.get("params", {}).get("name") for each in seen]

    with upstream("stdio") as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_an_answer_cut_off_over_http_leaves_the_outcome_unknown_and_is_not_asked_again(how):
    async def scenario():
        outcome = await ask(server, "cut")
        assert (outcome.state, outcome.code) == ("unknown", "closed")
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        assert [
            each["params"]["name"] for each in seen if "arguments" in each.get("params", {})
        ] == ["cut", "seen"]

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize(
    ("status", "state", "code"),
    [
        (401, "failed", "auth"),
        (400, "failed", "http_status"),
        (429, "failed", "http_status"),
        (503, "failed", "http_status"),
        (500, "unknown", "http_status"),
        (504, "unknown", "http_status"),
    ],
)
@pytest.mark.parametrize("how", [*HTTP, "sse"])
def test_http_statuses_say_whether_the_tool_may_have_run(status, state, code, how):
    async def scenario():
        outcome = await ask(server, "status", status=status, body="secret body")
        assert (outcome.state, outcome.code) == (state, code)
        assert "secret body" not in outcome.message

    with upstream(how) as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_server_that_stops_listening_is_noticed_by_the_call_that_cannot_be_sent(how):
    async def scenario():
        assert (await ask(server, "seen")).state == "succeeded"
        owner = upstream_calls._pool().owners[server.pk, ""]
        connection = owner.ready.result()
        stop.close()
        outcome = await ask(server, "say", result='{"content": []}')
        assert (outcome.state, outcome.code) == ("not_sent", "refused")
        assert connection.closed.is_set()
        await until(lambda: owner.failures > 0, "the owner dials again")

    with ExitStack() as stop:
        server = stop.enter_context(upstream(how))
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_session_the_server_forgot_costs_the_call_that_finds_out_and_no_other(how):
    async def scenario():
        assert (await ask(server, "seen")).state == "succeeded"
        lost = await ask(server, "forget")
        assert (lost.state, lost.code) == ("unknown", "closed")
        after = await asyncio.gather(*(ask(server, "say", result='{"content": []}') for _ in "123"))
        assert {outcome.state for outcome in after} == {"succeeded"}

    with upstream(how.replace("http", "http legacy")) as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_calls_under_way_end_well_when_another_finds_that_the_session_is_forgotten(how):
    async def scenario():
        held = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        first = upstream_calls._pool().owners[server.pk, ""].ready.result()
        lost = await ask(server, "forget")
        assert (lost.state, lost.code) == ("unknown", "closed")
        assert not first.closed.is_set()
        after = asyncio.create_task(ask(server, "say", result='{"content": []}'))
        await until(lambda: upstream_calls.in_flight(server.pk) == 2, "the next call is on its way")
        await let_go(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert (await after).state == "succeeded"
        assert first.closed.is_set()

    with upstream(how.replace("http", "http legacy")) as server:
        run(scenario)


@pytest.mark.parametrize("how", HTTP)
def test_a_call_without_end_keeps_others_from_the_next_connection_for_a_while_only(
    how, monkeypatch
):
    monkeypatch.setattr(connection_state, "LEAVES_WITHIN", 0.3)

    async def scenario():
        held = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        assert (await ask(server, "forget")).state == "unknown"
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"
        assert (await held).state == "unknown"

    with upstream(how.replace("http", "http legacy")) as server:
        run(scenario)


def only_connection(server):
    return upstream_calls._pool().owners[server.pk, ""].ready.result()


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_a_message_that_an_event_stream_of_old_turns_down_costs_no_other_call(era):
    async def scenario():
        held = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        first = only_connection(server)
        refused = await ask(server, "status", status=429)
        assert (refused.state, refused.code) == ("failed", "http_status")
        await let_go(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with upstream(f"sse {era}") as server:
        run(scenario)


def test_an_event_stream_of_old_that_the_server_forgot_is_opened_anew():
    async def scenario():
        await ask(server, "seen")
        first = only_connection(server)
        lost = await ask(server, "status", status=404)
        assert (lost.state, lost.code) == ("failed", "http_status")
        assert first.closed.is_set()
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("sse") as server:
        run(scenario)


# --- Servers that take no messages ------------------------------------------------------------


@pytest.mark.parametrize("post", ["late", "never"])
def test_a_post_that_is_not_answered_while_its_tool_runs_holds_up_nothing(post, monkeypatch):
    monkeypatch.setattr(streams, "SENDS_WITHIN", 0.1)

    async def scenario():
        held = asyncio.create_task(ask(server, "held", post=post))
        await begun(server, "held")
        first = only_connection(server)
        for _ in range(3):
            late = await ask(server, "later", seconds=0.2, post="late")  # longer than the limit
            assert late.state == "succeeded"
        refused = await ask(server, "status", status=400, seconds=0.3)
        assert (refused.state, refused.code) == ("failed", "http_status")
        await let_go(server)
        assert (await held).content == [{"type": "text", "text": "held"}]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with upstream("sse") as server:
        run(scenario)


def test_an_event_stream_of_old_whose_server_takes_no_messages_is_opened_anew(monkeypatch):
    monkeypatch.setattr(streams, "SENDS_WITHIN", 0.2)
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 0.1)

    async def scenario():
        await ask(server, "seen")
        owner = upstream_calls._pool().owners[server.pk, ""]
        other = asyncio.create_task(ask(server, "held"))
        await begun(server, "held")
        assert (await ask(server, "deaf", within=0.2)).state == "timed_out"
        await until(lambda: owner.failures == 1, "the connection is lost")
        assert owner.problem.message == "The server took no message for 0.2 s."
        assert (await other).state == "unknown"
        assert (await ask(server, "say", result='{"content": []}')).state == "succeeded"

    with upstream("sse") as server:
        run(scenario)


BIG = "x" * 1_000_000  # more than a pipe holds


def test_a_program_that_reads_no_more_is_started_anew_and_what_it_got_half_of_runs_once(
    monkeypatch,
):
    monkeypatch.setattr(streams, "SENDS_WITHIN", 0.2)
    monkeypatch.setattr(upstream_calls, "LATE_GRACE", 0.1)

    async def scenario():
        assert (await ask(server, "deaf")).state == "succeeded"
        owner = upstream_calls._pool().owners[server.pk, ""]
        whole = await ask(server, "say", within=0.3, result='{"content": []}', mark="whole")
        assert whole.state == "timed_out"  # all of it lies in the pipe
        half = asyncio.create_task(ask(server, "say", result='{"content": []}', mark=BIG))
        await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
        behind = await ask(server, "say", result='{"content": []}', mark="behind")
        assert [(await half).state, behind.state] == ["succeeded", "succeeded"]
        assert owner.problem.message == "The server took no message for 0.2 s."
        seen = json.loads((await ask(server, "seen")).content[0]["text"])
        given = [each["params"].get("arguments", {}) for each in seen if "params" in each]
        assert sorted(each["mark"] for each in given if "mark" in each) == ["behind", BIG]

    with upstream("stdio") as server:
        run(scenario)


def test_a_program_that_reads_on_only_when_its_tool_has_run_is_waited_for(monkeypatch):
    monkeypatch.setattr(streams, "SENDS_WITHIN", 0.1)

    async def scenario():
        await ask(server, "seen")
        first = only_connection(server)
        busy = asyncio.create_task(ask(server, "deaf", seconds=1))
        await until(lambda: upstream_calls.in_flight(server.pk) == 1, "the call is out")
        after = await ask(server, "say", result='{"content": []}', mark=BIG)
        assert [(await busy).state, after.state] == ["succeeded", "succeeded"]
        assert only_connection(server) is first
        assert not first.closed.is_set()

    with upstream("stdio") as server:
        run(scenario)
