"""Webhooks, e-mail and alerts: signed, at least once, retried for a day, raised once."""

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta

import pytest
from django.core import mail
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import AuditEntry
from servers.models import ServerState
from sessions_app.agents import api_keys
from sessions_app.models import Alert, CallState, Delivery, Webhook
from tests.support.factories import make_agent, make_call, make_event, make_server, make_session
from tests.support.receiver import running_receiver
from toolcrib.lib.errors import Invalid
from toolcrib.notifications import DIGEST, EVENTS, RAISED, RESOLVED, actions, alerts, digest
from toolcrib.notifications.deliveries import GIVE_UP, deliver_due, queue
from toolcrib.notifications.events import queue_events

pytestmark = pytest.mark.django_db
ALERTS = [RAISED, RESOLVED]


@pytest.fixture
def receiver():
    with running_receiver() as running:
        yield running


def make_webhook(address, events=ALERTS, kind="json"):
    return actions.create("ops", kind, address, events, actor=SYSTEM)


def test_a_notification_is_signed_and_has_an_id(receiver):
    _, secret = make_webhook(f"{receiver.url}/hook")
    queue(RAISED, "alert.raised:1", {"message": "CRM is failing."})
    assert deliver_due() == 1
    (posted,) = receiver.posted
    values = dict(part.split("=") for part in posted.headers["toolcrib-signature"].split(","))
    signed = f"{values['t']}.".encode() + posted.body
    assert values["v1"] == hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    body = json.loads(posted.body)
    assert (body["type"], body["data"]) == (RAISED, {"message": "CRM is failing."})
    assert body["id"] == posted.headers["toolcrib-delivery"] == Delivery.objects.get().delivery_id
    assert posted.path == "/hook"
    assert deliver_due() == 0


def test_what_does_not_arrive_is_repeated_with_the_same_id_until_a_day_has_passed(receiver):
    receiver.statuses = [500, 302, 200, 503]
    webhook, _ = make_webhook(receiver.url)
    queue(RAISED, "one", {"message": "x"})
    start, waits = timezone.now(), []
    for _ in range(3):
        delivery = Delivery.objects.get()
        waits.append(delivery.due_at - start)
        deliver_due(delivery.due_at)
    webhook.refresh_from_db()
    assert len({json.loads(posted.body)["id"] for posted in receiver.posted}) == 1
    assert len(receiver.posted) == 3
    assert waits == sorted(waits)
    assert (Delivery.objects.get().state, webhook.failing_since) == ("delivered", None)

    queue(RAISED, "two", {"message": "y"})
    Delivery.objects.filter(key="two").update(created_at=start - GIVE_UP)
    deliver_due()
    webhook.refresh_from_db()
    assert Delivery.objects.get(key="two").state == "failed"
    assert webhook.last_error == "The receiver answered HTTP 503."


def test_addresses_pass_the_same_guard_as_servers(settings):
    settings.ALLOWED_NETWORKS = []
    with pytest.raises(Invalid):
        make_webhook("ftp://example.org")
    make_webhook("http://127.0.0.1:9999/hook")
    queue(RAISED, "one", {"message": "x"})
    assert deliver_due() == 0
    assert "may not connect" in Delivery.objects.get().error


def test_slack_and_mail_get_texts(receiver, settings):
    settings.EMAIL_HOST = "mail.example.org"
    make_webhook(receiver.url, kind="slack")
    actions.create("mail", "email", "a@example.org, b@example.org", ALERTS, actor=SYSTEM)
    queue(RAISED, "one", {"message": "<!channel> & more", "url": "http://localhost:8000/"})
    assert deliver_due() == 2
    text = json.loads(receiver.posted[0].body)["text"]
    assert text == "&lt;!channel&gt; &amp; more\n<http://localhost:8000/>"
    (message,) = mail.outbox
    assert message.subject == "[Toolcrib] <!channel> & more"
    assert message.to == ["a@example.org", "b@example.org"]


def test_events_of_sessions_are_sent_once_under_the_names_that_were_asked_for(receiver):
    session = make_session(make_agent("scout"))
    make_event(session, "searched")
    make_webhook(receiver.url, ["session.searched", "call.held"])
    Webhook.objects.update(read_until=timezone.now() - timedelta(hours=1))
    Webhook.objects.update(created_at=timezone.now() - timedelta(hours=1))
    make_event(session, "loaded")
    assert queue_events() == 1
    assert queue_events() == 0
    deliver_due()
    (posted,) = receiver.posted
    body = json.loads(posted.body)
    assert body["type"] == "session.searched"
    assert body["data"]["session_id"] == session.session_id


