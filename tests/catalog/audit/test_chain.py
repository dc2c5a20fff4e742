"""Chain of the audit log: changes by SQL are found and named; the sink gets each entry once."""

import json
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection

from catalog.audit import SYSTEM, chain, record, seal
from catalog.audit.seal import Seal, SealUnreadable
from catalog.models import AuditEntry
from tests.support.factories import make_server

pytestmark = pytest.mark.django_db


def sql(text, *values):
    with connection.cursor() as cursor:
        cursor.execute(text, values)


@pytest.fixture
def entries(db):
    """Five chained entries, with values that databases store in different ways."""
    server = make_server(slug="weather")
    for number in range(5):
        after = {"number": number, "large": 1e20, "small": 0.1, "text": "ü", "list": [1.0, None]}
        record(SYSTEM, "server.sync", server, after=after)
    assert chain.extend() == 5
    return list(AuditEntry.objects.order_by("position"))


def bad_entry():
    result = chain.verify()
    assert not result.holds
    assert not chain.verify(newest=100).holds
    return result.entry


def test_entries_are_chained_once_in_order_and_verify(entries):
    assert [entry.position for entry in entries] == [1, 2, 3, 4, 5]
    assert len({entry.link for entry in entries}) == 5
    assert chain.extend() == 0
    result = chain.verify()
    assert (result.holds, result.verified, result.last, result.pending) == (
        *(True, 5, entries[-1]),
        0,
    )
    assert chain.verify(newest=2).verified == 2


@pytest.mark.parametrize(
    "change",
    [
        "actor_label = 'Mallory'",
        "actor_kind = 'user'",
        "actor_id = 7",
        "verb = 'server.add'",
        "target_kind = 'tool'",
        "target_id = 99",
        "target_label = 'other'",
        "at = '2020-01-01 00:00:00+00:00'",
        "before = '{\"a\": 1}'",
        "after = '{}'",
        "mac = ''",
        "link = ''",
    ],
)
def test_an_edited_field_is_found_and_its_entry_named(entries, change):
    sql("UPDATE catalog_auditentry SET " + change + " WHERE id = %s", entries[2].pk)  # noqa: S608

    assert bad_entry() == entries[2].pk
    assert chain.verify().last == entries[1]


@pytest.mark.skipif(connection.vendor != "sqlite", reason="other databases check types")
@pytest.mark.parametrize(
    "change",
    [
        "at = 'garbage'",
        "at = '9999-99-99 00:00:00'",
        "actor_label = x'ff00'",
        "actor_label = CAST(x'ff' AS TEXT)",
        "after = x'ff'",
        "after = 'NaN'",
        "position = 'garbage'",
        "link = x'ff'",
    ],
)
def test_a_field_of_another_type_is_found_and_its_entry_named(entries, change):
    """A value that cannot be read must not end the verification with a traceback."""
    sql("PRAGMA ignore_check_constraints = ON")
    sql("UPDATE catalog_auditentry SET " + change + " WHERE id = %s", entries[2].pk)  # noqa: S608
    sql("PRAGMA ignore_check_constraints = OFF")

    assert bad_entry() == entries[2].pk


def test_a_deleted_entry_is_found(entries):
    sql("DELETE FROM catalog_auditentry WHERE id = %s", entries[2].pk)

    assert bad_entry() == entries[3].pk
    assert f"1 entry is missing after entry {entries[1].pk}" in chain.verify().problem


def test_a_deletion_hidden_by_new_positions_is_found(entries):
    sql("DELETE FROM catalog_auditentry WHERE id = %s", entries[2].pk)
    for entry in entries[3:]:
        sql("UPDATE catalog_auditentry SET position = position - 1 WHERE id = %s", entry.pk)

    assert bad_entry() == entries[3].pk


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_cut_end_is_found_also_after_more_entries(entries, count):
    for entry in entries[5 - count :]:
        sql("DELETE FROM catalog_auditentry WHERE id = %s", entry.pk)

    assert bad_entry() is None
    assert f"{count} entr" in chain.verify().problem
    newer = record(SYSTEM, "server.sync", make_server())
    chain.extend()
    assert bad_entry() == newer.pk
    assert "missing" in chain.verify().problem


def test_an_inserted_entry_is_found_and_never_chained(entries):
    sql(
        "INSERT INTO catalog_auditentry (at, actor_kind, actor_label, verb, target_kind, "
        '"target_label", "before", "after", mac, link) '
        "SELECT at, actor_kind, 'Mallory', verb, target_kind, target_label, "
        "\"before\", \"after\", '0.0', '' FROM catalog_auditentry WHERE id = %s",
        entries[0].pk,
    )
    inserted = AuditEntry.objects.get(actor_label="Mallory")

    assert chain.extend() == 0
    assert bad_entry() == inserted.pk


