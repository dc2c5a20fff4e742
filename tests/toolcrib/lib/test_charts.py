"""Chart geometry, checked by value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrib.lib import charts
from toolcrib.lib.charts import Segment, Span


def test_the_parts_of_a_token_bar_lie_end_to_end_on_the_scale():
    bar = charts.token_bar(600, 300, 300, 2400, width=240)

    assert bar.segments == (
        Segment("preload", 0, 60),
        Segment("stub", 60, 30),
        Segment("rest", 90, 30),
    )
    assert bar.budget_x is None


def test_an_empty_part_is_not_drawn():
    assert charts.token_bar(0, 0, 0, 0).segments == ()
    assert [part.kind for part in charts.token_bar(0, 12, 0, 100).segments] == ["stub"]


def test_a_small_part_is_at_least_one_pixel_wide():
    assert charts.token_bar(1, 0, 0, 100_000, width=100).segments == (Segment("preload", 0, 1),)


def test_the_part_over_budget_is_marked_from_the_budget_line():
    bar = charts.token_bar(300, 100, 0, 0, budget=200, width=200)

    assert bar.budget_x == 100
    assert bar.segments[-1] == Segment("over", 100, 100)


def test_within_the_budget_only_the_hairline_is_drawn():
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
    spark = charts.sparkline([0, 10, 5])

    assert spark.lines == ("3,21 48,3 93,12",)
    assert spark.last == (93, 12)


def test_a_missing_value_is_a_gap_and_not_zero():
    spark = charts.sparkline([1, 1, None, 1, 1])

    assert len(spark.lines) == 2
    assert spark.last == (93, 3)


def test_a_sparkline_without_values_is_empty():
    assert charts.sparkline([]).lines == ()
    assert charts.sparkline([None]).last is None
    assert charts.sparkline([0, 0]).lines == ("3,21 93,21",)


@pytest.mark.parametrize(
    ("value", "top"), [(0, 2), (1, 2), (3, 4), (7, 10), (11, 20), (855, 1000), (1201, 2000)]
)
def test_an_axis_ends_at_a_round_even_number(value, top):
    assert charts.round_up(value) == top


def test_areas_are_stacked_in_steps_and_an_empty_part_has_none():
    chart = charts.stacked_area({"catalog": [50, 50], "searches": [0, 0], "results": [0, 50]})

    assert chart.areas == (
        ("catalog", "0,60 320,60 320,60 640,60 640,120 320,120 320,120 0,120"),
        ("results", "0,60 320,60 320,0 640,0 640,60 320,60 320,60 0,60"),
    )
    assert chart.labels == ("100", "50", "0")
    assert chart.limit_y is None


def test_a_limit_far_above_the_values_is_not_drawn():
    assert charts.stacked_area({"a": [100]}, limit=200).limit_y == 0
    assert charts.stacked_area({"a": [60], "b": [40]}, limit=50).limit_y == 60
    far = charts.stacked_area({"a": [100]}, limit=251)
    assert far.limit_y is None
    assert far.labels[0] == "100"


def test_spans_lie_to_scale_and_the_shortest_stay_visible():
    scale = charts.time_scale(1.7)

    assert scale.ticks == ("0", "500 ms", "1000 ms", "1500 ms", "2000 ms")
    assert charts.place_span(scale, 0.5, 1.5) == Span(25, 50)
    assert charts.place_span(scale, 2, 2) == Span(99.5, 0.5)
    assert charts.time_scale(0).seconds > 0
    assert charts.time_scale(53).ticks == ("0", "15 s", "30 s", "45 s", "60 s")
    assert charts.time_scale(300).ticks[-1] == "6 min"
    assert charts.time_scale(90_000).ticks[-1] == "32 h"


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_no_span_leaves_its_scale(start, took):
    span = charts.place_span(charts.time_scale(start + took), start, start + took)
    assert span.x >= 0
    assert span.x + span.width <= 100.01
