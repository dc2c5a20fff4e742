"""Syncs: lists, failures, leases, scheduling, credentials and the confirmation of programs."""

import json
import os
import select
import sys
import threading
from datetime import timedelta

import pytest
from django.db import connections
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import AuditEntry, Group, Revision, Tool
from servers.mcp_json import importer
from servers.models import Server, SyncRun, Trigger
from servers.registration import actions as server_actions
from servers.registration import validation
from servers.registration.drafts import ServerDraft
from servers.secret import Secret
from servers.sync import connection_test, runner, scheduling
from tests.support.factories import (
    ingest_tools,
    make_program,
    make_server,
    set_confirmed_credentials,
    tool_object,
)
from tests.support.upstreams.answers import LEGACY, MODERN
from tests.support.upstreams.running import ROOT, received_by, running_http
from tests.support.waiting import scaled
from toolcrib.lib.errors import ToolcribError

pytestmark = pytest.mark.django_db(transaction=True)

# A normal server, except while `came` exists: on tools/list it writes to `came`, and waits at `go`
# before it sends the answer prepared at that time.
GATED = """
import json, os, sys
from tests.support.upstreams.answers import respond, tool_list_json
from tests.support.waiting import scaled
came, go, tools = sys.argv[1:]
for line in sys.stdin:
    message = json.loads(line)
    reply = respond(message, tool_list_json(tools), "modern")
    if message.get("method") == "tools/list" and os.path.exists(came):
        open(came, "w").write("x")
        open(go).read(1)
    if reply is not None:
        print(reply.replace("\\n", " "), flush=True)
"""


def names():
    return set(Tool.objects.servable().values_list("name", flat=True))


def synced(server, trigger=Trigger.MANUAL) -> SyncRun:
    return runner.sync_now(server.pk, trigger)


def fresh(server) -> Server:
    return Server.objects.get(pk=server.pk)


def set_fields(server, **fields) -> Server:
    Server.objects.filter(pk=server.pk).update(**fields)
    return fresh(server)


class ToolsFile:
    """A file of tools that an upstream reads each time it starts."""

    def __init__(self, path):
        self.path = path

    def offer(self, *items):
        self.path.write_text(json.dumps(items))


@pytest.fixture
def tools_file(tmp_path):
    return ToolsFile(tmp_path / "tools.json")


class Gate:
    """A server that pauses in the middle of a sync until it is released."""

    def __init__(self, folder, tools):
        self.paths = folder / "came", folder / "go"
        for path in self.paths:
            os.mkfifo(path)
        # Read-write, so that opening does not wait for the other side.
        self.came, self.go = (os.open(path, os.O_RDWR) for path in self.paths)
        args = ["-c", GATED, *map(str, self.paths), str(tools.path)]
        digest = validation.argv_digest([sys.executable, *args], str(ROOT))
        self.server = make_server(
            transport="stdio",
            command=sys.executable,
            args=args,
            cwd=str(ROOT),
            confirmed_argv=digest,
        )
        self.runs = []
        self.thread = threading.Thread(target=self._sync)

    def _sync(self):
        try:
            self.runs.append(synced(self.server))
        finally:
            connections.close_all()

    def enter(self):
        """Start a sync in a thread, and return when the server has received tools/list."""
        self.thread.start()
        assert select.select([self.came], [], [], 60)[0], "the server received no tools/list"
        self.paths[0].unlink()  # only this sync waits

    def leave(self) -> SyncRun | None:
        """Let the server answer, and return the finished run."""
        os.write(self.go, b"x")
        self.thread.join(scaled(60))
        return SyncRun.objects.filter(pk=self.runs[0].pk).first()

    def close(self):
        os.write(self.go, b"x")
        if self.thread.ident:
            self.thread.join(scaled(60))
        os.close(self.came)
        os.close(self.go)


@pytest.fixture
def gate(tmp_path, tools_file):
    tools_file.offer(tool_object("old"))
    gate = Gate(tmp_path, tools_file)
    yield gate
    gate.close()


