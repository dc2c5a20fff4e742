"""The servers' pages: who may see and change what, what they cost, and what they never show."""

import html
import json
import re
import sys
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from catalog.models import AuditEntry, Tool
from servers.models import Credential, Server, SyncRun
from servers.registration.credentials import decrypt
from servers.sync import runner
from servers.urls import urlpatterns
from tests.support.factories import fold, make_program, make_server, tool_object
from tests.support.upstreams.running import ROOT, running_http

CANARY = "sk-canary0123456789abcdef"
BACKEND = "django.contrib.auth.backends.ModelBackend"

# route: (method, status for operators, status for admins). Outsiders always get 403 and
# anonymous people the sign-in page; a route that is missing here fails the test.
ROUTES = {
    "servers": ("get", 200, 200),
    "server-add": ("get", 403, 200),
    "server-add-check": ("post", 403, 302),
    "server-add-connect": ("post", 403, 302),
    "server-add-progress": ("get", 403, 302),
    "server-export": ("get", 200, 200),
    "servers-bulk": ("post", 403, 302),
    "server": ("get", 200, 200),
    "server-tools": ("get", 200, 200),
    "server-syncs": ("get", 200, 200),
    "server-status": ("get", 200, 200),
    "server-sync": ("post", 403, 302),
    "server-test": ("post", 403, 200),
    "server-enable": ("post", 403, 302),
    "server-disable": ("post", 403, 302),
    "server-settings": ("get", 200, 200),
    "server-edit": ("post", 403, 302),
    "server-credentials": ("post", 403, 302),
    "server-delete": ("post", 403, 302),
}
BODIES = {
    "server-add-check": {"source": "paste", "text": '{"a": {"url": "https://example.com/mcp"}}'},
    "servers-bulk": {"server": "weather", "act": "sync"},
    "server-edit": {"url": "http://127.0.0.1:1/other", "transport": "http"},
    "server-credentials": {"kind": "header", "name": "X-Key", "value": "some value"},
    "server-delete": {"typed_name": "weather"},
}
# Not only read: a page whose POST needs another role than its GET.
POSTS = [name for name, row in ROUTES.items() if row[0] == "post"] + ["server-settings"]
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def address(name):
    slugs = ["weather"] if "<slug" in route_of(name) else []
    return reverse(name, args=slugs)


def route_of(name):
    return next(str(one.pattern) for one in urlpatterns if one.name == name)


def signed_in(user, **options):
    client = Client(**options)
    if user is not None:
        client.force_login(user, backend=BACKEND)
    return client


def text_of(response):
    return html.unescape(response.content.decode())


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", name="Weather", url="http://127.0.0.1:1/mcp")
    fold(server, tool_object("get_forecast", description="Return the forecast."))
    return server


@pytest.fixture
def admins_client(admin):
    return signed_in(admin)


# --- Who may ----------------------------------------------------------------------------------


def test_every_route_has_a_row_in_the_table():
    assert {one.name for one in urlpatterns} == set(ROUTES)


@pytest.mark.parametrize("name", ROUTES)
def test_each_route_answers_everybody_as_the_table_says(name, weather, admin, operator, outsider):
    method, for_operator, for_admin = ROUTES[name]
    body = BODIES.get(name, {})

    def answer(user):
        return getattr(signed_in(user), method)(address(name), body)

    asked = answer(None)
    assert asked.status_code == 302
    assert asked["Location"] == f"/sign-in?next={address(name)}"
    assert answer(outsider).status_code == 403
    assert answer(operator).status_code == for_operator
    assert answer(admin).status_code == for_admin


@pytest.mark.parametrize("name", POSTS)
def test_operators_change_nothing(name, weather, operator):
    before = Server.objects.values().get(), AuditEntry.objects.count()

    answer = signed_in(operator).post(address(name), BODIES.get(name, {}))

    assert answer.status_code == 403
    assert (Server.objects.values().get(), AuditEntry.objects.count()) == before


@pytest.mark.parametrize("name", POSTS)
def test_a_post_without_the_csrf_token_is_refused(name, weather, admin):
    client = signed_in(admin, enforce_csrf_checks=True)

    answer = client.post(address(name), BODIES.get(name, {}))

    assert answer.status_code == 403
    assert "came from another site" in text_of(answer)
    assert Server.objects.filter(slug="weather", enabled=True).exists()


