"""About page: system information, health, and a report without secrets."""

import platform

import pytest

from catalog.audit import SYSTEM
from catalog.models import Vector
from catalog.search.embeddings import encoder
from catalog.search.embeddings import store as vector_store
from servers.models import Server
from sessions_app.agents import api_keys
from tests.support.factories import make_agent, make_server, make_tool
from toolcrib.accounts.invitations import password_link, setup_code
from toolcrib.pages import about

pytestmark = pytest.mark.django_db
CANARY = "canary-7f3a9c"


def report_text():
    return about.report(about.facts())


def test_the_report_names_versions_database_tokenizer_and_counts(settings):
    make_tool(make_server(slug="weather"))

    report = report_text()

    assert f"Version: {settings.VERSION}" in report
    assert f"Python: {platform.python_version()}" in report
    assert "Database: " in report
    assert "Tokenizer: " in report
    assert "Servers: 1\n" in report
    assert "Tools: 1\n" in report


def test_the_report_shows_the_state_of_search(settings, monkeypatch):
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    make_tool(make_server(slug="weather"), group=True)
    assert "Search: keyword only: embeddings are disabled in this installation\n" in report_text()

    settings.EMBEDDINGS = True
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    assert "Search: building vectors, 0 of 1 text done\n" in report_text()

    Vector.objects.create(
        model=encoder.MODEL, text_sha256=next(iter(vector_store.passages())), data=b""
    )
    assert "Search: keyword and semantic, 1 text\n" in report_text()


def test_the_page_contains_no_secrets_names_or_urls(page_of, admin, settings, monkeypatch):
    settings.SECRET_KEY = f"{CANARY}-secret-key"
    settings.ENCRYPTION_KEYS = [f"{CANARY}-encryption-key-of-thirty-two-characters"]
    settings.DATABASE_URL = f"postgres://u:{CANARY}@db.internal/x"
    settings.REDIS_URL = f"redis://:{CANARY}@127.0.0.1:1/0"
    settings.EMBEDDED = False
    settings.PUBLIC_URL = f"https://{CANARY}.example"
    settings.ALLOWED_HOSTS = [f"{CANARY}.example", "testserver"]
    monkeypatch.setenv("TOOLCRIB_SECRET_KEY", CANARY)
    settings.FROM_ENVIRONMENT = frozenset({"TOOLCRIB_SECRET_KEY"})
    server = make_server(slug="weather", name=CANARY, url=f"https://{CANARY}.example/mcp")
    agent = make_agent(f"agent-{CANARY}")
    key = api_keys.create_key("laptop", "agent", agent=agent, actor=SYSTEM)[1]

    page = page_of(admin, "/settings/about").content.decode()

    assert "Redis: unavailable" in page
    assert "TOOLCRIB_SECRET_KEY" in page
    report = report_text()
    for secret in (
        CANARY,
        key,
        setup_code(),
        password_link(admin).partition("/join/")[2],
        "db.internal",
    ):
        assert secret not in page
        assert secret not in report
    assert admin.username not in report
    assert Server.objects.get() == server


def test_a_worker_that_is_not_running_is_shown_as_failing(page_of, operator):
    page = page_of(operator, "/settings/about").content.decode()

    assert "in memory, worker not running" in page
    assert "tone-bad" in page
