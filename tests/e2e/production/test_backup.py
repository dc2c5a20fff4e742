"""Backup and restore on SQLite and PostgreSQL, with valid and damaged files and keys."""

import gzip
import json
import sqlite3
import subprocess

import pytest

from tests.support.installation import Installation, free_port
from tests.support.production import Production
from tests.support.waiting import scaled, wait_for

pytestmark = [pytest.mark.timeout(240)]

CANARY = "canary-7f3d-in-a-header"


CALL_IN_FLIGHT = """
from django.utils import timezone
from catalog.models import *
from sessions_app.models import *
now = timezone.now()
session = AgentSession.objects.create(
    agent=Agent.objects.get(), strategy="dispatch", mode="deferred", decided_by="forced",
    snapshot=CatalogSnapshot.objects.create(sha256="0" * 64, text="", body="{}", tokens=0),
    revision=1, last_used_at=now)
call = Call.objects.create(
    session=session, agent=session.agent, tool=Tool.objects.first(), tool_name="x", state="sent",
    accepted_at=now, deadline=now, arguments='{"city": "Oslo"}')
Event.objects.create(session=session, at=now, kind="called", call=call)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A stopped installation with a user, a token, a server, an agent and a session."""
    from tests.support.upstreams.running import running_http

    toolcrib = Installation(tmp_path_factory.mktemp("source") / "data")
    with running_http("healthy") as url, toolcrib:
        toolcrib.token("admin")
        join = (
            "from toolcrib.accounts.invitations import set_up; set_up('a@b.org', 'a quiet river')"
        )
        assert toolcrib.command("shell", "-c", join).returncode == 0
        body = {"name": "weather", "transport": "http", "url": url}
        status, response = toolcrib.api("POST", "/servers", body | {"headers": {"X-Key": CANARY}})
        assert status == 201, response
        wait_for(lambda: toolcrib.tool_names("weather"), 30)
        wait_for(lambda: toolcrib.api("GET", "/servers/weather")[1]["state"] == "connected", 30)
        body = {"name": "scout", "groups": ["mcp:weather"], "calls_per_minute": 7}
        assert toolcrib.api("POST", "/agents", body)[0] == 201
        assert toolcrib.api("POST", "/agents/scout/keys", {"days": 9})[0] == 201
        wait_for(lambda: audit_chain(toolcrib)["pending"] == 0, 30)
    shell(toolcrib, CALL_IN_FLIGHT)
    return toolcrib


@pytest.fixture(scope="module")
def backup(source, tmp_path_factory):
    file = tmp_path_factory.mktemp("backup") / "toolcrib.backup"
    done = source.command("backup", "--plain", str(file))
    assert done.returncode == 0, done.stderr
    assert "Store the two files separately" in done.stdout
    return file


