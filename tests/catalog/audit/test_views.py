"""Audit log page and exports."""

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import call_command
from django.db import connection
from django.utils import timezone

from catalog import audit
from catalog.audit import SYSTEM, Actor
from catalog.audit import chain as audit_chain
from catalog.audit import queries as audit_queries
from catalog.audit import views as audit_views
from catalog.groups import actions as group_actions
from catalog.models import AuditEntry
from catalog.tools import actions as tool_actions
from tests.support.factories import make_server, make_tool
from toolcrib.lib.text import FORMULA_PREFIXES

pytestmark = pytest.mark.django_db
ADA = Actor("user", "ada@example.org")


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


@pytest.fixture
def signed_in(client, operator):
    client.force_login(operator, backend="django.contrib.auth.backends.ModelBackend")
    return client


@pytest.fixture
def forecast(db):
    return make_tool(make_server(slug="weather"), "get_forecast")


def set_time(entry, day):
    """Set the time of an entry, bypassing the append-only model."""
    at = datetime.fromisoformat(day).replace(tzinfo=UTC)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE catalog_auditentry SET at = %s WHERE id = %s", [at, entry.pk])


def test_a_row_expands_to_the_values_before_and_after(signed_in, forecast):
    tool_actions.set_call_policy(forecast, "deny", actor=ADA)

    page = text_of(signed_in.get("/audit?verb=tool.policy"))

    assert "ada@example.org changed the call policy of weather__get_forecast" in page
    assert "Field Before After policy allow deny" in page


@pytest.mark.parametrize(
    ("actor", "words"),
    [
        (ADA, "user"),
        (SYSTEM, "system"),
        (Actor.command("sync"), "command"),
        (Actor("token", "ci"), "API key"),
        (Actor("agent", "scout"), "agent"),
    ],
)
def test_each_kind_of_actor_is_named(signed_in, forecast, actor, words):
    audit.record(actor, "tool.hold", forecast)

    page = signed_in.get("/audit?verb=tool.hold")

    assert f"· {words} ·" in text_of(page)
    assert f'class="kind {actor.kind}"' in page.content.decode()


def test_a_range_ends_now_and_is_kept_by_filters_links_and_exports(signed_in, forecast):
    now = timezone.now()
    for verb, days in (("tool.hold", 0), ("tool.release", 3), ("tool.rename", 40)):
        set_time(audit.record(ADA, verb, forecast), (now - timedelta(days=days)).isoformat())

    def verbs(query, **headers):
        response = signed_in.get(f"/audit?{query}", **headers)
        return re.findall(r"· (tool\.\w+) ·", text_of(response)), response.content.decode()

    assert verbs("range=24h")[0] == ["tool.hold"]
    assert verbs("range=7d")[0] == ["tool.release", "tool.hold"]
    assert len(verbs("range=nonsense")[0]) == 3
    page = verbs("range=7d&target=tool")[1]
    assert 'name="range" value="7d"' in page  # other filters keep it
    assert re.search(r'href="\?range=30d&amp;target=tool"[^>]*>30 days', page)
    assert 'href="/audit/export.csv?range=7d&amp;target=tool"' in page
    exported = json.loads(signed_in.get("/audit/export.json?range=24h").content)["entries"]
    assert "tool.release" not in [entry["verb"] for entry in exported]
    # A date replaces the range; after a filter the links keep the other filters.
    since = f"{now - timedelta(days=60):%Y-%m-%d}"
    listed, page = verbs(f"range=24h&since={since}")
    assert (len(listed), 'name="range"' in page) == (3, False)
    page = verbs("range=7d&actor=ada@example.org", HTTP_HX_REQUEST="true")[1]
    assert re.search(r'<nav class="chips range" id="range"[^>]* hx-swap-oob="true"', page)
    assert re.search(r'href="\?range=30d&amp;actor=ada%40example.org"', page)


