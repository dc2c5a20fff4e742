"""Keys: shown once, kept as digests, good until revoked, expired or their owner is disabled."""

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


def mint(agent, name="laptop", **more):
    return api_keys.create_key(name, "agent", agent=agent, actor=ADA, **more)


def everything_kept():
    """What the database holds of keys, as text."""
    rows = [*ApiKey.objects.values(), *AuditEntry.objects.values()]
    return json.dumps(rows, default=str)


def age(key, **moments):
    ApiKey.objects.filter(pk=key.pk).update(**moments)


# --- Making and finding -------------------------------------------------------------------------


def test_a_key_is_found_by_its_text_and_kept_as_a_digest(scout):
    key, text = mint(scout)

    found = api_keys.find_key(text)
    assert (found.pk, found.agent, found.scope) == (key.pk, scout, "agent")
    assert text.startswith(key.prefix)
    assert len(key.prefix) == 10
    assert text not in everything_kept()
    assert text[10:] not in everything_kept()


def test_a_key_says_who_made_it_and_when_it_was_used(scout):
    key, text = mint(scout)
    assert (key.created_by, key.last_used_at) == ("ada@example.org", None)

    api_keys.find_key(text)
    first = ApiKey.objects.get(pk=key.pk).last_used_at
    api_keys.find_key(text)

    assert first is not None
    assert ApiKey.objects.get(pk=key.pk).last_used_at == first  # once a minute is enough
    age(key, last_used_at=first - timedelta(minutes=2))
    api_keys.find_key(text)
    assert ApiKey.objects.get(pk=key.pk).last_used_at >= first


def test_no_two_keys_are_alike(scout):
    texts = {mint(scout)[1] for _ in range(50)}

    assert len(texts) == 50


@pytest.mark.parametrize("text", ["", "tcb_", "tcb_wrong", "tcb_" + "x" * 500, "Bearer", "tcb_\0"])
def test_what_is_no_key_finds_nothing(text, scout):
    mint(scout)

    assert api_keys.find_key(text) is None


@pytest.mark.parametrize(
    ("scope", "with_agent", "words"),
    [
        ("agent", False, "belongs to an agent"),
        ("admin", True, "has the scope agent"),
        ("operator", True, "has the scope agent"),
        ("root", False, "A scope is one of"),
    ],
)
def test_a_scope_and_its_owner_must_fit(scope, with_agent, words, scout):
    with pytest.raises(Invalid) as error:
        api_keys.create_key("laptop", scope, agent=scout if with_agent else None, actor=ADA)

    assert words in error.value.message
    assert not ApiKey.objects.exists()


@pytest.mark.parametrize("name", ["", "  ", "x" * 121, "a\nb", "a\0b"])
def test_a_name_that_cannot_be_kept_is_refused(name, scout):
    with pytest.raises(Invalid):
        mint(scout, name)


# --- Their end ----------------------------------------------------------------------------------


def test_a_key_ends_when_it_says(scout):
    key, text = mint(scout, expires_at=timezone.now() + timedelta(hours=1))
    assert api_keys.find_key(text)

    age(key, expires_at=timezone.now() - timedelta(seconds=1))

    assert api_keys.find_key(text) is None


def test_a_key_that_has_expired_already_is_not_made(scout):
    with pytest.raises(Invalid) as error:
        mint(scout, expires_at=timezone.now() - timedelta(seconds=1))

    assert "expired already" in error.value.message


def test_a_revoked_key_is_refused_and_its_siblings_are_not(scout):
    key, text = mint(scout)
    _, other = mint(scout)

    api_keys.revoke(key, actor=ADA)
    api_keys.revoke(key, actor=ADA)

    assert api_keys.find_key(text) is None
    assert api_keys.find_key(other)
    entry = AuditEntry.objects.get(verb="key.revoke")
    assert sentence(entry) == f"ada@example.org revoked agent key laptop {key.prefix}…"
    assert entry.before == {"scope": "agent", "agent": "scout"}


def test_a_disabled_agents_keys_are_refused_until_it_is_enabled(scout):
    _, text = mint(scout)

    agent_actions.disable(scout, actor=ADA)
    assert api_keys.find_key(text) is None

    agent_actions.enable(scout, actor=ADA)
    assert api_keys.find_key(text)


def test_a_refused_key_does_not_count_as_used(scout):
    key, text = mint(scout)
    agent_actions.disable(scout, actor=ADA)

    api_keys.find_key(text)

    assert ApiKey.objects.get(pk=key.pk).last_used_at is None


