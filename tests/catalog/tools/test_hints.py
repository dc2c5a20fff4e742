"""Hints: the other names and example queries that a tool is found by."""

import json

import pytest

from catalog.audit import SYSTEM, Actor, sentence
from catalog.models import AuditEntry, Revision, ToolHint
from catalog.models.search import LONGEST_HINT
from catalog.tools import hints
from tests.support.factories import make_tool
from toolcrib.lib.errors import Conflict, Invalid

pytestmark = pytest.mark.django_db


@pytest.fixture
def tool(db):
    return make_tool(name="create_issue")


@pytest.fixture
def ask(client, admin_token):
    """Ask the API as an admin: ask("GET", "/tools/…") -> (status, body)."""

    def send(method, path, body=None, token=None):
        answer = client.generic(
            method,
            f"/api/v1{path}",
            json.dumps(body) if body is not None else "",
            content_type="application/json",
            headers={"Authorization": f"Bearer {token or admin_token}"},
        )
        return answer.status_code, json.loads(answer.content or b"null")

    return send


def test_a_hint_is_kept_on_one_line_audited_and_raises_the_revision(tool):
    before = Revision.current()

    hint = hints.add(tool, "alias", "  bug \n report ", actor=Actor("user", "ada"))

    assert (hint.kind, hint.text, hint.created_by) == ("alias", "bug report", "ada")
    assert Revision.current() == before + 1
    entry = AuditEntry.objects.get(verb="tool.hint.add")
    assert sentence(entry) == f"ada gave {tool.public_name} a hint for search"
    assert entry.after == {"alias": "bug report"}


def test_the_same_hint_again_changes_nothing(tool):
    first = hints.add(tool, "example", "file a bug", actor=SYSTEM)
    before = Revision.current()

    assert hints.add(tool, "example", "file a  bug", actor=SYSTEM) == first
    assert hints.add(tool, "alias", "file a bug", actor=SYSTEM) != first
    assert Revision.current() == before + 1
    assert AuditEntry.objects.filter(verb="tool.hint.add").count() == 2


def test_a_removed_hint_is_gone_once_and_for_all(tool):
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
        ("alias", "x" * (LONGEST_HINT + 1)),
        ("alias", "a\0b"),
        ("example", "half \ud800"),
    ],
)
def test_what_cannot_be_a_hint_is_refused_and_leaves_nothing(tool, kind, text):
    before = Revision.current()

    with pytest.raises(Invalid):
        hints.add(tool, kind, text, actor=SYSTEM)

    assert Revision.current() == before
    assert not ToolHint.objects.exists()


def test_a_tool_has_so_many_hints_and_no_more(tool):
    ToolHint.objects.bulk_create(
        ToolHint(tool=tool, kind="alias", text=f"name {number}")
        for number in range(hints.MAX_HINTS_PER_TOOL)
    )

    with pytest.raises(Conflict, match="as many as a tool may have"):
        hints.add(tool, "alias", "one more", actor=SYSTEM)


def test_the_api_lists_adds_and_removes(tool, ask, operator_token):
    path = f"/tools/{tool.public_name}/hints"

    assert ask("POST", path, {"kind": "alias", "text": "bug"}, operator_token)[0] == 403
    status, made = ask("POST", path, {"kind": "alias", "text": "bug"})
    assert status == 201
    assert (made["kind"], made["text"], made["created_by"]) == ("alias", "bug", "tests")
    assert ask("GET", path, token=operator_token) == (200, [made])
    assert ask("POST", path, {"kind": "nickname", "text": "bug"})[0] == 422
    assert ask("DELETE", f"{path}/{made['id'] + 1}")[1]["error"]["code"] == "not_found"
    assert ask("DELETE", f"{path}/{made['id']}")[0] == 204
    assert ask("GET", path) == (200, [])


def test_the_page_of_a_tool_adds_removes_and_undoes(tool, admin, page_of, client):
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


def test_a_bad_hint_on_the_page_says_why(tool, admin, page_of, client):
    page_of(admin, "/tools")

    told = client.post(
        f"/tools/{tool.public_name}/hints", {"kind": "alias", "text": " "}, follow=True
    )

    assert "A hint needs words." in told.content.decode()


def test_an_operator_reads_hints_and_changes_none(tool, operator, page_of, client):
    hint = hints.add(tool, "alias", "bug", actor=SYSTEM)

    shown = page_of(operator, f"/tools/{tool.public_name}").content.decode()

    assert "bug" in shown
    assert "tool-hint" not in shown
    assert "Add hint" not in shown
    assert client.post(f"/tools/{tool.public_name}/hints/{hint.pk}/remove").status_code == 403
    assert ToolHint.objects.exists()
