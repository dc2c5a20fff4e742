"""Which sessions have ended, for the coordination of upstream connections."""

import pytest
from django.utils import timezone

from servers.connections import coordination
from tests.support.factories import make_session

pytestmark = pytest.mark.django_db


def test_one_query_finds_the_ended_sessions(django_assert_num_queries):
    make_session(session_id="ses_open")
    make_session(session_id="ses_closed", state="closed", ended_at=timezone.now())
    make_session(session_id="ses_expired", state="expired", ended_at=timezone.now())
    ids = {"ses_open", "ses_closed", "ses_expired", "ses_never"}
    with django_assert_num_queries(1):
        assert coordination.ended_sessions(ids) == ids - {"ses_open"}
    with django_assert_num_queries(0):
        assert coordination.ended_sessions(set()) == set()
