"""Audit entries of sign-ins, failed ones and sign-outs."""

from types import SimpleNamespace

import pytest

from catalog.models import AuditEntry
from tests.support.people import PASSWORD
from toolcrib.accounts import sign_ins

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_failures_yet(monkeypatch):
    for name in ("_minute", "_recorded", "_omitted"):
        monkeypatch.setattr(sign_ins, name, 0)


def sign_in(client, name, password):
    return client.post("/sign-in", {"username": name, "password": password})


def entries():
    rows = AuditEntry.objects.filter(verb__startswith="person.sign").order_by("pk")
    return [(row.verb, row.actor_label, row.target_label) for row in rows]


def test_signing_in_and_out_is_recorded_with_the_address(client, admin):
    sign_in(client, "ada@example.org", PASSWORD)
    client.post("/sign-out")

    ada = "ada@example.org"
    assert entries() == [("person.sign_in", ada, ada), ("person.sign_out", ada, ada)]
    assert AuditEntry.objects.get(verb="person.sign_in").after == {"address": "127.0.0.1"}


def test_a_failed_sign_in_is_recorded_without_what_was_typed(client, admin):
    sign_in(client, "ada@example.org", "wrong password")
    sign_in(client, "my-secret-password", "x")

    assert entries() == [
        ("person.sign_in_failed", "Somebody", "ada@example.org"),
        ("person.sign_in_failed", "Somebody", "an unknown name"),
    ]
    rows = AuditEntry.objects.values_list("before", "after", "target_label")
    assert "my-secret-password" not in str(list(rows))
    assert "wrong password" not in str(list(rows))


def test_a_locked_name_is_recorded_too(client, admin):
    for _ in range(7):
        response = sign_in(client, "ada@example.org", "wrong password")

    assert response.status_code == 429
    assert len(entries()) == 7


def test_of_a_flood_the_rest_is_counted(client, admin, monkeypatch):
    monkeypatch.setattr(sign_ins, "MAX_FAILURES", 3)
    monkeypatch.setattr(sign_ins, "time", SimpleNamespace(monotonic=lambda: 600.0))  # one minute
    for number in range(5):
        sign_in(client, f"nobody-{number}", "x")
    assert len(entries()) == 3

    monkeypatch.setattr(sign_ins, "MAX_FAILURES", 4)
    sign_in(client, "nobody", "x")
    assert AuditEntry.objects.latest("pk").after["omitted_before"] == 2


def test_an_incomplete_form_is_no_failed_sign_in(client, admin):
    client.post("/sign-in", {"username": "ada@example.org"})

    assert entries() == []
