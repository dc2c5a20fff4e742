"""Golden queries: added on the page, run at every revision, regressions reported."""

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
from tests.support.factories import ingest_tools, tool_object
from tests.support.installation import ROOT
from toolcrib.celery import app
from toolcrib.lib.errors import Conflict
from toolcrib.pages import attention

pytestmark = pytest.mark.django_db
EXPECTED = "github__create_issue"


@pytest.fixture
def marked(github, slack):
    query = golden_queries.set_expected_tools(
        "create an issue", [EXPECTED], origin="api", actor=SYSTEM
    )
    golden_runs.run_one(query)
    return query


def hide(name=EXPECTED):
    tool_writes.hold(Tool.objects.get(public_name=name), "", actor=SYSTEM)


def ranks(query):
    return {row.strategy: row.rank for row in query.results.all()}


# --- Scheduling ---------------------------------------------------------------------------------


def test_a_new_query_is_run_immediately(marked):
    assert ranks(marked)["bm25"] == 1
    assert ranks(marked)["hybrid"] == 1


def test_a_new_revision_is_run_once_and_reports_regressions(marked):
    assert golden_runs.run_if_due().revision == Revision.current()
    assert golden_runs.run_if_due() is None

    hide()
    run = golden_runs.run_if_due()

    assert run.revision == Revision.current()
    assert run.scores["bm25"]["broke"] == 1
    assert run.finished_at is not None
    assert ranks(marked)["bm25"] is None
    assert golden_queries.list_regressions() == [marked]


def test_a_burst_of_revisions_causes_one_run_for_the_newest(marked):
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


def test_only_one_process_runs_the_queries_at_a_time(marked):
    GoldenRun.objects.create(revision=Revision.current(), started_at=timezone.now())

    assert golden_runs.run_if_due() is None
    with pytest.raises(Conflict, match="in progress"):
        golden_runs.run_now()
    Revision.bump()
    assert golden_runs.run_if_due() is None


def test_a_run_of_a_dead_process_is_replaced(marked):
    long_ago = timezone.now() - golden_runs.RUN_TIMEOUT - timedelta(seconds=1)
    GoldenRun.objects.create(revision=Revision.current(), started_at=long_ago)

    assert golden_runs.run_if_due().finished_at is not None
    assert GoldenRun.objects.count() == 1


def test_old_runs_are_deleted(marked, monkeypatch):
    monkeypatch.setattr(golden_runs, "MAX_STORED_RUNS", 3)
    for _ in range(5):
        Revision.bump()
        golden_runs.run_if_due()

    revisions = list(GoldenRun.objects.values_list("revision", flat=True))
    assert revisions == [Revision.current() - step for step in range(3)]


def test_the_schedule_runs_the_queries_on_the_index_queue(marked):
    assert app.conf.beat_schedule["run_golden"]["task"] == tasks.run_golden.name
    assert app.amqp.router.route({}, tasks.run_golden.name)["queue"].name == "index"

    tasks.run_golden()

    assert GoldenRun.objects.get().revision == Revision.current()


def test_a_run_waits_for_embeddings_and_then_includes_the_embedding_strategy(
    github, slack, settings, monkeypatch
):
    settings.EMBEDDINGS, settings.MODELS_DIR = True, ROOT / ".cache" / "models"
    monkeypatch.setattr(vector_store, "model", vector_store.Model())
    query = golden_queries.set_expected_tools(
        "open a bug report", [EXPECTED], origin="api", actor=SYSTEM
    )
    assert vector_store.model.load() is not None
    golden_runs.run_one(query)
    assert not query.results.exists()
    assert golden_runs.run_if_due() is None
    with pytest.raises(Conflict, match="Embeddings are being computed"):
        golden_runs.run_now()
    assert playground_search.embedding_progress() == {"done": 0, "total": 7}

    assert vector_store.embed_missing() == 7
    vector_store.installation_vectors._last_lookup.clear()  # it looks again after a second
    run = golden_runs.run_if_due()

    assert run.scores.keys() == {"hybrid", "bm25", "embedding"}
    assert ranks(query)["embedding"] == 1
    assert playground_search.embedding_progress() is None
    result = playground_search.run_query(
        playground_search.PlaygroundQuery(query="open a bug report")
    )
    assert result.answer["strategy"] == "hybrid"
    assert result.hits[0]["embedding"] == 1.0


