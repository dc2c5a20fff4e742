"""People who can sign in with a password."""

import pytest

from tests.support.people import PASSWORD, make_person
from toolcrib.lib.roles import Role


@pytest.fixture
def admin(db):
    return make_person("ada@example.org", Role.ADMIN, PASSWORD)