# --- End to end -------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ["modern", "legacy"])
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_sync_adds_the_tools_of_a_server_to_the_catalog(transport, era):
    legacy = ("--legacy",) if era == "legacy" else ()
    if transport == "stdio":
        server = make_program("healthy", *legacy, slug="weather")
        run = synced(server)
    else:
        with running_http("healthy", *legacy) as url:
            server = make_server(slug="weather", url=url)
            run = synced(server)

    assert (run.outcome, run.added, run.rejected, run.pages) == ("ok", 7, 0, 1)
    assert run.trigger == "manual"
    assert "get_forecast" in run.names["added"]
    assert run.seconds > 0
    server = fresh(server)
    assert (server.state, server.state_reason) == ("connected", "")
    assert server.protocol_version == (MODERN if era == "modern" else LEGACY)
    assert server.server_info["name"] == "weather"
    assert server.instructions == "Ask for forecasts by city."
    assert server.sync_lease_until is None
    assert server.sync_due_at > timezone.now()
    tool = Tool.objects.get(public_name="weather__get_forecast")
    assert tool.approved.annotations["readOnlyHint"] is True
    assert tool in server.group.tools.all()


@pytest.mark.parametrize(("trust", "expected"), [("auto", True), ("strict", False)])
def test_the_first_sync_alone_describes_the_group(trust, expected):
    server = set_fields(make_program("healthy", slug="weather"), trust=trust)
    synced(server)
    group = Group.objects.get(follows=server)
    assert group.description == ("Ask for forecasts by city." if expected else "")
    assert group.is_described_by_server is expected

    group_actions.edit(group, description="", actor=SYSTEM)
    synced(server)
    assert Group.objects.get(follows=server).description == ""


def test_a_second_sync_without_changes_does_not_increment_the_revision(tools_file):
    tools_file.offer(tool_object("a"), tool_object("b"))
    server = make_program("raw_stdio", "--tools-file", str(tools_file.path))
    synced(server)
    revision = Revision.current()

    run = synced(server)

    assert (run.added, run.changed, run.removed, run.unchanged) == (0, 0, 0, 2)
    assert Revision.current() == revision


def test_all_pages_are_listed():
    run = synced(make_program("many", "--tools", "95", "--pages", "10"))

    assert (run.outcome, run.added, run.pages) == ("ok", 95, 10)
    assert names() == {f"tool_{number}" for number in range(95)}


def test_a_rejected_tool_is_named_in_the_run_and_the_others_are_added(tools_file):
    tools_file.offer(tool_object("good"), {"name": "bad"}, 7, tool_object("fine"))

    run = synced(make_program("raw_stdio", "--tools-file", str(tools_file.path)))

    assert (run.outcome, run.added, run.rejected) == ("ok", 2, 2)
    assert run.names["rejected"] == [
        {"name": "bad", "reason": "inputSchema must be an object, not missing or null"},
        {"name": "(no name)", "reason": "not an object"},
    ]
    assert names() == {"good", "fine"}
    assert Tool.objects.get(name="bad").state == "rejected"


# --- Failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("same", "cursor_repeated"),
        ("cycle", "cursor_loop"),
        ("endless", "page_limit"),
        ("empty", "cursor_repeated"),
        ("huge", "cursor_invalid"),
    ],
)
def test_an_invalid_cursor_fails_with_its_own_code_and_the_old_list_stays(how, code):
    """Hostile input 2."""
    server = make_program("many", "--cursor", how)
    ingest_tools(server, tool_object("old"))

    run = synced(server)

    assert (run.outcome, run.code) == ("failed", code)
    assert run.error
    assert names() == {"old"}
    assert fresh(server).state_code == code


@pytest.mark.parametrize(
    ("path", "code"), [("/500", "http"), ("/html", "not_mcp"), ("/401", "auth"), ("/list/cut", "")]
)
def test_a_failing_server_keeps_its_last_list_and_records_the_reason(path, code):
    with running_http("raw_http") as url:
        server = make_server(url=url + path)
        ingest_tools(server, tool_object("old"))
        revision = Revision.current()

        run = synced(server)

    assert run.outcome == "failed"
    assert run.code.startswith(code)
    server = fresh(server)
    assert server.state == "failing"
    assert server.state_reason == run.error
    assert server.failures == 1
    assert names() == {"old"}
    assert Revision.current() == revision
    assert server.last_synced_at is None