@pytest.mark.parametrize("position", [0, 6, -1])
def test_an_inserted_entry_with_a_position_is_found(entries, position):
    sql(
        "INSERT INTO catalog_auditentry (at, actor_kind, actor_label, verb, target_kind, "
        '"target_label", "before", "after", mac, link, position) '
        "SELECT at, actor_kind, 'Mallory', verb, target_kind, target_label, "
        '"before", "after", \'0.0\', link, %s FROM catalog_auditentry WHERE id = %s',
        position,
        entries[4].pk,
    )

    inserted = AuditEntry.objects.get(actor_label="Mallory")
    assert chain.verify().entry == (inserted.pk if position else entries[0].pk)
    assert chain.verify(newest=2).holds is (position == 0)


def test_a_copied_entry_is_found_even_if_the_constraint_was_dropped(entries):
    copied = record(SYSTEM, "server.sync", make_server())
    sql("DROP INDEX audit_mac_used_once")
    sql(
        "INSERT INTO catalog_auditentry (at, actor_kind, actor_label, verb, target_kind, "
        'target_id, target_label, "before", "after", mac, link) '
        "SELECT at, actor_kind, actor_label, verb, target_kind, target_id, target_label, "
        '"before", "after", mac, link FROM catalog_auditentry WHERE id = %s',
        copied.pk,
    )
    chain.extend()

    assert bad_entry() == AuditEntry.objects.latest("id").pk
    assert "copy" in chain.verify().problem


def test_reordered_entries_are_found(entries):
    first, second = entries[1], entries[2]
    sql("UPDATE catalog_auditentry SET position = 99 WHERE id = %s", first.pk)
    sql("UPDATE catalog_auditentry SET position = 2 WHERE id = %s", second.pk)
    sql("UPDATE catalog_auditentry SET position = 3 WHERE id = %s", first.pk)

    assert bad_entry() == second.pk


def test_entries_that_exchanged_their_contents_are_found(entries):
    first, second = entries[1], entries[2]
    fields = [field.attname for field in AuditEntry._meta.fields]
    content = [name for name in fields if name not in ("id", "position", "link")]
    sql("UPDATE catalog_auditentry SET mac = 'x' WHERE id = %s", first.pk)
    for target, source in ((second, first), (first, second)):
        AuditEntry._base_manager.filter(pk=target.pk).update(
            **{name: getattr(source, name) for name in content}
        )

    assert bad_entry() == first.pk


def test_an_edited_entry_cannot_be_hidden_among_those_from_before_the_chain(entries):
    sql(
        "UPDATE catalog_auditentry SET position = 0, actor_label = 'Mallory' WHERE id = %s",
        entries[0].pk,
    )

    assert not chain.verify().holds


def test_entries_from_before_the_chain_are_marked_and_changes_to_them_found():
    old = record(SYSTEM, "server.sync", make_server())
    sql("UPDATE catalog_auditentry SET position = 0, mac = '' WHERE id = %s", old.pk)
    chain.extend(always=True)
    assert (chain.verify().holds, chain.verify().unchained) == (True, 1)

    sql("UPDATE catalog_auditentry SET actor_label = 'Mallory' WHERE id = %s", old.pk)
    assert "before the chain" in chain.verify().problem
    record(SYSTEM, "server.sync", make_server())
    chain.extend()
    assert "before the chain" in chain.verify().problem


def test_an_entry_that_is_not_chained_yet_is_counted(entries):
    record(SYSTEM, "server.sync", make_server())

    assert (chain.verify().holds, chain.verify().pending) == (True, 1)


# --- The seal -----------------------------------------------------------------------------------


def test_a_changed_seal_is_rejected_and_nothing_more_is_chained(entries, settings):
    path = Path(settings.AUDIT_SEAL)
    path.write_text(path.read_text().replace('"count":5', '"count":4'))
    record(SYSTEM, "server.sync", make_server())

    with pytest.raises(SealUnreadable, match="was changed"):
        chain.extend()
    assert "seal" in chain.verify().problem


def test_a_lost_seal_is_reported_and_its_replacement_recorded(entries, settings):
    Path(settings.AUDIT_SEAL).unlink()
    assert "seal is missing" in chain.verify().problem

    chain.extend(always=True)

    assert chain.verify().holds
    assert AuditEntry.objects.filter(verb="audit.reseal", position=6).exists()


