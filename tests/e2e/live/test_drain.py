"""SIGTERM during calls: they finish within the drain time, or are answered as `unknown`.

Other requests that take longer get the error `stopping`.
"""

import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.agents import make_agent, read_ledger
from tests.support.installation import Installation
from tests.support.servers import register
from tests.support.upstreams.running import running_http
from tests.support.waiting import scaled, wait_for


def received_requests(url: str) -> str:
    with urllib.request.urlopen(f"{url}/_seen", timeout=scaled(5)) as response:  # noqa: S310 - our own
        return str(response.read().decode())


@pytest.mark.timeout(240)
def test_calls_finish_within_the_drain_time_or_are_answered_as_unknown(tmp_path):
    journal = tmp_path / "journal"
    with (
        running_http("counting", "--journal", str(journal)) as url,
        running_http("raw_http") as hanging,
        Installation(tmp_path / "data", env={"TOOLCRIB_DRAIN": "8"}) as toolcrib,
        ThreadPoolExecutor(4) as callers,
    ):
        register(toolcrib, "office", url)
        session = make_agent(toolcrib, "clerk").open()
        assert session.post_call("count").status == 200
        brief = callers.submit(session.post_call, "wait", {"name": "brief", "seconds": 3})
        long = callers.submit(
            session.post_call, "wait", {"name": "long", "seconds": 60}, timeout=90
        )
        keyed = callers.submit(session.post_call, "wait", {"name": "keyed", "seconds": 60}, key="k")
        names = ("wait brief", "wait long", "wait keyed")
        wait_for(lambda: all(name in journal.read_text() for name in names), 30)
        draft = {"name": "hangs", "transport": "http", "url": f"{hanging}/hang"}
        tested = callers.submit(toolcrib.api, "POST", "/servers/test", draft)
        wait_for(
            lambda: "/hang" in received_requests(hanging), 30, what="the connection test hangs"
        )
        toolcrib.stop(signal.SIGTERM)
        assert toolcrib.process.code == 0, toolcrib.log
        status, body = tested.result(scaled(30))
        assert (status, body["error"]["code"]) == (503, "stopping")
        responses = [caller.result(scaled(30)) for caller in (brief, long, keyed)]
    assert [response.status for response in responses] == [200, 200, 200], responses
    assert [response.json["state"] for response in responses] == ["succeeded", "unknown", "unknown"]
    assert {response.code for response in responses[1:]} == {"stopping"}
    assert "Whether the tool ran is not known" in responses[1].json["content"][0]["text"]
    rows = {row["call_id"]: row["state"] for row in read_ledger(tmp_path / "data", session)}
    assert all(rows[response.json["call_id"]] == response.json["state"] for response in responses)
