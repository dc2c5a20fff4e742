"""A call whose row was committed although the database reported an error does not stay open."""

import asyncio
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.utils import timezone

from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.writer import CallRow
from sessions_app.models import Call
from tests.support.waiting import scaled, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def make_row():
    now = timezone.now()
    return CallRow(
        call_id="call_doubtful",
        tool_name="github__create_issue",
        path="dispatch",
        idempotency_key=None,
        arguments="{}",
        accepted_at=now,
        deadline=now + timedelta(hours=1),
        holder=call_ledger.THIS_PROCESS,
    )


@pytest.mark.parametrize("committed", [True, False])
def test_the_row_of_a_call_that_may_be_committed_is_closed(monkeypatch, committed):
    entry = make_row()
    write_batch = ledger_writer.write_batch
    failed = []

    def lose_connection(batch):
        """Fail once, before or after the commit, as when the connection breaks."""
        if failed:
            return write_batch(batch)
        if committed:
            write_batch(batch)
        else:
            entry.pk = 12345  # of the transaction that was rolled back
        failed.append(batch)
        monkeypatch.setattr(ledger_writer, "STALE_CONNECTION_SECONDS", -1)
        raise OperationalError("server closed the connection unexpectedly")

    async def scenario():
        monkeypatch.setattr(ledger_writer, "write_batch", lose_connection)
        async with asyncio.timeout(scaled(30)), ledger_writer.run_writer(on_loop=False):
            with pytest.raises(OperationalError):
                await call_ledger.accept(entry, lambda _: None)
            await asyncio.to_thread(wait_for, lambda: not call_ledger._abandoned_tasks)

    asyncio.run(scenario())
    states = list(Call.objects.values_list("call_id", "state", "error_code"))
    assert states == ([(entry.call_id, "cancelled", "cancelled")] if committed else [])
