"""Golden queries in the product: marked on the page, run at every revision, drops reported."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.models import AuditEntry, GoldenQuery, GoldenRun, Revision, Tool
from catalog.search import golden_queries
from catalog.search.embeddings import store as vector_store
from catalog.tools import actions as tool_writes
from sessions_app import tasks
from sessions_app.playground import golden_runs
from sessions_app.playground import search as playground_search
from tests.sessions_app.playground.test_search import text_of
from tests.support.factories import fold, tool_object
from tests.support.installation import ROOT
from toolcrib.celery import app
from toolcrib.lib.errors import Conflict
from toolcrib.pages import attention

pytestmark = pytest.mark.django_db
RIGHT = "github__create_issue"


@pytest.fixture
def marked(github, slack):
    query = golden_queries.mark("create an issue", [RIGHT], origin="api", actor=SYSTEM)
    golden_runs.run_one(query)
    return query


def hide(name=RIGHT):
    tool_writes.hold(Tool.objects.get(public_name=name), "", actor=SYSTEM)


def ranks(query):
    return {row.strategy: row.rank for row in query.results.all()}


# --- When they are run --------------------------------------------------------------------------


def test_a_marked_query_is_measured_at_once(marked):
    assert ranks(marked)["bm25"] == 1
    assert ranks(marked)["hybrid"] == 1


def test_a_new_revision_is_run_once_and_says_what_broke(marked):
    assert golden_runs.run_if_due().revision == Revision.current()
    assert golden_runs.run_if_due() is None

    hide()
    run = golden_runs.run_if_due()

    assert run.revision == Revision.current()
    assert run.scores["bm25"]["broke"] == 1
    assert run.finished_at is not None
    assert ranks(marked)["bm25"] is None
    assert golden_queries.broken() == [marked]


def test_a_burst_of_revisions_is_run_once_for_the_newest(marked):
    golden_runs.run_if_due()
    for _ in range(5):
        Revision.bump()

    assert golden_runs.run_if_due().revision == Revision.current()
    assert golden_runs.run_if_due() is None
    assert GoldenRun.objects.count() == 2


def test_without_golden_queries_nothing_is_run(github):
    assert not golden_runs.is_due()
    assert golden_runs.run_if_due() is None
    assert not GoldenRun.objects.exists()


def test_while_one_process_runs_them_no_other_does(marked):
    GoldenRun.objects.create(revision=Revision.current(), started_at=timezone.now())

    assert golden_runs.run_if_due() is None
    with pytest.raises(Conflict, match="being run"):
        golden_runs.run_now()
    Revision.bump()
    assert golden_runs.run_if_due() is None


def test_a_run_that_died_is_taken_over(marked):
    long_ago = timezone.now() - golden_runs.GIVEN_UP - timedelta(seconds=1)
    GoldenRun.objects.create(revision=Revision.current(), started_at=long_ago)

    assert golden_runs.run_if_due().finished_at is not None
    assert GoldenRun.objects.count() == 1


def test_old_runs_are_forgotten(marked, monkeypatch):
    monkeypatch.setattr(golden_runs, "KEPT", 3)
    for _ in range(5):
        Revision.bump()
        golden_runs.run_if_due()

    kept = list(GoldenRun.objects.values_list("revision", flat=True))
    assert kept == [Revision.current() - step for step in range(3)]


def test_the_schedule_has_them_run_on_the_queue_for_indexing(marked):
    assert app.conf.beat_schedule["run_golden"]["task"] == tasks.run_golden.name
    assert app.amqp.router.route({}, tasks.run_golden.name)["queue"].name == "index"

    tasks.run_golden()

    assert GoldenRun.objects.get().revision == Revision.current()


def test_a_run_waits_for_the_vectors_and_then_scores_by_meaning_too(
    github, slack, settings, monkeypatch
):
    settings.EMBEDDINGS, settings.MODELS_DIR = True, ROOT / ".cache" / "models"
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    query = golden_queries.mark("open a bug report", [RIGHT], origin="api", actor=SYSTEM)
    assert vector_store.model.load() is not None
    golden_runs.run_one(query)
    assert not query.results.exists()
    assert golden_runs.run_if_due() is None
    with pytest.raises(Conflict, match="vectors are being computed"):
        golden_runs.run_now()
    assert playground_search.progress() == playground_search.Progress(0, 7)

    assert vector_store.embed_missing() == 7
    vector_store.installed._looked.clear()  # it looks again after a second
    run = golden_runs.run_if_due()

    assert run.scores.keys() == {"hybrid", "bm25", "embedding"}
    assert ranks(query)["embedding"] == 1
    assert playground_search.progress() is None
    shown = playground_search.run_query(
        playground_search.PlaygroundQuery(query="open a bug report")
    )
    assert shown.answer["strategy"] == "hybrid"
    assert shown.hits[0].embedding == 1.0


def test_no_agents_rights_move_a_golden_query(marked, github):
    """An agent without the tool changes nothing: searched is what every group has."""
    run = golden_runs.run_if_due()

    assert run.scores["bm25"]["first"] == 1


# --- The pages ----------------------------------------------------------------------------------


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    return client


def test_the_right_answer_is_marked_beside_a_result(github, signed_in):
    sent = {"q": " create  an issue", "tool": RIGHT, "address": "q=create+an+issue&limit=5"}

    told = signed_in.post("/search/mark", sent, follow=True)

    assert told.redirect_chain[0][0] == "/search?q=create+an+issue&limit=5"
    held = GoldenQuery.objects.get()
    assert (held.query, held.right, held.origin) == ("create an issue", [RIGHT], "playground")
    assert held.marked_by == "ada@example.org"
    assert ranks(held)["bm25"] == 1
    assert "Right answer" in text_of(told)
    assert "is the right answer to “create an issue”" in text_of(told)


def test_a_second_right_answer_is_added_and_both_can_be_taken_back(github, signed_in):
    for name in (RIGHT, "github__list_issues"):
        signed_in.post("/search/mark", {"q": "issue", "tool": name, "origin": "agents"})
    held = GoldenQuery.objects.get()
    assert (held.right, held.origin) == ([RIGHT, "github__list_issues"], "agents")

    signed_in.post("/search/mark", {"q": "issue", "tool": RIGHT, "right": "0"})
    assert GoldenQuery.objects.get().right == ["github__list_issues"]
    signed_in.post("/search/mark", {"q": "issue", "tool": "github__list_issues", "right": "0"})
    assert not GoldenQuery.objects.exists()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"q": "issue", "tool": "github__nothing"}, "There is no tool called github__nothing."),
        ({"q": "issue", "tool": ""}, "There is no tool called"),
        ({"q": "", "tool": RIGHT}, "A golden query has 1 to 500 characters."),
        ({"q": "a\0", "tool": RIGHT}, "NUL"),
    ],
)
def test_what_cannot_be_marked_says_why(github, signed_in, sent, said):
    assert said in text_of(signed_in.post("/search/mark", sent, follow=True))
    assert not GoldenQuery.objects.exists()


def test_a_drop_stands_on_the_search_pages_and_on_the_overview(marked, signed_in):
    assert not [one for one in attention.items() if "A search broke" in one.sentence]
    hide()
    golden_runs.run_if_due()

    page = text_of(signed_in.get("/search/golden"))
    assert "1 of 1 broke" in page
    assert "create an issue github__create_issue bm25: 1 → , now not found" in page
    first = marked.results.get(strategy="bm25").first
    assert first
    assert first in page
    assert "1 golden query broke. “create an issue”." in text_of(signed_in.get("/search"))
    said = [one.sentence for one in attention.items() if "A search broke" in one.sentence]
    assert said == [
        "A search broke: “create an issue” found github__create_issue at rank 1 and now no longer "
        "finds it."
    ]
    assert said[0] in text_of(signed_in.get("/"))


def test_a_drop_is_taken_for_good_or_the_query_removed(marked, signed_in):
    hide()
    golden_runs.run_if_due()

    signed_in.post(f"/search/golden/{marked.pk}/accept")
    assert golden_queries.broken() == []
    assert AuditEntry.objects.filter(verb="golden.accept").exists()
    page = text_of(signed_in.get("/search/golden"))
    assert "All 1 find their answer where they did before." in page

    signed_in.post(f"/search/golden/{marked.pk}/remove")
    assert not GoldenQuery.objects.exists()
    assert "No golden query yet" in text_of(signed_in.get("/search/golden"))
    gone = signed_in.post(f"/search/golden/{marked.pk}/remove", follow=True)
    assert "There is no such golden query." in text_of(gone)


def test_the_page_says_when_a_run_is_due_and_runs_it(marked, signed_in):
    assert "a run is due" in text_of(signed_in.get("/search/golden"))

    told = signed_in.post("/search/golden/run", follow=True)

    assert "The golden queries were run." in text_of(told)
    assert "a run is due" not in text_of(told)
    assert "bm25 1 of 1 1 of 1 1.00 0" in text_of(told)


def test_the_page_of_golden_queries_costs_no_more_with_more_of_them(
    marked, signed_in, django_assert_max_num_queries
):
    for number in range(30):
        golden_queries.mark(f"query {number}", [RIGHT], origin="api", actor=SYSTEM)
    golden_runs.run_if_due()
    signed_in.get("/search/golden")

    with django_assert_max_num_queries(16):
        signed_in.get("/search/golden")


# --- The API ------------------------------------------------------------------------------------


@pytest.fixture
def ask(client, admin_token):
    def send(method, path, body=None, token=admin_token):
        answer = client.generic(
            method,
            f"/api/v1/search{path}",
            json.dumps(body) if body is not None else "",
            content_type="application/json",
            headers={"Authorization": f"Bearer {token}"},
        )
        return answer.status_code, json.loads(answer.content or b"null")

    return send


def test_the_api_marks_lists_accepts_and_removes(github, ask, operator_token):
    sent = {"query": "create an issue", "tools": [RIGHT]}
    assert ask("POST", "/golden", sent, operator_token)[0] == 403
    status, made = ask("POST", "/golden", sent)
    assert status == 201
    assert (made["origin"], made["tools"], made["broke"]) == ("api", [RIGHT], False)
    assert {row["strategy"]: row["rank"] for row in made["results"]}["bm25"] == 1
    assert ask("GET", "/golden", token=operator_token)[1]["items"] == [made]
    assert ask("POST", "/golden", {"query": "x", "tools": ["no__tool"]})[0] == 404

    hide()
    golden_runs.run_if_due()
    _, standing = ask("GET", "/golden/standing")
    assert [one["query"] for one in standing["broke"]] == ["create an issue"]
    worst = next(row for row in standing["broke"][0]["results"] if row["strategy"] == "bm25")
    assert (worst["good_rank"], worst["rank"], worst["broke"]) == (1, None, True)
    assert standing["runs"][0]["scores"]["bm25"]["broke"] == 1

    assert ask("POST", f"/golden/{made['id']}/accept")[1]["broke"] is False
    assert ask("GET", "/golden/standing")[1]["broke"] == []
    assert ask("DELETE", f"/golden/{made['id']}")[0] == 204
    assert ask("DELETE", f"/golden/{made['id']}")[0] == 404


def test_the_api_runs_them_now_unless_they_are_being_run(marked, ask):
    status, run = ask("POST", "/golden/run")
    assert (status, run["revision"]) == (200, Revision.current())

    GoldenRun.objects.update(finished_at=None, started_at=timezone.now())
    assert ask("POST", "/golden/run")[0] == 409


def test_a_better_tool_that_takes_the_first_place_is_named(marked, github):
    golden_runs.run_if_due()
    fold(
        github.follows,
        *(tool_object(name) for name in ("list_issues", "search_code", "merge_pull", "get_file")),
        tool_object("create_issue", description="Create an issue in a repository."),
        tool_object("create_an_issue", description="Create an issue."),
    )

    golden_runs.run_if_due()

    row = marked.results.get(strategy="bm25")
    assert (row.rank, row.first, row.broke) == (2, "github__create_an_issue", True)
