"""Rate limits in a real Redis decide as those in memory do."""

import random

import pytest

from sessions_app.agents.rate_limits import LocalWindow, RedisWindow

pytestmark = pytest.mark.needs_redis


def test_redis_and_memory_decide_the_same(shared_redis):
    in_redis, in_memory = RedisWindow(shared_redis.url), LocalWindow()
    numbers = random.Random(7)  # noqa: S311 - not for secrets
    now = 29_000_000 * 60.0
    decisions = []
    for _ in range(2_000):
        now += numbers.choice([0, 0, 0.4, 3, 20, 70])
        key, limit = numbers.choice(["a", "b"]), numbers.choice([3, 8])
        decision = in_redis.hit(key, limit, now)
        assert decision == in_memory.hit(key, limit, now)
        decisions.append(decision)
    assert 200 < sum(decisions) < 1_800  # both answers occurred often
