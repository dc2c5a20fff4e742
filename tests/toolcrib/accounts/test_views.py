"""Setup, sign-in, sessions and invitations."""

import json
import re

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import AuditEntry
from tests.support.people import PASSWORD
from toolcrib.accounts import invitations
from toolcrib.lib.errors import Conflict
from toolcrib.lib.roles import Role, role_of


@pytest.fixture
def browser(db):
    return Client(enforce_csrf_checks=True)


def post(browser, path, **fields):
    """Submit a form as a browser does, with the CSRF token of its page."""
    page = browser.get(path)
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.content.decode())
    assert token, page.content
    return browser.post(path, {**fields, "csrfmiddlewaretoken": token[1]})


def sign_in(browser, name, password):
    return post(browser, "/sign-in", username=name, password=password)


def test_the_setup_link_creates_the_first_admin_once(browser):
    path = f"/setup/{invitations.setup_code()}"

    response = post(browser, path, email="Ada@Example.org", password=PASSWORD)

    assert response.status_code == 302
    user = User.objects.get()
    assert role_of(user) == Role.ADMIN
    assert user.username == "ada@example.org"
    assert user.password.startswith("argon2")
    assert browser.get("/").status_code == 200
    assert Client().get(path).headers["Location"] == "/sign-in"
    with pytest.raises(Conflict):
        invitations.set_up("eve@example.org", PASSWORD)


def test_an_invalid_setup_code_is_rejected_with_a_hint(browser):
    response = browser.get("/setup/0000")
    assert response.status_code == 404
    assert "prints the current link" in response.content.decode()


@pytest.mark.parametrize("password", ["short", "123456789012", "ada@example.org"])
def test_a_weak_password_is_rejected_with_the_reason(browser, password):
    response = post(
        browser, f"/setup/{invitations.setup_code()}", email="ada@example.org", password=password
    )
    assert response.status_code == 422
    assert "assword" in response.content.decode()
    assert not User.objects.exists()


def test_signing_in_and_out(browser, admin):
    assert browser.get("/").headers["Location"] == "/sign-in?next=/"
    assert sign_in(browser, " ADA@example.org ", PASSWORD).headers["Location"] == "/"
    home = browser.get("/")
    assert home.status_code == 200
    cookie = browser.cookies["toolcrib-session"]
    assert cookie["httponly"]
    assert cookie["samesite"] == "Lax"

    old = cookie.value
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', home.content.decode())[1]
    browser.post("/sign-out", {"csrfmiddlewaretoken": token})
    thief = Client()
    thief.cookies["toolcrib-session"] = old
    assert thief.get("/").status_code == 302


def test_an_unknown_name_gets_the_same_response_as_a_wrong_password(browser, admin):
    def response_text(name):
        text = sign_in(browser, name, "wrong wrong wrong").content.decode()
        text = re.sub(r'value="[^"]*"', "", text)
        return text.replace(name, "")

    assert response_text(admin.username) == response_text("nobody@example.org")


def test_redirects_to_another_site_are_ignored(browser, admin):
    page = browser.get("/sign-in?next=https://evil.example/")
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.content.decode())[1]
    response = browser.post(
        "/sign-in?next=https://evil.example/",
        {"username": admin.username, "password": PASSWORD, "csrfmiddlewaretoken": token},
    )
    assert response.headers["Location"] == "/"
    theme = Client().post("/theme", {"theme": "dark", "next": "//evil.example"})
    assert theme.headers["Location"] == "/"


@pytest.mark.parametrize(("key", "hours"), [("seen", 0.6), ("began", 12.1)])
def test_a_session_ends_after_half_an_hour_idle_or_twelve_hours(browser, admin, key, hours):
    sign_in(browser, admin.username, PASSWORD)
    assert browser.get("/").status_code == 200
    session = browser.session
    session[key] = timezone.now().timestamp() - hours * 3600
    session.save()
    assert browser.get("/").status_code == 302


def test_changing_the_password_ends_other_sessions(browser, admin):
    sign_in(browser, admin.username, PASSWORD)
    invitations.set_password(admin, "another long and quiet river")
    assert browser.get("/").status_code == 302


def test_an_invitation_works_once_and_assigns_the_role(browser, db, capsys):
    call_command("invite", "otto@example.org", "--role", "operator", "--json")
    link = json.loads(capsys.readouterr().out)["link"]
    path = link.partition("localhost:8000")[2]

    assert post(browser, path, password=PASSWORD).status_code == 302

    assert role_of(User.objects.get()) == Role.OPERATOR
    assert browser.get("/").status_code == 200
    assert Client().get(path).status_code == 404
    with pytest.raises(Conflict):
        invitations.invite("otto@example.org", Role.ADMIN, actor=SYSTEM)


def test_a_password_link_for_an_unknown_user_fails(db, capsys):
    with pytest.raises(SystemExit) as ended:
        call_command("reset_password", "nobody")
    assert ended.value.code == 1
    assert "No user named nobody." in capsys.readouterr().err


def test_an_outsider_sees_only_which_admins_to_ask(page_of, outsider, admin):
    response = page_of(outsider, "/")
    text = response.content.decode()
    assert response.status_code == 403
    assert "viewer" in text
    assert admin.username in text
    assert "/servers" not in text


def test_every_page_has_security_headers_against_scripts_and_frames(browser, admin):
    response = browser.get("/sign-in")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["X-Frame-Options"] == "DENY"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert browser.get("/sign-in", headers={"host": "evil.test"}).status_code == 400


def test_a_form_without_a_csrf_token_is_rejected_with_a_hint(browser, admin):
    response = browser.post("/sign-in", {"username": "x", "password": "y"})
    assert response.status_code == 403
    assert "reload the page" in response.content.decode()


def test_people_change_their_own_password_and_other_browsers_are_signed_out(browser, admin):
    sign_in(browser, admin.username, PASSWORD)
    other = Client(enforce_csrf_checks=True)
    sign_in(other, admin.username, PASSWORD)
    new = "another long and quiet river"
    path, both = "/settings/password", {"new_password1": new, "new_password2": new}
    assert post(browser, path, old_password="wrong", **both).status_code == 422
    assert post(browser, path, old_password=PASSWORD, **both).headers["Location"] == (
        "/settings/profile"
    )
    assert browser.get("/settings/profile").status_code == 200
    assert other.get("/").headers["Location"].startswith("/sign-in")
    assert sign_in(Client(enforce_csrf_checks=True), admin.username, new).status_code == 302
    assert AuditEntry.objects.filter(verb="person.password").count() == 1