def test_the_stderr_of_a_crashed_program_is_recorded(tmp_path):
    run = synced(make_program("raw_stdio", "--do", "crash"))

    assert (run.outcome, run.code) == ("failed", "crashed")
    assert "no API key" in run.detail
    assert "\x1b" not in run.detail


def test_a_server_that_recovers_is_connected_again(tools_file):
    tools_file.offer(tool_object("a"))
    server = make_program("raw_stdio", "--tools-file", str(tools_file.path))
    set_fields(server, state="failing", state_code="crashed", state_reason="It did.", failures=3)

    synced(server)

    server = fresh(server)
    assert (server.state, server.state_code, server.state_reason) == ("connected", "", "")
    assert server.failures == 0


def test_tools_stay_available_when_one_list_is_empty(tools_file):
    """R15."""
    many = [tool_object(f"t{number}") for number in range(200)]
    server = make_program("raw_stdio", "--tools-file", str(tools_file.path))
    tools_file.offer(*many)
    synced(server)
    revision = Revision.current()

    tools_file.offer()
    held = synced(server)
    assert (held.outcome, held.removed) == ("held", 0)
    assert "More than half" in held.error
    assert len(names()) == 200
    assert fresh(server).sync_due_at < timezone.now() + timedelta(seconds=61)

    tools_file.offer(*many)
    assert synced(server).outcome == "ok"
    assert len(names()) == 200
    assert Revision.current() == revision


def test_tools_that_are_missing_in_two_syncs_are_removed(tools_file):
    """R15."""
    server = make_program("raw_stdio", "--tools-file", str(tools_file.path))
    tools_file.offer(*map(tool_object, "abcd"))
    synced(server)
    tools_file.offer(tool_object("a"))
    synced(server)

    run = synced(server)

    assert (run.outcome, run.removed) == ("ok", 3)
    assert names() == {"a"}
    assert fresh(server).removals_held is False


# --- Concurrent syncs -------------------------------------------------------------------------


def test_concurrent_syncs_of_one_server_list_it_once(gate):
    gate.enter()

    assert runner.sync_if_due(gate.server.pk) is None
    assert gate.leave().outcome == "ok"
    assert SyncRun.objects.count() == 1


def test_a_manual_sync_waits_for_a_running_one(gate, tools_file):
    gate.enter()
    second = []

    def after():
        try:
            second.append(synced(gate.server))
        finally:
            connections.close_all()

    waiting = threading.Thread(target=after)
    waiting.start()
    tools_file.offer(tool_object("old"), tool_object("new"))
    gate.leave()
    waiting.join()

    assert second[0].outcome == "ok"
    assert names() == {"old", "new"}
    assert SyncRun.objects.count() == 2


def test_waiting_for_a_running_sync_times_out():
    server = make_server(sync_lease_until=timezone.now() + timedelta(minutes=1))

    with pytest.raises(ToolcribError, match="still running") as caught:
        runner.sync_now(server.pk, Trigger.MANUAL, patience=0)
    assert caught.value.code == "busy"


def test_requests_during_a_sync_cause_exactly_one_more(gate, tools_file):
    """R5: the last change is never lost."""
    gate.enter()
    tools_file.offer(tool_object("old"), tool_object("new"))
    for _ in range(50):
        scheduling.request_sync(gate.server.pk, Trigger.LIST_CHANGED)
    gate.leave()
    assert names() == {"old"}

    server = fresh(gate.server)
    assert server.sync_due_at <= server.last_sync_started_at + scheduling.minimum_gap(server)
    set_fields(server, sync_due_at=timezone.now())
    run = runner.sync_if_due(server.pk)

    assert (run.outcome, run.trigger) == ("ok", "list_changed")
    assert names() == {"old", "new"}
    assert runner.sync_if_due(server.pk) is None