@pytest.mark.parametrize("name", [name for name, row in ROUTES.items() if row[0] == "post"])
def test_what_changes_something_cannot_be_fetched(name, weather, admins_client):
    if name != "server-add-check":
        assert admins_client.get(address(name)).status_code == 405


def test_the_forbidden_page_names_who_can_help(weather, admin, outsider):
    page = text_of(signed_in(outsider).get("/servers"))

    assert "This needs the role operator." in page
    assert admin.username in page


@pytest.mark.parametrize("name", ["servers", "server", "server-settings"])
def test_operators_see_no_button_that_would_be_refused(name, weather, operator):
    page = signed_in(operator).get(address(name)).content.decode()

    forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page)
    assert set(forms) <= {"/theme", "/sign-out", "/servers/bulk"}
    assert "Sync" not in re.findall(r"<button[^>]*>([^<]*)", page)


def test_add_and_export_are_pages_and_no_slugs(weather, admins_client):
    assert "Paste your mcp.json" in text_of(admins_client.get("/servers/add"))
    assert admins_client.get("/servers/export")["Content-Type"] == "application/json"


def test_a_server_that_is_not_there_is_told_in_words(admins_client):
    answer = admins_client.get("/servers/no-such")

    assert answer.status_code == 404
    assert "There is no server called no-such." in text_of(answer)


# --- The list ---------------------------------------------------------------------------------


def queries(client, path):
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path).status_code == 200
    return len(captured)


@pytest.mark.parametrize("path", ["/servers", "/servers?state=failing&sort=-tokens", "/"])
def test_the_list_costs_the_same_for_three_servers_and_for_sixty(path, admins_client):
    for number in range(3):
        fold(make_server(state="failing"), tool_object(f"tool_{number}"))
    admins_client.get(path)
    few = queries(admins_client, path)

    for number in range(57):
        fold(make_server(state="failing"), tool_object(f"more_{number}"))

    admins_client.get(path)  # the shelf is read once for each revision
    assert queries(admins_client, path) == few <= 35


@pytest.mark.parametrize("name", ["server", "server-tools", "server-syncs", "server-settings"])
def test_a_servers_page_costs_the_same_however_much_it_holds(name, weather, admins_client):
    admins_client.get(address(name))
    few = queries(admins_client, address(name))

    fold(weather, *(tool_object(f"tool_{number}") for number in range(40)))
    for number in range(40):
        Credential.objects.create(
            server=weather, kind="header", name=f"X-{number}", origin_sha256="", ciphertext="x"
        )
        SyncRun.objects.create(
            server=weather, trigger="manual", fence=number, started_at=timezone.now(), outcome="ok"
        )

    assert queries(admins_client, address(name)) <= few + 1 <= 20


def test_the_list_says_status_tools_and_cost(weather, admins_client):
    make_server(slug="crm", state="failing", failures=3, state_reason="The server answered HTML.")

    page = text_of(admins_client.get("/servers"))

    assert "Failing (3)" in page
    assert "The server answered HTML." in page
    tokens = Tool.objects.get().approved.tokens
    assert f"≈{tokens}" in page


def test_filters_sort_and_search_stand_in_the_address(admins_client):
    make_server(slug="alpha", state="connected")
    make_server(slug="beta", state="failing")
    make_program("healthy", slug="gamma", state="connected")

    def listed(query):
        page = admins_client.get(f"/servers?{query}").content.decode()
        return re.findall(r'id="row-([a-z]+)"', page)

    assert listed("") == ["alpha", "beta", "gamma"]
    assert listed("state=connected") == ["alpha", "gamma"]
    assert listed("transport=stdio") == ["gamma"]
    assert listed("q=BET") == ["beta"]
    assert listed("sort=-name") == ["gamma", "beta", "alpha"]
    assert listed("state=no-such-state&sort=no-such&after=x") == ["alpha", "beta", "gamma"]


def test_a_filter_that_finds_nothing_says_so_and_offers_to_clear(weather, admins_client):
    page = text_of(admins_client.get("/servers?q=nothing"))

    assert "No servers match" in page
    assert "Clear filters" in page


