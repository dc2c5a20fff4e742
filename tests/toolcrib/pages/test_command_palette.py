"""Command palette: pages, actions and names, by role and with bounded cost."""

import re

import pytest
from django.contrib.auth.models import User
from django.urls import resolve

from catalog.models import Group, Tool
from tests.support.factories import make_agent, make_server, make_session, make_tool
from toolcrib.lib.roles import Role
from toolcrib.pages import command_palette
from toolcrib.pages.navigation import context

pytestmark = pytest.mark.django_db


@pytest.fixture
def objects():
    server = make_server(slug="weather", name="Weather station")
    make_tool(server, "get_forecast")
    make_tool(server, "report_weather")
    Group.objects.create(group_id="research", display_name="Weather research")
    return make_session(make_agent("weatherman"))


def labels(query, role=Role.ADMIN):
    return {
        section.name: [choice.label for choice in section.choices]
        for section in command_palette.search(query, role)
    }


def test_one_word_finds_every_kind_of_object(objects):
    found = labels("weather")
    assert found["Servers"] == ["Weather station"]
    assert found["Tools"] == ["weather__get_forecast", "weather__report_weather"]
    assert found["Groups"] == ["mcp:weather", "research"]
    assert found["Agents"] == ["weatherman"]
    assert found["Sessions"] == [f"{objects.session_id[:12]}…"]


def test_every_word_must_match_and_prefix_matches_come_first(objects):
    assert labels("weather FORE")["Tools"] == ["weather__get_forecast"]
    make_tool(make_server(slug="a"), "not_research")
    Group.objects.create(group_id="a-research", display_name="A")
    assert labels("research")["Groups"] == ["research", "a-research"]
    assert labels("weather nothing-like-it") == {}


def test_a_session_is_found_by_the_start_of_its_id(objects):
    assert labels(objects.session_id[:9])["Sessions"] == [f"{objects.session_id[:12]}…"]
    assert "Sessions" not in labels("ses_nowhere")


@pytest.mark.parametrize("wild", ["%", "_", "\\", "'", '"', "%%%", "a" * 5000])
def test_wildcards_and_quotes_are_matched_literally(wild, objects, page_of, admin):
    assert "Servers" not in labels(wild[:200])
    assert page_of(admin, "/palette", query_params={"q": wild}).status_code == 200


def test_an_empty_query_shows_pages_and_actions_only(objects):
    assert set(labels("")) == {"Pages", "Actions"}


def test_the_palette_lists_every_page_of_the_navigation_with_its_shortcut(rf, admin):
    request = rf.get("/")
    request.user = admin
    nav = [item for section in context(request)["shell"]["nav"] for item in section["items"]]
    pages = command_palette.search("", Role.ADMIN)[0].choices
    known = {(choice.url, choice.keys) for choice in pages}
    assert nav
    for item in nav:
        keys = f"g {item['key']}" if item["key"] else ""
        assert (item["url"], keys) in known, item["label"]


def test_an_operator_is_offered_only_pages_that_operators_can_open(objects, operator, client):
    client.force_login(operator, backend="django.contrib.auth.backends.ModelBackend")
    actions = {choice.label for choice in command_palette.search("", Role.OPERATOR)[1].choices}
    assert "Add server" not in actions
    assert "Create group" not in actions
    assert "Actions" not in labels("sync weather", Role.OPERATOR)
    for section in command_palette.search("e", Role.OPERATOR) + command_palette.search(
        "", Role.OPERATOR
    ):
        for choice in section.choices:
            if choice.posts:  # the themes, which every reader may choose
                assert choice.url.startswith("/theme?")
                continue
            assert resolve(re.split(r"[?#]", choice.url)[0]).func.required_role <= Role.OPERATOR
            assert client.get(choice.url, follow=True).status_code == 200, choice.url


def test_an_admin_can_open_every_result(objects, admin, client):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    for section in command_palette.search("", Role.ADMIN) + command_palette.search(
        "weather", Role.ADMIN
    ):
        for choice in section.choices:
            assert client.get(choice.url, follow=True).status_code == 200, choice.url


def test_sync_is_an_action_that_posts_and_excludes_disabled_servers(objects, admin, client):
    make_server(slug="idle", name="Weather of old", enabled=False)
    found = command_palette.search("sync weather", Role.ADMIN)
    (sync,) = next(section for section in found if section.name == "Actions").choices
    assert (sync.label, sync.posts) == ("Sync Weather station", True)
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    assert client.get(sync.url).status_code == 405
    text = client.get("/palette?q=sync+weather").text
    assert f'<form method="post" action="{sync.url}">' in text


