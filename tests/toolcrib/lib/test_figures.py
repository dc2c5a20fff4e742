import pytest

from toolcrib.lib.figures import percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7], 0.95, 7),
        ([1, 2], 0.5, 1),
        (list(range(1, 101)), 0.5, 50),
        (list(range(1, 101)), 0.95, 95),
    ],
)
def test_a_percentile_is_an_observed_value(values, share, expected):
    assert percentile(values, share) == expected
