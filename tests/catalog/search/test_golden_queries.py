"""Golden queries: expected tools, runs, regressions and accepting them."""

import pytest

from catalog.audit import SYSTEM, Actor
from catalog.models import AuditEntry, GoldenQuery, GoldenResult
from catalog.search import golden_queries
from catalog.search.index import Index, Searchable
from tests.support.factories import make_server, make_tool
from toolcrib.lib.errors import Conflict, Invalid

pytestmark = pytest.mark.django_db


def searchable(name, description):
    return Searchable(
        name=name,
        original_name=name.partition("__")[2],
        server=name.partition("__")[0],
        title="",
        description=description,
        parameters="",
        groups=(),
    )


def make_index(*described):
    """Return an index of tools given as (name, description)."""
    return Index([searchable(*tool) for tool in described])


@pytest.fixture
def server(db):
    return make_server(slug="desk")


@pytest.fixture
def query(server):
    make_tool(server, "open_ticket")
    return golden_queries.set_expected_tools(
        "open a ticket", ["desk__open_ticket"], origin="api", actor=SYSTEM
    )


def crowd(number, words="open a ticket quickly"):
    """Return tools that all contain every term of the query."""
    return [(f"other__open_a_ticket_{at:02}", words) for at in range(number)]


def result(query, strategy="bm25"):
    return GoldenResult.objects.get(golden=query, strategy=strategy)


EXPECTED = ("desk__open_ticket", "Open a ticket.")


def test_the_query_is_stored_on_one_line_with_its_expected_tools_and_author(server):
    make_tool(server, "open_ticket")

    golden = golden_queries.set_expected_tools(
        " open  a\nticket ", ["desk__open_ticket"] * 2, origin="api", actor=Actor("user", "ada")
    )

    assert (golden.query, golden.right, golden.marked_by) == (
        "open a ticket",
        ["desk__open_ticket"],
        "ada",
    )
    entry = AuditEntry.objects.get(verb="golden.mark")
    assert (entry.before, entry.after) == ({"right": []}, {"right": ["desk__open_ticket"]})


def test_the_same_tools_record_nothing_and_other_tools_delete_the_results(server, query):
    make_tool(server, "close_ticket")
    golden_queries.run_queries(make_index(EXPECTED), [query], 1)

    again = golden_queries.set_expected_tools(
        "open a ticket", ["desk__open_ticket"], origin="api", actor=SYSTEM
    )
    assert again.results.exists()
    assert AuditEntry.objects.filter(verb="golden.mark").count() == 1

    changed = golden_queries.set_expected_tools(
        "open a ticket", ["desk__close_ticket"], origin="api", actor=SYSTEM
    )
    assert changed.pk == query.pk
    assert not changed.results.exists()


@pytest.mark.parametrize(
    ("text", "names", "error"),
    [
        ("", ["desk__open_ticket"], Invalid),
        ("x" * 501, ["desk__open_ticket"], Invalid),
        ("a\0b", ["desk__open_ticket"], Invalid),
        ("half \ud800", ["desk__open_ticket"], Invalid),
        ("open", [], Invalid),
        ("open", ["desk__nothing"], Invalid),
        ("open", ["desk__\0"], Invalid),
        ("open", [f"desk__{at}" for at in range(21)], Invalid),
    ],
)
def test_invalid_queries_and_tools_are_rejected(server, text, names, error):
    make_tool(server, "open_ticket")

    with pytest.raises(error):
        golden_queries.set_expected_tools(text, names, origin="api", actor=SYSTEM)

    assert not GoldenQuery.objects.exists()


def test_the_number_of_golden_queries_is_limited(query):
    GoldenQuery.objects.bulk_create(
        GoldenQuery(query=f"query {at}", right=["x"], origin="api")
        for at in range(golden_queries.MAX_GOLDEN_QUERIES - 1)
    )

    with pytest.raises(Conflict, match="the maximum"):
        golden_queries.set_expected_tools(
            "one more", ["desk__open_ticket"], origin="api", actor=SYSTEM
        )


def test_the_first_run_saves_the_rank_and_reports_no_regression(query):
    scores = golden_queries.run_queries(make_index(EXPECTED, ("desk__sleep", "Sleep.")), [query], 7)

    saved = result(query)
    assert (saved.rank, saved.first, saved.revision) == (1, "desk__open_ticket", 7)
    assert (saved.good_rank, saved.good_revision, saved.broke) == (1, 7, False)
    assert scores["bm25"] == golden_queries.Score(queries=1, first=1, found=1, mrr=1.0, broke=0)


