"""Numbers as text: plain decimals at every magnitude."""

import pytest

from orchestrator import units

MAGNITUDES = [factor * 10.0**exponent for exponent in range(-12, 7) for factor in (1.0, 1.5, 3.0, 9.94, 9.96, 9.996)]


@pytest.mark.parametrize("text", [units.percent, units.milliseconds])
def test_no_number_is_shown_with_an_exponent(text):
    assert [shown for value in (0.0, *MAGNITUDES) if "e" in (shown := text(value)).replace("under", "")] == []


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0004, "0.04%"), (0.994, "99%"), (0.996, "100%"), (1.5, "150%"), (12.345, "1,234%"), (3e-8, "under 0.0001%")],
)
def test_percentages(share, shown):
    assert units.percent(share) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0723, "72.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (99.97, "100 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_short_times(seconds, shown):
    assert units.milliseconds(seconds) == shown
