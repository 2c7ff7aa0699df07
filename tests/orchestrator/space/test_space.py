"""The space: canonical, without duplicates, in a fixed order; names and parameters of candidates."""

import math
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.notation import diff, flat_params, short_name
from orchestrator.space.space import build_candidate, knob_values, make_space
from tests.orchestrator.space.candidate_strategies import CANDIDATES, MODELS, SEEDS, canonicalize, random_candidate
from tests.support.sweep_files import FULL, SMALL, write
from trials.files import from_json, to_json
from trials.spec import (
    Candidate,
    Precision,
    SelectiveRecompute,
)

LLAMA = SweepSpec.model_validate(SMALL).to_workload().model


def select(*counts, pattern="a"):
    return SelectiveRecompute(pattern=pattern, num_layers=counts)


def canonical(**parts):
    return canonicalize(Candidate(**parts), LLAMA)


@given(CANDIDATES, MODELS)
def test_canonicalising_twice_changes_nothing(candidate, model):
    once = canonicalize(candidate, model)
    assert canonicalize(once, model) == once


@pytest.mark.parametrize(
    ("cp", "tp", "devices_per_node", "degree", "resolved"),
    [
        (16, 1, 8, "auto", ("hybrid", 8)),
        (16, 4, 8, "auto", ("hybrid", 2)),
        (12, 1, 8, "auto", ("hybrid", 4)),
        (16, 1, None, "auto", ("hybrid", 8)),
        (16, 8, 8, "auto", ("ring", 1)),
        (4, 1, 8, "auto", ("ulysses", 1)),
        (16, 4, 8, 4, ("hybrid", 4)),
        (16, 4, 8, 1, ("ring", 1)),
        (16, 4, 8, 16, ("ulysses", 1)),
    ],
)
def test_hybrid_exchanges_as_many_heads_as_node_and_model_allow(cp, tp, devices_per_node, degree, resolved):
    model = replace(LLAMA, hidden_size=512, num_heads=32, num_kv_heads=8)
    knobs = {"cp": cp, "tp": tp, "cp_method": "hybrid", "ulysses_degree": degree}
    layout = build_candidate({**knob_values(Candidate()), **knobs}, model, devices_per_node=devices_per_node).layout
    assert (layout.cp_method, layout.ulysses_degree) == resolved


@given(CANDIDATES)
def test_canonicalising_keeps_the_number_of_ranks_and_batches(candidate):
    once = canonicalize(candidate, LLAMA)
    assert once.layout.world_size == candidate.layout.world_size
    assert once.num_microbatches(48) == candidate.num_microbatches(48)


def variant(rng):
    """Two candidates: drawn at random they would hardly ever differ in one thing only."""
    one, other = random_candidate(rng, fitting=True), random_candidate(rng, fitting=True)
    part = rng.choice(["layout", "recompute", "precision", "loader", "kernels"])
    mine, theirs = getattr(one, part), getattr(other, part)
    name = rng.choice(fields_of(mine)).name
    changed = rng.choice([theirs, replace(mine, **{name: getattr(theirs, name)})])
    return one, replace(one, **{part: changed})


def has_right_shape(candidate):
    counts = candidate.layout.stage_layers
    shape = [candidate.layout.pp] * candidate.layout.num_virtual_stages
    return candidate.layout.pp == 1 or ([len(row) for row in counts] == shape and sum(map(sum, counts)) == 4)


@given(SEEDS.map(variant), MODELS)
def test_keys_and_names_are_equal_exactly_for_equal_candidates(pair, model):
    one, other = (canonicalize(candidate, model) for candidate in pair)
    assume(has_right_shape(one) and has_right_shape(other))
    assert (one == other) == (one.config_key == other.config_key)
    assert (one == other) == (short_name(one) == short_name(other))
    assert (one == other) == (flat_params(one) == flat_params(other))
    assert (one == other) == (diff(one, other) == {})


@given(CANDIDATES, MODELS)
def test_canonical_candidates_survive_json_and_knobs(candidate, model):
    once = canonicalize(candidate, model)
    assert from_json(Candidate, to_json(once)) == once
    assert build_candidate(knob_values(once), model) == once


