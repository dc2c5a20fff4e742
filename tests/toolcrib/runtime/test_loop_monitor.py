"""Event-loop lag: measurement, API and the about page."""

import asyncio
import time

import pytest

from tests.support.waiting import scaled, wait_for
from toolcrib.runtime.lifespan import runtime
from toolcrib.runtime.loop_monitor import LoopMonitor


def test_the_maximum_and_p99_of_the_last_minute_are_reported():
    monitor = LoopMonitor()
    for number in range(200):
        monitor.record(0.001 * (number == 7), now=100.0)
    monitor.record(0.4, now=130.0)
    lag = monitor.lag(now=140.0)
    assert (lag.longest_ms, lag.p99_ms, lag.is_long) == (400.0, 0.0, True)
    for seconds in (0.2, 0.2, 0.2):
        monitor.record(seconds, now=130.0)
    assert monitor.lag(now=140.0).p99_ms == 200.0
    assert monitor.lag(now=180.0).longest_ms == 400.0
    assert monitor.lag(now=191.0).seconds == 0


def test_a_blocked_loop_is_measured():
    async def scenario():
        async with monitor.running():
            await asyncio.to_thread(wait_for, lambda: monitor.lag().seconds)
            while monitor.lag().longest_ms < 250:  # the first block may end an idle interval
                deadline = time.monotonic() + 0.4
                while time.monotonic() < deadline:
                    pass
                await asyncio.to_thread(time.sleep, 0)

    monitor = LoopMonitor()
    asyncio.run(asyncio.wait_for(scenario(), scaled(30)))
    assert monitor.lag().is_long


def test_operators_read_the_lag_over_the_api(client, operator_token):
    def request(token):
        return client.get("/api/v1/health", headers={"Authorization": f"Bearer {token}"})

    response = request(operator_token)
    assert response.status_code == 200
    assert response.json()["event_loop"] == {"longest_ms": 0.0, "p99_ms": 0.0, "seconds": 0}
    assert response.json()["servers"] == []
    assert response.json()["process"]
    assert request("tcb_nothing").status_code == 401


@pytest.fixture
def long_lag(monkeypatch):
    monitor = LoopMonitor()
    monitor.record(1.5, now=time.monotonic())
    monkeypatch.setattr(runtime, "loop_monitor", monitor)


def test_a_long_lag_is_shown_as_failing_on_the_about_page(long_lag, client, admin):
    client.force_login(admin)
    page = client.get("/settings/about").content.decode()
    assert "max 1,500 ms, p99 1,500 ms in the last minute" in page
