"""Server pages: permissions, query counts, import wizard, secrets and escaping."""

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
from servers.registration import actions as server_actions
from servers.registration.credentials import decrypt
from servers.sync import runner
from servers.urls import urlpatterns
from tests.support.factories import ingest_tools, make_program, make_server, tool_object
from tests.support.upstreams.running import ROOT, running_http

CANARY = "sk-canary0123456789abcdef"
BACKEND = "django.contrib.auth.backends.ModelBackend"

# route: (method, status for operators, status for admins). Outsiders always get 403, and
# anonymous users the sign-in page. A route that is missing here fails a test.
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
# Includes server-settings, whose POST requires a higher role than its GET.
POSTS = [name for name, row in ROUTES.items() if row[0] == "post"] + ["server-settings"]
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def url_of(name):
    slugs = ["weather"] if "<slug" in route_of(name) else []
    return reverse(name, args=slugs)


def route_of(name):
    return next(str(route.pattern) for route in urlpatterns if route.name == name)


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
    ingest_tools(server, tool_object("get_forecast", description="Return the forecast."))
    return server


@pytest.fixture
def admins_client(admin):
    return signed_in(admin)


# --- Permissions ------------------------------------------------------------------------------


def test_every_route_has_a_row_in_the_table():
    assert {route.name for route in urlpatterns} == set(ROUTES)


@pytest.mark.parametrize("name", ROUTES)
def test_each_route_enforces_the_roles_in_the_table(name, weather, admin, operator, outsider):
    method, for_operator, for_admin = ROUTES[name]
    body = BODIES.get(name, {})

    def send(user):
        return getattr(signed_in(user), method)(url_of(name), body)

    anonymous = send(None)
    assert anonymous.status_code == 302
    assert anonymous["Location"] == f"/sign-in?next={url_of(name)}"
    assert send(outsider).status_code == 403
    assert send(operator).status_code == for_operator
    assert send(admin).status_code == for_admin


@pytest.mark.parametrize("name", POSTS)
def test_operators_cannot_change_anything(name, weather, operator):
    before = Server.objects.values().get(), AuditEntry.objects.count()

    response = signed_in(operator).post(url_of(name), BODIES.get(name, {}))

    assert response.status_code == 403
    assert (Server.objects.values().get(), AuditEntry.objects.count()) == before


@pytest.mark.parametrize("name", POSTS)
def test_a_post_without_the_csrf_token_is_rejected(name, weather, admin):
    client = signed_in(admin, enforce_csrf_checks=True)

    response = client.post(url_of(name), BODIES.get(name, {}))

    assert response.status_code == 403
    assert "submitted from another site" in text_of(response)
    assert Server.objects.filter(slug="weather", enabled=True).exists()


@pytest.mark.parametrize("name", [name for name, row in ROUTES.items() if row[0] == "post"])
def test_actions_reject_get(name, weather, admins_client):
    if name != "server-add-check":
        assert admins_client.get(url_of(name)).status_code == 405


def test_the_forbidden_page_lists_admins(weather, admin, outsider):
    page = text_of(signed_in(outsider).get("/servers"))

    assert "This requires the role viewer." in page
    assert admin.username in page


@pytest.mark.parametrize("name", ["servers", "server", "server-settings"])
def test_operators_see_no_forms_they_cannot_submit(name, weather, operator):
    page = signed_in(operator).get(url_of(name)).content.decode()

    forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page)
    assert set(forms) <= {"/theme", "/sign-out", "/servers/bulk"}
    buttons = re.findall(r"<button[^>]*>([^<]*)", page)
    assert "Sync" not in {label.strip() for label in buttons}


def test_add_and_export_are_not_slugs(weather, admins_client):
    assert "Paste your mcp.json" in text_of(admins_client.get("/servers/add"))
    assert admins_client.get("/servers/export")["Content-Type"] == "application/json"


def test_the_list_offers_an_export_for_each_client(weather, admins_client):
    page = admins_client.get("/servers").content.decode()
    for shape, key in (("vscode", "servers"), ("cursor", "mcpServers")):
        assert f'href="/servers/export?shape={shape}" download' in page
        assert weather.slug in admins_client.get(f"/servers/export?shape={shape}").json()[key]
    assert "mcpServers" in admins_client.get("/servers/export?shape=zed").json()


