"""Search hints: aliases and example queries of tools."""

import json
import re

import pytest

from catalog import cache
from catalog.audit import SYSTEM, Actor, sentence
from catalog.hints import actions as hints
from catalog.models import AuditEntry, GoldenQuery, HintSource, Revision, ToolHint
from catalog.models.search import MAX_AUTOMATIC_HINTS, MAX_HINT_LENGTH
from tests.support.factories import make_agent, make_tool
from toolcrib.lib.errors import Conflict, Invalid

pytestmark = pytest.mark.django_db


@pytest.fixture
def tool(db):
    return make_tool(name="create_issue")


@pytest.fixture
def call_api(client, admin_token):
    """Call the API as an admin: call_api("GET", "/tools/…") -> (status, body)."""

    def send(method, path, body=None, token=None):
        response = client.generic(
            method,
            f"/api/v1{path}",
            json.dumps(body) if body is not None else "",
            content_type="application/json",
            headers={"Authorization": f"Bearer {token or admin_token}"},
        )
        return response.status_code, json.loads(response.content or b"null")

    return send


def test_a_hint_is_normalized_audited_and_bumps_the_revision(tool):
    before = Revision.current()

    hint = hints.add(tool, "alias", "  bug \n report ", actor=Actor("user", "ada"))

    assert (hint.kind, hint.text, hint.created_by) == ("alias", "bug report", "ada")
    assert Revision.current() == before + 1
    entry = AuditEntry.objects.get(verb="tool.hint.add")
    assert sentence(entry) == f"ada added a search alias to {tool.public_name}"
    assert entry.after == {"alias": "bug report"}


def test_adding_an_existing_hint_changes_nothing(tool):
    first = hints.add(tool, "example", "file a bug", actor=SYSTEM)
    before = Revision.current()

    assert hints.add(tool, "example", "file a  bug", actor=SYSTEM) == first
    assert hints.add(tool, "alias", "file a bug", actor=SYSTEM) != first
    assert Revision.current() == before + 1
    assert AuditEntry.objects.filter(verb="tool.hint.add").count() == 2


def test_removing_a_hint_twice_is_recorded_once(tool):
    hint = hints.add(tool, "alias", "bug", actor=SYSTEM)
    before = Revision.current()

    hints.remove(hint, actor=SYSTEM)
    hints.remove(hint, actor=SYSTEM)

    assert not ToolHint.objects.exists()
    assert Revision.current() == before + 1
    assert AuditEntry.objects.get(verb="tool.hint.remove").before == {"alias": "bug"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("nickname", "bug"),
        ("alias", " \n "),
        ("alias", "x" * (MAX_HINT_LENGTH + 1)),
        ("alias", "a\0b"),
        ("example", "half \ud800"),
    ],
)
def test_an_invalid_hint_is_rejected_and_changes_nothing(tool, kind, text):
    before = Revision.current()

    with pytest.raises(Invalid):
        hints.add(tool, kind, text, actor=SYSTEM)

    assert Revision.current() == before
    assert not ToolHint.objects.exists()


def test_the_number_of_hints_per_tool_is_limited(tool):
    ToolHint.objects.bulk_create(
        ToolHint(tool=tool, kind="alias", text=f"name {number}")
        for number in range(hints.MAX_HINTS_PER_TOOL)
    )

    with pytest.raises(Conflict, match="the maximum"):
        hints.add(tool, "alias", "one more", actor=SYSTEM)


def test_the_api_lists_adds_and_removes_hints(tool, call_api, operator_token):
    path = f"/tools/{tool.public_name}/hints"

    assert call_api("POST", path, {"kind": "alias", "text": "bug"}, operator_token)[0] == 403
    status, hint = call_api("POST", path, {"kind": "alias", "text": "bug"})
    assert status == 201
    assert (hint["kind"], hint["text"], hint["created_by"]) == ("alias", "bug", "tests")
    assert call_api("GET", path, token=operator_token)[1]["items"] == [hint]
    assert call_api("POST", path, {"kind": "nickname", "text": "bug"})[0] == 422
    assert call_api("DELETE", f"{path}/{hint['id'] + 1}")[1]["error"]["code"] == "not_found"
    assert call_api("DELETE", f"{path}/{hint['id']}")[0] == 204
    assert call_api("GET", path) == (200, {"items": [], "next_cursor": None})