def test_without_servers_the_list_is_the_first_step(admins_client, operator):
    assert "Paste your mcp.json" in text_of(admins_client.get("/servers"))
    assert "Servers appear here once an admin has added one." in text_of(
        signed_in(operator).get("/servers")
    )


def test_more_than_a_page_of_servers_is_paged(admins_client):
    for number in range(105):
        make_server(slug=f"server-{number:03}", name=f"server-{number:03}")

    first = text_of(admins_client.get("/servers"))
    second = text_of(admins_client.get("/servers?after=100"))

    assert "1 to 100 of 105 servers" in first
    assert "101 to 105 of 105 servers" in second


def test_selected_servers_are_synced_or_disabled_together(admins_client):
    for slug in ("alpha", "beta", "gamma"):
        make_server(slug=slug)

    back = admins_client.post(
        "/servers/bulk",
        {"server": ["alpha", "beta"], "act": "disable", "next": "/servers?sort=-name"},
        follow=True,
    )

    assert back.redirect_chain == [("/servers?sort=-name", 302)]
    assert "Disabled 2 servers." in text_of(back)
    assert set(Server.objects.filter(enabled=True).values_list("slug", flat=True)) == {"gamma"}

    admins_client.post("/servers/bulk", {"server": ["alpha", "gamma"], "act": "sync"})
    assert Server.objects.get(slug="gamma").sync_due_at is not None
    assert Server.objects.get(slug="alpha").sync_due_at is None


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example/x"])
def test_no_form_sends_people_to_another_site(target, weather, admins_client):
    answer = admins_client.post("/servers/weather/sync", {"next": target})

    assert answer["Location"] == "/servers/weather"


# --- Adding -----------------------------------------------------------------------------------


def paste(client, text, **extra):
    return client.post("/servers/add/check", {"source": "paste", "text": text}, **extra)


def confirmations(page):
    return re.findall(r'name="confirm" value="([0-9a-f]{64})"', page)


def picks(page):
    return re.findall(r'name="pick" value="([a-z0-9-]+)" checked', page)


def as_worker():
    """Run what is due, as a worker would."""
    for server in Server.objects.filter(sync_due_at__lte=timezone.now()):
        runner.sync_if_due(server.pk)


@pytest.mark.django_db(transaction=True)
def test_three_servers_are_added_without_javascript_and_the_bad_one_keeps_its_reason(admin):
    client = signed_in(admin)
    with running_http("healthy") as url:
        text = json.dumps(
            {
                "mcpServers": {
                    "weather": {"url": url, "headers": {"Authorization": f"Bearer {CANARY}"}},
                    "local": {
                        "command": sys.executable,
                        "args": ["-m", "tests.support.upstreams.healthy"],
                        "cwd": str(ROOT),
                    },
                    "nobody": {"url": "http://127.0.0.1:1/mcp"},
                    "both": {"url": url, "command": "npx"},
                }
            }
        )
        checked = paste(client, text, follow=True)
        page = text_of(checked)
        assert checked.redirect_chain == [("/servers/add/check", 302)]
        assert "Runs a program on this machine:" in page
        assert "-m tests.support.upstreams.healthy" in page
        assert "It has both a command and a url." in page
        assert Server.objects.count() == 0

        body = {"pick": picks(page), "confirm": confirmations(page)}
        waiting = client.post("/servers/add/connect", body, follow=True)
        assert waiting.redirect_chain == [("/servers/add/progress", 302)]
        assert "Refresh" in text_of(waiting)
        assert 'data-poll-state="running"' in text_of(waiting)

        as_worker()
        done = text_of(client.get("/servers/add/progress"))

    assert done.count("7 tools · ≈") == 2
    assert "before its first word." in done
    assert "refused" in done
    assert 'action="/servers/nobody/sync?next=/servers/add/progress"' in done
    assert "It has both a command and a url." in done
    assert 'data-poll-state="done"' in done
    assert set(Server.objects.values_list("slug", flat=True)) == {"weather", "local", "nobody"}
    for response in (checked, waiting):
        assert CANARY not in text_of(response)
    assert CANARY not in done


