"""Without a database pages answer 503 with a sentence, and /readyz says why nothing is served."""

from contextlib import contextmanager

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connection,
)
from django.test import Client

from tests.support.people import make_person
from toolcrib.lib.roles import Role
from toolcrib.middleware import PageErrors
from toolcrib.runtime import write_probe as probe_module
from toolcrib.runtime.write_probe import write_probe

AWAY = OperationalError("connection to server at 10.0.0.5 failed: Connection refused")
FULL = OperationalError("database or disk is full")


@pytest.fixture(autouse=True)
def fresh_probe(monkeypatch, db):
    monkeypatch.setattr(probe_module, "INTERVAL", 0.0)
    yield
    write_probe._problem = ""


@contextmanager
def failing(error, statements=("SELECT", "INSERT", "UPDATE", "DELETE")):
    """Make these statements fail, as they do when the database or its disk is at fault."""

    def execute(run, sql, params, many, context):
        if sql.lstrip().upper().startswith(statements):
            raise error
        return run(sql, params, many, context)

    with connection.execute_wrapper(execute):
        yield


@pytest.fixture
def operator(db):
    browser = Client()
    browser.force_login(make_person("otto@example.org", Role.OPERATOR, ""))
    return browser


@pytest.mark.parametrize("path", ["/sign-in", "/", "/servers", "/settings/about"])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (AWAY, "Database unavailable."),
        (InterfaceError("connection already closed"), "Database unavailable."),
        (FULL, "The disk is full."),
        (DatabaseError("database disk image is malformed"), "The database file is damaged."),
    ],
)
def test_a_page_without_a_database_is_a_503_with_a_sentence(
    operator, path, error, sentence, caplog
):
    for browser in (operator, Client()):
        browser.cookies["theme"] = "dark"
        with failing(error):
            response = browser.get(path)
        if path != "/sign-in" and browser is not operator:
            assert response.status_code == 302, "sign-in is required without asking the database"
            continue
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) > 0
        page = response.content.decode()
        assert sentence in page
        assert 'data-theme="dark"' in page
        assert "10.0.0.5" not in page
    assert not any(record.exc_info for record in caplog.records)


def test_a_fragment_without_a_database_is_a_notice(operator):
    with failing(AWAY):
        response = operator.get("/servers", headers={"HX-Request": "true"})
    assert response.status_code == 503
    assert "<html" not in response.content.decode()
    assert "Database unavailable." in response.content.decode()


def test_an_error_of_ours_is_not_taken_for_an_unavailable_database(rf):
    middleware = PageErrors(lambda request: None)
    for error in (LookupError("ours"), IntegrityError("UNIQUE constraint failed")):
        assert middleware.process_exception(rf.get("/"), error) is None


def test_the_api_without_a_database_answers_in_its_format():
    with failing(AWAY):
        response = Client().get("/api/v1/tools", headers={"Authorization": "Bearer tcb_x"})
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "2"
    assert response.json()["error"]["code"] == "busy"


def test_readiness_names_the_reason_if_writes_fail_and_recovers():
    with failing(FULL, ("INSERT", "UPDATE")):
        response = Client().get("/readyz")
        assert response.status_code == 503
        body = response.json()
        assert (body["status"], body["database"]) == ("down", "read-only")
        assert body["reason"] == "The disk is full."
        assert Client().get("/livez").status_code == 200
    body = Client().get("/readyz").json()
    assert (body["status"], body["database"]) == ("ok", "ok")
    assert "reason" not in body


def test_readiness_without_a_database():
    with failing(AWAY):
        response = Client().get("/readyz")
    assert response.status_code == 503
    assert response.json()["database"] == "down"
    assert response.json()["reason"] == "Database unavailable."


def test_readiness_writes_at_most_once_in_an_interval(monkeypatch, django_assert_num_queries):
    monkeypatch.setattr(probe_module, "INTERVAL", 3600.0)
    Client().get("/readyz")
    with django_assert_num_queries(2):  # two reads of the revision
        Client().get("/readyz")
        Client().get("/readyz")


def test_the_row_of_the_probe_is_no_session(operator):
    Client().get("/readyz")
    thief = Client()
    thief.cookies["toolcrib-session"] = probe_module.KEY
    assert thief.get("/").status_code == 302