def test_an_unknown_server_gives_a_404_page(admins_client):
    response = admins_client.get("/servers/no-such")

    assert response.status_code == 404
    assert "Server not found: no-such." in text_of(response)


# --- List -------------------------------------------------------------------------------------


def count_queries(client, path):
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path).status_code == 200
    return len(captured)


@pytest.mark.parametrize("path", ["/servers", "/servers?state=failing&sort=-tokens", "/"])
def test_the_list_has_a_constant_number_of_queries(path, admins_client):
    for number in range(3):
        ingest_tools(make_server(state="failing"), tool_object(f"tool_{number}"))
    admins_client.get(path)
    few = count_queries(admins_client, path)

    for number in range(57):
        ingest_tools(make_server(state="failing"), tool_object(f"more_{number}"))

    admins_client.get(path)  # the catalog cache is loaded once per revision
    assert count_queries(admins_client, path) == few <= 38


@pytest.mark.parametrize("name", ["server", "server-tools", "server-syncs", "server-settings"])
def test_a_server_page_has_a_constant_number_of_queries(name, weather, admins_client):
    admins_client.get(url_of(name))
    few = count_queries(admins_client, url_of(name))

    ingest_tools(weather, *(tool_object(f"tool_{number}") for number in range(40)))
    for number in range(40):
        Credential.objects.create(
            server=weather, kind="header", name=f"X-{number}", origin_sha256="", ciphertext="x"
        )
        SyncRun.objects.create(
            server=weather, trigger="manual", fence=number, started_at=timezone.now(), outcome="ok"
        )

    assert count_queries(admins_client, url_of(name)) <= few + 1 <= 22


def test_the_list_shows_status_tools_and_cost(weather, admins_client):
    make_server(slug="crm", state="failing", failures=3, state_reason="The server answered HTML.")

    page = text_of(admins_client.get("/servers"))

    assert "Failing, 3 retries" in page
    assert "The server answered HTML." in page
    tokens = Tool.objects.get().approved.tokens
    assert f"≈{tokens}" in page


def test_filters_sorting_and_search_are_in_the_query_string(admins_client):
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


def test_an_empty_filter_result_offers_to_clear_the_filters(weather, admins_client):
    page = text_of(admins_client.get("/servers?q=nothing"))

    assert "No servers match" in page
    assert "Clear filters" in page


def test_without_servers_the_list_shows_the_setup(admins_client, operator):
    assert "Paste your mcp.json" in text_of(admins_client.get("/servers"))
    assert "Ask an admin to add a server." in text_of(signed_in(operator).get("/servers"))


def test_the_list_is_paginated(admins_client):
    for number in range(105):
        make_server(slug=f"server-{number:03}", name=f"server-{number:03}")

    first = text_of(admins_client.get("/servers"))
    second = text_of(admins_client.get("/servers?after=100"))

    assert "1 to 100 of 105 servers" in first
    assert "101 to 105 of 105 servers" in second


def test_bulk_sync_and_disable(admins_client):
    for slug in ("alpha", "beta", "gamma"):
        make_server(slug=slug)

    response = admins_client.post(
        "/servers/bulk",
        {"server": ["alpha", "beta"], "act": "disable", "next": "/servers?sort=-name"},
        follow=True,
    )

    assert response.redirect_chain == [("/servers?sort=-name", 302)]
    assert "Disabled 2 servers." in text_of(response)
    assert set(Server.objects.filter(enabled=True).values_list("slug", flat=True)) == {"gamma"}

    body = {"server": ["alpha", "gamma"], "act": "sync"}
    response = admins_client.post("/servers/bulk", body, follow=True)
    assert "Sync queued for 1 server. Skipped 1 disabled server." in text_of(response)
    assert Server.objects.get(slug="gamma").sync_due_at is not None
    assert Server.objects.get(slug="alpha").sync_due_at is None


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example/x"])
def test_redirects_stay_on_this_site(target, weather, admins_client):
    response = admins_client.post("/servers/weather/sync", {"next": target})

    assert response["Location"] == "/servers/weather"


# --- Import wizard ----------------------------------------------------------------------------


def paste(client, text, **extra):
    return client.post("/servers/add/check", {"source": "paste", "text": text}, **extra)


def confirmations(page):
    return re.findall(r'name="confirm" value="([0-9a-f]{64})"', page)


def picks(page):
    return re.findall(r'name="pick" value="([a-z0-9-]+)" checked', page)


