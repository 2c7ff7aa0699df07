"""The space: canonical, without duplicates, in a fixed order; names and parameters of candidates."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.candidates import build_candidate, canonicalize, knob_values
from orchestrator.knobs import KNOB_NAMES
from orchestrator.space import diff, enumerate_space, flat_params, make_space, short_name
from orchestrator.sweep import SweepSpec, load_sweep
from tests.orchestrator.candidate_strategies import CANDIDATES
from tests.orchestrator.sweep_files import FULL, SMALL, write
from trials.codec import from_json, to_json
from trials.spec import Candidate, FullRecompute, Kernels, Layout, Loader, LossScale, NoRecompute, Precision

NUM_LAYERS = 4


def canonical(**parts):
    return canonicalize(Candidate(**parts), NUM_LAYERS)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"layout": Layout(zero_stage=3)}, {"layout": Layout()}),
        ({"layout": Layout(sequence_parallel=True)}, {"layout": Layout()}),
        ({"layout": Layout(replicate_with="fsdp2")}, {"layout": Layout()}),
        (
            {"layout": Layout(dp_replicate=2, dp_shard=2, zero_stage=3, replicate_with="fsdp2")},
            {"layout": Layout(dp_replicate=2, dp_shard=2, zero_stage=3)},
        ),
        (
            {"layout": Layout(dp_replicate=2, dp_shard=2, zero_stage=1, replicate_with="fsdp2")},
            {"layout": Layout(dp_replicate=2, dp_shard=2, zero_stage=1)},
        ),
        ({"recompute": FullRecompute(num_layers=9)}, {"recompute": FullRecompute(num_layers=4)}),
        ({"recompute": FullRecompute(num_layers=0)}, {"recompute": NoRecompute()}),
        ({"precision": Precision(level="O0", dtype="float16", loss_scale=LossScale())}, {"precision": Precision()}),
        (
            {"precision": Precision(level="O1", dtype="bfloat16", loss_scale=LossScale())},
            {"precision": Precision(level="O1", dtype="bfloat16")},
        ),
        (
            {"precision": Precision(level="O2", dtype="float16")},
            {"precision": Precision(level="O2", dtype="float16", loss_scale=LossScale())},
        ),
        ({"loader": Loader(prefetch_factor=4)}, {"loader": Loader()}),
        ({"loader": Loader(num_workers=2)}, {"loader": Loader(num_workers=2, prefetch_factor=2)}),
        ({"kernels": Kernels(backend="eager")}, {"kernels": Kernels()}),
    ],
)
def test_knobs_without_effect_get_their_neutral_value(written, meant):
    assert canonical(**written) == Candidate(**meant)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2, replicate_with="fsdp2"),
        Layout(tp=2, sequence_parallel=True),
        Layout(dp_shard=2, zero_stage=2),
        Layout(dp_replicate=2, tp=2, replicate_with="ddp"),
    ],
)
def test_knobs_with_effect_are_kept(layout):
    assert canonical(layout=layout).layout == layout


@given(CANDIDATES)
def test_canonicalising_twice_changes_nothing(candidate):
    once = canonicalize(candidate, NUM_LAYERS)
    assert canonicalize(once, NUM_LAYERS) == once


@given(CANDIDATES)
def test_canonicalising_keeps_the_number_of_ranks_and_batches(candidate):
    once = canonicalize(candidate, NUM_LAYERS)
    assert once.layout.world_size == candidate.layout.world_size
    assert once.num_microbatches(48) == candidate.num_microbatches(48)


@given(CANDIDATES, CANDIDATES)
def test_keys_and_names_are_equal_exactly_for_equal_candidates(one, other):
    one, other = canonicalize(one, NUM_LAYERS), canonicalize(other, NUM_LAYERS)
    assert (one == other) == (one.config_key == other.config_key)
    assert (one == other) == (short_name(one) == short_name(other))
    assert (one == other) == (flat_params(one) == flat_params(other))
    assert (one == other) == (diff(one, other) == {})


@given(CANDIDATES)
def test_canonical_candidates_survive_json_and_knobs(candidate):
    once = canonicalize(candidate, NUM_LAYERS)
    assert from_json(Candidate, to_json(once)) == once
    assert build_candidate(knob_values(once), NUM_LAYERS) == once


@given(CANDIDATES)
def test_parameters_are_scalars(candidate):
    params = flat_params(canonicalize(candidate, NUM_LAYERS))
    assert list(params) == ["world_size", *KNOB_NAMES]
    assert all(isinstance(value, bool | int | float | str) for value in params.values())


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        (Candidate(), "dp1 mbs1 O0"),
        (
            Candidate(
                layout=Layout(dp_replicate=2, dp_shard=2, zero_stage=3, tp=2, sequence_parallel=True),
                micro_batch_size=4,
                recompute=FullRecompute(num_layers=4),
                precision=Precision(level="O1", dtype="bfloat16"),
                loader=Loader(num_workers=2, prefetch_factor=2),
            ),
            "dp2 z3x2 tp2sp mbs4 full4 O1-bf16 w2",
        ),
        (
            Candidate(
                layout=Layout(dp_replicate=2, tp=2, replicate_with="fsdp2"),
                precision=Precision(level="O2", dtype="float16", loss_scale=LossScale()),
                loader=Loader(num_workers=1, prefetch_factor=4),
                kernels=Kernels(compile="block"),
            ),
            "dp2f tp2 mbs1 O2-fp16 w1p4 compile",
        ),
    ],
)
def test_short_names(candidate, name):
    assert short_name(candidate) == name


def test_diff_tells_baseline_and_candidate():
    fast = Candidate(micro_batch_size=4, precision=Precision(level="O1", dtype="bfloat16"))
    assert diff(fast, Candidate()) == {"micro_batch_size": (1, 4), "precision": ("O0", "O1-bf16")}


LISTS = {
    "dp_replicate": [1, 2, 4],
    "dp_shard": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "tp": [1, 2, 3],
    "sequence_parallel": [False, True],
    "replicate_with": ["auto", "ddp", "fsdp2"],
    "micro_batch_size": [1, 2, 3],
    "recompute": ["none", "full", {"full": 2}, {"full": 4}, {"full": 9}],
    "precision": ["O0", "O1", "O2", {"level": "O1", "dtype": "bfloat16"}, {"level": "O1", "dtype": "float16"}],
    "num_workers": [0, 1],
    "prefetch_factor": [0, 2, 4],
    "compile": ["off", "block"],
}


def subset(values):
    return st.lists(st.sampled_from(values), min_size=1, max_size=2, unique_by=repr)


SPACES = st.fixed_dictionaries({}, optional={name: subset(values) for name, values in LISTS.items()})


def spec_with(space):
    try:
        return SweepSpec.model_validate({**SMALL, "space": space})
    except ValueError as error:  # {level: O1, dtype: bfloat16} is O1 in long form
        assert "listed twice" in str(error)
        return None


@given(SPACES)
def test_enumeration_is_the_product_without_duplicates(space):
    spec = spec_with(space)
    if spec is None:
        return
    found = [candidate for _, candidate in enumerate_space(spec)]
    names = list(spec.choices)
    everything = [
        build_candidate(dict(zip(names, values, strict=True)), NUM_LAYERS) for values in product(*spec.choices.values())
    ]
    assert set(found) == set(everything)
    assert len(found) == len(set(found)) == len({candidate.config_key for candidate in found})
    made = make_space(spec)
    assert made.product_size == len(everything) == math.prod(map(len, spec.choices.values()))
    assert (len(made), made.num_duplicates) == (len(found), len(everything) - len(found))


def test_enumeration_has_a_fixed_order_and_tells_knob_values(tmp_path):
    spec = load_sweep(write(tmp_path, FULL))
    pairs = list(enumerate_space(spec))
    assert pairs == list(enumerate_space(SweepSpec.from_json(spec.to_json())))
    assert all(build_candidate(values, NUM_LAYERS) == candidate for values, candidate in pairs)
    assert len(pairs) > 100
