"""Exports and overlays are those of the goldens; ``python -m tests.goldens.frameworks --dump`` shows all texts."""

import pytest

from tests.goldens.frameworks import NAMES, record, stored, thinned

STEP = 3


@pytest.mark.parametrize("name", NAMES)
def test_exports_and_overlays_match_the_goldens(name):
    made, kept = record(name, STEP), thinned(stored(name), STEP)
    for part, text in kept.items():
        assert made[part] == text, part
    assert made.keys() == kept.keys()
