"""The geometry of charts, by value."""

from hypothesis import given
from hypothesis import strategies as st

from toolcrib import charts
from toolcrib.charts import Segment


def test_the_parts_of_a_token_bar_lie_end_to_end_on_the_scale():
    bar = charts.token_bar(600, 300, 300, 2400, width=240)

    assert bar.segments == (
        Segment("preload", 0, 60),
        Segment("stub", 60, 30),
        Segment("rest", 90, 30),
    )
    assert bar.budget_x is None


def test_a_part_that_is_not_there_is_not_drawn():
    assert charts.token_bar(0, 0, 0, 0).segments == ()
    assert [part.kind for part in charts.token_bar(0, 12, 0, 100).segments] == ["stub"]


def test_the_smallest_part_is_still_a_pixel():
    assert charts.token_bar(1, 0, 0, 100_000, width=100).segments == (Segment("preload", 0, 1),)


def test_what_lies_over_the_budget_is_marked_from_the_budget_on():
    bar = charts.token_bar(300, 100, 0, 0, budget=200, width=200)

    assert bar.budget_x == 100
    assert bar.segments[-1] == Segment("over", 100, 100)


def test_within_the_budget_only_the_hairline_shows_it():
    bar = charts.token_bar(100, 0, 0, 0, budget=200, width=200)

    assert bar.budget_x == 200
    assert [part.kind for part in bar.segments] == ["preload"]


@given(*[st.integers(0, 10**7)] * 4, st.none() | st.integers(0, 10**7))
def test_nothing_is_drawn_outside_the_bar(preload, stub, rest, scale, budget):
    bar = charts.token_bar(preload, stub, rest, scale, budget=budget)

    for part in bar.segments:
        assert part.x >= 0
        assert part.x + part.width <= bar.width + 1.1


def test_a_cost_bar_is_scaled_to_the_largest_of_the_page():
    assert charts.cost_bar(310, 620, width=64).segments == (Segment("value", 0, 32),)
    assert charts.cost_bar(0, 620).segments == ()


def test_a_sparkline_runs_from_zero_to_its_maximum():
    spark = charts.sparkline([0, 10, 5], width=96, height=24)

    assert spark.lines == ("3,21 48,3 93,12",)
    assert spark.last == (93, 12)


def test_a_missing_value_is_a_gap_and_not_zero():
    spark = charts.sparkline([1, 1, None, 1, 1])

    assert len(spark.lines) == 2
    assert spark.last == (93, 3)


def test_a_sparkline_of_nothing_is_empty():
    assert charts.sparkline([]).lines == ()
    assert charts.sparkline([None]).last is None
    assert charts.sparkline([0, 0]).lines == ("3,21 93,21",)
