"""API keys: shown once, stored as digests, valid until revoked, expired or the owner disabled."""

import json
import subprocess
import sys
from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM, Actor, sentence
from catalog.models import AuditEntry
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.models import ApiKey
from tests.support.installation import ROOT, Installation
from toolcrib.lib.errors import Conflict, Invalid, NotFound

ADA = Actor("user", "ada@example.org", 1)


@pytest.fixture
def scout(db):
    return agent_actions.create("scout", actor=SYSTEM)


def create(agent, name="laptop", **more):
    return api_keys.create_key(name, "agent", agent=agent, actor=ADA, **more)


def stored_rows():
    """Return all stored keys and audit entries, as text."""
    rows = [*ApiKey.objects.values(), *AuditEntry.objects.values()]
    return json.dumps(rows, default=str)


def update(key, **fields):
    ApiKey.objects.filter(pk=key.pk).update(**fields)


# --- Create and find ----------------------------------------------------------------------------


def test_a_key_is_found_by_its_text_and_stored_as_a_digest(scout):
    key, text = create(scout)

    found = api_keys.find_key(text)
    assert (found.pk, found.agent, found.scope) == (key.pk, scout, "agent")
    assert text.startswith(key.prefix)
    assert len(key.prefix) == 10
    assert text not in stored_rows()
    assert text[10:] not in stored_rows()


def test_a_key_records_its_creator_and_last_use(scout):
    key, text = create(scout)
    assert (key.created_by, key.last_used_at) == ("ada@example.org", None)

    api_keys.find_key(text)
    first = ApiKey.objects.get(pk=key.pk).last_used_at
    api_keys.find_key(text)

    assert first is not None
    assert ApiKey.objects.get(pk=key.pk).last_used_at == first  # once a minute is enough
    update(key, last_used_at=first - timedelta(minutes=2))
    api_keys.find_key(text)
    assert ApiKey.objects.get(pk=key.pk).last_used_at >= first


def test_keys_are_unique(scout):
    texts = {create(scout)[1] for _ in range(50)}

    assert len(texts) == 50


@pytest.mark.parametrize("text", ["", "tcb_", "tcb_wrong", "tcb_" + "x" * 500, "Bearer", "tcb_\0"])
def test_an_invalid_text_finds_no_key(text, scout):
    create(scout)

    assert api_keys.find_key(text) is None


@pytest.mark.parametrize(
    ("scope", "with_agent", "words"),
    [
        ("agent", False, "must belong to an agent"),
        ("admin", True, "must have the scope agent"),
        ("operator", True, "must have the scope agent"),
        ("root", False, "scope must be one of"),
    ],
)
def test_the_scope_must_match_the_owner(scope, with_agent, words, scout):
    with pytest.raises(Invalid) as error:
        api_keys.create_key("laptop", scope, agent=scout if with_agent else None, actor=ADA)

    assert words in error.value.message
    assert not ApiKey.objects.exists()


@pytest.mark.parametrize("name", ["", "  ", "x" * 121, "a\nb", "a\0b"])
def test_an_invalid_name_is_rejected(name, scout):
    with pytest.raises(Invalid):
        create(scout, name)


# --- Expire, revoke and rotate ------------------------------------------------------------------


def test_a_key_is_invalid_after_its_expiry_time(scout):
    key, text = create(scout, expires_at=timezone.now() + timedelta(hours=1))
    assert api_keys.find_key(text)

    update(key, expires_at=timezone.now() - timedelta(seconds=1))

    assert api_keys.find_key(text) is None


def test_an_expiry_time_in_the_past_is_rejected(scout):
    with pytest.raises(Invalid) as error:
        create(scout, expires_at=timezone.now() - timedelta(seconds=1))

    assert "in the past" in error.value.message


def test_revoking_a_key_leaves_the_agents_other_keys_valid(scout):
    key, text = create(scout)
    _, other = create(scout)

    api_keys.revoke(key, actor=ADA)
    api_keys.revoke(key, actor=ADA)

    assert api_keys.find_key(text) is None
    assert api_keys.find_key(other)
    entry = AuditEntry.objects.get(verb="key.revoke")
    assert sentence(entry) == f"ada@example.org revoked agent key laptop {key.prefix}…"
    assert entry.before == {"scope": "agent", "agent": "scout"}


def test_a_disabled_agents_keys_are_rejected_until_it_is_enabled(scout):
    _, text = create(scout)

    agent_actions.set_enabled(scout, False, actor=ADA)
    assert api_keys.find_key(text) is None

    agent_actions.set_enabled(scout, True, actor=ADA)
    assert api_keys.find_key(text)


def test_a_rejected_key_does_not_count_as_used(scout):
    key, text = create(scout)
    agent_actions.set_enabled(scout, False, actor=ADA)

    api_keys.find_key(text)

    assert ApiKey.objects.get(pk=key.pk).last_used_at is None


