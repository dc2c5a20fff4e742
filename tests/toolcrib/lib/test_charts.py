"""Chart geometry, checked by value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrib.lib import charts
from toolcrib.lib.charts import DayBar, Lane, Segment


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


def test_a_step_line_keeps_its_value_for_the_width_of_a_step():
    line = charts.step_line([0, 50, 75, 100])

    assert line.points == "0,120 160,120 160,60 320,60 320,30 480,30 480,0 640,0"
    assert line.labels == ("100", "50", "0")
    assert line.limit_y is None


def test_a_limit_far_above_the_values_is_not_drawn():
    assert charts.step_line([100], limit=200).limit_y == 0
    assert charts.step_line([100], limit=50).limit_y == 60
    far = charts.step_line([100], limit=251)
    assert far.limit_y is None
    assert far.labels[0] == "100"


def test_bars_start_at_zero_with_errors_at_the_top():
    chart = charts.day_bars([(10, 5), (4, 0)])

    assert chart.bars == (
        DayBar(x=48, width=224, y=0, height=120, error_height=60),
        DayBar(x=368, width=224, y=72, height=48, error_height=0),
    )
    assert chart.labels == ("10", "5", "0")


def test_a_day_without_data_is_a_gap_and_a_single_error_is_visible():
    chart = charts.day_bars([None, (0, 0), (10_000, 1), None])

    assert [bar.x for bar in chart.bars] == [344]
    assert chart.bars[0].error_height == 1.5
    assert charts.day_bars([]).bars == ()


def test_lanes_lie_between_the_first_start_and_the_last_end():
    assert charts.lanes([(10, 10), (10, 15), (20, 20)]) == [
        Lane(0, 2),
        Lane(0, 32),
        Lane(62, 2),
    ]
    assert charts.lanes([]) == []
    assert charts.lanes([(3, 3)]) == [Lane(0, 2)]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=20))
def test_no_lane_leaves_its_row(spans):
    for lane in charts.lanes([(start, start + took) for start, took in spans]):
        assert lane.x >= 0
        assert lane.x + lane.width <= 64.2