def test_a_process_that_died_before_sealing_leaves_a_chain_that_verifies_and_grows(entries):
    seal.write(Seal(3, entries[2].link))

    assert chain.verify().holds
    record(SYSTEM, "server.sync", make_server())
    chain.extend()
    assert (chain.verify().holds, chain.verify().verified) == (True, 6)


# --- Keys ---------------------------------------------------------------------------------------


def test_another_key_verifies_nothing_and_a_rotated_one_everything(entries, settings):
    old = settings.ENCRYPTION_KEYS
    new = ["n" * 40]
    settings.ENCRYPTION_KEYS = new + old
    assert chain.verify().holds
    record(SYSTEM, "server.sync", make_server())
    assert chain.sign_again() == 6
    chain.extend()

    settings.ENCRYPTION_KEYS = new
    assert (chain.verify().holds, chain.verify().verified) == (True, 6)
    settings.ENCRYPTION_KEYS = old
    assert not chain.verify().holds


def test_a_new_chain_counts_older_entries_as_recorded_before_it(entries, settings, capsys):
    settings.ENCRYPTION_KEYS = ["other" * 10]
    with pytest.raises(SystemExit):
        call_command("verify_audit")

    call_command("verify_audit", "--restart")
    chain.extend()

    result = chain.verify()
    assert (result.holds, result.verified, result.unchained) == (True, 1, 5)


# --- The command --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--json",), ("--restart",)])
def test_a_missing_table_is_reported_in_a_sentence(entries, capsys, options):
    sql("ALTER TABLE catalog_auditentry RENAME TO moved")

    with pytest.raises(SystemExit) as ended:
        call_command("verify_audit", *options)

    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("The database cannot be used: ")
    assert "restore a backup" in shown.err
    assert "Traceback" not in shown.err


def test_the_command_names_the_first_bad_entry_and_fails(entries, capsys):
    call_command("verify_audit")
    assert "All 5 chained entries verified." in capsys.readouterr().out
    for entry in entries[2:4]:
        sql("UPDATE catalog_auditentry SET actor_label = 'Mallory' WHERE id = %s", entry.pk)

    with pytest.raises(SystemExit) as ended:
        call_command("verify_audit", "--json")

    assert ended.value.code == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["holds"], body["verified"], body["entry"]) == (False, 2, entries[2].pk)
    assert body["last_entry"] == entries[1].pk


# --- The sink -----------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def sink(settings, tmp_path):
    settings.AUDIT_SINK = str(tmp_path / "audit.jsonl")
    return tmp_path / "audit.jsonl"


def test_the_sink_gets_every_entry_once_also_from_before_it_was_set(entries, sink):
    record(SYSTEM, "server.sync", make_server(slug="late"))
    for _ in range(3):
        chain.extend(always=True)

    written = lines(sink)
    assert [line["position"] for line in written] == [1, 2, 3, 4, 5, 6]
    assert written[-1]["sentence"] == "Toolcrib queued a sync of server late"
    assert sink.stat().st_mode & 0o777 == 0o600


def test_a_crash_before_the_seal_repeats_no_line(entries, sink):
    chain.extend(always=True)
    seal.write(Seal(5, entries[-1].link, delivered=2))

    chain.extend(always=True)

    assert [line["position"] for line in lines(sink)] == [1, 2, 3, 4, 5]


def test_a_line_that_a_crash_left_incomplete_is_written_again(entries, sink):
    chain.extend(always=True)
    text = sink.read_text()
    sink.write_text(text[:-30])
    seal.write(Seal(5, entries[-1].link, delivered=4))

    chain.extend(always=True)

    assert sink.read_text() == text


def test_a_rotated_file_continues_with_the_next_entry(entries, sink):
    chain.extend(always=True)
    sink.rename(sink.with_suffix(".1"))
    record(SYSTEM, "server.sync", make_server())

    chain.extend()

    assert [line["position"] for line in lines(sink)] == [6]


def test_standard_output_is_a_sink(entries, settings, capfdbinary):
    settings.AUDIT_SINK = "-"

    chain.extend(always=True)
    chain.extend(always=True)

    written = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["position"] for line in written] == [1, 2, 3, 4, 5]


def test_a_sink_that_cannot_be_written_keeps_the_chain_and_gets_the_entries_later(
    entries, settings, tmp_path
):
    settings.AUDIT_SINK = str(tmp_path / "missing" / "audit.jsonl")
    record(SYSTEM, "server.sync", make_server())
    with pytest.raises(FileNotFoundError):
        chain.extend()
    assert (chain.verify().holds, chain.verify().verified) == (True, 6)

    (tmp_path / "missing").mkdir()
    chain.extend(always=True)

    assert len(lines(tmp_path / "missing" / "audit.jsonl")) == 6
