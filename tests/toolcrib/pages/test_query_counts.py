"""No page asks the database more often when there is more to show, or sends without end."""

from collections import Counter
from dataclasses import dataclass

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog import cache
from tests.support.every_page import asks
from tests.support.growing import grow
from tests.support.seeding import admin, seed

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(400)]
MOST = 40  # queries of one page, those of the frame and of the person's session included
LARGEST = 1024 * 1024  # bytes of one page
# Files hold what they are asked for; each names its limit.
DOWNLOADS = ("audit-csv", "audit-json", "session-json", "server-export", "usage-csv")


@dataclass
class Answer:
    status: int
    statements: list[str]
    size: int


@pytest.fixture
def asked(client):
    """Ask for everything there is: asked(examples, before) -> {what: answer}, acts left out.

    What costs more than `before` is asked again: a process keeps what it has read, and once a
    minute a person's session is written.
    """

    def ask(one):
        with CaptureQueriesContext(connection) as queries:
            answer = one.of(client)
        return Answer(
            answer.status_code,
            [query["sql"] for query in queries.captured_queries],
            len(answer.content),
        )

    def count(examples, before=None):
        client.force_login(admin(), backend="django.contrib.auth.backends.ModelBackend")
        cache.clear()
        found = {}
        for one in asks(examples):
            answer = ask(one)
            if answer.status == 405:
                continue
            if before is None or len(answer.statements) > len(before[one.label].statements):
                answer = min(answer, ask(one), key=lambda this: len(this.statements))
            found[one.label] = answer
        return found

    return count


def test_ten_times_the_rows_cost_every_page_the_same_number_of_queries(asked):
    examples = seed(tools=60, groups=6, calls=120, sessions=24)
    first = asked(examples)
    seed(tools=540, groups=54, calls=1080, sessions=216, mark="2")
    grow(examples)
    second = asked(examples, first)

    assert first.keys() == second.keys()
    assert {name: one.status for name, one in first.items() if one.status >= 400} == {}
    more = {
        name: f"{len(first[name].statements)} then {len(one.statements)}: "
        f"{_news(first[name].statements, one.statements)}"
        for name, one in second.items()
        if len(one.statements) > len(first[name].statements)
    }
    assert more == {}
    assert {name: len(one.statements) for name, one in second.items() if _many(one)} == {}
    pages = {name: one for name, one in second.items() if not name.startswith(DOWNLOADS)}
    assert {name: one.size for name, one in pages.items() if one.size > LARGEST} == {}


def _many(answer):
    return len(answer.statements) > MOST


def _news(before, after):
    """The statement that is repeated most often in the larger case."""
    seen, now = (Counter(statement[:160] for statement in some) for some in (before, after))
    return max(now, key=lambda shape: now[shape] - seen[shape])