def test_a_tool_that_drops_from_the_first_place_is_a_regression(query):
    golden_queries.run_queries(make_index(EXPECTED), [query], 1)

    scores = golden_queries.run_queries(
        make_index(EXPECTED, ("desk__open_a_ticket", "Open a ticket.")), [query], 2
    )

    saved = result(query)
    assert (saved.rank, saved.broke) == (2, True)
    assert (saved.good_rank, saved.good_revision, saved.first) == (1, 1, "desk__open_a_ticket")
    assert scores["bm25"].broke == 1
    assert golden_queries.list_regressions() == [query]
    assert golden_queries.count_regressions() == 1


def test_a_missing_tool_is_a_regression_until_it_is_back(query):
    golden_queries.run_queries(make_index(EXPECTED), [query], 1)
    golden_queries.run_queries(make_index(("desk__sleep", "Sleep.")), [query], 2)
    assert (result(query).rank, result(query).broke) == (None, True)

    golden_queries.run_queries(make_index(EXPECTED), [query], 3)

    assert (result(query).rank, result(query).broke, result(query).good_revision) == (1, False, 3)
    assert golden_queries.list_regressions() == []


def test_a_move_within_the_first_five_is_not_a_regression(query):
    # The names of the crowd contain the query too, so all of them rank above the expected tool.
    golden_queries.run_queries(make_index(EXPECTED, *crowd(1)), [query], 1)
    assert result(query).rank == 2

    golden_queries.run_queries(make_index(EXPECTED, *crowd(4)), [query], 2)
    assert (result(query).rank, result(query).broke, result(query).good_rank) == (5, False, 5)

    golden_queries.run_queries(make_index(EXPECTED, *crowd(5)), [query], 3)
    assert (result(query).rank, result(query).broke, result(query).good_rank) == (6, True, 5)


def test_a_tool_that_was_never_found_is_not_a_regression(query):
    golden_queries.run_queries(make_index(("desk__sleep", "Sleep.")), [query], 1)

    assert (result(query).rank, result(query).broke) == (None, False)
    assert golden_queries.list_regressions() == []


def test_an_accepted_regression_is_the_new_baseline(query):
    golden_queries.run_queries(make_index(EXPECTED), [query], 1)
    worse = make_index(EXPECTED, ("desk__open_a_ticket", "Open a ticket."))
    golden_queries.run_queries(worse, [query], 2)

    golden_queries.accept(query, actor=SYSTEM)

    assert (result(query).broke, result(query).good_rank) == (False, 2)
    entry = AuditEntry.objects.get(verb="golden.accept")
    assert (entry.before["bm25"], entry.after["bm25"]) == (1, 2)
    golden_queries.run_queries(worse, [query], 3)
    assert not result(query).broke
    golden_queries.accept(query, actor=SYSTEM)
    assert AuditEntry.objects.filter(verb="golden.accept").count() == 1


def test_any_of_several_expected_tools_counts(server, query):
    make_tool(server, "close_ticket")
    query = golden_queries.set_expected_tools(
        "open a ticket", ["desk__open_ticket", "desk__close_ticket"], origin="api", actor=SYSTEM
    )

    golden_queries.run_queries(
        make_index(("desk__close_ticket", "Open a ticket or close one.")), [query], 1
    )

    assert result(query).rank == 1


def test_results_of_queries_changed_or_removed_during_the_run_are_discarded(server, query):
    make_tool(server, "close_ticket")
    seen = list(GoldenQuery.objects.all())
    golden_queries.set_expected_tools(
        "open a ticket", ["desk__close_ticket"], origin="api", actor=SYSTEM
    )

    golden_queries.run_queries(make_index(EXPECTED), seen, 1)
    assert not GoldenResult.objects.exists()

    golden_queries.remove(golden_queries.find_golden_query(query.pk), actor=SYSTEM)
    golden_queries.run_queries(make_index(EXPECTED), seen, 1)
    assert not GoldenResult.objects.exists()
    assert AuditEntry.objects.filter(verb="golden.remove").count() == 1


def test_every_available_strategy_has_its_own_metrics(query):
    scores = golden_queries.run_queries(make_index(EXPECTED), [query], 1)

    assert {"hybrid", "bm25"} <= scores.keys() <= {"hybrid", "bm25", "embedding"}