def test_a_sync_of_a_server_that_was_edited_meanwhile_saves_nothing(gate):
    """R13."""
    ingest_tools(gate.server, tool_object("before"))
    gate.enter()
    set_confirmed_credentials(gate.server, "env", {"TOKEN": Secret("x")})

    run = gate.leave()

    assert run.outcome == "superseded"
    assert names() == {"before"}
    server = fresh(gate.server)
    assert server.sync_lease_until is None
    assert server.sync_due_at <= timezone.now()


def test_a_sync_that_lost_its_lease_saves_nothing(gate, tools_file):
    """R13, R17: an outdated list does not replace a newer one."""
    gate.enter()
    tools_file.offer(tool_object("new"))
    set_fields(gate.server, sync_lease_until=timezone.now() - timedelta(seconds=1))
    newer = synced(gate.server)

    stale = gate.leave()

    assert (newer.outcome, stale.outcome) == ("ok", "superseded")
    assert newer.fence > stale.fence
    assert names() == {"new"}


def test_a_server_deleted_during_its_sync_leaves_no_rows(gate):
    gate.enter()
    server_actions.delete_server(gate.server, actor=SYSTEM)
    gate.leave()

    assert not Tool.objects.exists()
    assert not SyncRun.objects.exists()


def test_the_run_of_a_dead_process_is_marked_as_interrupted_by_the_next(tools_file):
    """R18."""
    tools_file.offer(tool_object("a"))
    server = make_program("raw_stdio", "--tools-file", str(tools_file.path))
    past = timezone.now() - timedelta(minutes=1)
    set_fields(server, sync_fence=7, sync_lease_until=past)
    dead = SyncRun.objects.create(server=server, trigger="schedule", fence=7, started_at=past)

    run = synced(server)

    dead.refresh_from_db()
    assert (dead.outcome, dead.code) == ("failed", "interrupted")
    assert dead.finished_at is not None
    assert (run.outcome, run.fence) == ("ok", 8)


def test_a_disabled_server_is_not_synced():
    server = make_server(enabled=False, sync_due_at=timezone.now())

    scheduling.request_sync(server.pk, Trigger.LIST_CHANGED)

    assert runner.sync_if_due(server.pk) is None
    assert not SyncRun.objects.exists()


# --- Scheduling -------------------------------------------------------------------------------


def notified(server, **fields):
    """Return the seconds from the last sync to the one that a notification makes due."""
    now = timezone.now()
    fields = {"last_sync_started_at": now, "sync_due_at": None, **fields}
    server = set_fields(server, **fields)
    scheduling.request_sync(server.pk, Trigger.LIST_CHANGED)
    return (fresh(server).sync_due_at - server.last_sync_started_at).total_seconds()


def test_a_notification_right_after_a_sync_waits_for_the_minimum_gap():
    assert notified(make_server()) == 5


def test_a_notification_after_the_gap_makes_a_sync_due_at_once():
    long_ago = timezone.now() - timedelta(seconds=10)

    assert notified(make_server(), last_sync_started_at=long_ago) == pytest.approx(10, abs=2)


@pytest.mark.parametrize(
    ("quiet", "seconds"), [(0, 5), (1, 5), (2, 10), (3, 20), (4, 40), (5, 60), (50, 60)]
)
def test_the_gap_grows_while_notifications_bring_no_changes(quiet, seconds):
    """R6: a server that notifies whenever it is listed does not loop."""
    assert notified(make_server(), quiet_syncs=quiet) == seconds


def test_the_gap_is_reset_after_a_quiet_time():
    server = make_server(quiet_syncs=5, last_sync_started_at=timezone.now() - timedelta(minutes=3))

    assert scheduling.minimum_gap(server) == timedelta(seconds=5)


def test_notified_syncs_without_changes_are_counted_until_a_change(tools_file):
    server = make_program("raw_stdio", "--tools-file", str(tools_file.path))
    tools_file.offer(tool_object("a"))
    synced(server)

    for expected in (1, 2):
        synced(server, Trigger.LIST_CHANGED)
        assert fresh(server).quiet_syncs == expected
    tools_file.offer(tool_object("a"), tool_object("b"))
    synced(server, Trigger.LIST_CHANGED)
    assert fresh(server).quiet_syncs == 0