def audit_chain(toolcrib, env=None):
    done = toolcrib.command("verify_audit", "--json", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def key_path(backup):
    return backup.with_name(backup.name + ".key")


def read_header(path):
    with gzip.open(path, "rt") as file:
        return json.loads(file.readline())


READ_CREDENTIAL = (
    "from servers.models import Credential; from servers.registration.credentials import decrypt; "
    "print(decrypt(Credential.objects.get().ciphertext).reveal())"
)
STORY = """
import json
from django.contrib.auth.models import User
from catalog.models import *
from servers.models import *
from sessions_app.models import *
print(json.dumps({
    "people": list(User.objects.values_list("username", "is_superuser")),
    "tools": list(Tool.objects.values_list("pk", "public_name", "approved__sha256", "state")),
    "bodies": sorted(Definition.objects.values_list("sha256", "body", "tokens")),
    "made": [str(at) for at in Tool.objects.order_by("pk").values_list("created_at", flat=True)],
    "groups": list(Membership.objects.values_list("group__group_id", "tool__name", "position")),
    "keys": list(ApiKey.objects.values_list("sha256", "scope", "agent__name", "created_by")),
    "agents": list(Agent.objects.values_list("name", "calls_per_minute", "all_groups")),
    "its groups": list(AgentGroup.objects.values_list("agent__name", "group__group_id")),
    "sessions": list(AgentSession.objects.values_list("session_id", "agent__name", "state")),
    "calls": list(Call.objects.values_list("call_id", "session__session_id", "arguments")),
    "events": list(Event.objects.values_list("session__session_id", "kind", "call__call_id")),
    "runs": list(SyncRun.objects.values_list("outcome", "added", "trigger")),
    "audit": list(AuditEntry.objects.exclude(verb__startswith="installation.")
                  .values_list("verb", "target_label", "actor_label")),
}))
"""


def shell(toolcrib, code):
    done = toolcrib.command("shell", "--no-imports", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def story(toolcrib):
    return json.loads(shell(toolcrib, STORY))


def test_the_two_files_are_private_and_contain_no_secret_in_plain_text(source, backup):
    assert backup.stat().st_mode & 0o777 == 0o600
    assert key_path(backup).stat().st_mode & 0o777 == 0o600
    clear = gzip.decompress(backup.read_bytes()).decode()
    assert "get_forecast" in clear
    assert CANARY not in clear
    keys = json.loads(key_path(backup).read_text())["files"]
    assert keys["encryption.key"] == (source.data_dir / "encryption.key").read_text().strip()
    for secret in (*keys.values(), source.token("admin")):
        assert secret not in clear
    assert CANARY not in key_path(backup).read_text()
    header = read_header(backup)
    assert header["rows"]["servers.Credential"] == 1
    assert "catalog.0001_initial" in header["migrations"]
    assert not list(backup.parent.glob(".*.new"))


def test_existing_files_are_not_overwritten_without_an_option(source, backup):
    before = backup.read_bytes()
    done = source.command("backup", "--plain", str(backup))
    assert done.returncode == 1
    assert "exists" in done.stderr
    assert backup.read_bytes() == before


def test_everything_is_restored_into_an_empty_folder(source, backup, tmp_path):
    empty = Installation(tmp_path / "new")
    done = empty.command("restore", str(backup), "--key", str(key_path(backup)))
    assert done.returncode == 0, done.stderr
    assert story(empty) == story(source)
    assert [len(story(empty)[key]) for key in ("agents", "its groups", "calls")] == [1, 1, 1]
    state = "from sessions_app.models import Call; print(Call.objects.get().state)"
    assert (shell(source, state), shell(empty, state)) == ("sent", "unknown")
    assert shell(empty, READ_CREDENTIAL) == CANARY
    for name in ("secret.key", "encryption.key"):
        file = empty.data_dir / name
        assert file.read_text() == (source.data_dir / name).read_text()
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.with_name(name + ".old").exists()
    # It serves: the old token works, new ids follow the restored ones, no setup is required,
    # and no restored lease blocks a sync.
    with empty:
        token = source.token("admin")
        assert empty.setup_url == ""
        status, server = empty.api("GET", "/servers/weather", token=token)
        assert (status, server["tools"]) == (200, 7)
        body = {"name": "second", "transport": "http", "url": f"http://127.0.0.1:{free_port()}/mcp"}
        assert empty.api("POST", "/servers", body, token=token)[0] == 201
        wait_for(
            lambda: (
                empty.api("GET", "/servers/weather/sync-runs", token=token)[1]["items"][0]["code"]
                == "refused"
            ),
            30,
            what="a new sync of a server that is not running",
        )


def test_without_the_key_only_the_credentials_are_lost_with_a_message(backup, tmp_path):
    empty = Installation(tmp_path / "new")
    done = empty.command("restore", str(backup))
    assert done.returncode == 3
    assert read_header(backup)["key"] in done.stderr
    assert "1 credential of weather and the stored arguments and results" in done.stderr
    assert "enter the credentials again" in done.stderr
    assert len(story(empty)["tools"]) == 7

    second = empty.command("restore", str(backup), "--replace", "--key", str(key_path(backup)))
    assert second.returncode == 0, second.stderr
    assert shell(empty, READ_CREDENTIAL) == CANARY


def test_a_key_of_another_backup_is_rejected(backup, tmp_path):
    other = Installation(tmp_path / "other")
    assert other.command("migrate", "--skip-checks", "-v", "0").returncode == 0
    other_file = tmp_path / "other.backup"
    assert other.command("backup", "--plain", str(other_file)).returncode == 0
    done = other.command("restore", str(backup), "--key", str(key_path(other_file)))
    assert done.returncode == 1
    assert "another key" in done.stderr
    assert story(other)["tools"] == []


def test_existing_data_is_not_replaced_without_an_option(source, backup):
    before = story(source)
    done = source.command("restore", str(backup))
    assert done.returncode == 1
    assert "already contains data" in done.stderr
    assert story(source) == before


DAMAGED = ("cut", "flipped", "flipped in its rows", "text")


def damaged(backup, damage, target):
    content = backup.read_bytes()
    lines = gzip.decompress(content).splitlines(keepends=True)
    misnamed = gzip.compress(b"".join(lines).replace(b'"call_policy"', b'"cbers4olicy"'))
    target.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "cut at a line": gzip.compress(b"".join(lines[: len(lines) // 2])),
            "flipped": content[:2000] + bytes([content[2000] ^ 255]) + content[2001:],
            "flipped in its rows": misnamed[:-8] + content[-8:],
            "empty": b"",
            "text": b"this is not a backup\n",
            "other json": gzip.compress(b"[1, 2]\n"),
            "stranger": gzip.compress(b"".join(lines) + b'{"model": "auth.group", "pk": 1}\n'),
            "misnamed": misnamed,
            "mistyped": gzip.compress(
                b"".join(lines).replace(b'"calls_per_minute": 7', b'"calls_per_minute": "x"')
            ),
            "beheaded": gzip.compress(b"".join([b'{"format": 1}\n', *lines[1:]])),
            "orphan": gzip.compress(
                b"".join(line for line in lines if b'"servers.server"' not in line).replace(
                    b'"servers.Server": 1', b'"servers.Server": 0'
                )
            ),
            "newer": gzip.compress(
                lines[0].replace(b'"catalog.0001_initial"', b'"catalog.0099_later"')
            ),
        }[damage]
    )
    return target


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "cut at a line",
        "flipped",
        "flipped in its rows",
        "empty",
        "text",
        "other json",
        "stranger",
        "misnamed",
        "mistyped",
        "beheaded",
        "orphan",
        "newer",
    ],
)
def test_a_damaged_file_changes_nothing(backup, tmp_path, tmp_path_factory, damage):
    folder = tmp_path_factory.getbasetemp() / "bad-target"
    target = Installation(folder / "data")
    if not folder.exists():
        assert target.command("migrate", "--skip-checks", "-v", "0").returncode == 0
        target.token("admin")
    database = folder / "data" / "toolcrib.sqlite3"

    def rows():
        with sqlite3.connect(database) as connection:
            return "\n".join(connection.iterdump())

    before = rows()
    done = target.command("restore", str(damaged(backup, damage, tmp_path / "bad")), "--replace")
    assert done.returncode == 1, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert ("corrupt" in done.stderr) == (damage in DAMAGED), done.stderr
    assert rows() == before


def test_backup_and_restore_work_through_pipes(source, tmp_path):
    empty = Installation(tmp_path / "new")
    written = subprocess.run(
        source._argv("backup", "--plain", "-"),
        env=source.env,
        capture_output=True,
        check=True,
        timeout=scaled(60),
    )
    assert b"encryption.key" in written.stderr
    subprocess.run(
        empty._argv("restore", "-"),
        env=empty.env,
        input=written.stdout,
        capture_output=True,
        check=False,
        timeout=scaled(60),
    )
    assert len(story(empty)["tools"]) == 7


def test_a_missing_file_is_reported_in_a_sentence(tmp_path):
    done = Installation(tmp_path / "new").command("restore", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.needs_postgres
@pytest.mark.needs_redis
def test_sqlite_moves_to_postgresql_and_back(source, backup, postgres, shared_redis, tmp_path):
    keys = json.loads(key_path(backup).read_text())["files"]
    url = postgres.create("moved")  # not migrated
    target = Production(
        url,
        shared_redis.create(),
        tmp_path,
        {"TOOLCRIB_ENCRYPTION_KEYS": keys["encryption.key"]},
    )
    refused = target.command("restore", str(backup), "--key", str(key_path(backup)))
    assert refused.returncode == 1
    assert "TOOLCRIB_ENCRYPTION_KEYS" in refused.stderr

    done = target.command("restore", str(backup))
    assert done.returncode == 0, done.stderr
    assert story(target) == story(source)
    assert shell(target, READ_CREDENTIAL) == CANARY
    try:
        # New rows get ids after the restored ones.
        target.start("web")
        body = {"name": "second", "transport": "http", "url": f"http://127.0.0.1:{free_port()}/mcp"}
        status, response = target.api("POST", "/servers", body, token=source.token("admin"))
        assert status == 201, response
    finally:
        target.stop()

    file = tmp_path / "from-postgres.backup"
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("five random words in a row\n")
    written = target.command("backup", str(file), "--passphrase-file", str(passphrase))
    assert written.returncode == 0, written.stderr
    assert "TOOLCRIB_ENCRYPTION_KEYS" in written.stdout
    assert not key_path(file).exists()
    back = Installation(tmp_path / "back", {"TOOLCRIB_ENCRYPTION_KEYS": keys["encryption.key"]})
    returned = back.command("restore", str(file), "--passphrase-file", str(passphrase))
    assert returned.returncode == 0, returned.stderr
    assert story(back)["bodies"] == story(source)["bodies"]
    assert shell(back, READ_CREDENTIAL) == CANARY


def test_a_rotated_key_replaces_the_old_one(source, backup, tmp_path):
    home = Installation(tmp_path / "new")
    keys = json.loads(key_path(backup).read_text())["files"]
    done = home.command("restore", str(backup), "--key", str(key_path(backup)))
    assert done.returncode == 0, done.stderr
    before = audit_chain(home)
    assert before["verified"] >= 5
    new = "n" * 48
    both = {"TOOLCRIB_ENCRYPTION_KEYS": f"{new},{keys['encryption.key']}"}
    rotated = home.command("rotate_key", "--json", env=both)
    assert rotated.returncode == 0, rotated.stderr
    assert json.loads(rotated.stdout)["rotated"] == 1

    only_new = {"TOOLCRIB_ENCRYPTION_KEYS": new}
    assert audit_chain(home, only_new) == before | {"pending": before["pending"] + 1}
    read = home.command("shell", "--no-imports", "-c", READ_CREDENTIAL, env=only_new)
    assert read.stdout.strip() == CANARY
    lost = home.command("rotate_key", env={"TOOLCRIB_ENCRYPTION_KEYS": "x" * 48})
    assert lost.returncode == 3
    assert "weather: header X-Key" in lost.stderr


# --- Passphrase -----------------------------------------------------------------------------------

PASSPHRASE = {"TOOLCRIB_BACKUP_PASSPHRASE": "five random words in a row"}


def test_without_a_passphrase_nothing_is_written(source, tmp_path):
    file = tmp_path / "toolcrib.backup"
    done = source.command("backup", str(file))

    assert done.returncode == 1
    assert "there is no passphrase" in done.stderr
    assert "--plain" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_encrypted_backup_is_restored_with_its_passphrase_only(source, tmp_path):
    file = tmp_path / "toolcrib.backup"
    done = source.command("backup", str(file), env=PASSPHRASE)
    assert done.returncode == 0, done.stderr
    key = (source.data_dir / "encryption.key").read_text().strip()
    assert key.encode() not in key_path(file).read_bytes()
    for path in (file, key_path(file)):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_bytes().startswith(b"TOOLCRIB ENCRYPTED 1\n")

    empty = Installation(tmp_path / "new")
    arguments = ("restore", str(file), "--key", str(key_path(file)))
    for env, sentence in (
        ({}, "encrypted with a passphrase"),
        ({"TOOLCRIB_BACKUP_PASSPHRASE": "another passphrase"}, "The passphrase is wrong"),
    ):
        refused = empty.command(*arguments, env=env)
        assert refused.returncode == 1
        assert sentence in refused.stderr
        assert "Traceback" not in refused.stderr
    truncated = tmp_path / "truncated"
    truncated.write_bytes(file.read_bytes()[:-40])
    assert "corrupt or truncated" in empty.command("restore", str(truncated), env=PASSPHRASE).stderr
    assert story(empty)["tools"] == []

    done = empty.command(*arguments, env=PASSPHRASE)
    assert done.returncode == 0, done.stderr
    assert story(empty) == story(source)
    assert shell(empty, READ_CREDENTIAL) == CANARY


def test_a_backup_of_an_older_version_is_restored_with_its_payloads(source, tmp_path):
    """Written before payloads were encrypted: in clear, without data keys, with whole answers."""
    written = subprocess.run(
        source._argv("backup", "--plain", "-"),
        env=source.env,
        capture_output=True,
        check=True,
        timeout=scaled(60),
    )
    header, *rows = map(json.loads, gzip.decompress(written.stdout).splitlines())
    header["migrations"] = [
        name for name in header["migrations"] if "data_key" not in name and "storage" not in name
    ]
    assert len(header["migrations"]) > 10
    rows = [row for row in rows if row["model"] != "sessions_app.datakey"]
    for row in rows:
        row["fields"].pop("payload_storage", None)
        if row["model"] == "sessions_app.call":
            row["fields"]["arguments"] = '{"city": "Oslo"}'
            call = row["pk"]
    answer = {"call": call, "body": "{}", "created_at": "2026-01-01T00:00:00+00:00"}
    rows.append({"model": "sessions_app.callanswer", "pk": 1, "fields": answer})
    header["rows"]["sessions_app.CallAnswer"] = 1
    del header["rows"]["sessions_app.DataKey"]
    file = tmp_path / "old.backup"
    file.write_bytes(
        gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in [header, *rows]))
    )
    key_file = tmp_path / "old.key"
    assert source.command("backup", "--plain", str(tmp_path / "now")).returncode == 0
    key_path(tmp_path / "now").rename(key_file)

    target = Installation(tmp_path / "new")
    done = target.command("restore", str(file), "--key", str(key_file))

    assert done.returncode == 0, done.stderr
    assert story(target) == story(source)
    count = "from sessions_app.models import CallAnswer; print(CallAnswer.objects.count())"
    assert shell(target, count) == "0"
    with sqlite3.connect(target.data_dir / "toolcrib.sqlite3") as database:
        assert database.execute("SELECT arguments FROM sessions_app_call").fetchone()[0][0] == "~"
