"""What is answered is what was answered; see :mod:`tests.goldens.answers`."""

import pytest

from tests.goldens import answers


@pytest.mark.parametrize("name", answers.NAMES)
def test_answers_match_the_goldens(name):
    kept = answers.read(name)
    found = answers.answered(name, kept)
    wrong = [f"> {question}\n{found[question]}\n" for question in kept if found[question] != kept[question]]
    assert not wrong, "\n".join([*wrong, "on purpose: python -m tests.goldens.answers --write"])
    assert len(kept) >= 10
