"""Every sign of a short name is explained, by one table that writes both."""

import dataclasses
import random

from orchestrator.config.schema import NOTATION_FILE, with_signs
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.notation import NOTATION, legend, name_parts_of, names_apart, short_name, spelled
from tests.orchestrator.space.candidate_strategies import random_candidate
from tests.support import ROOT
from trials.spec import Candidate, CustomChoice


def test_every_knob_has_a_sign():
    assert {knob for sign in NOTATION for knob in sign.knobs} == {*KNOB_NAMES, "own"}


def test_the_documented_signs_are_up_to_date():
    text = (ROOT / NOTATION_FILE).read_text(encoding="utf-8")
    assert with_signs(text) == text


def test_every_word_of_any_name_is_explained():
    """The signs make up the name, one after another; each has a meaning in which all its values are filled in."""
    rng, unseen = random.Random(5), set(NOTATION)
    for number in range(1500):
        own = (CustomChoice(name="--opt", value="a b" * (number % 20 + 1)), CustomChoice(name="f:x.opt", value=True))
        candidate = dataclasses.replace(random_candidate(rng), own=own[: number % 3])
        name, signs = short_name(candidate), spelled(candidate)
        rest = name
        for sign, meaning in signs:
            assert meaning
            assert rest.lstrip(" +").startswith(sign.lstrip("+")), (rest, sign)
            rest = rest.lstrip(" +")[len(sign.lstrip("+")) :]
        assert rest == ""
        found = {part.sign for word in name_parts_of(candidate) for part in word}
        assert len(legend([candidate])) == len(found)
        unseen -= found
    assert unseen <= {
        sign for sign in NOTATION if sign.general == "…-NAME"
    }  # a backend of torch.compile other than its own


def test_common_parts_of_names_are_shown_once():
    first, second = Candidate(), Candidate(micro_batch_size=2)
    assert names_apart([first, second]) == (["mbs1", "mbs2"], "dp1 O0")
    assert names_apart([first, first]) == (["as above", "as above"], "dp1 mbs1 O0")
    assert names_apart([first]) == (["dp1 mbs1 O0"], "")