def test_hints_can_be_added_removed_and_restored_on_the_page(tool, admin, page_of, client):
    path = f"/tools/{tool.public_name}"
    page_of(admin, path)

    added = client.post(f"{path}/hints", {"kind": "example", "text": "file a <bug>"}, follow=True)
    assert "file a &lt;bug&gt;" in added.content.decode()
    hint = ToolHint.objects.get()
    removed = client.post(f"{path}/hints/{hint.pk}/remove", follow=True).content.decode()
    assert "Removed “file a &lt;bug&gt;”" in removed
    assert not ToolHint.objects.exists()
    assert "Removed “" not in client.get(path).content.decode()
    client.post(f"{path}/hints", {"kind": "example", "text": "file a <bug>"})  # what Undo sends
    assert ToolHint.objects.get().text == "file a <bug>"


def test_an_invalid_hint_on_the_page_shows_the_reason(tool, admin, page_of, client):
    page_of(admin, "/tools")

    response = client.post(
        f"/tools/{tool.public_name}/hints", {"kind": "alias", "text": " "}, follow=True
    )

    assert "The search alias is empty." in response.content.decode()


def test_an_operator_can_read_but_not_change_hints(tool, operator, page_of, client):
    hint = hints.add(tool, "alias", "bug", actor=SYSTEM)

    page = page_of(operator, f"/tools/{tool.public_name}").content.decode()

    assert "bug" in page
    assert "tool-hint" not in page
    assert "Add alias" not in page
    assert client.post(f"/tools/{tool.public_name}/hints/{hint.pk}/remove").status_code == 403
    assert ToolHint.objects.exists()


# --- Sources --------------------------------------------------------------------------------------


def texts(tool, agent=None):
    """Return the hints that search uses for a tool."""
    catalog = cache.current()
    cached = catalog.tools[tool.pk]
    if agent and agent.pk in catalog.agent_phrases:
        return [*cached.hints, *catalog.agent_phrases[agent.pk][tool.pk]]
    return [*cached.hints, *cached.phrases]


def set_hints(tool, source, *lines):
    return hints.replace({tool.pk: lines}, HintSource(source))


def use_hint(tool, agent, text):
    return ToolHint.objects.create(tool=tool, kind="example", text=text, source="use", agent=agent)


def test_hints_of_a_source_are_replaced_with_one_new_revision(tool):
    set_hints(tool, "model", "something broke", "tell the developers")
    before = Revision.current()

    assert set_hints(tool, "model", "something broke", "who fixes this?") == 1

    assert texts(tool) == ["something broke", "who fixes this?"]
    assert Revision.current() == before + 1
    assert set_hints(tool, "model", "something broke", "who fixes this?") == 0
    assert Revision.current() == before + 1


def test_people_come_first_and_the_rest_is_cut_by_source(tool):
    set_hints(tool, "bundled", *(f"bundled {at}" for at in range(3)))
    set_hints(tool, "model", *(f"model {at}" for at in range(6)))
    hints.add(tool, "alias", "by a person", actor=SYSTEM)

    assert texts(tool) == [
        "by a person",
        *(f"model {at}" for at in range(6)),
        "bundled 0",
        "bundled 1",
    ]
    assert ToolHint.objects.exclude(source="admin").count() == MAX_AUTOMATIC_HINTS


def test_a_removed_automatic_hint_does_not_come_back_by_itself(tool):
    set_hints(tool, "bundled", "do I need an umbrella", "will it rain")
    hints.remove(tool.hints.get(text="will it rain"), actor=SYSTEM)

    set_hints(tool, "bundled", "do I need an umbrella", "will it rain", "how warm is it")

    assert texts(tool) == ["do I need an umbrella", "how warm is it"]
    hints.add(tool, "example", "will it rain", actor=SYSTEM)  # what Undo sends
    assert "will it rain" in texts(tool)