@given(CANDIDATES)
def test_parameters_are_scalars(candidate):
    params = flat_params(canonicalize(candidate, LLAMA))
    assert list(params) == ["world_size", *KNOB_NAMES]
    assert all(isinstance(value, bool | int | float | str) for value in params.values())


def test_diff_has_the_values_of_baseline_and_candidate():
    fast = Candidate(micro_batch_size=4, precision=Precision(level="O1", dtype="bfloat16"))
    assert diff(fast, Candidate()) == {"micro_batch_size": (1, 4), "precision": ("O0", "O1-bf16")}


LISTS = {
    "pp": [1, 2, 4],
    "schedule": ["1f1b", "gpipe", "zbv"],
    "num_virtual_stages": [1, 2],
    "stage_layers": ["even", {"offset": [-1, 1]}, {"offset": [0, 0]}, {"counts": [2, 2]}, {"counts": [[1, 1], [1, 1]]}],
    "dp_replicate": [1, 2, 4],
    "cp": [1, 2],
    "tp_engine": ["auto", "dtensor", "local"],
    "num_copies": [1, 2],
    "shard_embedding": [False, True],
    "dp_shard": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "tp": [1, 2, 3],
    "sequence_parallel": [False, True],
    "replicate_with": ["auto", "ddp", "fsdp2"],
    "micro_batch_size": [1, 2, 3],
    "recompute": [
        "none",
        "full",
        {"full": 2},
        {"full": 9},
        {"full": [4, 0]},
        {"select": {"a": "all"}},
        {"communication": 1},
        {"full": "all", "select": {"a": 1}},
    ],
    "precision": ["O0", "O1", "O2", {"level": "O1", "dtype": "bfloat16"}, {"level": "O1", "dtype": "float16"}],
    "gradient_reduction": ["each", "last"],
    "loss_chunks": [1, 4],
    "offload_activations": [False, True],
    "offload_optimizer": [False, True],
    "num_workers": [0, 1],
    "prefetch_factor": [0, 2, 4],
    "dataloader": ["manual", "auto"],
    "compile": ["off", "block", "model"],
    "compile_mode": ["default", "max-autotune"],
    "memory_format": ["nchw", "nhwc"],
}


def subset(values):
    return st.lists(st.sampled_from(values), min_size=1, max_size=2, unique_by=repr)


SPACES = st.sets(st.sampled_from(sorted(LISTS)), max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: subset(LISTS[name]) for name in sorted(names)})
)


def spec_with(space):
    try:
        return SweepSpec.model_validate({**SMALL, "space": space})
    except ValueError as error:  # {level: O1, dtype: bfloat16} is O1 in long form
        assert "listed twice" in str(error)
        return None


def space_of(spec):
    return make_space(spec.choices, spec.to_workload().model)


@given(SPACES)
def test_enumeration_is_the_product_without_duplicates(space):
    spec = spec_with(space)
    if spec is None:
        return
    found = list(space_of(spec))
    names = list(spec.choices)
    everything = [
        build_candidate(dict(zip(names, values, strict=True)), LLAMA) for values in product(*spec.choices.values())
    ]
    assert set(found) == set(everything)
    assert len(found) == len(set(found)) == len({candidate.config_key for candidate in found})
    made = space_of(spec)
    assert made.product_size == len(everything) == math.prod(map(len, spec.choices.values()))
    assert (len(made), made.num_duplicates) == (len(found), len(everything) - len(found))


def test_enumeration_has_a_fixed_order_and_round_trips_knob_values(tmp_path):
    few = {"attention": ["auto"], "offload_activations": [False], "loss_chunks": [1], "pin_memory": [True]}
    spec = load_sweep(write(tmp_path, {**FULL, "space": FULL["space"] | few}))
    found = list(space_of(spec))
    assert found == list(space_of(SweepSpec.from_json(spec.to_json())))
    assert all(build_candidate(knob_values(candidate), spec.to_workload().model) == candidate for candidate in found)
    assert len(found) > 100