def test_golden_queries_are_independent_of_agent_permissions(marked, github):
    """Queries search the tools of all groups, whatever agents exist."""
    run = golden_runs.run_if_due()

    assert run.scores["bm25"]["first"] == 1


# --- The pages ----------------------------------------------------------------------------------


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend="django.contrib.auth.backends.ModelBackend")
    return client


def test_an_expected_tool_is_set_beside_a_result(github, signed_in):
    form = {"q": " create  an issue", "tool": EXPECTED, "address": "q=create+an+issue&limit=5"}

    page = signed_in.post("/search/mark", form, follow=True)

    assert page.redirect_chain[0][0] == "/search?q=create+an+issue&limit=5"
    golden = GoldenQuery.objects.get()
    assert (golden.query, golden.right, golden.origin) == (
        "create an issue",
        [EXPECTED],
        "playground",
    )
    assert golden.marked_by == "ada@example.org"
    assert ranks(golden)["bm25"] == 1
    assert "Expected tool" in text_of(page)
    assert f"Expected tool for “create an issue”: {EXPECTED}." in text_of(page)


def test_a_second_expected_tool_is_added_and_both_can_be_unset(github, signed_in):
    for name in (EXPECTED, "github__list_issues"):
        signed_in.post("/search/mark", {"q": "issue", "tool": name, "origin": "agents"})
    golden = GoldenQuery.objects.get()
    assert (golden.right, golden.origin) == ([EXPECTED, "github__list_issues"], "agents")

    signed_in.post("/search/mark", {"q": "issue", "tool": EXPECTED, "right": "0"})
    assert GoldenQuery.objects.get().right == ["github__list_issues"]
    signed_in.post("/search/mark", {"q": "issue", "tool": "github__list_issues", "right": "0"})
    assert not GoldenQuery.objects.exists()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"q": "issue", "tool": "github__nothing"}, "Tool not found: github__nothing."),
        ({"q": "issue", "tool": ""}, "Tool not found: ."),
        ({"q": "", "tool": EXPECTED}, "A golden query has 1 to 500 characters."),
        ({"q": "a\0", "tool": EXPECTED}, "NUL"),
    ],
)
def test_an_invalid_golden_query_shows_an_error(github, signed_in, form, message):
    assert message in text_of(signed_in.post("/search/mark", form, follow=True))
    assert not GoldenQuery.objects.exists()


def test_a_regression_is_shown_on_the_search_pages_and_on_the_overview(marked, signed_in):
    assert not [item for item in attention.items() if "Search regression" in item.message]
    hide()
    golden_runs.run_if_due()

    page = text_of(signed_in.get("/search/golden"))
    assert "1 of 1 regressed" in page
    assert "create an issue github__create_issue bm25: 1 → , now not found" in page
    first = marked.results.get(strategy="bm25").first
    assert first
    assert first in page
    assert "1 golden query regressed: “create an issue”" in text_of(signed_in.get("/search"))
    items = [item.message for item in attention.items() if "Search regression" in item.message]
    assert items == [
        "Search regression: “create an issue” found github__create_issue at rank 1 and now no "
        "longer finds it."
    ]
    assert items[0] in text_of(signed_in.get("/"))


def test_a_regression_is_accepted_or_the_query_removed(marked, signed_in):
    hide()
    golden_runs.run_if_due()

    signed_in.post(f"/search/golden/{marked.pk}/accept")
    assert golden_queries.list_regressions() == []
    assert AuditEntry.objects.filter(verb="golden.accept").exists()
    response = signed_in.get("/search/golden")
    assert "No regressions in 1 query." in text_of(response)
    # The run found one; the page counts those that are left, in the heading and by strategy.
    assert {score["broke"] for score in response.context["scores"]} == {0}

    signed_in.post(f"/search/golden/{marked.pk}/remove")
    assert not GoldenQuery.objects.exists()
    assert "No golden queries yet" in text_of(signed_in.get("/search/golden"))
    page = signed_in.post(f"/search/golden/{marked.pk}/remove", follow=True)
    assert "Golden query not found." in text_of(page)


