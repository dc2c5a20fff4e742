"""Sign-in attempts are limited by name, by address and overall; nobody is locked out for ever."""

from types import SimpleNamespace

import pytest
from django.core import signing
from django.test import Client, RequestFactory

from sessions_app.agents import rate_limits
from tests.support.people import PASSWORD, make_person
from toolcrib.accounts import sign_in_limits
from toolcrib.http.client_address import client_address
from toolcrib.lib.roles import Role

WRONG = "wrong wrong wrong"
START = 30_000 * sign_in_limits.PERIOD


@pytest.fixture(autouse=True)
def clock(monkeypatch, settings, db):
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast
    clock = SimpleNamespace(now=float(START))
    time = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: 0.0)
    monkeypatch.setattr(rate_limits, "time", time)
    rate_limits.clear()
    yield clock
    rate_limits.clear()


def attempt(name, password=WRONG, address="192.0.2.1", browser=None, **headers):
    """Send the form of the sign-in page and return the response."""
    return (browser or Client()).post(
        "/sign-in", {"username": name, "password": password}, REMOTE_ADDR=address, **headers
    )


def statuses(attempts):
    return [response.status_code for response in attempts]


def test_the_sixth_attempt_for_a_name_from_an_address_is_rejected_with_the_time_to_wait(admin):
    assert statuses(attempt(admin.username) for _ in range(5)) == [200] * 5
    rejected = attempt(admin.username, PASSWORD)
    assert rejected.status_code == 429
    assert rejected.headers["Retry-After"] == "1080"
    assert "Try again in 18 minutes." in rejected.content.decode()
    assert attempt(f" {admin.username.upper()} ").status_code == 429


def test_sixteen_guesses_for_a_locked_name_from_four_other_addresses_are_rejected(admin):
    statuses(attempt(admin.username) for _ in range(5))
    guesses = [
        attempt(admin.username, address=f"198.51.100.{host}") for host in range(4) for _ in range(4)
    ]
    assert statuses(guesses) == [200] * 5 + [429] * 11


def test_twelve_names_from_one_address_are_rejected(admin):
    guesses = [attempt(f"person-{number}@example.org") for number in range(12)]
    assert statuses(guesses) == [200] * 10 + [429] * 2
    assert attempt("person-1@example.org", address="192.0.2.2").status_code == 200


def test_guesses_for_many_names_from_many_addresses_are_limited_together(admin):
    guesses = [
        attempt(f"person-{number}@example.org", address=f"10.0.{number}.1") for number in range(103)
    ]
    assert statuses(guesses) == [200] * 100 + [429] * 3


def test_a_rejected_attempt_does_not_extend_the_wait(admin, clock):
    statuses(attempt(admin.username) for _ in range(5))
    wait = int(attempt(admin.username).headers["Retry-After"])
    for _ in range(20):
        clock.now += wait / 20
        last = attempt(admin.username, PASSWORD)
    assert last.status_code == 302


def test_a_person_signs_in_with_a_known_browser_during_an_attack(admin):
    known = Client()
    assert attempt(admin.username, PASSWORD, browser=known).status_code == 302
    known.cookies.pop("toolcrib-session")
    for number in range(120):
        attempt(admin.username, address=f"10.0.{number}.1")
        attempt(f"person-{number}@example.org", address=f"10.1.{number}.1")
    assert attempt(admin.username, PASSWORD).status_code == 429, "an unknown browser has to wait"
    assert attempt(admin.username, PASSWORD, browser=known).status_code == 302


def test_guesses_in_a_known_browser_are_limited_too(admin):
    known = Client()
    attempt(admin.username, PASSWORD, browser=known)
    known.cookies.pop("toolcrib-session")
    guesses = [
        attempt(admin.username, address=f"10.0.0.{number}", browser=known) for number in range(7)
    ]
    assert statuses(guesses) == [200] * 5 + [429] * 2
    other = make_person("otto@example.org", Role.OPERATOR, PASSWORD)
    statuses(attempt(other.username, address="10.0.0.9") for _ in range(5))
    assert attempt(other.username, address="10.0.0.9", browser=known).status_code == 429


def test_the_cookie_of_a_browser_cannot_be_forged(admin):
    forged = Client()
    value = {"name": sign_in_limits._digest(admin.username), "device": "1"}
    forged.cookies["toolcrib-device"] = signing.dumps(value, key="another key" * 4, salt="x")
    assert statuses(attempt(admin.username, browser=forged) for _ in range(6)) == [200] * 5 + [429]


def test_a_correct_password_is_refunded(admin):
    for _ in range(30):
        assert attempt(admin.username, PASSWORD).status_code == 302
    statuses(attempt(admin.username) for _ in range(4))
    assert attempt(admin.username, PASSWORD).status_code == 302
    assert statuses(attempt(admin.username) for _ in range(5)) == [200] * 5


def test_only_a_trusted_proxy_names_the_address_of_a_client(admin, settings):
    def forwarded(number):
        return {"HTTP_X_FORWARDED_FOR": f"203.0.113.{number}"}

    guesses = [attempt(f"a{number}@b.org", **forwarded(number)) for number in range(11)]
    assert guesses[-1].status_code == 429, "the header of a stranger is ignored"
    settings.PROXIES = ["192.0.2.0/24"]
    guesses = [attempt(f"a{number}@b.org", **forwarded(number)) for number in range(11)]
    assert statuses(guesses) == [200] * 11


@pytest.mark.parametrize(
    ("remote", "forwarded", "address"),
    [
        ("192.0.2.1", "", "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7, 203.0.113.5", "203.0.113.5"),
        ("192.0.2.1", "198.51.100.7, 203.0.113.5, 192.0.2.9", "203.0.113.5"),
        ("192.0.2.1", "2001:db8::1:2:3:4", "2001:db8::"),
        ("192.0.2.1", "nonsense", "192.0.2.1"),
        ("203.0.113.5", "198.51.100.7", "203.0.113.5"),
    ],
)
def test_the_address_is_what_the_last_untrusted_hop_had(remote, forwarded, address, settings):
    settings.PROXIES = ["192.0.2.0/24"]
    request = RequestFactory().get("/", REMOTE_ADDR=remote, HTTP_X_FORWARDED_FOR=forwarded)
    assert client_address(request) == address