def test_the_date_range_is_inclusive(signed_in, forecast):
    days = {"2026-03-01 23:59:59": "tool.hold", "2026-03-02 00:00:00": "tool.release"}
    for day, verb in days.items():
        set_time(audit.record(ADA, verb, forecast), day)

    def verbs(query):
        page = text_of(signed_in.get(f"/audit?{query}"))
        return [verb for verb in days.values() if f"· {verb} ·" in page]

    assert verbs("since=2026-03-01&until=2026-03-02") == ["tool.hold", "tool.release"]
    assert verbs("until=2026-03-01") == ["tool.hold"]
    assert verbs("since=2026-03-02") == ["tool.release"]
    assert verbs("since=2026-03-03") == []
    assert len(verbs("since=yesterday&until=9999-12-31")) == 2


def test_filters_are_kept_in_the_form_and_in_the_links(signed_in, forecast):
    audit.record(ADA, "tool.hold", forecast)

    page = signed_in.get("/audit?actor=ada@example.org&since=2020-01-01&times=local")
    text = page.content.decode()

    assert 'value="2020-01-01"' in text
    assert re.search(r'<option value="ada@example.org" selected>', text)
    assert 'data-times="local"' in text
    assert "/audit/export.csv?actor=ada%40example.org&amp;since=2020-01-01" in text
    assert "Show UTC" in text


def test_htmx_gets_the_rows_and_a_url_without_empty_fields(signed_in, forecast):
    audit.record(ADA, "tool.hold", forecast)

    page = signed_in.get("/audit?q=FORE&actor=&since=", headers={"HX-Request": "true"})

    assert page.headers["HX-Push-Url"] == "/audit?q=FORE"
    assert "<html" not in page.content.decode()


def test_the_csv_contains_the_filtered_entries_and_no_formulas(signed_in, forecast):
    for label in ("=HYPERLINK(1)", "+1", "-1", "@sum", "\tx", "ada"):
        audit.record(Actor("user", label), "tool.hold", forecast, after={"reason": "a, b"})
    audit.record(ADA, "tool.release", forecast)

    response = signed_in.get("/audit/export.csv?verb=tool.hold")

    rows = list(csv.DictReader(io.StringIO(response.content.decode())))
    assert [row["actor"] for row in rows] == [
        "ada",
        "'\tx",
        "'@sum",
        "'-1",
        "'+1",
        "'=HYPERLINK(1)",
    ]
    assert rows[0]["sentence"] == "ada hid weather__get_forecast"
    assert rows[0]["after"] == '{"reason": "a, b"}'
    assert not any(cell.startswith(FORMULA_PREFIXES) for row in rows for cell in row.values())
    assert "attachment" in response.headers["Content-Disposition"]


def test_the_json_contains_before_and_after(signed_in, forecast):
    tool_actions.set_call_policy(forecast, "deny", actor=ADA)

    body = signed_in.get("/audit/export.json").json()

    assert body["entries"][0]["before"] == {"policy": "allow"}
    assert body["entries"][0]["actor"] == "ada@example.org"
    assert "note" not in body


def test_a_truncated_export_has_a_note(signed_in, forecast, monkeypatch):
    monkeypatch.setattr(audit_queries, "MAX_EXPORTED", 3)
    for _ in range(5):
        audit.record(ADA, "tool.hold", forecast)

    page = text_of(signed_in.get("/audit?verb=tool.hold"))
    table = signed_in.get("/audit/export.csv?verb=tool.hold").content.decode().splitlines()
    body = signed_in.get("/audit/export.json?verb=tool.hold").json()

    note = "the newest 3 of these 5 entries"
    assert note in page
    assert note in table[-1]
    assert len(table) == 5
    assert note in body["note"]
    assert len(body["entries"]) == 3


def test_people_without_the_operator_role_cannot_read_the_log(client, outsider):
    client.force_login(outsider, backend="django.contrib.auth.backends.ModelBackend")

    for path in ("/audit", "/audit/export.csv", "/audit/export.json"):
        assert client.get(path).status_code == 403