def test_the_page_shows_that_a_run_is_due_and_runs_it(marked, signed_in):
    assert "a run is due" in text_of(signed_in.get("/search/golden"))

    page = signed_in.post("/search/golden/run", follow=True)

    assert "Golden query run finished." in text_of(page)
    assert "a run is due" not in text_of(page)
    assert "bm25 1 of 1 1 of 1 1.00 0" in text_of(page)


def test_the_golden_queries_page_takes_a_fixed_number_of_queries(
    marked, signed_in, django_assert_max_num_queries
):
    for number in range(30):
        golden_queries.set_expected_tools(f"query {number}", [EXPECTED], origin="api", actor=SYSTEM)
    golden_runs.run_if_due()
    signed_in.get("/search/golden")

    with django_assert_max_num_queries(16):
        signed_in.get("/search/golden")


# --- The API ------------------------------------------------------------------------------------


@pytest.fixture
def call_api(client, admin_token):
    def send(method, path, body=None, token=admin_token):
        response = client.generic(
            method,
            f"/api/v1/search{path}",
            json.dumps(body) if body is not None else "",
            content_type="application/json",
            headers={"Authorization": f"Bearer {token}"},
        )
        return response.status_code, json.loads(response.content or b"null")

    return send


def test_the_api_adds_lists_accepts_and_removes_golden_queries(github, call_api, operator_token):
    body = {"query": "create an issue", "tools": [EXPECTED]}
    assert call_api("POST", "/golden", body, operator_token)[0] == 403
    status, created = call_api("POST", "/golden", body)
    assert status == 201
    assert (created["origin"], created["tools"], created["broke"]) == ("api", [EXPECTED], False)
    assert {row["strategy"]: row["rank"] for row in created["results"]}["bm25"] == 1
    assert call_api("GET", "/golden", token=operator_token)[1]["items"] == [created]
    assert call_api("POST", "/golden", {"query": "x", "tools": ["no__tool"]})[0] == 422

    hide()
    golden_runs.run_if_due()
    _, standing = call_api("GET", "/golden/standing")
    assert [row["query"] for row in standing["broke"]] == ["create an issue"]
    worst = next(row for row in standing["broke"][0]["results"] if row["strategy"] == "bm25")
    assert (worst["good_rank"], worst["rank"], worst["broke"]) == (1, None, True)
    assert standing["runs"][0]["scores"]["bm25"]["broke"] == 1

    assert call_api("POST", f"/golden/{created['id']}/accept")[1]["broke"] is False
    assert call_api("GET", "/golden/standing")[1]["broke"] == []
    assert call_api("DELETE", f"/golden/{created['id']}")[0] == 204
    assert call_api("DELETE", f"/golden/{created['id']}")[0] == 404


def test_the_api_runs_the_queries_unless_a_run_is_in_progress(marked, call_api):
    status, run = call_api("POST", "/golden/run")
    assert (status, run["revision"]) == (200, Revision.current())

    GoldenRun.objects.update(finished_at=None, started_at=timezone.now())
    assert call_api("POST", "/golden/run")[0] == 409


def test_the_tool_that_now_ranks_first_is_recorded(marked, github):
    golden_runs.run_if_due()
    ingest_tools(
        github.follows,
        *(tool_object(name) for name in ("list_issues", "search_code", "merge_pull", "get_file")),
        tool_object("create_issue", description="Create an issue in a repository."),
        tool_object("create_an_issue", description="Create an issue."),
    )

    golden_runs.run_if_due()

    row = marked.results.get(strategy="bm25")
    assert (row.rank, row.first, row.broke) == (2, "github__create_an_issue", True)
