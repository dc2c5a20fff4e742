import pytest

from toolcrib.lib.percentile import percentile


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([], 0.5, None),
        ([7], 0.95, 7),
        ([1, 2], 0.5, 1),
        (list(range(1, 101)), 0.5, 50),
        (list(range(1, 101)), 0.95, 95),
    ],
)
def test_a_percentile_is_a_value_that_was_seen(values, share, found):
    assert percentile(values, share) == found
