"""Audit log: recording, sentences and immutability."""

import pytest
from django.contrib.auth.models import User

from catalog import audit
from catalog.audit import SENTENCES, SYSTEM, Actor, record, sentence
from catalog.models import AuditEntry
from tests.support.factories import make_server

pytestmark = pytest.mark.django_db


def test_a_sentence_names_actor_action_and_object(admin):
    server = make_server(slug="weather")

    entry = record(Actor.user(admin), "server.disable", server)

    assert sentence(entry) == "ada@example.org disabled server weather"


def test_an_entry_stays_readable_after_actor_and_object_are_deleted(admin):
    server = make_server(slug="weather")
    entry = record(Actor.user(admin), "server.delete", server)
    server.delete()
    User.objects.all().delete()

    assert sentence(AuditEntry.objects.get(pk=entry.pk)) == (
        "ada@example.org deleted server weather"
    )


def test_every_verb_has_a_sentence_and_an_unknown_verb_is_an_error():
    server = make_server()

    for verb in SENTENCES:
        text = sentence(record(SYSTEM, verb, server))
        assert ("{target}" in SENTENCES[verb]) == (server.slug in text)
    with pytest.raises(ValueError, match="no sentence"):
        record(SYSTEM, "server.paint", server)


def test_an_entry_cannot_be_changed_or_deleted():
    entry = record(Actor.command("sync"), "server.sync", make_server())

    entry.verb = "server.add"
    with pytest.raises(TypeError, match="append-only"):
        entry.save()
    with pytest.raises(TypeError, match="append-only"):
        entry.delete()
    assert AuditEntry.objects.get().verb == "server.sync"


@pytest.mark.parametrize("act", ["update", "delete"])
def test_entries_cannot_be_changed_or_deleted_in_bulk(act):
    record(SYSTEM, "server.sync", make_server())
    arguments = {"verb": "server.add"} if act == "update" else {}

    with pytest.raises(TypeError, match="append-only"):
        getattr(AuditEntry.objects.all(), act)(**arguments)
    assert AuditEntry.objects.get().verb == "server.sync"


def test_a_label_longer_than_the_column_is_truncated():
    entry = audit.record(Actor("user", "x" * 500), "server.sync", make_server())

    assert len(entry.actor_label) == 200