def run_due_syncs():
    """Run the due syncs, as a worker would."""
    for server in Server.objects.filter(sync_due_at__lte=timezone.now()):
        runner.sync_if_due(server.pk)


@pytest.mark.django_db(transaction=True)
def test_servers_are_added_without_javascript_and_the_invalid_one_is_reported(admin):
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
        assert "Runs a command on this machine:" in page
        assert "-m tests.support.upstreams.healthy" in page
        assert "The entry has both a command and a url." in page
        assert Server.objects.count() == 0

        body = {"pick": picks(page), "confirm": confirmations(page)}
        running = client.post("/servers/add/connect", body, follow=True)
        assert running.redirect_chain == [("/servers/add/progress", 302)]
        assert "Refresh" in text_of(running)
        assert 'data-poll-state="running"' in text_of(running)

        run_due_syncs()
        done = text_of(client.get("/servers/add/progress"))

    assert done.count("7 tools · ≈") == 2
    assert "with all schemas" in done
    assert "refused" in done
    assert 'action="/servers/nobody/sync?next=/servers/add/progress"' in done
    assert "The entry has both a command and a url." in done
    assert 'data-poll-state="done"' in done
    assert set(Server.objects.values_list("slug", flat=True)) == {"weather", "local", "nobody"}
    for response in (checked, running):
        assert CANARY not in text_of(response)
    assert CANARY not in done


def test_an_unconfirmed_command_is_not_saved_and_can_be_confirmed_later(admins_client):
    page = text_of(admins_client.post("/servers/add/check", {"source": "demo"}, follow=True))
    assert "servers.demo" in page

    rejected = admins_client.post("/servers/add/connect", {"pick": "demo"}, follow=True)
    assert "select Allow this command" in text_of(rejected)
    assert Server.objects.count() == 0

    body = {"pick": "demo", "confirm": confirmations(page)}
    admins_client.post("/servers/add/connect", body)
    assert Server.objects.get().argv == [sys.executable, "-m", "servers.demo"]


def test_saved_servers_are_not_offered_again(admins_client):
    text = '{"a": {"url": "https://a.example/mcp"}, "b": {"url": "https://b.example/mcp"}}'
    paste(admins_client, text)

    admins_client.post("/servers/add/connect", {"pick": "a"})
    page = admins_client.get("/servers/add/check").content.decode()

    assert picks(page) == ["b"]
    admins_client.post("/servers/add/connect", {"pick": "b"})
    assert set(Server.objects.values_list("slug", flat=True)) == {"a", "b"}
    # All servers are saved, so the text is discarded.
    assert admins_client.get("/servers/add/check")["Location"] == "/servers/add/progress"


def test_missing_variables_are_prompted_for(admins_client):
    text = '{"wiki": {"url": "https://wiki.example/mcp", "headers": {"X-Key": "${WIKI_KEY}"}}}'
    page = text_of(paste(admins_client, text, follow=True))
    assert 'type="password" id="variable-1" name="variable:WIKI_KEY"' in page
    assert "Missing values" in page

    rejected = admins_client.post("/servers/add/connect", {"pick": "wiki"}, follow=True)
    assert "Missing values for variables: WIKI_KEY." in text_of(rejected)
    assert Server.objects.count() == 0

    again = admins_client.post(
        "/servers/add/check", {"again": "1", "variable:WIKI_KEY": CANARY}, follow=True
    )
    assert "Entered" in text_of(again)
    assert CANARY not in text_of(again)
    admins_client.post("/servers/add/connect", {"pick": "wiki"})
    assert decrypt(Credential.objects.get().ciphertext).reveal() == CANARY


def test_a_registered_server_is_marked_and_not_selected(weather, admins_client):
    page = text_of(paste(admins_client, '{"w": {"url": "http://127.0.0.1:1/mcp"}}', follow=True))

    assert "Duplicate of weather." in page
    assert picks(page) == []


def test_a_json_syntax_error_is_shown_with_line_and_column(admins_client):
    response = paste(admins_client, '{\n  "mcpServers": {\n    "a" 1\n  }\n}')

    assert response.status_code == 422
    assert "Line 3, column" in text_of(response)
    assert Server.objects.count() == 0


def test_the_check_reports_that_stdio_is_disabled(admins_client, settings):
    settings.ALLOW_STDIO = False

    page = text_of(admins_client.post("/servers/add/check", {"source": "demo"}, follow=True))

    assert "Stdio servers are disabled on this installation." in page
    assert confirmations(page) == []
    body = {"pick": "demo"}
    admins_client.post("/servers/add/connect", body)
    assert Server.objects.count() == 0


