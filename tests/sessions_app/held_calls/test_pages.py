"""Approvals page, tab Calls: what it shows, decisions, bulk decisions, who may decide."""

import json
import re

import pytest
from django.test import Client

from catalog.models import AuditEntry
from sessions_app.models import Call, Grant, HeldCall
from sessions_app.models.encryption import encrypt_text
from tests.sessions_app.rules.test_dispatch import add_rule
from tests.support.factories import make_run

BACKEND = "django.contrib.auth.backends.ModelBackend"
ARGUMENTS = {"what": "delete all", "password": "hunter2-hunter2"}
pytestmark = pytest.mark.django_db


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


@pytest.fixture
def signed_in(client, operator):
    client.force_login(operator, backend=BACKEND)
    return client


@pytest.fixture
def held(scout):
    """A held call of a session that has read nothing."""
    add_rule("Ask first", effect="hold", reason="It <b>changes</b> data.", tools=["github__*"])
    return hold(scout)


def hold(scout, what="delete all"):
    answer = scout.open().call("github__create_issue", {"what": what})
    assert answer["state"] == "held"
    return answer["call_id"]


def decide(client, decision, *call_ids, **fields):
    return client.post("/calls/decide", {"call": call_ids, "decision": decision, **fields})


def test_a_held_call_is_shown_with_agent_session_rule_and_arguments(signed_in, held, scout):
    response = signed_in.get("/approvals/calls")
    page = text_of(response)
    for shown in ("github__create_issue", "scout", "Ask first", "delete all", "Allow once"):
        assert shown in page
    assert "<b>changes</b>" not in response.content.decode()
    assert "It made no call before this one." in page
    assert f"/sessions/{Call.objects.get().session.session_id}" in response.content.decode()


def test_reading_the_arguments_of_held_calls_is_recorded_once(signed_in, held, scout):
    hold(scout, "delete some")
    for _ in range(2):
        signed_in.get("/approvals/calls")
    read = AuditEntry.objects.filter(verb="session.read").values_list("target_label", flat=True)
    held_in = Call.objects.values_list("session__session_id", flat=True)
    assert len(read) == 2
    assert all(any(session in label for session in held_in) for label in read)


def test_a_call_of_a_script_is_shown_with_the_script_that_waits(signed_in, held):
    waits = "Called by a script, which waits for this decision"
    assert waits not in text_of(signed_in.get("/approvals/calls"))
    call = Call.objects.get()
    run = make_run(call.session, state="held", code="await github.create_issue(what='<b>')")
    Call.objects.update(run=run)
    response = signed_in.get("/approvals/calls")
    source = response.content.decode()
    assert waits in text_of(response)
    assert '<span class="token-keyword">await</span> github.create_issue' in source
    assert "&#x27;&lt;b&gt;&#x27;" in source
    assert f'href="/sessions/{call.session.session_id}/scripts/{run.run_id}"' in source


def test_navigation_overview_and_tabs_count_held_calls(signed_in, held):
    assert "1 call waits for a decision." in text_of(signed_in.get("/"))
    for path in ("/approvals", "/approvals/calls"):
        page = text_of(signed_in.get(path))
        assert "Definitions 0" in page
        assert "Calls 1" in page
        assert "needs attention, 1" in page


def test_the_earlier_calls_of_the_session_are_beside_the_call(signed_in, scout):
    session = scout.open()
    session.call("slack__post_message", {"what": "x"})
    add_rule("Ask first", effect="hold", tools=["github__*"])
    session.call("github__create_issue", {"what": "y"})
    assert "slack__post_message" in text_of(signed_in.get("/approvals/calls"))


def test_the_poll_answers_only_when_the_list_has_changed(signed_in, held, scout):
    page = signed_in.get("/approvals/calls").content.decode()
    poll = re.search(r'data-poll="([^"]+)"', page)[1]
    part = {"HX-Request": "true"}
    assert signed_in.get(poll, headers=part).status_code == 204
    hold(scout, "something else")
    changed = signed_in.get(poll, headers=part)
    assert changed.status_code == 200
    assert "something else" in text_of(changed)
    assert "data-nav-count" in changed.content.decode()


def test_a_call_is_allowed_once(signed_in, held):
    page = signed_in.post("/calls/decide", {"call": held, "decision": "allow"}, follow=True)
    assert "Allowed github__create_issue." in text_of(page)
    assert Call.objects.get().state == "approved"
    assert not Grant.objects.exists()
    assert AuditEntry.objects.get(verb="call.allow").actor_label == "otto@example.org"


def test_a_call_is_allowed_for_its_session(signed_in, held):
    decide(signed_in, "allow-session", held)
    grant = Grant.objects.get()
    assert (grant.tools, grant.rule_name) == (["github__create_issue"], "Ask first")


def test_a_call_is_denied_with_words_that_the_agent_gets(signed_in, held, scout):
    decide(signed_in, "deny", held, comment="Use the form instead.")
    answer = scout.send("GET", f"/calls/{held}")
    assert answer["state"] == "denied"
    assert "Use the form instead." in answer["content"][0]["text"]


def test_identical_calls_are_decided_together(signed_in, held, scout):
    others = [hold(scout), hold(scout)]
    page = signed_in.get("/approvals/calls")
    assert "3 identical calls" in text_of(page)
    assert page.content.decode().count("Allow once") == 1
    decide(signed_in, "allow", held, *others)
    assert set(Call.objects.values_list("state", flat=True)) == {"approved"}


def test_the_second_person_sees_who_decided(signed_in, held):
    decide(signed_in, "allow", held)
    page = signed_in.post("/calls/decide", {"call": held, "decision": "deny"}, follow=True)
    assert "otto@example.org decided." in text_of(page)
    assert Call.objects.get().state == "approved"


def test_secrets_are_masked_on_the_page(signed_in, scout, held):
    sealed = encrypt_text(json.dumps({"arguments": ARGUMENTS}))
    HeldCall.objects.update(request=sealed)
    page = text_of(signed_in.get("/approvals/calls"))
    assert "delete all" in page
    assert "hunter2" not in page


def test_people_without_a_role_see_and_decide_nothing(held, outsider):
    client = Client()
    client.force_login(outsider, backend=BACKEND)
    assert client.get("/approvals/calls").status_code == 403
    assert decide(client, "allow", held).status_code == 403
    assert Call.objects.get().state == "held"


def test_a_list_of_ten_held_calls_takes_a_fixed_number_of_queries_each(
    signed_in, held, scout, django_assert_max_num_queries
):
    for number in range(9):
        hold(scout, str(number))
    with django_assert_max_num_queries(50):
        signed_in.get("/approvals/calls")
