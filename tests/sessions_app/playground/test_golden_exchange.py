"""Golden queries on their own page: adding, importing, exporting, and the command for CI."""

import json

import pytest
from django.core.management import CommandError, call_command

from catalog.models import GoldenQuery
from tests.support.factories import make_server, make_tool

BACKEND = "django.contrib.auth.backends.ModelBackend"
pytestmark = pytest.mark.django_db


@pytest.fixture
def as_admin(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


@pytest.fixture
def tools(db):
    server = make_server(slug="weather")
    for name in ("get_forecast", "list_stations"):
        make_tool(server, name, description=f"{name.replace('_', ' ')} of a town.")


def test_queries_with_several_right_answers_are_added_imported_and_exported(as_admin, tools):
    as_admin.post("/search/golden/add", {"query": "rain", "tools": "weather__get_forecast"})
    lines = "query,tools\nsnow today,weather__get_forecast,weather__list_stations\n"
    as_admin.post("/search/golden/add", {"lines": lines})
    assert GoldenQuery.objects.get(query="snow today").right == [
        "weather__get_forecast",
        "weather__list_stations",
    ]
    exported = as_admin.get("/search/golden/export.csv").content.decode()
    assert exported.splitlines() == [
        "query,tools",
        "rain,weather__get_forecast",
        "snow today,weather__get_forecast,weather__list_stations",
    ]
    GoldenQuery.objects.all().delete()
    as_admin.post("/search/golden/add", {"lines": exported})
    assert GoldenQuery.objects.count() == 2


def test_an_import_with_a_wrong_line_saves_nothing_and_names_the_line(as_admin, tools):
    lines = "rain,weather__get_forecast\nsnow,weather__nothing"
    page = as_admin.post("/search/golden/add", {"lines": lines}, follow=True).content.decode()
    assert "Line 2: Tool not found: weather__nothing." in page
    assert not GoldenQuery.objects.exists()


def test_the_command_fails_if_an_expected_tool_is_not_found(as_admin, tools, capsys):
    as_admin.post("/search/golden/add", {"query": "forecast", "tools": "weather__get_forecast"})
    call_command("golden_queries", "--json")
    assert json.loads(capsys.readouterr().out)["failed"] == []
    as_admin.post("/search/golden/add", {"query": "zzzqqq", "tools": "weather__get_forecast"})
    with pytest.raises(CommandError, match="1 golden queries fail"):
        call_command("golden_queries")
