"""Query counts and page sizes do not grow with the data."""

from collections import Counter
from dataclasses import dataclass

import pytest
from django.db import connection, reset_queries
from django.test.utils import CaptureQueriesContext

from catalog import cache
from tests.support.every_page import page_requests
from tests.support.growing import add_related_rows
from tests.support.seeding import make_admin, seed

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(400)]
MAX_QUERIES = 45  # per page, including navigation and the user's session
MAX_USAGE_QUERIES = 60  # of the usage page, which has a table of every kind
MAX_PAGE_BYTES = 1024 * 1024
# Downloads have their own limits.
DOWNLOADS = (
    *("audit-csv", "audit-json", "session-json", "sessions-export"),
    *("server-export", "rule-export", "usage-csv"),
)


@dataclass
class Response:
    status: int
    statements: list[str]
    size: int


@pytest.fixture
def request_all(client):
    """Request every page: request_all(examples, before) -> {label: response}, actions excluded.

    A page that needs more queries than in `before` is requested again: the process caches data, and
    once a minute the user's session is saved.
    """

    def request(page):
        reset_queries()  # the log of a connection is limited
        with CaptureQueriesContext(connection) as queries:
            response = page.send(client)
        content = response.getvalue()  # an export reads its rows while it is sent
        return Response(
            response.status_code,
            [query["sql"] for query in queries.captured_queries],
            len(content),
        )

    def count(examples, before=None):
        client.force_login(make_admin(), backend="django.contrib.auth.backends.ModelBackend")
        cache.clear()
        responses = {}
        for page in page_requests(examples):
            response = request(page)
            if response.status == 405:
                continue
            if before is None or len(response.statements) > len(before[page.label].statements):
                response = min(response, request(page), key=lambda each: len(each.statements))
            responses[page.label] = response
        return responses

    return count


def test_ten_times_the_rows_need_the_same_number_of_queries(request_all):
    examples = seed(tools=60, groups=6, calls=120, sessions=24)
    first = request_all(examples)
    seed(tools=540, groups=54, calls=1080, sessions=216, suffix="2")
    add_related_rows(examples)
    second = request_all(examples, first)

    assert first.keys() == second.keys()
    assert {name: page.status for name, page in first.items() if page.status >= 400} == {}
    more = {
        name: f"{len(first[name].statements)} then {len(page.statements)}: "
        f"{_most_repeated(first[name].statements, page.statements)}"
        for name, page in second.items()
        if len(page.statements) > len(first[name].statements)
    }
    assert more == {}
    assert {
        name: len(page.statements)
        for name, page in second.items()
        if len(page.statements) > (MAX_USAGE_QUERIES if name.startswith("usage") else MAX_QUERIES)
    } == {}
    pages = {name: page for name, page in second.items() if not name.startswith(DOWNLOADS)}
    assert {name: page.size for name, page in pages.items() if page.size > MAX_PAGE_BYTES} == {}


def _most_repeated(before, after):
    """Return the statement whose count grew most."""
    old, new = (Counter(statement[:160] for statement in batch) for batch in (before, after))
    return max(new, key=lambda shape: new[shape] - old[shape])