def test_a_selection_that_is_not_in_the_text_is_rejected(admins_client):
    paste(admins_client, '{"a": {"url": "https://a.example/mcp"}}')

    response = admins_client.post("/servers/add/connect", {"pick": ["a", "other"]}, follow=True)

    assert "The list has changed since it was displayed." in text_of(response)
    assert Server.objects.count() == 0


@pytest.mark.parametrize("path", ["/servers/add/check", "/servers/add/progress"])
def test_a_step_without_its_predecessor_redirects_to_the_first(path, admins_client):
    assert admins_client.get(path)["Location"] == "/servers/add"


def test_url_and_command_sources_lead_to_the_same_check(admins_client):
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
    assert 'Allow this command and connect<span class="sr-only"> npx</span>' in page


def test_each_outcome_is_announced_once(admins_client):
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


# --- Server detail ----------------------------------------------------------------------------


def test_a_failing_server_shows_its_reason_and_output(admins_client):
    make_server(
        slug="crashed",
        state="failing",
        state_since=timezone.now() - timedelta(minutes=5),
        failures=2,
        state_reason="The program exited with code 1.",
        state_detail="Traceback: no licence found",
    )

    page = text_of(admins_client.get("/servers/crashed"))

    assert "Failing for 5 min, 2 retries" in page
    assert "The program exited with code 1." in page
    assert "<summary>Log</summary>" in page
    assert "no licence found" in page
    assert "Reconnect" in page
    assert "Test connection" not in page  # one action


def test_the_history_shows_changes_and_rejection_reasons(weather, admins_client):
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


def test_the_status_is_polled_during_a_sync_and_announces_its_end(weather, admins_client):
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
def test_a_connection_test_shows_its_result_on_the_page(admin):
    client = signed_in(admin)
    with running_http("healthy") as url:
        make_server(slug="up", url=url)
        success = text_of(client.post("/servers/up/test"))
    make_server(slug="down", url="http://127.0.0.1:1/mcp")
    failure = text_of(client.post("/servers/down/test", headers={"HX-Request": "true"}))

    assert "Connected. 7 tools found." in success
    assert "refused" in failure
    assert "<html" not in failure


def test_settings_are_saved_and_invalid_ones_are_reported(weather, admins_client):
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

    rejected = admins_client.post("/servers/weather/settings", fields | {"call_timeout": "0"})
    assert rejected.status_code == 422
    assert "Call timeout" in text_of(rejected)


def test_a_new_host_removes_credentials_and_requires_new_values(weather, admins_client):
    admins_client.post(
        "/servers/weather/credentials",
        {"kind": "header", "name": "Authorization", "value": f"Bearer {CANARY}"},
    )
    page = text_of(admins_client.get("/servers/weather/settings"))
    assert "Authorization" in page
    assert "removes stored credentials" in page

    admins_client.post(
        "/servers/weather/connection", {"url": "http://127.0.0.2:1/mcp", "transport": "http"}
    )

    assert Credential.objects.get().voided
    assert "Value required" in text_of(admins_client.get("/servers/weather/settings"))
    assert "1 credential requires a value." in text_of(admins_client.get("/servers/weather"))
    admins_client.post(
        "/servers/weather/credentials",
        {"kind": "header", "name": "Authorization", "remove_credential": "1"},
    )
    assert not Credential.objects.exists()


def test_a_changed_command_must_be_confirmed_before_it_runs(admins_client):
    server = make_program("healthy", slug="local")
    command, *args = server.argv
    body = {"command": command, "args": "\n".join([*args, "--legacy"]), "cwd": server.cwd}

    page = text_of(admins_client.post("/servers/local/connection", body, follow=True))
    server.refresh_from_db()
    assert "--legacy" not in server.args
    assert "This runs a new command on this machine:" in page

    (digest,) = confirmations(page)
    admins_client.post("/servers/local/connection", {"confirm": "0" * 64})
    server.refresh_from_db()
    assert "--legacy" not in server.args

    admins_client.post("/servers/local/connection", {"confirm": digest})
    server.refresh_from_db()
    assert server.args[-1] == "--legacy"
    assert server.confirmed_argv == digest
    assert "runs a new command" not in text_of(admins_client.get("/servers/local/settings"))


