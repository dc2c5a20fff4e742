"""Backup files are encrypted with a passphrase; every damage is found before anything is used."""

import io
import os

import pytest

from toolcrib import backup_encryption
from toolcrib.backup_encryption import (
    CHUNK,
    HEADER_BYTES,
    TAG_BYTES,
    check_new_passphrase,
    decrypted_reader,
    encrypted_writer,
    is_encrypted,
    read_passphrase,
)
from toolcrib.lib.errors import Invalid

PASSPHRASE = "five random words in a row"


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch):
    monkeypatch.setattr(backup_encryption, "SCRYPT_COST", 1 << 4)


def encrypted(content, passphrase=PASSPHRASE):
    file = io.BytesIO()
    with encrypted_writer(file, passphrase) as stream:
        for start in range(0, len(content), 10_007):
            stream.write(content[start : start + 10_007])
    return file.getvalue()


def decrypted(data, passphrase=PASSPHRASE):
    return decrypted_reader(io.BytesIO(data), passphrase).read()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7])
def test_content_of_any_size_comes_back(size):
    content = os.urandom(size)
    data = encrypted(content)

    assert is_encrypted(io.BytesIO(data))
    assert content[:32] not in data or size < 32
    assert decrypted(data) == content


def test_the_content_can_be_read_twice():
    stream = decrypted_reader(io.BytesIO(encrypted(b"a" * 3 * CHUNK)), PASSPHRASE)
    first = stream.read()
    stream.seek(0)

    assert stream.read() == first == b"a" * 3 * CHUNK


def test_two_files_of_the_same_content_differ():
    assert encrypted(b"same")[HEADER_BYTES:] != encrypted(b"same")[HEADER_BYTES:]


def chunks(data):
    body, size = data[HEADER_BYTES:], CHUNK + TAG_BYTES
    return [body[start : start + size] for start in range(0, len(body), size)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda header, parts: header + b"".join(parts[:-1]),
        lambda header, parts: header + b"".join(parts)[:-1],
        lambda header, parts: header + b"".join([parts[1], parts[0], *parts[2:]]),
        lambda header, parts: header + b"".join([parts[0], *parts]),
        lambda header, parts: header + b"".join(parts) + b"more",
        lambda header, parts: header + b"".join(parts[1:]),
        lambda header, parts: header,
        lambda header, parts: header[:-1],
        lambda header, parts: header + bytes([parts[0][0] ^ 1]) + b"".join(parts)[1:],
    ],
)
def test_a_damaged_file_is_rejected_with_a_sentence(damage):
    data = encrypted(os.urandom(3 * CHUNK))

    with pytest.raises(Invalid, match=r"corrupt or truncated|passphrase is wrong"):
        decrypted(damage(data[:HEADER_BYTES], chunks(data)))


def test_a_wrong_passphrase_is_told_from_a_damaged_file():
    with pytest.raises(Invalid, match="The passphrase is wrong"):
        decrypted(encrypted(b"content"), "another passphrase")
    with pytest.raises(Invalid, match="encrypted with a passphrase"):
        decrypted(encrypted(b"content"), "")


def test_a_passphrase_is_read_from_a_file_or_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLCRIB_BACKUP_PASSPHRASE", "from the environment")
    file = tmp_path / "passphrase"
    file.write_text("from the file\nnot this\n")

    assert read_passphrase(None) == "from the environment"
    assert read_passphrase(str(file)) == "from the file"
    with pytest.raises(Invalid, match="cannot be read"):
        read_passphrase(str(tmp_path / "missing"))


@pytest.mark.parametrize(("text", "sentence"), [("", "no passphrase"), ("short", "too short")])
def test_a_backup_needs_a_passphrase(text, sentence):
    with pytest.raises(Invalid, match=sentence):
        check_new_passphrase(text)