def test_a_program_that_was_not_confirmed_is_not_saved_and_can_be_confirmed_later(admins_client):
    page = text_of(admins_client.post("/servers/add/check", {"source": "demo"}, follow=True))
    assert "servers.demo" in page

    refused = admins_client.post("/servers/add/connect", {"pick": "demo"}, follow=True)
    assert "tick Run exactly this program" in text_of(refused)
    assert Server.objects.count() == 0

    body = {"pick": "demo", "confirm": confirmations(page)}
    admins_client.post("/servers/add/connect", body)
    assert Server.objects.get().argv == [sys.executable, "-m", "servers.demo"]


def test_what_was_saved_is_not_offered_again_when_the_rest_is_checked_once_more(admins_client):
    text = '{"a": {"url": "https://a.example/mcp"}, "b": {"url": "https://b.example/mcp"}}'
    paste(admins_client, text)

    admins_client.post("/servers/add/connect", {"pick": "a"})
    page = admins_client.get("/servers/add/check").content.decode()

    assert picks(page) == ["b"]
    admins_client.post("/servers/add/connect", {"pick": "b"})
    assert set(Server.objects.values_list("slug", flat=True)) == {"a", "b"}
    # All of it is saved, so nothing of the text is kept.
    assert admins_client.get("/servers/add/check")["Location"] == "/servers/add/progress"


def test_missing_variables_are_asked_for_and_posted_back(admins_client):
    text = '{"wiki": {"url": "https://wiki.example/mcp", "headers": {"X-Key": "${WIKI_KEY}"}}}'
    page = text_of(paste(admins_client, text, follow=True))
    assert 'type="password" id="variable-1" name="variable:WIKI_KEY"' in page
    assert "Values missing" in page

    refused = admins_client.post("/servers/add/connect", {"pick": "wiki"}, follow=True)
    assert "Values are missing for: WIKI_KEY." in text_of(refused)
    assert Server.objects.count() == 0

    again = admins_client.post(
        "/servers/add/check", {"again": "1", "variable:WIKI_KEY": CANARY}, follow=True
    )
    assert "Entered" in text_of(again)
    assert CANARY not in text_of(again)
    admins_client.post("/servers/add/connect", {"pick": "wiki"})
    assert decrypt(Credential.objects.get().ciphertext).reveal() == CANARY


def test_a_server_known_already_is_marked_and_not_picked(weather, admins_client):
    page = text_of(paste(admins_client, '{"w": {"url": "http://127.0.0.1:1/mcp"}}', follow=True))

    assert "This is the same as weather." in page
    assert picks(page) == []


def test_broken_json_is_refused_with_its_line_and_column(admins_client):
    answer = paste(admins_client, '{\n  "mcpServers": {\n    "a" 1\n  }\n}')

    assert answer.status_code == 422
    assert "Line 3, column" in text_of(answer)
    assert Server.objects.count() == 0


def test_where_programs_are_off_the_check_says_so(admins_client, settings):
    settings.ALLOW_STDIO = False

    page = text_of(admins_client.post("/servers/add/check", {"source": "demo"}, follow=True))

    assert "This installation does not run programs." in page
    assert confirmations(page) == []
    body = {"pick": "demo"}
    admins_client.post("/servers/add/connect", body)
    assert Server.objects.count() == 0


def test_a_pick_that_the_text_does_not_give_is_sent_back(admins_client):
    paste(admins_client, '{"a": {"url": "https://a.example/mcp"}}')

    answer = admins_client.post("/servers/add/connect", {"pick": ["a", "other"]}, follow=True)

    assert "The list has changed since it was shown." in text_of(answer)
    assert Server.objects.count() == 0


@pytest.mark.parametrize("path", ["/servers/add/check", "/servers/add/progress"])
def test_a_step_without_what_goes_before_it_leads_to_the_first(path, admins_client):
    assert admins_client.get(path)["Location"] == "/servers/add"


