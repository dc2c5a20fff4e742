"""No page asks the database more often when there is more to show."""

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog import shelf
from tests.browser import addresses
from tests.seeding import admin, grow, seed

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(400)]
MOST = 40  # queries of one page
# Once a minute the person's own session is written; that is no page's cost.
KEEPING = re.compile(r'SAVEPOINT|RELEASE|UPDATE "django_session"')


@pytest.fixture
def asked(client):
    """Count what every page asks: asked(examples) -> {address: (status, statements)}."""

    def count(examples):
        client.force_login(admin(), backend="django.contrib.auth.backends.ModelBackend")
        found = {}
        for pattern in addresses.patterns():
            if pattern.name in addresses.OUTSIDE:
                continue
            path = addresses.path_of(pattern, examples)
            client.get(path)  # what a process keeps is kept after this
            with CaptureQueriesContext(connection) as queries:
                answer = client.get(path)
            if answer.status_code != 405:
                statements = [
                    one["sql"] for one in queries.captured_queries if not KEEPING.match(one["sql"])
                ]
                found[path] = (answer.status_code, statements)
        return found

    return count


def test_twice_the_rows_cost_every_page_the_same_number_of_queries(asked):
    examples = seed(tools=60, groups=6, calls=120, sessions=12)
    first = asked(examples)
    seed(tools=60, groups=6, calls=120, sessions=12, mark="2")
    grow(examples)
    shelf.forget()
    second = asked(examples)

    assert first.keys() == second.keys()
    assert {path: status for path, (status, _) in first.items() if status >= 400} == {}
    more = {
        path: f"{len(first[path][1])} then {len(statements)}: {_news(first[path][1], statements)}"
        for path, (_, statements) in second.items()
        if len(statements) > len(first[path][1])
    }
    assert more == {}
    many = {path: len(one) for path, (_, one) in second.items() if len(one) > MOST}
    assert many == {}


def _news(before, after):
    """The statement that is repeated most often in the larger case."""
    shapes = [statement[:160] for statement in after]
    return max(set(shapes), key=lambda one: shapes.count(one) - before.count(one))