def test_each_alert_is_raised_once_and_resolved():
    make_webhook("http://127.0.0.1:1/hook")
    now = timezone.now()
    server = make_server(slug="crm", name="CRM", state=ServerState.FAILING, state_since=now)
    agent = make_agent("scout")
    api_keys.create_key(
        "main", "agent", agent=agent, actor=SYSTEM, expires_at=now + timedelta(days=2)
    )
    session = make_session(agent)
    held = make_call(session, state=CallState.HELD)
    for _ in range(20):
        make_call(session, state=CallState.FAILED, is_error=True)
    assert alerts.evaluate(now + timedelta(seconds=61))[0] == 4
    assert alerts.evaluate(now + timedelta(seconds=62)) == (0, 0)
    kinds = set(Alert.objects.values_list("kind", "key"))
    assert {
        ("server_failing", "crm"),
        ("approval_waiting", "calls"),
        ("error_rate", "calls"),
    } < kinds
    assert "key_expiring" in {kind for kind, _ in kinds}

    server.state = ServerState.CONNECTED
    server.save()
    held.state = CallState.SUCCEEDED
    held.save()
    assert alerts.evaluate(now + timedelta(seconds=63)) == (0, 2)
    assert Delivery.objects.filter(event=RAISED).count() == 4
    assert Delivery.objects.filter(event=RESOLVED).count() == 2
    server.state = ServerState.FAILING
    server.save()
    assert alerts.evaluate(now + timedelta(seconds=64)) == (1, 0)


def test_the_digest_is_sent_once_a_week(receiver):
    make_webhook(receiver.url, [DIGEST])
    make_call(make_session(make_agent("scout")))
    monday = datetime(2026, 11, 16, 9, tzinfo=UTC)
    assert digest.queue_if_due(monday - timedelta(hours=2)) == 0
    assert digest.queue_if_due(monday) == 1
    assert digest.queue_if_due(monday + timedelta(hours=1)) == 0
    assert digest.queue_if_due(monday + timedelta(days=7)) == 1
    data = json.loads(Delivery.objects.first().data)
    assert data["message"].startswith("Last 7 days: ")


def test_the_api_never_returns_an_address_or_a_secret_again(admin_token, client):
    headers = {"Authorization": f"Bearer {admin_token}"}
    url = "https://hooks.example.org/T0/s3cret"
    body = {"name": "ops", "address": url, "events": ["alert.raised"]}
    created = client.post("/api/v1/webhooks", body, "application/json", headers=headers)
    assert created.status_code == 201, created.content
    assert created.json()["secret"].startswith("whs_")
    path = created.headers["Location"]
    changed = client.patch(path, {"enabled": False}, "application/json", headers=headers)
    assert changed.json()["enabled"] is False
    assert client.post(f"{path}/test", {}, "application/json", headers=headers).status_code == 202
    for address in (path, "/api/v1/webhooks", f"{path}/deliveries", "/api/v1/alerts"):
        answer = client.get(address, headers=headers)
        assert answer.status_code == 200, address
        assert b"s3cret" not in answer.content
        assert b"whs_" not in answer.content
    stored = Webhook.objects.values_list("address", "secret")
    assert stored  # decrypted by the model; the audit log has neither
    assert "s3cret" not in json.dumps(list(AuditEntry.objects.values("before", "after")))
    assert client.delete(path, headers=headers).status_code == 204
    wrong = {**body, "events": ["nothing"]}
    refused = client.post("/api/v1/webhooks", wrong, "application/json", headers=headers)
    assert refused.status_code == 422


def test_admins_add_test_and_delete_receivers_on_the_page(client, admin, operator):
    client.force_login(admin)
    values = {
        "name": "ops",
        "kind": "json",
        "address": "https://hooks.example.org/x",
        "events": EVENTS[:2],
    }
    page = client.post("/settings/notifications", values).content.decode()
    assert "whs_" in page
    assert "https://hooks.example.org" in page
    webhook = Webhook.objects.get()
    for act in ("test", "disable", "enable"):
        assert client.post(f"/settings/notifications/{webhook.pk}/{act}").status_code == 302
    assert Delivery.objects.get().event == "test"
    assert "whs_" not in client.get("/settings/notifications").content.decode()
    client.force_login(operator)
    assert client.post("/settings/notifications", values).status_code == 403
    assert client.post(f"/settings/notifications/{webhook.pk}/delete").status_code == 403
    assert Webhook.objects.exists()
