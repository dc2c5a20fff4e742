"""Deletion of one session by page and API."""

import pytest

from catalog.models import AuditEntry
from sessions_app.models import AgentSession, Call, Event
from tests.support.agent_client import add_tools, make_agent_client
from tests.support.asgi_requests import send_api
from tests.support.factories import make_call, make_event, make_session

pytestmark = pytest.mark.django_db
BACKEND = "django.contrib.auth.backends.ModelBackend"


def delete(session_id, token):
    return send_api(
        "DELETE", f"/api/v1/sessions/{session_id}", b"", {"Authorization": f"Bearer {token}"}
    )


@pytest.fixture
def recorded(db):
    session = make_session(calls=1)
    call = make_call(session, arguments={"text": "secret"}, result_copy={"text": "secret"})
    make_event(session, "called", call=call)
    return session


def test_an_admin_deletes_a_session_with_its_calls_and_an_entry_says_so(recorded, admin_token):
    other = make_session()

    assert delete(recorded.session_id, admin_token).status_code == 204

    assert list(AgentSession.objects.all()) == [other]
    assert (Call.objects.count(), Event.objects.count()) == (0, 0)
    entry = AuditEntry.objects.get(verb="session.delete")
    assert (entry.target_label, entry.before["calls"]) == (recorded.session_id, 1)
    assert delete(recorded.session_id, admin_token).status_code == 404


def test_operators_and_agents_cannot_delete(recorded, operator_token):
    assert delete(recorded.session_id, operator_token).status_code == 403
    client = make_agent_client()
    add_tools("weather", "forecast")
    session = client.open()
    response = client.send("DELETE", f"/sessions/{session.id}")
    assert response.status == 403
    assert "Agents cannot delete sessions." in response["error"]["message"]
    assert AgentSession.objects.count() == 2


def test_a_session_with_running_calls_is_closed_and_deleted_later(recorded, admin_token):
    running = make_call(recorded, state="accepted", finished_at=None)

    response = delete(recorded.session_id, admin_token)

    assert response.status_code == 409
    recorded.refresh_from_db()
    assert recorded.state == "closed"
    Call.objects.filter(pk=running.pk).update(state="succeeded")
    assert delete(recorded.session_id, admin_token).status_code == 204


def test_a_fork_and_the_agents_next_calls_go_on(admin_token):
    add_tools("weather", "forecast")
    client = make_agent_client()
    parent = client.open(mode="deferred")
    loaded = parent.load("mcp:weather").json
    child = parent.post("/fork")["id"]

    assert delete(parent.id, admin_token).status_code == 204

    again = client.send("POST", f"/sessions/{child}/load", {"group_id": "mcp:weather"})
    assert again["schemas"] == loaded["schemas"]
    assert client.send("GET", f"/sessions/{parent.id}").status == 404
    gone = parent.load("mcp:weather")
    assert (gone.status, gone["error"]["code"]) == (404, "unknown_session")


def test_the_page_deletes_after_the_id_was_typed(client, admin, recorded):
    client.force_login(admin, backend=BACKEND)
    path, name = f"/sessions/{recorded.session_id}", recorded.session_id[:12]
    assert f"Type <code>{name}</code> to confirm" in client.get(path).content.decode()

    refused = client.post(f"{path}/delete", {"typed_name": "ses_"}, follow=True)
    assert f"Type {name} to delete this session." in refused.content.decode()
    assert AgentSession.objects.exists()

    done = client.post(f"{path}/delete", {"typed_name": name}, follow=True)
    assert f"Deleted session {name}" in done.content.decode()
    assert not AgentSession.objects.exists()


def test_an_operator_sees_no_way_to_delete(client, operator, recorded):
    client.force_login(operator, backend=BACKEND)

    page = client.get(f"/sessions/{recorded.session_id}").content.decode()

    assert "Delete session" not in page
    assert client.post(f"/sessions/{recorded.session_id}/delete").status_code == 403
