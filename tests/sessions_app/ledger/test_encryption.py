"""Payloads are encrypted in the database, readable through the models, and survive a key change."""

import json

import pytest
from django.core.management import call_command
from django.db import connection

from sessions_app.ledger import calls as call_ledger
from sessions_app.models import Call, DataKey, encryption
from sessions_app.models.encryption import (
    UNREADABLE,
    UnreadablePayload,
    decrypt,
    decrypt_text,
    encrypt,
    encrypt_text,
    payloads_as_stored,
)
from tests.support.factories import make_call

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def forget_keys():
    """Start as a new process does, and leave nothing of a test's keys behind."""

    def forget():
        encryption._keys.clear()
        encryption._encryptor = None
        encryption._cipher.cache_clear()

    forget()
    yield forget
    forget()


def stored(column, call):
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column} FROM sessions_app_call WHERE id = %s", [call.pk])  # noqa: S608
        return cursor.fetchone()[0]


def test_bytes_come_back_and_differ_each_time():
    first, second = encrypt(b"payload"), encrypt(b"payload")

    assert first != second
    assert b"payload" not in first
    assert decrypt(first) == decrypt(second) == b"payload"


@pytest.mark.parametrize("position", [0, 2, 8, 20, -1])
def test_changed_bytes_are_not_decrypted(position):
    data = bytearray(encrypt(b"payload"))
    data[position] ^= 1

    with pytest.raises(UnreadablePayload):
        decrypt(bytes(data))


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01" * 40, b"plain text that is long enough"])
def test_what_is_not_encrypted_is_not_decrypted(data):
    with pytest.raises(UnreadablePayload):
        decrypt(data)


def test_an_empty_text_and_an_encrypted_one_stay_as_they_are():
    text = encrypt_text('{"a":1}')

    assert encrypt_text(text) == text
    assert encrypt_text("") == ""
    assert decrypt_text('{"a":1}') == '{"a":1}'  # stored in clear by an older version


def test_the_columns_of_a_call_are_encrypted_and_read_in_clear():
    call = make_call(arguments='{"city":"Oslo"}', result_copy='{"content":[]}')

    for column, text in (("arguments", '{"city":"Oslo"}'), ("result_copy", '{"content":[]}')):
        assert stored(column, call).startswith("~")
        assert text not in stored(column, call)
        assert getattr(Call.objects.get(pk=call.pk), column) == text
    with payloads_as_stored():
        assert Call.objects.get(pk=call.pk).arguments == stored("arguments", call)


def test_an_emptied_payload_can_be_found():
    call = make_call(arguments="")

    assert stored("arguments", call) == ""
    assert Call.objects.filter(arguments="").get() == call


def test_another_process_reads_what_this_one_wrote(forget_keys):
    data = encrypt(b"payload")
    forget_keys()

    assert decrypt(data) == b"payload"


def test_a_rotated_key_reads_old_payloads_with_the_new_key_alone(forget_keys, settings, capsys):
    (old,) = settings.ENCRYPTION_KEYS
    data = encrypt(b"payload")
    settings.ENCRYPTION_KEYS = ["a new key of the installation, long enough", old]
    call_command("rotate_key", "--json")

    assert json.loads(capsys.readouterr().out)["data_keys"] == 1
    settings.ENCRYPTION_KEYS = settings.ENCRYPTION_KEYS[:1]
    forget_keys()
    assert decrypt(data) == b"payload"


def test_with_a_lost_key_old_payloads_are_unreadable_and_new_ones_are_stored(forget_keys, settings):
    call = make_call(arguments='{"city":"Oslo"}')
    settings.ENCRYPTION_KEYS = ["another key of the installation, long enough"]
    forget_keys()
    encryption.ensure_data_key()

    assert Call.objects.get(pk=call.pk).arguments == UNREADABLE
    assert decrypt(encrypt(b"payload")) == b"payload"
    assert DataKey.objects.count() == 2


# --- Calls that were stored in clear --------------------------------------------------------------


def store_in_clear(call, **columns):
    with connection.cursor() as cursor:
        for name, text in columns.items():
            sql = f"UPDATE sessions_app_call SET {name} = %s WHERE id = %s"  # noqa: S608
            cursor.execute(sql, [text, call.pk])


def test_calls_of_an_older_version_are_readable_and_then_redacted_and_encrypted():
    calls = [make_call() for _ in range(5)]
    for call in calls:
        store_in_clear(call, arguments='{"pwd":"hunter2"}', result_copy='{"a":"pin: 1234"}')
    encryption.mark_calls_as_clear()
    assert Call.objects.get(pk=calls[0].pk).arguments == '{"pwd":"hunter2"}'

    assert [call_ledger.encrypt_clear_calls(limit=2) for _ in range(4)] == [2, 2, 1, 0]

    for call in calls:
        assert stored("arguments", call).startswith("~")
        row = Call.objects.get(pk=call.pk)
        assert (row.arguments, row.result_copy) == ('{"pwd":"***"}', '{"a":"pin: ***"}')


def test_a_truncated_and_an_emptied_payload_of_an_older_version_stay_what_they_are():
    cut = make_call()
    store_in_clear(cut, arguments='{"bytes":9,"cut":true,"start":"{\\"pwd\\":\\"x"}')
    gone = make_call(arguments="", result_copy="")
    encryption.mark_calls_as_clear()
    call_ledger.encrypt_clear_calls()

    assert json.loads(Call.objects.get(pk=cut.pk).arguments)["start"] == '{"pwd":"***'
    assert stored("arguments", gone) == ""


def test_a_new_installation_has_no_calls_in_clear():
    make_call()

    assert call_ledger.encrypt_clear_calls() == 0