def test_url_and_command_end_as_the_same_check(admins_client):
    url = {
        "source": "url",
        "url": "https://crm.example/mcp",
        "transport": "http",
        "pair_name": ["Authorization", ""],
        "pair_value": [f"Bearer {CANARY}", ""],
    }
    page = text_of(admins_client.post("/servers/add/check", url, follow=True))
    assert picks(page) == ["crm-example"]
    assert "Authorization" in page
    assert CANARY not in page

    command = {"source": "command", "command": "npx -y some-server", "args": "", "cwd": ""}
    page = text_of(admins_client.post("/servers/add/check", command, follow=True))
    assert "npx -y some-server" in page
    assert picks(page) == ["npx"]


def test_a_poll_hears_of_each_end_once(admins_client):
    paste(admins_client, '{"a": {"url": "https://a.example/mcp"}}')
    admins_client.post("/servers/add/connect", {"pick": "a"})
    server = Server.objects.get()
    headers = {"HX-Request": "true"}

    running = admins_client.get("/servers/add/progress?ended=", headers=headers)
    assert "HX-Trigger" not in running
    assert b"<html" not in running.content

    Server.objects.update(sync_due_at=timezone.now() + timedelta(hours=1))
    SyncRun.objects.create(
        server=server,
        trigger="added",
        fence=1,
        started_at=timezone.now(),
        finished_at=timezone.now(),
        outcome="failed",
        error="The connection was refused.",
    )
    ended = admins_client.get("/servers/add/progress?ended=", headers=headers)
    assert json.loads(ended["HX-Trigger"]) == {"announce": "a failed: The connection was refused."}
    assert b"?ended=a" in ended.content
    again = admins_client.get("/servers/add/progress?ended=a", headers=headers)
    assert "HX-Trigger" not in again


# --- One server -------------------------------------------------------------------------------


def test_a_failing_server_says_why_and_keeps_its_last_words(admins_client):
    make_server(
        slug="crashed",
        state="failing",
        failures=2,
        state_reason="The program exited with code 1.",
        state_detail="Traceback: no licence found",
    )

    page = text_of(admins_client.get("/servers/crashed"))

    assert "Failing (2)" in page
    assert "The program exited with code 1." in page
    assert "<summary>Details</summary>" in page
    assert "no licence found" in page


def test_the_history_says_what_each_sync_did_and_why_tools_were_rejected(weather, admins_client):
    now = timezone.now()
    SyncRun.objects.create(
        server=weather,
        trigger="schedule",
        fence=1,
        started_at=now - timedelta(seconds=1.2),
        finished_at=now,
        outcome="ok",
        added=2,
        changed=1,
        rejected=1,
        names={"added": ["one", "two"], "rejected": [{"name": "bad", "reason": "No schema."}]},
    )
    SyncRun.objects.create(server=weather, trigger="manual", fence=2, started_at=now)

    page = text_of(admins_client.get("/servers/weather/syncs"))

    assert "+2 tools, 1 changed, 0 missing, 1 rejected · 1.2 s" in page
    assert "No schema." in page
    assert "Connecting…" in page


def test_the_status_is_polled_while_a_sync_runs_and_then_tells_the_end(weather, admins_client):
    headers = {"HX-Request": "true"}
    Server.objects.update(sync_due_at=timezone.now())
    running = admins_client.get("/servers/weather/status?tab=server", headers=headers)
    assert b'data-poll-state="running"' in running.content
    assert "HX-Trigger" not in running

    Server.objects.update(sync_due_at=timezone.now() + timedelta(hours=1))
    ended = admins_client.get("/servers/weather/status?tab=server", headers=headers)
    assert b'data-poll-state="done"' in ended.content
    assert "announce" in json.loads(ended["HX-Trigger"])


@pytest.mark.django_db(transaction=True)
def test_a_connection_test_tells_its_result_on_the_page(admin):
    client = signed_in(admin)
    with running_http("healthy") as url:
        make_server(slug="up", url=url)
        good = text_of(client.post("/servers/up/test"))
    make_server(slug="down", url="http://127.0.0.1:1/mcp")
    bad = text_of(client.post("/servers/down/test", headers={"HX-Request": "true"}))

    assert "Connected. It offers 7 tools." in good
    assert "refused" in bad
    assert "<html" not in bad


