"""One server for each data folder, and a sentence if it cannot be written."""

import os
import re

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, IntegrityError

from toolcrib.config import installation_keys
from toolcrib.config.databases import explain_failure
from toolcrib.lib.errors import DatabaseUnavailable


def test_a_second_server_on_a_data_folder_gets_the_pid_of_the_first(tmp_path):
    held = installation_keys.lock_data_dir(tmp_path)
    with pytest.raises(installation_keys.DataDirectoryInUse) as refused:
        installation_keys.lock_data_dir(tmp_path)
    assert f"(pid {os.getpid()}) uses the data folder {tmp_path}. Stop it" in str(refused.value)
    assert (tmp_path / "serve.lock").stat().st_mode & 0o777 == 0o600

    os.close(held)  # as at the end of the process
    os.close(installation_keys.lock_data_dir(tmp_path))


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    folder = tmp_path / "data"
    folder.write_text("a file")
    sentence = re.escape(f"Cannot write to the data folder {folder}: Not a directory. Make it")
    with pytest.raises(ImproperlyConfigured, match=sentence):
        installation_keys.local_key(folder / "secret.key")
    with pytest.raises(ImproperlyConfigured, match=sentence):
        installation_keys.lock_data_dir(folder)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("database disk image is malformed", "The database file is damaged. Move "),
        ("file is not a database", "The database file is damaged. Move "),
        ("attempt to write a readonly database", "The database is read-only. Check the disk"),
        ("database or disk is full", "The disk is full. Check the disk"),
        ("unable to open database file", "The database file cannot be opened. Check the disk"),
        ("disk I/O error", "The disk reports errors. Check the disk"),
        ("no such table: catalog_tool", ""),
    ],
)
def test_an_unusable_database_is_explained_and_other_errors_are_not(error, sentence, settings):
    settings.EMBEDDED = True
    explained = explain_failure(DatabaseError(error))
    assert explained.startswith(sentence)
    assert bool(explained) == bool(sentence)


def test_a_response_names_the_problem_of_the_disk_and_no_other_detail():
    full = DatabaseUnavailable(DatabaseError("database or disk is full"))
    assert full.sentence == "The disk is full. An operator has to act; try again later."
    other = DatabaseUnavailable(IntegrityError("UNIQUE constraint failed: secret"))
    assert other.sentence == "Database unavailable. Try again."
