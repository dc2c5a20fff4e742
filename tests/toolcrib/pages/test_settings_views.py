"""Settings, people and profile pages, for admins and operators."""

import re
from datetime import UTC, datetime

import pytest
from django.contrib.auth.models import User
from django.test import Client

from catalog import preferences
from catalog.audit import SYSTEM, Actor
from catalog.models import AuditEntry
from tests.support.factories import make_server
from tests.support.people import PASSWORD, make_person
from toolcrib.accounts import invitations
from toolcrib.lib import display
from toolcrib.lib.errors import Conflict
from toolcrib.lib.roles import Role, role_of
from toolcrib.lib.text import plural
from toolcrib.pages import settings_views

pytestmark = pytest.mark.django_db
BACKEND = "django.contrib.auth.backends.ModelBackend"
PAGES = ("general", "tokens", "sync", "retention", "people", "about", "profile")


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


@pytest.fixture
def as_admin(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


@pytest.fixture
def as_operator(operator):
    client = Client()
    client.force_login(operator, backend=BACKEND)
    return client


def test_settings_open_with_general_and_link_every_page(as_admin):
    assert as_admin.get("/settings").headers["Location"] == "/settings/general"
    page = as_admin.get("/settings/general").content.decode()
    for name in PAGES:
        assert f'href="/settings/{name}"' in page
    assert re.search(r'data-go=","', page)
    assert as_admin.get("/settings/colours").status_code == 404


@pytest.mark.parametrize("name", PAGES)
def test_every_page_needs_few_queries_and_the_operator_role(
    name, as_admin, as_operator, outsider, client, django_assert_max_num_queries
):
    as_admin.get(f"/settings/{name}")
    with django_assert_max_num_queries(25):
        assert as_admin.get(f"/settings/{name}").status_code == 200
    assert as_operator.get(f"/settings/{name}").status_code == 200
    stranger = Client()
    stranger.force_login(outsider, backend=BACKEND)
    assert stranger.get(f"/settings/{name}").status_code == 403


def test_a_section_saves_in_displayed_units_and_reports_the_change(as_admin):
    before = preferences.values()

    response = as_admin.post("/settings/general", {"session_idle_seconds": "90"}, follow=True)

    assert "Saved: session idle timeout. Applies immediately." in text_of(response)
    assert preferences.values() == before | {"session_idle_seconds": 5400}
    assert 'value="90"' in response.content.decode()
    assert AuditEntry.objects.get().verb == "settings.change"


def test_saving_unchanged_values_records_no_change(as_admin):
    fields = {"keep_payloads_days": "30", "keep_sessions_days": "365"}

    response = as_admin.post("/settings/retention", fields, follow=True)
    assert "No changes." in text_of(response)
    assert not AuditEntry.objects.exists()


@pytest.mark.parametrize("bad", ["", "0", "x", "99999999", "1.5"])
def test_an_invalid_value_is_rejected_at_its_field(as_admin, bad):
    fields = {"keep_payloads_days": bad, "keep_sessions_days": "10"}

    response = as_admin.post("/settings/retention", fields)

    assert response.status_code == 422
    assert 'aria-invalid="true"' in response.content.decode()
    assert preferences.value("keep_sessions_days") == 365


def test_values_fixed_by_the_environment_show_their_variable_and_cannot_be_changed(
    as_admin, settings
):
    settings.FROM_ENVIRONMENT = frozenset({"TOOLCRIB_KEEP_PAYLOADS_DAYS", "TOOLCRIB_SYNC_GAP"})
    settings.KEEP_PAYLOADS_DAYS = 3

    page = as_admin.get("/settings/retention")
    assert "3 days Set by TOOLCRIB_KEEP_PAYLOADS_DAYS ." in text_of(page)
    assert 'name="keep_payloads_days"' not in page.content.decode()
    as_admin.post("/settings/retention", {"keep_payloads_days": 9, "keep_sessions_days": 10})
    now = preferences.values("retention")
    assert now == {"keep_payloads_days": 3, "keep_sessions_days": 10}
    sync = text_of(as_admin.get("/settings/sync"))
    assert "s TOOLCRIB_SYNC_GAP" in sync
    assert "TOOLCRIB_SYNC_GAP default" not in sync
    assert "TOOLCRIB_MAX_TOOLS default" in sync


def test_an_operator_can_read_settings_and_not_change_them(as_operator, admin):
    page = as_operator.get("/settings/retention")
    assert "Only admins can change settings." in text_of(page)
    assert (
        "<button"
        not in page.content.decode().partition('class="settings"')[2].partition("</main>")[0]
    )

    response = as_operator.post("/settings/retention", {"keep_payloads_days": 1})

    assert response.status_code == 403
    assert preferences.value("keep_payloads_days") == 30


def test_every_listed_environment_setting_exists():
    for section, rows in settings_views.ENVIRONMENT.items():
        listed = settings_views._environment(section)
        assert [row["variable"] for row in listed] == [variable for variable, *_ in rows]


# --- People -------------------------------------------------------------------------------------


def test_an_invitation_shows_its_link_once_and_the_link_works(as_admin):
    response = as_admin.post("/settings/people", {"name": "Bo@example.org", "role": "operator"})

    link = re.search(r"http://localhost:8000(/join/[^<\s]+)", response.content.decode())[1]
    assert "no-store" in response.headers["Cache-Control"]
    assert "/join/" not in as_admin.get("/settings/people").content.decode()
    assert "Invited" in text_of(as_admin.get("/settings/people"))
    bo = Client()
    assert bo.post(link, {"password": "a long and quiet river"}).status_code == 302
    assert role_of(User.objects.get(username="bo@example.org")) == Role.OPERATOR
    assert AuditEntry.objects.filter(verb="person.invite", actor_label="ada@example.org").exists()


@pytest.mark.parametrize("name", ["", "two words", "x" * 151, "otto@example.org"])
def test_an_invalid_invitation_is_rejected(as_admin, name):
    make_person("otto@example.org", Role.OPERATOR, PASSWORD)

    response = as_admin.post("/settings/people", {"name": name, "role": "operator"})

    assert response.status_code == 422
    assert "/join/" not in response.content.decode()


def test_a_role_change_takes_effect_with_the_next_request(as_admin, as_operator, operator):
    as_admin.post(f"/settings/people/{operator.pk}/role", {"role": "outsider"})

    assert as_operator.get("/tools").status_code == 403
    entry = AuditEntry.objects.get(verb="person.role")
    assert (entry.before, entry.after) == ({"role": "operator"}, {"role": "outsider"})


def test_a_disabled_person_loses_access_immediately_and_can_be_enabled_again(
    as_admin, as_operator, operator
):
    path = f"/settings/people/{operator.pk}"

    as_admin.post(f"{path}/disable")
    assert as_operator.get("/tools").headers["Location"].startswith("/sign-in")
    as_admin.post(f"{path}/enable")

    operator.refresh_from_db()
    assert operator.is_active
    assert list(AuditEntry.objects.values_list("verb", flat=True)) == [
        "person.enable",
        "person.disable",
    ]


@pytest.mark.parametrize(("act", "fields"), [("disable", {}), ("role", {"role": "operator"})])
def test_the_last_admin_cannot_be_removed(as_admin, admin, act, fields):
    invitations.invite("eve@example.org", Role.ADMIN, actor=SYSTEM)  # has not joined
    admin.set_password(PASSWORD)
    admin.save()
    as_admin.force_login(admin, backend=BACKEND)
    disabled = make_person("zoe@example.org", Role.ADMIN, PASSWORD)
    invitations.set_active(disabled, False, actor=SYSTEM)

    response = as_admin.post(f"/settings/people/{admin.pk}/{act}", fields, follow=True)

    assert "ada@example.org is the last admin." in text_of(response)
    admin.refresh_from_db()
    assert role_of(admin) == Role.ADMIN


def test_an_admin_can_be_disabled_if_another_remains(admin):
    make_person("bo@example.org", Role.ADMIN, PASSWORD)

    invitations.set_active(admin, False, actor=SYSTEM)
    with pytest.raises(Conflict):
        invitations.change_role(
            User.objects.get(username="bo@example.org"), Role.OPERATOR, actor=Actor.command("x")
        )


def test_a_password_link_is_shown_to_admins_only(as_admin, as_operator, operator, admin):
    response = as_admin.post(f"/settings/people/{operator.pk}/link")
    assert "/join/" in response.content.decode()
    assert "Invitation for otto@example.org" in text_of(response)
    joined = make_person("bo@example.org", Role.OPERATOR, PASSWORD)
    response = as_admin.post(f"/settings/people/{joined.pk}/link")
    assert "Password link for bo@example.org" in text_of(response)

    for act in ("link", "role", "disable"):
        rejected = as_operator.post(f"/settings/people/{admin.pk}/{act}", {"role": "outsider"})
        assert rejected.status_code == 403
    assert as_operator.post("/settings/people", {"name": "x", "role": "admin"}).status_code == 403
    assert not User.objects.filter(username="x").exists()
    assert "Invite person" not in text_of(as_operator.get("/settings/people"))


@pytest.mark.parametrize(("path", "status"), [("0/role", 404), ("{}/paint", 404), ("{}/role", 422)])
def test_invalid_changes_of_a_person_are_rejected(as_admin, operator, path, status):
    assert as_admin.post(f"/settings/people/{path.format(operator.pk)}").status_code == status


def test_the_list_of_people_needs_a_fixed_number_of_queries(
    as_admin, django_assert_max_num_queries
):
    as_admin.get("/settings/people")
    User.objects.bulk_create(User(username=f"p{n}", password="!") for n in range(600))

    with django_assert_max_num_queries(18):
        page = as_admin.get("/settings/people")

    assert "Only the first 500 people are listed." in text_of(page)


# --- Profile ------------------------------------------------------------------------------------


def test_times_numbers_and_density_are_shown_as_the_profile_says(as_operator, db):
    make_server(slug="crm", last_synced_at=datetime(2026, 1, 2, 12, 0, tzinfo=UTC))
    values = {"timezone": "Asia/Tokyo", "numbers": "point", "density": "compact", "keys": "on"}
    assert as_operator.post("/settings/profile", values).status_code == 302
    page = as_operator.get("/servers").content.decode()
    assert "Fri 2 Jan 2026, 21:00:00 JST" in page
    assert 'data-density="compact"' in page
    assert plural(1940, "tool") == "1,940 tools"  # outside of a request
    with display.activate(display.read(values)):
        assert plural(1940, "tool") == "1.940 tools"
    assert as_operator.post("/settings/profile", {"timezone": "Nowhere"}).status_code == 422
    as_operator.cookies["timezone"] = "Nowhere"
    assert "12:00:00 UTC" in as_operator.get("/servers").content.decode()


def test_keyboard_shortcuts_are_turned_off_and_on_per_browser(as_operator):
    assert 'data-keys="on"' in as_operator.get("/tools").content.decode()

    as_operator.post("/settings/profile", {})
    assert 'data-keys="off"' in as_operator.get("/tools").content.decode()

    as_operator.post("/settings/profile", {"keys": "on"})
    assert 'data-keys="on"' in as_operator.get("/tools").content.decode()


def test_the_api_lists_and_changes_settings(client, admin_token):
    def send(method, body=None):
        return getattr(client, method)(
            "/api/v1/settings",
            body,
            content_type="application/json",
            headers={"authorization": f"Bearer {admin_token}"},
        )

    listed = {item["name"]: item for item in send("get").json()["items"]}
    assert listed["keep_payloads_days"]["value"] == listed["keep_payloads_days"]["default"]

    changed = send("patch", {"values": {"keep_payloads_days": 3}}).json()["items"]
    assert next(item for item in changed if item["name"] == "keep_payloads_days")["value"] == 3
    assert preferences.value("keep_payloads_days") == 3

    for bad in ({"keep_payloads_days": 0}, {"colour": 1}):
        rejected = send("patch", {"values": bad})
        assert rejected.status_code == 422
        assert next(iter(bad)) in rejected.json()["error"]["message"]


def test_general_settings_offer_a_missing_embedding_model(as_operator, settings, monkeypatch):
    settings.EMBEDDINGS = True
    assert "toolcrib install-model" not in as_operator.get("/settings/general").content.decode()
    monkeypatch.setattr("catalog.search.embeddings.encoder.PACKAGE", "no_such_package")
    assert "toolcrib install-model" in as_operator.get("/settings/general").content.decode()
