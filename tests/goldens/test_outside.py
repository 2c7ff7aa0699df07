"""What users see is what it was; see :mod:`tests.goldens.outside`."""

import pytest

from orchestrator.text import CONTROLS
from tests.goldens import outside, variants

REMEDY = "on purpose: python -m tests.goldens.outside --write"


def test_user_visible_output_matches_the_goldens():
    texts = outside.made() | outside.submitted()
    differing = [found for name, text in texts.items() if (found := outside.difference(name, text))]
    assert not differing, "\n\n".join([*differing, REMEDY])
    names = [*texts, *map(variants.file_name, variants.VARIANTS)]
    assert sorted(names) == sorted(path.name for path in outside.FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_special_states_of_a_sweep_are_shown_everywhere_and_fit(name):
    found = outside.difference(variants.file_name(name), variants.text(name))
    assert not found, f"{found}\n\n{REMEDY}"
    shown = variants.rendered(name)
    for part, text in shown.items():
        assert not CONTROLS.search(text.replace("\n", "").replace("\t", "")), part
        is_table = part.startswith(("ps", "status", "explain", "report")) and "\nexit code 2\n" not in text
        if is_table and not part.endswith("--json"):
            assert max(map(len, text.splitlines())) <= outside.WIDTH, part
