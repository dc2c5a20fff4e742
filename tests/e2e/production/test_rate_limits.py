"""Rate limits in a real Redis decide as those in memory do."""

import math
import random

import pytest

from sessions_app.agents.rate_limits import Charge, LocalWindow, RedisWindow

pytestmark = pytest.mark.needs_redis


def test_redis_and_memory_decide_the_same(shared_redis):
    in_redis, in_memory = RedisWindow(shared_redis.url), LocalWindow()
    numbers = random.Random(7)  # noqa: S311 - not for secrets
    now = 29_000_000 * 60.0
    allowed = []
    for _ in range(2_000):
        now += numbers.choice([0, 0, 0.4, 3, 20, 70])
        agent = numbers.choice([1, 2])
        calls = Charge("calls", agent, numbers.choice([3, 8]))
        cost = Charge("cost", agent, numbers.choice([10, 20]), numbers.choice([1.0, 2.0, 7.3]))
        added = Charge("cost", agent, math.inf, numbers.random())  # bytes, never refused
        name = Charge("sign-in", f"name-{agent}", 5, numbers.choice([1.0, 1.0, -1.0]), period=900)
        charges = numbers.choice([[calls, cost], [calls], [cost], [added], [name], [name, cost]])
        waits = in_redis.hit(charges, now)
        assert waits == in_memory.hit(charges, now)
        allowed.append(not any(waits))
    assert 200 < sum(allowed) < 1_800  # both answers occurred often