def test_rotating_gives_a_new_key_and_lets_the_old_one_end_in_a_day(scout):
    key, text = mint(scout)
    before = timezone.now()

    new, new_text = api_keys.rotate(key, actor=ADA)

    key.refresh_from_db()
    assert api_keys.find_key(text).pk == key.pk
    assert api_keys.find_key(new_text).pk == new.pk != key.pk
    assert before + api_keys.OVERLAP <= key.expires_at <= timezone.now() + api_keys.OVERLAP
    assert (new.name, new.agent, new.scope, new.expires_at) == ("laptop", scout, "agent", None)
    age(key, expires_at=timezone.now())
    assert api_keys.find_key(text) is None
    assert api_keys.find_key(new_text)
    entry = AuditEntry.objects.get(verb="key.rotate")
    assert entry.after["replaced_by"] == new.prefix
    assert new_text not in everything_kept()


def test_the_new_key_lasts_as_long_as_the_old_one_was_meant_to(scout):
    now = timezone.now()
    key, _ = mint(scout, expires_at=now + timedelta(days=60))
    age(key, created_at=now - timedelta(days=30))

    new, _ = api_keys.rotate(ApiKey.objects.get(pk=key.pk), actor=ADA)

    assert now + timedelta(days=90) <= new.expires_at <= timezone.now() + timedelta(days=90)


def test_a_key_that_ended_or_ends_soon_is_not_rotated(scout):
    revoked, _ = mint(scout)
    api_keys.revoke(revoked, actor=ADA)
    rotated, _ = mint(scout)
    api_keys.rotate(rotated, actor=ADA)
    before = ApiKey.objects.count()

    for key, words in ((revoked, "revoked"), (rotated, "within 24 hours")):
        with pytest.raises(Conflict) as error:
            api_keys.rotate(key, actor=ADA)
        assert words in error.value.message
    assert ApiKey.objects.count() == before


def test_tokens_of_people_rotate_too_and_are_called_tokens(db):
    key, _ = api_keys.create_key("tests", "admin", actor=ADA)

    new, text = api_keys.rotate(key, actor=ADA)

    assert (new.scope, api_keys.find_key(text).pk) == ("admin", new.pk)
    assert AuditEntry.objects.filter(verb="token.rotate").count() == 1


# --- Naming one ---------------------------------------------------------------------------------


def test_a_key_is_named_by_id_or_prefix(scout):
    key, _ = mint(scout)

    assert (
        api_keys.find_key_by_reference(str(key.pk))
        == key
        == api_keys.find_key_by_reference(key.prefix)
    )


@pytest.mark.parametrize("name", ["0", "9" * 17, "9" * 40, "tcb_nobody", "", "tcb_\0"])
def test_a_key_that_is_not_there_is_told(name, scout):
    with pytest.raises(NotFound):
        api_keys.find_key_by_reference(name)


def test_a_prefix_of_two_keys_names_neither(scout):
    key, _ = mint(scout)
    age(mint(scout)[0], prefix=key.prefix)

    with pytest.raises(Conflict) as error:
        api_keys.find_key_by_reference(key.prefix)

    assert "by its id" in error.value.hint


# --- Every process ------------------------------------------------------------------------------

ASKING = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
import django
django.setup()
from sessions_app.agents import api_keys as keys
for line in sys.stdin:
    found = keys.find_key(line.strip())
    print("good" if found else "refused", flush=True)
"""


class Asking:
    """A process that stays, and says of each key whether it is good."""

    def __init__(self, toolcrib):
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASKING],
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

    def end(self):
        self.process.communicate(timeout=30)


def test_what_one_process_revokes_or_disables_every_other_refuses_next(tmp_path):
    toolcrib = Installation(tmp_path / "data")
    key = json.loads(toolcrib.command("create_agent", "scout", "--json").stdout)["key"]
    processes = [Asking(toolcrib), Asking(toolcrib)]
    try:
        assert [ask(key) for ask in processes] == ["good", "good"]
        change = "from sessions_app.agents import {0} as x; from sessions_app.models import *; "
        change += "from catalog.audit import SYSTEM; x.{1}({2}.objects.get(), actor=SYSTEM)"
        for words, answer in (
            (("actions", "disable", "Agent"), "refused"),
            (("actions", "enable", "Agent"), "good"),
            (("api_keys", "revoke", "ApiKey"), "refused"),
        ):
            done = toolcrib.command("shell", "--no-imports", "-c", change.format(*words))
            assert done.returncode == 0, done.stderr
            assert [ask(key) for ask in processes] == [answer, answer]
    finally:
        for ask in processes:
            ask.end()