@pytest.mark.parametrize(
    ("query", "label"),
    [
        ("rotate", "Rotate or revoke a key"),
        ("rotate weatherman", "Rotate a key of weatherman"),
        ("revoke", "Revoke a key of weatherman"),
        ("restart", "Reconnect Broken station"),
        ("reconnect broken", "Reconnect Broken station"),
        ("disable weather", "Disable Weather station"),
        ("delete weather", "Delete Weather station"),
        ("edit weatherman", "Edit weatherman"),
        ("hide forecast", "Access of weather__get_forecast"),
        ("try forecast", "Try weather__get_forecast"),
        ("token weather", "Enter credentials of Weather station"),
        ("sign out", "Sign out"),
        ("deny", "Decide held calls"),
        ("run", "Try a script"),
    ],
)
def test_a_verb_finds_the_action(query, label, objects, client, admin):
    make_server(slug="broken", name="Broken station", state="failing")
    section = next(
        part for part in command_palette.search(query, Role.ADMIN) if part.name == "Actions"
    )
    choice = next(choice for choice in section.choices if choice.label == label)
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    if not choice.posts:  # the place that it leads to exists
        page = client.get(choice.url, follow=True).text
        fragment = choice.url.partition("#")[2]
        assert f'id="{fragment}"' in page or not fragment
    viewer = [found for name, found in labels(query, Role.VIEWER).items() if name == "Actions"]
    assert viewer == ([["Sign out"]] if label == "Sign out" else [])


@pytest.mark.parametrize(
    ("word", "label", "row"),
    [
        ("failing", "Failing servers", "Broken station"),
        ("held", "Hidden tools", "weather__report_weather"),
        ("open", "Open sessions", "weatherman"),
        ("unused", "Unused tools", "weather__get_forecast"),
    ],
)
def test_a_state_finds_the_list_of_it(word, label, row, objects, page_of, operator):
    make_server(slug="broken", name="Broken station", state="failing")
    Tool.objects.filter(name="report_weather").update(state="held")
    section = command_palette.search(word, Role.VIEWER)[0]
    choice = next(choice for choice in section.choices if choice.label == label)
    assert row in page_of(operator, choice.url).text
    assert "Held calls" in labels("held", Role.OPERATOR)["Pages"]


def test_the_dialog_gets_only_the_list_and_the_page_works_without_it(objects, page_of, admin):
    page = page_of(admin, "/palette?q=forecast").text
    assert page.count("<h1>") == 1
    assert 'href="/tools/weather__get_forecast"' in page
    part = page_of(admin, "/palette?q=forecast", headers={"HX-Request": "true"}).text
    assert "<html" not in part
    assert re.search(r'<a\s+role="option"[^>]*href="/tools/weather__get_forecast"', part)
    assert 'data-palette-said="1 result"' in part
    none = page_of(admin, "/palette?q=<b>x", headers={"HX-Request": "true"}).text
    assert "No results for" in none
    assert "<b>" not in none


def test_the_number_of_queries_does_not_grow_with_rows(
    objects, page_of, admin, client, django_assert_max_num_queries
):
    for number in range(30):
        make_agent(f"weather-{number}")
        Group.objects.create(group_id=f"weather-{number}", display_name="x")
    page_of(admin, "/palette?q=weather")
    with django_assert_max_num_queries(9):  # session, user, six searches, and one spare
        response = client.get("/palette?q=weather", headers={"HX-Request": "true"})
    assert response.text.count('role="option"') <= 7 * command_palette.MAX_RESULTS_PER_KIND


def test_outsiders_have_no_access(page_of, outsider):
    assert User.objects.filter(pk=outsider.pk).exists()
    assert page_of(outsider, "/palette?q=a").status_code == 403


@pytest.mark.parametrize(
    ("query", "label"),
    [
        ("dark", "Dark theme"),
        ("people", "People"),
        ("approve", "Approve changes"),
        ("password", "Change password"),
        ("retention", "Settings: Retention"),
    ],
)
def test_actions_and_settings_are_found(db, query, label):
    found = [
        choice.label
        for section in command_palette.search(query, Role.ADMIN)
        for choice in section.choices
    ]
    assert label in found
