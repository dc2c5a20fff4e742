"""Golden queries: marking, measuring, what counts as a drop, and taking it for good."""

import pytest

from catalog.audit import SYSTEM, Actor
from catalog.models import AuditEntry, GoldenQuery, GoldenResult
from catalog.search import golden_queries
from catalog.search.index import Index, Searchable
from tests.support.factories import make_server, make_tool
from toolcrib.lib.errors import Conflict, Invalid, NotFound

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


def shelf_of(*described):
    """An index of tools whose words the test writes: (name, description)."""
    return Index([searchable(*one) for one in described])


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
    """Tools that all hold every word of the query."""
    return [(f"other__open_a_ticket_{at:02}", words) for at in range(number)]


def result(query, strategy="bm25"):
    return GoldenResult.objects.get(golden=query, strategy=strategy)


RIGHT = ("desk__open_ticket", "Open a ticket.")


def test_marking_keeps_the_query_on_one_line_with_its_answer_and_says_who(server):
    make_tool(server, "open_ticket")

    made = golden_queries.set_expected_tools(
        " open  a\nticket ", ["desk__open_ticket"] * 2, origin="api", actor=Actor("user", "ada")
    )

    assert (made.query, made.right, made.marked_by) == (
        "open a ticket",
        ["desk__open_ticket"],
        "ada",
    )
    entry = AuditEntry.objects.get(verb="golden.mark")
    assert (entry.before, entry.after) == ({"right": []}, {"right": ["desk__open_ticket"]})


def test_marking_the_same_again_records_nothing_and_another_answer_starts_anew(server, query):
    make_tool(server, "close_ticket")
    golden_queries.run_queries(shelf_of(RIGHT), [query], 1)

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
        ("open", ["desk__nothing"], NotFound),
        ("open", ["desk__\0"], NotFound),
        ("open", [f"desk__{at}" for at in range(21)], Invalid),
    ],
)
def test_what_cannot_be_marked_is_refused(server, text, names, error):
    make_tool(server, "open_ticket")

    with pytest.raises(error):
        golden_queries.set_expected_tools(text, names, origin="api", actor=SYSTEM)

    assert not GoldenQuery.objects.exists()


def test_there_are_so_many_golden_queries_and_no_more(query):
    GoldenQuery.objects.bulk_create(
        GoldenQuery(query=f"query {at}", right=["x"], origin="api")
        for at in range(golden_queries.MOST - 1)
    )

    with pytest.raises(Conflict, match="as many as there may be"):
        golden_queries.set_expected_tools(
            "one more", ["desk__open_ticket"], origin="api", actor=SYSTEM
        )


def test_the_first_run_says_where_a_query_stands_and_calls_nothing_a_drop(query):
    scores = golden_queries.run_queries(shelf_of(RIGHT, ("desk__sleep", "Sleep.")), [query], 7)

    kept = result(query)
    assert (kept.rank, kept.first, kept.revision) == (1, "desk__open_ticket", 7)
    assert (kept.good_rank, kept.good_revision, kept.broke) == (1, 7, False)
    assert scores["bm25"] == golden_queries.Score(queries=1, first=1, found=1, mrr=1.0, broke=0)


def test_a_tool_that_falls_from_the_first_place_breaks_its_query(query):
    golden_queries.run_queries(shelf_of(RIGHT), [query], 1)

    scores = golden_queries.run_queries(
        shelf_of(RIGHT, ("desk__open_a_ticket", "Open a ticket.")), [query], 2
    )

    kept = result(query)
    assert (kept.rank, kept.broke) == (2, True)
    assert (kept.good_rank, kept.good_revision, kept.first) == (1, 1, "desk__open_a_ticket")
    assert scores["bm25"].broke == 1
    assert golden_queries.list_regressions() == [query]
    assert golden_queries.count_regressions() == 1


def test_a_tool_that_is_gone_breaks_its_query_and_mends_it_when_it_is_back(query):
    golden_queries.run_queries(shelf_of(RIGHT), [query], 1)
    golden_queries.run_queries(shelf_of(("desk__sleep", "Sleep.")), [query], 2)
    assert (result(query).rank, result(query).broke) == (None, True)

    golden_queries.run_queries(shelf_of(RIGHT), [query], 3)

    assert (result(query).rank, result(query).broke, result(query).good_revision) == (1, False, 3)
    assert golden_queries.list_regressions() == []


def test_a_move_within_the_first_five_is_no_drop(query):
    # The crowd's names hold the query too, so all of them stand before the right one.
    golden_queries.run_queries(shelf_of(RIGHT, *crowd(1)), [query], 1)
    assert result(query).rank == 2

    golden_queries.run_queries(shelf_of(RIGHT, *crowd(4)), [query], 2)
    assert (result(query).rank, result(query).broke, result(query).good_rank) == (5, False, 5)

    golden_queries.run_queries(shelf_of(RIGHT, *crowd(5)), [query], 3)
    assert (result(query).rank, result(query).broke, result(query).good_rank) == (6, True, 5)


def test_what_was_never_found_is_no_drop(query):
    golden_queries.run_queries(shelf_of(("desk__sleep", "Sleep.")), [query], 1)

    assert (result(query).rank, result(query).broke) == (None, False)
    assert golden_queries.list_regressions() == []


def test_a_drop_that_is_accepted_counts_from_there(query):
    golden_queries.run_queries(shelf_of(RIGHT), [query], 1)
    worse = shelf_of(RIGHT, ("desk__open_a_ticket", "Open a ticket."))
    golden_queries.run_queries(worse, [query], 2)

    golden_queries.accept(query, actor=SYSTEM)

    assert (result(query).broke, result(query).good_rank) == (False, 2)
    entry = AuditEntry.objects.get(verb="golden.accept")
    assert (entry.before["bm25"], entry.after["bm25"]) == (1, 2)
    golden_queries.run_queries(worse, [query], 3)
    assert not result(query).broke
    golden_queries.accept(query, actor=SYSTEM)
    assert AuditEntry.objects.filter(verb="golden.accept").count() == 1


def test_any_of_several_right_answers_will_do(server, query):
    make_tool(server, "close_ticket")
    query = golden_queries.set_expected_tools(
        "open a ticket", ["desk__open_ticket", "desk__close_ticket"], origin="api", actor=SYSTEM
    )

    golden_queries.run_queries(
        shelf_of(("desk__close_ticket", "Open a ticket or close one.")), [query], 1
    )

    assert result(query).rank == 1


def test_a_query_that_was_changed_or_removed_meanwhile_is_left_alone(server, query):
    make_tool(server, "close_ticket")
    seen = list(GoldenQuery.objects.all())
    golden_queries.set_expected_tools(
        "open a ticket", ["desk__close_ticket"], origin="api", actor=SYSTEM
    )

    golden_queries.run_queries(shelf_of(RIGHT), seen, 1)
    assert not GoldenResult.objects.exists()

    golden_queries.remove(golden_queries.find_golden_query(query.pk), actor=SYSTEM)
    golden_queries.run_queries(shelf_of(RIGHT), seen, 1)
    assert not GoldenResult.objects.exists()
    assert AuditEntry.objects.filter(verb="golden.remove").count() == 1


def test_every_strategy_there_is_has_a_score_of_its_own(query):
    scores = golden_queries.run_queries(shelf_of(RIGHT), [query], 1)

    assert {"hybrid", "bm25"} <= scores.keys() <= {"hybrid", "bm25", "embedding"}