def test_settings_are_saved_and_refused_ones_are_explained(weather, admins_client):
    fields = {
        "name": "Forecasts",
        "description": "",
        "trust": "strict",
        "connection_policy": "on_demand",
        "isolation": "shared",
        "call_timeout": "30",
        "concurrency": "4",
        "poll_seconds": "600",
    }
    assert admins_client.post("/servers/weather/settings", fields).status_code == 302
    weather.refresh_from_db()
    assert (weather.name, weather.trust, weather.call_timeout) == ("Forecasts", "strict", 30)

    refused = admins_client.post("/servers/weather/settings", fields | {"call_timeout": "0"})
    assert refused.status_code == 422
    assert "Call timeout" in text_of(refused)


def test_a_new_address_voids_credentials_and_says_to_enter_them_again(weather, admins_client):
    admins_client.post(
        "/servers/weather/credentials",
        {"kind": "header", "name": "Authorization", "value": f"Bearer {CANARY}"},
    )
    page = text_of(admins_client.get("/servers/weather/settings"))
    assert "Authorization" in page
    assert "voids stored credentials" in page

    admins_client.post(
        "/servers/weather/connection", {"url": "http://127.0.0.2:1/mcp", "transport": "http"}
    )

    assert Credential.objects.get().voided
    assert "Enter again" in text_of(admins_client.get("/servers/weather/settings"))
    assert "must be entered again" in text_of(admins_client.get("/servers/weather"))
    admins_client.post(
        "/servers/weather/credentials",
        {"kind": "header", "name": "Authorization", "remove_credential": "1"},
    )
    assert not Credential.objects.exists()


def test_a_changed_program_runs_only_after_it_was_shown_and_confirmed(admins_client):
    server = make_program("healthy", slug="local")
    command, *args = server.argv
    body = {"command": command, "args": "\n".join([*args, "--legacy"]), "cwd": server.cwd}

    page = text_of(admins_client.post("/servers/local/connection", body, follow=True))
    server.refresh_from_db()
    assert "--legacy" not in server.args
    assert "This runs another program on this machine:" in page

    (digest,) = confirmations(page)
    admins_client.post("/servers/local/connection", {"confirm": "0" * 64})
    server.refresh_from_db()
    assert "--legacy" not in server.args

    admins_client.post("/servers/local/connection", {"confirm": digest})
    server.refresh_from_db()
    assert server.args[-1] == "--legacy"
    assert server.confirmed_argv == digest
    assert "another program" not in text_of(admins_client.get("/servers/local/settings"))


def test_a_server_is_deleted_only_under_its_own_name(weather, admins_client):
    refused = admins_client.post("/servers/weather/delete", {"typed_name": "whether"})
    assert refused.status_code == 422
    assert "nothing was deleted" in text_of(refused)

    done = admins_client.post("/servers/weather/delete", {"typed_name": "weather"}, follow=True)
    assert "Weather is deleted" in text_of(done)
    assert not Server.objects.exists()


def test_disabling_and_enabling_are_told(weather, admins_client):
    off = admins_client.post("/servers/weather/disable", follow=True)
    assert "Agents get none of its tools" in text_of(off)
    assert admins_client.post("/servers/weather/sync").status_code == 422

    on = admins_client.post("/servers/weather/enable", follow=True)
    assert "Weather is enabled." in text_of(on)
    assert Server.objects.get().enabled


# --- What is never shown ----------------------------------------------------------------------

