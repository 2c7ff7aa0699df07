"""The user's knobs: one spelling per candidate, names, filters, dominance by declared memory."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.space.knobs import KNOBS, CustomKnob, chosen, combinations, in_order, memory_ranks
from orchestrator.space.notation import INHERITED, diff, flat_params, short_name
from orchestrator.space.rules import Filters, Pruner, check
from orchestrator.space.space import build_candidate, make_space
from tests.trials.tiny import SHAPE, WORKLOAD
from trials.spec import Candidate, CustomChoice

NAMES = ("--a", "$B", "file:c.d", "e")


@st.composite
def own_spaces(draw):
    """Knobs of which some need values of others, in any order that has no circle."""
    knobs = []
    for name in draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]:
        values = draw(st.sampled_from([(1, 2), (True, False), ("x", "y", "z"), (0.5,)]))
        when = []
        for other in knobs:
            if draw(st.booleans()):
                kept = draw(st.sets(st.sampled_from(other.values), min_size=1))
                when.append((other.name, tuple(kept)))
        knobs.append(CustomKnob(name=name, values=values, when=tuple(when)))
    return draw(st.permutations(knobs))


@given(own_spaces())
def test_choices_without_effect_are_omitted_and_equal_ones_merged(knobs):
    ordered = in_order(knobs)
    found = set(combinations(ordered))
    for own in found:
        values = {choice.name: choice.value for choice in own}
        assert chosen(ordered, values) == own  # canonical already
        assert [choice.name for choice in own] == sorted(values)
        for knob in knobs:
            assert (knob.name in values) == knob.applies(values)
    brute = {
        chosen(ordered, dict(zip([k.name for k in ordered], values, strict=True)))
        for values in itertools.product(*(k.values for k in ordered))
    }
    assert found == brute
    assert len({short_name(Candidate(own=own)) for own in found}) == len(found)
    assert len({Candidate(own=own).config_key for own in found}) == len(found)


def own(**values):
    return Candidate(own=tuple(CustomChoice(name=name, value=value) for name, value in sorted(values.items())))


def test_custom_knobs_are_part_of_the_space_and_of_every_name():
    knobs = in_order(
        (CustomKnob(name="--x", values=(1, 2)), CustomKnob(name="y", values=("a", "b"), when=(("--x", (2,)),)))
    )
    base = build_candidate({**_choices(single=True)}, SHAPE, knobs, {"--x": 1})
    space = make_space(_choices(), SHAPE, knobs)
    assert [short_name(c) for c in space] == ["dp1 mbs1 O0 x=1", "dp1 mbs1 O0 x=2 y=a", "dp1 mbs1 O0 x=2 y=b"]
    assert (space.product_size, space.num_duplicates) == (4, 1)
    last = list(space)[-1]
    assert flat_params(last)["--x"] == 2
    assert diff(last, base) == {"--x": (1, 2), "y": (INHERITED, "b")}


def _choices(*, single=False):
    values = {knob.name: knob.read(Candidate()) for knob in KNOBS}
    return values if single else {name: (value,) for name, value in values.items()}


def test_patterns_may_contain_custom_knobs():
    filters = Filters(forbid=({"e": ("x",)},), require=({"e": ("x", "y", INHERITED)},))
    broken = {e: [v.rule_id for v in check(own(e=e), WORKLOAD, None, filters)] for e in ("x", "y", "z")}
    assert broken == {"x": ["forbid.0"], "y": [], "z": ["require.0"]}
    assert not check(Candidate(), WORKLOAD, None, filters)  # inherited


def test_memory_rules_out_what_needs_more():
    knobs = (
        CustomKnob(name="dtype", values=("float32", "bfloat16"), memory="falls"),
        CustomKnob(name="cache", values=(1, 2, 3), memory="rises"),
        CustomKnob(name="tracing", values=(True, False), memory="none"),
        CustomKnob(name="other", values=(1, 2)),
    )
    candidates = [Candidate(own=own) for own in combinations(in_order(knobs))]
    witness = own(dtype="bfloat16", cache=2, tracing=True, other=1)
    pruned = Pruner(candidates, own=memory_ranks(knobs)).add(witness)
    found = {tuple(choice.value for choice in candidates[row].own) for row in pruned}  # cache, dtype, other, tracing
    assert found == set(itertools.product((2, 3), ("float32", "bfloat16"), (1,), (True, False)))
    assert set(pruned.values()) == {"oom-same", "oom-own.cache", "oom-own.dtype", "oom-several"}
    assert set(Pruner(candidates).add(witness).values()) == {"oom-same"}  # nothing is known: nothing is ruled out