def test_rotating_creates_a_key_and_keeps_the_old_one_valid_for_24_hours(scout):
    key, text = create(scout)
    before = timezone.now()

    new, new_text = api_keys.rotate(key, actor=ADA)

    key.refresh_from_db()
    assert api_keys.find_key(text).pk == key.pk
    assert api_keys.find_key(new_text).pk == new.pk != key.pk
    overlap = api_keys.ROTATION_OVERLAP
    assert before + overlap <= key.expires_at <= timezone.now() + overlap
    assert (new.name, new.agent, new.scope, new.expires_at) == ("laptop", scout, "agent", None)
    update(key, expires_at=timezone.now())
    assert api_keys.find_key(text) is None
    assert api_keys.find_key(new_text)
    entry = AuditEntry.objects.get(verb="key.rotate")
    assert entry.after["replaced_by"] == new.prefix
    assert new_text not in stored_rows()


def test_the_new_key_has_the_same_lifetime_as_the_old_one(scout):
    now = timezone.now()
    key, _ = create(scout, expires_at=now + timedelta(days=60))
    update(key, created_at=now - timedelta(days=30))

    new, _ = api_keys.rotate(ApiKey.objects.get(pk=key.pk), actor=ADA)

    assert now + timedelta(days=90) <= new.expires_at <= timezone.now() + timedelta(days=90)


def test_a_revoked_or_soon_expiring_key_cannot_be_rotated(scout):
    revoked, _ = create(scout)
    api_keys.revoke(revoked, actor=ADA)
    rotated, _ = create(scout)
    api_keys.rotate(rotated, actor=ADA)
    before = ApiKey.objects.count()

    for key, words in ((revoked, "revoked"), (rotated, "within 24 hours")):
        with pytest.raises(Conflict) as error:
            api_keys.rotate(key, actor=ADA)
        assert words in error.value.message
    assert ApiKey.objects.count() == before


def test_rotating_an_admin_key_is_audited_as_a_token(db):
    key, _ = api_keys.create_key("tests", "admin", actor=ADA)

    new, text = api_keys.rotate(key, actor=ADA)

    assert (new.scope, api_keys.find_key(text).pk) == ("admin", new.pk)
    assert AuditEntry.objects.filter(verb="token.rotate").count() == 1


# --- Find by reference --------------------------------------------------------------------------


def test_a_key_is_found_by_id_or_prefix(scout):
    key, _ = create(scout)

    assert (
        api_keys.find_key_by_reference(str(key.pk))
        == key
        == api_keys.find_key_by_reference(key.prefix)
    )


@pytest.mark.parametrize("name", ["0", "9" * 17, "9" * 40, "tcb_nobody", "", "tcb_\0"])
def test_an_unknown_reference_raises_not_found(name, scout):
    with pytest.raises(NotFound):
        api_keys.find_key_by_reference(name)


def test_an_ambiguous_prefix_is_a_conflict(scout):
    key, _ = create(scout)
    update(create(scout)[0], prefix=key.prefix)

    with pytest.raises(Conflict) as error:
        api_keys.find_key_by_reference(key.prefix)

    assert "id" in error.value.hint


# --- Several processes --------------------------------------------------------------------------

CHECK_KEYS = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
import django
django.setup()
from sessions_app.agents import api_keys as keys
for line in sys.stdin:
    key = keys.find_key(line.strip())
    print("valid" if key else "invalid", flush=True)
"""


class KeyChecker:
    """A long-running process that reports whether a key is valid."""

    def __init__(self, toolcrib):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHECK_KEYS],
            cwd=ROOT,
            env=toolcrib.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, key):
        self.process.stdin.write(f"{key}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def stop(self):
        self.process.communicate(timeout=30)


def test_a_change_by_one_process_takes_effect_in_all_others(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    key = json.loads(toolcrib.command("create_agent", "scout", "--json").stdout)["key"]
    checkers = [KeyChecker(toolcrib), KeyChecker(toolcrib)]
    try:
        assert [check(key) for check in checkers] == ["valid", "valid"]
        change = "from sessions_app.agents import {0} as x; from sessions_app.models import *; "
        change += "from catalog.audit import SYSTEM; x.{1}, actor=SYSTEM)"
        for words, expected in (
            (("actions", "set_enabled(Agent.objects.get(), False"), "invalid"),
            (("actions", "set_enabled(Agent.objects.get(), True"), "valid"),
            (("api_keys", "revoke(ApiKey.objects.get()"), "invalid"),
        ):
            done = toolcrib.command("shell", "--no-imports", "-c", change.format(*words))
            assert done.returncode == 0, done.stderr
            assert [check(key) for check in checkers] == [expected, expected]
    finally:
        for checker in checkers:
            checker.stop()