@pytest.mark.parametrize("path", ["/audit", "/audit?q=x&actor=ada@example.org&since=2020-01-01"])
def test_the_number_of_queries_does_not_grow_with_the_log(
    path, signed_in, forecast, django_assert_max_num_queries
):
    def count_queries(entries):
        row = {"actor_kind": "user", "actor_label": "ada@example.org", "verb": "tool.hold"}
        AuditEntry.objects.bulk_create(
            AuditEntry(**row, target_kind="tool", target_label=f"x{number}", after={"a": 1})
            for number in range(entries)
        )
        with django_assert_max_num_queries(22) as captured:
            assert signed_in.get(path).status_code == 200
        return len(captured)

    signed_in.get(path)  # the first visit writes the session
    assert count_queries(3) == count_queries(500)


def test_hostile_labels_are_escaped(signed_in, forecast):
    audit.record(Actor("user", "<script>x</script>\u202e"), "tool.hold", forecast)

    page = signed_in.get("/audit").content.decode()

    assert "<script>x" not in page
    assert "&lt;script&gt;x&lt;/script&gt;⟨U+202E⟩" in page


# --- The chain on the page, and entries about reads ---------------------------------------------


def test_the_page_says_that_the_chain_holds(signed_in, forecast):
    audit.record(ADA, "tool.hold", forecast)
    audit_chain.extend()
    audit.record(ADA, "tool.release", forecast)

    page = text_of(signed_in.get("/audit"))

    assert "All 1 chained entry verified. 1 entry to be chained." in page


def test_the_page_names_the_first_changed_entry_and_where_the_chain_holds(signed_in, forecast):
    rows = [audit.record(ADA, "tool.hold", forecast) for _ in range(3)]
    audit_chain.extend()
    set_time(rows[1], "2026-03-01 00:00:00")

    page = text_of(signed_in.get("/audit"))

    assert "The audit log was changed outside Toolcrib." in page
    assert f"holds up to entry {rows[0].pk}. Entry {rows[1].pk} was changed" in page


def test_an_entry_with_an_unknown_verb_is_shown_as_it_is(signed_in, forecast):
    """Edited by SQL, or recorded by a newer version."""
    tool_actions.set_call_policy(forecast, "deny", actor=ADA)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE catalog_auditentry SET verb = 'tool.{x}'")

    assert (
        "ada@example.org tool.{x} weather__get_forecast"
        in json.loads(signed_in.get("/audit/export.json").content)["entries"][0]["sentence"]
    )
    assert "weather__get_forecast" in text_of(signed_in.get("/audit"))


def test_a_long_log_is_verified_whole_on_request(signed_in, forecast, monkeypatch):
    monkeypatch.setattr(audit_views, "VERIFIED_ENTRIES", 2)
    rows = [audit.record(ADA, "tool.hold", forecast) for _ in range(4)]
    audit_chain.extend()
    set_time(rows[0], "2026-03-01 00:00:00")

    assert "The newest 2 chained entries verified." in text_of(signed_in.get("/audit"))
    assert "was changed outside Toolcrib" in text_of(signed_in.get("/audit?verify=1"))


@pytest.mark.parametrize(
    ("path", "verb"),
    [
        ("/audit/export.csv", "audit.export"),
        ("/audit/export.json", "audit.export"),
        ("/servers/export", "server.export"),
        ("/usage/tools.csv", "usage.export"),
    ],
)
def test_an_export_is_recorded(signed_in, path, verb):
    assert signed_in.get(path).status_code == 200

    assert AuditEntry.objects.get(verb=verb).actor_label == "otto@example.org"


@pytest.mark.django_db(transaction=True)
def test_backups_and_key_rotations_are_recorded(tmp_path, capsys):
    call_command("backup", str(tmp_path / "backup"), "--plain")
    call_command("rotate_key")
    capsys.readouterr()

    verbs = list(AuditEntry.objects.order_by("pk").values_list("verb", "actor_label"))
    assert verbs == [
        ("installation.backup", "manage.py backup"),
        ("installation.rotate_key", "manage.py rotate_key"),
    ]


def test_the_search_finds_words_of_the_sentence_and_names_the_tools(signed_in, forecast):
    group = group_actions.create("research", "Research", "", actor=ADA).group
    group_actions.assign(group, [forecast], actor=ADA)
    page = text_of(signed_in.get("/audit?q=ada+added+tools"))
    assert "ada@example.org added tools to group research : weather__get_forecast" in page
    assert "ada@example.org created group" not in page