def test_an_edited_hint_is_of_the_person_who_edited_it(tool, call_api):
    set_hints(tool, "model", "something broke")
    path = f"/tools/{tool.public_name}/hints"
    [hint] = call_api("GET", path)[1]["items"]
    assert (hint["source"], hint["agent"]) == ("model", None)

    status, edited = call_api("PATCH", f"{path}/{hint['id']}", {"text": "it is broken"})

    assert (status, edited["source"], edited["text"]) == (200, "admin", "it is broken")
    set_hints(tool, "model", "something broke")
    assert texts(tool) == ["it is broken"]


def test_a_hint_from_use_counts_for_its_agent_until_it_is_accepted(tool, call_api):
    scout, other = make_agent("scout"), make_agent("other")
    hint = use_hint(tool, scout, "yell at the devs")
    Revision.bump()

    assert texts(tool, scout) == ["yell at the devs"]
    assert texts(tool, other) == texts(tool) == []
    items = call_api("GET", "/hints?pending=true")[1]["items"]
    assert [(item["tool_name"], item["agent"]) for item in items] == [(tool.public_name, "scout")]
    status, accepted = call_api("POST", f"/tools/{tool.public_name}/hints/{hint.pk}/accept")

    assert (status, accepted["agent"], accepted["source"]) == (200, None, "use")
    assert texts(tool, other) == texts(tool) == ["yell at the devs"]
    assert AuditEntry.objects.get(verb="tool.hint.accept").after == {"example": "yell at the devs"}


def test_two_hints_from_use_are_accepted_for_a_tool_and_no_more(tool):
    scout = make_agent("scout")
    for at in range(2):
        hints.accept(use_hint(tool, scout, f"query {at}"), actor=SYSTEM)

    with pytest.raises(Conflict, match="already has 2 hints from use"):
        hints.accept(use_hint(tool, scout, "query 2"), actor=SYSTEM)


def test_the_same_query_of_two_agents_is_accepted_once(tool):
    first, second = (use_hint(tool, make_agent(name), "fix it") for name in ("a", "b"))

    hints.accept(first, actor=SYSTEM)

    assert not ToolHint.objects.filter(pk=second.pk).exists()
    assert texts(tool) == ["fix it"]


def test_hints_from_use_displace_others_of_the_same_agent_only(tool):
    scout = make_agent("scout")
    set_hints(tool, "model", *(f"model {at}" for at in range(8)))
    use_hint(tool, scout, "own")
    Revision.bump()

    assert texts(tool, scout) == ["own", *(f"model {at}" for at in range(7))]
    assert len(texts(tool)) == 8


def test_the_page_shows_sources_and_accepts_as_an_operator(tool, operator, page_of, client):
    set_hints(tool, "bundled", "something <broke>")
    hint = use_hint(tool, make_agent("scout"), "yell at the devs")

    page = page_of(operator, f"/tools/{tool.public_name}").content.decode()

    assert "something &lt;broke&gt;" in page
    assert ">bundled<" in page
    assert "for scout only" in page
    response = client.post(f"/tools/{tool.public_name}/hints/{hint.pk}/accept", follow=True)
    assert "now counts in the searches of all agents" in response.content.decode()
    assert ToolHint.objects.for_all_agents().filter(source="use").exists()


def test_a_query_from_use_becomes_a_golden_query_with_one_click(tool, admin, page_of, client):
    use_hint(tool, make_agent("scout"), "yell at the devs")
    page = page_of(admin, "/search/hints").content.decode()
    [form] = re.findall(r'action="/search/mark".*?</form>', page, re.DOTALL)

    client.post("/search/mark", dict(re.findall(r'name="(\w+)" value="([^"]*)"', form)))

    golden = GoldenQuery.objects.get()
    assert (golden.query, golden.right) == ("yell at the devs", [tool.public_name])
    assert golden.origin == "agents"