def test_a_changed_value_of_a_program_must_be_confirmed_before_it_is_used(admins_client):
    server = make_program("healthy", slug="local")
    body = {"kind": "env", "name": "API_KEY", "value": CANARY}

    page = text_of(admins_client.post("/servers/local/credentials", body, follow=True))
    assert not Credential.objects.exists()
    assert "Nothing has changed yet." in page
    assert CANARY not in page
    (digest,) = confirmations(page)

    admins_client.post("/servers/local/credentials", {"confirm": "0" * 64})
    assert not Credential.objects.exists()
    other = body | {"name": "OTHER"}
    admins_client.post("/servers/local/credentials", other)  # replaces the pending change
    admins_client.post("/servers/local/credentials", {"confirm": digest})
    assert not Credential.objects.exists()
    admins_client.post("/servers/local/credentials", {"cancel": "1"})
    assert "Nothing has changed yet." not in text_of(admins_client.get("/servers/local/settings"))

    admins_client.post("/servers/local/credentials", body)
    page = text_of(
        admins_client.post("/servers/local/credentials", {"confirm": digest}, follow=True)
    )
    assert "Saved credential API_KEY." in page
    assert "Nothing has changed yet." not in page
    server.refresh_from_db()
    assert server_actions.build_spec(server).env["API_KEY"].reveal() == CANARY

    removal = {"kind": "env", "name": "API_KEY", "remove_credential": "1"}
    page = text_of(admins_client.post("/servers/local/credentials", removal, follow=True))
    assert "Without the environment variable" in page
    assert Credential.objects.exists()
    admins_client.post("/servers/local/credentials", {"confirm": confirmations(page)[0]})
    assert not Credential.objects.exists()


def test_the_check_marks_variables_of_a_command(admins_client):
    entry = {"command": "x", "args": ["--api-key", CANARY]}
    text = json.dumps({"mcpServers": {"one": entry}})
    body = {"source": "paste", "text": text}
    page = text_of(admins_client.post("/servers/add/check", body, follow=True))
    assert '<mark class="variable">${ONE_API_KEY}</mark>' in page
    assert "never shown" in page
    assert CANARY not in page


def test_deleting_a_server_requires_its_name(weather, admins_client):
    rejected = admins_client.post("/servers/weather/delete", {"typed_name": "whether"})
    assert rejected.status_code == 422
    assert "Nothing was deleted." in text_of(rejected)

    done = admins_client.post("/servers/weather/delete", {"typed_name": "weather"}, follow=True)
    assert "Deleted Weather" in text_of(done)
    assert not Server.objects.exists()


def test_disabling_and_enabling(weather, admins_client):
    off = admins_client.post("/servers/weather/disable", follow=True)
    assert "Disabled Weather. Its tools are unavailable." in text_of(off)
    assert admins_client.post("/servers/weather/sync").status_code == 422

    on = admins_client.post("/servers/weather/enable", follow=True)
    assert "Enabled Weather. Sync queued." in text_of(on)
    assert Server.objects.get().enabled


# --- Secrets and escaping ---------------------------------------------------------------------

SECRET_INPUTS = [
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
    """Yield every value in the database as text."""
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')  # noqa: S608 - our own table names
            for row in cursor.fetchall():
                yield from map(str, row)


@pytest.mark.parametrize(("path", "body"), SECRET_INPUTS)
def test_a_secret_is_in_no_response_and_no_table(path, body, weather, admins_client):
    make_program("healthy", slug="local")

    response = admins_client.post(path, body, follow=True)
    pages = [response.content.decode()]
    if response.status_code == 200 and "/add/" in path:
        connect = {
            "pick": picks(pages[0]),
            "confirm": confirmations(pages[0]),
            "variable:X": CANARY,
        }
        connected = admins_client.post("/servers/add/connect", connect, follow=True)
        pages.append(connected.content.decode())
    for server in Server.objects.all():
        for tab in ("", "/tools", "/syncs", "/settings", "/status"):
            pages.append(admins_client.get(f"/servers/{server.slug}{tab}").content.decode())
    pages += [admins_client.get(path).content.decode() for path in ("/servers", "/servers/export")]

    assert not [page for page in pages if CANARY in page]
    assert not [text for text in everything_stored() if CANARY in text]


def test_hostile_text_is_escaped(admins_client):
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
    ingest_tools(server, tool_object("tool", description=HOSTILE))
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