PLANTED = [
    ("/servers/add/check", {"source": "paste", "text": f'{{"a": "{CANARY}", oops'}),
    (
        "/servers/add/check",
        {
            "source": "paste",
            "text": json.dumps(
                {
                    "a": {
                        "url": f"https://a.example/mcp?api_key={CANARY}",
                        "headers": {"Authorization": f"Bearer {CANARY}"},
                        "apiKey": CANARY,
                    },
                    "b": {
                        "command": "npx",
                        "args": ["--token", CANARY],
                        "env": {"API_KEY": CANARY},
                    },
                    "c": {"url": "https://c.example/mcp", "headers": {"X-A": f"{CANARY}\n"}},
                }
            ),
        },
    ),
    (
        "/servers/add/check",
        {
            "source": "url",
            "url": f"https://a.example/mcp?api_key={CANARY}",
            "transport": "http",
            "pair_name": ["X-Key", "Cookie"],
            "pair_value": [CANARY, CANARY],
        },
    ),
    ("/servers/add/check", {"source": "url", "url": "", "pair_name": "", "pair_value": CANARY}),
    (
        "/servers/add/check",
        {"source": "command", "command": "npx", "args": f"--token\n{CANARY}", "cwd": "relative"},
    ),
    (
        "/servers/add/check",
        {"source": "command", "command": f'npx --token "{CANARY}', "args": "", "cwd": ""},
    ),
    ("/servers/weather/credentials", {"kind": "header", "name": "Authorization", "value": CANARY}),
    ("/servers/weather/credentials", {"kind": "header", "name": "Cookie", "value": CANARY}),
    ("/servers/weather/credentials", {"kind": "no-such", "name": "X-Key", "value": CANARY}),
    (
        "/servers/weather/connection",
        {"url": f"https://a.example/mcp?api_key={CANARY}", "transport": "http"},
    ),
    (
        "/servers/weather/connection",
        {"url": f"gopher://a.example/?api_key={CANARY}", "transport": "http"},
    ),
    ("/servers/weather/connection", {"url": f"https://a.example/{CANARY}", "transport": "no"}),
    (
        "/servers/local/connection",
        {"command": sys.executable, "args": f"-m\nx\n--token\n{CANARY}", "cwd": "/"},
    ),
    ("/servers/local/connection", {"command": "x", "args": f"--token={CANARY}", "cwd": "no"}),
]


def everything_stored():
    """Every text of the whole database."""
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')  # noqa: S608 - names of our own tables
            for row in cursor.fetchall():
                yield from map(str, row)


@pytest.mark.parametrize(("path", "body"), PLANTED)
def test_a_secret_is_in_no_answer_and_in_no_table(path, body, weather, admins_client):
    make_program("healthy", slug="local")

    answer = admins_client.post(path, body, follow=True)
    pages = [answer.content.decode()]
    if answer.status_code == 200 and "/add/" in path:
        picked = picks(pages[0])
        sent = {"pick": picked, "confirm": confirmations(pages[0]), "variable:X": CANARY}
        pages.append(admins_client.post("/servers/add/connect", sent, follow=True).content.decode())
    for server in Server.objects.all():
        for tab in ("", "/tools", "/syncs", "/settings", "/status"):
            pages.append(admins_client.get(f"/servers/{server.slug}{tab}").content.decode())
    pages += [admins_client.get(path).content.decode() for path in ("/servers", "/servers/export")]

    assert not [page for page in pages if CANARY in page]
    assert not [text for text in everything_stored() if CANARY in text]


def test_hostile_texts_are_written_out_and_never_run(admins_client):
    server = make_server(
        slug="hostile",
        name=HOSTILE,
        description=HOSTILE,
        state="failing",
        state_reason=f"{HOSTILE} \u202egnp.exe",
        state_detail=HOSTILE,
        server_info={"name": HOSTILE, "version": HOSTILE, "title": HOSTILE},
        instructions=f"{HOSTILE} \u200b",
        protocol_version="<b>",
    )
    fold(server, tool_object("tool", description=HOSTILE))
    SyncRun.objects.create(
        server=server,
        trigger="manual",
        fence=1,
        started_at=timezone.now(),
        finished_at=timezone.now(),
        outcome="failed",
        error=HOSTILE,
        detail=HOSTILE,
        names={"added": [HOSTILE], "rejected": [{"name": HOSTILE, "reason": HOSTILE}]},
        warnings=[HOSTILE],
    )
    paste(admins_client, json.dumps({HOSTILE: {"url": "https://a.example/mcp", HOSTILE: 1}}))
    tabs = ["", "/tools", "/syncs", "/settings", "/status"]

    pages = [admins_client.get(f"/servers/hostile{tab}").content.decode() for tab in tabs]
    pages += [
        admins_client.get(path).content.decode()
        for path in ("/", "/servers", "/servers/add/check", f"/servers?q={HOSTILE}")
    ]

    for page in pages:
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert "\u202e" not in page
        assert "\u200b" not in page
        assert "&lt;script&gt;alert" in page
