"""Search hints: aliases and example queries of tools."""

import json

import pytest

from catalog.audit import SYSTEM, Actor, sentence
from catalog.models import AuditEntry, Revision, ToolHint
from catalog.models.search import MAX_HINT_LENGTH
from catalog.tools import hints
from tests.support.factories import make_tool
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
    assert call_api("GET", path, token=operator_token) == (200, [hint])
    assert call_api("POST", path, {"kind": "nickname", "text": "bug"})[0] == 422
    assert call_api("DELETE", f"{path}/{hint['id'] + 1}")[1]["error"]["code"] == "not_found"
    assert call_api("DELETE", f"{path}/{hint['id']}")[0] == 204
    assert call_api("GET", path) == (200, [])


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