def test_a_manual_sync_does_not_wait_for_the_gap():
    server = make_server(last_sync_started_at=timezone.now(), quiet_syncs=6)

    scheduling.request_sync(server.pk, Trigger.LIST_CHANGED)
    scheduling.request_sync(server.pk, Trigger.MANUAL)

    server = fresh(server)
    assert server.sync_due_at <= timezone.now()
    assert server.sync_trigger == "manual"


def test_a_request_does_not_postpone_an_earlier_one():
    soon = timezone.now() + timedelta(seconds=1)
    server = make_server(last_sync_started_at=timezone.now(), sync_due_at=soon)

    scheduling.request_sync(server.pk, Trigger.LIST_CHANGED)

    assert fresh(server).sync_due_at == soon


@pytest.mark.parametrize(
    ("ttl_ms", "low", "high"),
    [
        (None, 720, 1080),
        (-1, 720, 1080),
        (0, 720, 1080),
        (1, 5, 7.5),
        (60_000, 48, 72),
        (10**18, 2400, 3600),
        (10**400, 2400, 3600),
    ],
)
def test_the_ttl_of_a_server_is_clamped_between_five_seconds_and_an_hour(ttl_ms, low, high):
    """Hostile input 28."""
    waits = {scheduling.next_poll(Server(), ttl_ms).total_seconds() for _ in range(200)}

    assert low <= min(waits)
    assert max(waits) <= high
    assert len(waits) > 100, "polls are jittered"


def test_the_shortest_poll_interval_respects_the_gap():
    waits = [scheduling.next_poll(Server(poll_seconds=5), None) for _ in range(50)]

    assert min(waits) >= timedelta(seconds=5)


@pytest.mark.parametrize(("ttl", "warned"), [(-1, True), ('"soon"', True), (60000, False)])
def test_an_invalid_ttl_is_ignored_with_a_warning(tmp_path, ttl, warned):
    """Hostile input 28."""
    path = tmp_path / "list.json"
    path.write_text(f'{{"tools": [], "ttlMs": {ttl}, "cacheScope": "public"}}')

    run = synced(make_program("raw_stdio", "--tools-file", str(path), "--era", "legacy"))

    assert run.outcome == "ok"
    assert any("ttlMs" in warning for warning in run.warnings) == warned


# --- Protocol version and credentials ---------------------------------------------------------


def test_a_server_that_changes_its_protocol_version_is_audited(tools_file):
    """Hostile input 29."""
    tools_file.offer(tool_object("a"))
    server = make_program("raw_stdio", "--era", "legacy", "--tools-file", str(tools_file.path))
    set_fields(server, protocol_version=MODERN)

    synced(server)
    synced(server)

    entry = AuditEntry.objects.get(verb="server.protocol")
    assert (entry.before, entry.after) == ({"version": MODERN}, {"version": LEGACY})
    assert fresh(server).protocol_version == LEGACY


def with_header(slug, url):
    return ServerDraft(
        name=slug,
        slug=slug,
        transport="http",
        url=url,
        headers={"Authorization": Secret("Bearer canary")},
    )


def bearers(url):
    return {request["headers"].get("authorization") for request in received_by(url)["requests"]}


def test_a_credential_is_sent_to_the_server_it_was_entered_for():
    with running_http("raw_http") as url:
        server = server_actions.add_server(with_header("one", f"{url}/tools"), actor=SYSTEM)

        assert synced(server).outcome == "ok"
        assert bearers(url) == {"Bearer canary"}


def test_a_credential_is_not_sent_to_another_address():
    """T4: editing the URL removes the credentials of the old one."""
    with running_http("raw_http") as old, running_http("raw_http") as new:
        server = server_actions.add_server(with_header("one", f"{old}/tools"), actor=SYSTEM)
        draft = ServerDraft(name="one", slug="one", transport="http", url=f"{new}/tools")
        server_actions.edit_connection(server, draft, actor=SYSTEM)

        run = synced(server)
        assert (run.outcome, run.code) == ("failed", "credentials_missing")
        assert received_by(new)["requests"] == []

        server_actions.set_credentials(server, "header", {"Authorization": None}, actor=SYSTEM)
        assert synced(server).outcome == "ok"
        assert bearers(new) == {None}


# --- Confirmation of programs -----------------------------------------------------------------


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "it ran"


def canary_argv(canary):
    return [sys.executable, "-c", f"open({str(canary)!r}, 'w').close()"]


def draft_of(argv, slug="canary"):
    return ServerDraft(
        name=slug, slug=slug, transport="stdio", command=argv[0], args=tuple(argv[1:])
    )


def existing(argv, confirmed):
    return make_server(transport="stdio", command=argv[0], args=argv[1:], confirmed_argv=confirmed)


def add(argv, confirmed):
    server_actions.add_server(draft_of(argv), actor=SYSTEM, confirmed=confirmed)


def edit(argv, confirmed):
    server_actions.edit_connection(make_server(), draft_of(argv), actor=SYSTEM, confirmed=confirmed)


def edit_a_program(argv, confirmed):
    """Its old argv was confirmed, the new one was not."""
    harmless = [sys.executable, "-c", "pass"]
    server = existing(harmless, validation.argv_digest(harmless, ""))
    server_actions.edit_connection(server, draft_of(argv), actor=SYSTEM, confirmed=confirmed)


def bring_in(argv, confirmed):
    text = json.dumps({"mcpServers": {"canary": {"command": argv[0], "args": argv[1:]}}})
    (result,) = importer.save_drafts(
        importer.check_import(text, {}), actor=SYSTEM, confirmed=[confirmed] if confirmed else []
    )
    if result.code:
        raise ToolcribError(result.message, code=result.code)


def try_out(argv, confirmed):
    connection_test.test_draft(draft_of(argv), confirmed=confirmed, actor=SYSTEM)


def try_out_saved(argv, confirmed):
    result = connection_test.test_server(existing(argv, confirmed), actor=SYSTEM)
    raise ToolcribError(result.message, code=result.code)


def run_sync(argv, confirmed):
    run = synced(existing(argv, confirmed))
    raise ToolcribError(run.error, code=run.code)


ACTIONS = [add, edit, edit_a_program, bring_in, try_out, try_out_saved, run_sync]


@pytest.mark.parametrize("action", ACTIONS)
def test_no_action_runs_a_program_if_stdio_is_not_allowed(action, canary, settings):
    """T1."""
    settings.ALLOW_STDIO = False
    argv = canary_argv(canary)

    with pytest.raises(ToolcribError) as caught:
        action(argv, validation.argv_digest(argv, ""))

    assert caught.value.code == "stdio_off"
    assert not canary.exists()
    assert not Server.objects.filter(slug="canary").exists()


@pytest.mark.parametrize("action", ACTIONS)
def test_no_action_runs_a_program_that_was_not_confirmed(action, canary):
    """T1."""
    with pytest.raises(ToolcribError) as caught:
        action(canary_argv(canary), "")

    assert caught.value.code == "confirm_argv"
    assert not canary.exists()


@pytest.mark.parametrize("action", ACTIONS)
def test_no_action_runs_a_program_other_than_the_one_confirmed(action, canary):
    """T1: the argv must match exactly."""
    argv = canary_argv(canary)

    with pytest.raises(ToolcribError) as caught:
        action(argv, validation.argv_digest([*argv, "--more"], ""))

    assert caught.value.code == "confirm_argv"
    assert not canary.exists()


@pytest.mark.parametrize("action", [try_out_saved, run_sync])
def test_a_program_that_was_confirmed_runs(action, canary):
    """Verifies that the canary works."""
    argv = canary_argv(canary)

    with pytest.raises(ToolcribError):
        action(argv, validation.argv_digest(argv, ""))

    assert canary.exists()


def test_a_program_changed_in_the_database_does_not_run(canary):
    """T1: the digest is compared with the argv in the database."""
    harmless = [sys.executable, "-c", "pass"]
    server = existing(harmless, validation.argv_digest(harmless, ""))
    set_fields(server, args=canary_argv(canary)[1:])

    assert synced(server).code == "confirm_argv"
    assert not canary.exists()
