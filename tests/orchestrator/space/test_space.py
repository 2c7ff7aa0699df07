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
    Kernels,
    Layout,
    LinearModel,
    Loader,
    LoaderTuning,
    LossScale,
    Precision,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
)

LLAMA = SweepSpec.model_validate(SMALL).to_workload().model
PIPELINE = Layout(pp=2, stage_layers=((3, 1),))


def select(*counts, pattern="a"):
    return SelectiveRecompute(pattern=pattern, num_layers=counts)


def canonical(**parts):
    return canonicalize(Candidate(**parts), LLAMA)


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
        ({"layout": Layout(schedule="zbv", num_virtual_stages=2, stage_layers=((1, 2),))}, {"layout": Layout()}),
        ({"layout": Layout(tp_engine="local", num_copies=2, cp_method="ulysses")}, {"layout": Layout()}),
        ({"layout": Layout(shard_embedding=True)}, {"layout": Layout()}),
        ({"recompute": Recompute(full=((9,),))}, {"recompute": Recompute(full=((4,),))}),
        ({"recompute": Recompute(full=((0,),), communication=((0,),))}, {"recompute": Recompute()}),
        (
            {"layout": PIPELINE, "recompute": Recompute(full=((2, 2),), selective=(select((2, 0)), select((9, 1))))},
            {"layout": PIPELINE, "recompute": Recompute(full=((2, 1),), selective=(select((3, 0)),))},
        ),
        (
            {"recompute": Recompute(selective=(select((1,), pattern="b"), select((1,))))},
            {"recompute": Recompute(selective=(select((1,)), select((1,), pattern="b")))},
        ),
        ({"precision": Precision(level="O0", dtype="float16", loss_scale=LossScale())}, {"precision": Precision()}),
        (
            {"precision": Precision(level="O1", dtype="bfloat16", loss_scale=LossScale())},
            {"precision": Precision(level="O1", dtype="bfloat16")},
        ),
        (
            {"precision": Precision(level="O2", dtype="float16")},
            {"precision": Precision(level="O2", dtype="float16", loss_scale=LossScale())},
        ),
        (
            {"precision": Precision(level="O1", dtype="bfloat16", white=("b", "a", "b"))},
            {"precision": Precision(level="O1", dtype="bfloat16", white=("a", "b"))},
        ),
        ({"precision": Precision(level="O0", black=("a",))}, {"precision": Precision()}),
        ({"loader": Loader(prefetch_factor=4, persistent_workers=True)}, {"loader": Loader()}),
        (
            {"loader": Loader(num_workers=2, persistent_workers=True, tuning=LoaderTuning())},
            {"loader": Loader(persistent_workers=True, tuning=LoaderTuning())},
        ),
        ({"loader": Loader(num_workers=2)}, {"loader": Loader(num_workers=2, prefetch_factor=2)}),
        ({"kernels": Kernels(backend="eager", compile_mode="max-autotune")}, {"kernels": Kernels()}),
        ({"kernels": Kernels(memory_format="nhwc", cudnn_tuning_range=(1, 10))}, {"kernels": Kernels()}),
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
        Layout(cp=2, replicate_with="fsdp2", cp_method="ulysses", shard_embedding=True),
        Layout(tp=2, tp_engine="local", num_copies=2),
        Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 1), (0, 2))),
    ],
)
def test_knobs_with_effect_are_kept(layout):
    assert canonical(layout=layout).layout == layout


def test_kernels_are_kept_where_the_model_has_their_operators():
    kernels = Kernels(attention="math", memory_format="nhwc", cudnn_tuning_range=(1, 4))
    assert canonicalize(Candidate(kernels=kernels), ResNetModel()).kernels == replace(kernels, attention="auto")
    assert canonicalize(Candidate(kernels=kernels), LLAMA).kernels == Kernels(attention="math")
    assert canonicalize(Candidate(kernels=kernels), LinearModel()).kernels == Kernels()


@given(CANDIDATES, MODELS)
def test_canonicalising_twice_changes_nothing(candidate, model):
    once = canonicalize(candidate, model)
    assert canonicalize(once, model) == once


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


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        (Candidate(), "dp1 mbs1 O0"),
        (
            Candidate(
                layout=Layout(dp_replicate=2, dp_shard=2, zero_stage=3, tp=2, sequence_parallel=True),
                micro_batch_size=4,
                recompute=Recompute(full=((4,),)),
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
        (
            Candidate(
                layout=Layout(
                    pp=2,
                    dp_replicate=2,
                    cp=2,
                    tp=2,
                    schedule="interleaved",
                    num_virtual_stages=2,
                    stage_layers=((5, 4), (4, 3)),
                    replicate_with="fsdp2",
                    shard_embedding=True,
                    cp_method="ulysses",
                    sequence_parallel=True,
                    tp_engine="local",
                    num_copies=2,
                ),
                recompute=Recompute(
                    full=((5, 4), (4, 3)),
                    selective=(select((1, 0), (0, 0), pattern=r"feed_forward\.mul"),),
                    communication=((2, 2), (2, 2)),
                ),
                precision=Precision(level="O1", dtype="bfloat16", white=("softmax",), black=("linear",)),
                loader=Loader(persistent_workers=True, tuning=LoaderTuning(), pin_memory=True),
                kernels=Kernels(attention="flash", matmul_precision="high"),
            ),
            r"pp2 interleavedv2 L5,4/4,3 dp2f emb cp2u tp2splc2 mbs1 "
            r"full16+~feed_forward\.mul:1,0/0,0+comm:2,2/2,2 O1-bf16+softmax-linear w-auto pin keep "
            r"attn-flash matmul-high",
        ),
        (
            Candidate(
                layout=Layout(pp=4, schedule="zbv", num_virtual_stages=2, stage_layers=((2, 2, 2, 2), (2, 2, 2, 2))),
                recompute=Recompute(full=((2, 2, 2, 2), (2, 0, 0, 0))),
                kernels=Kernels(compile="model", compile_mode="max-autotune"),
            ),
            "pp4 zbv mbs1 full2x4/2,0x3 O0 compile-model-max-autotune",
        ),
        (
            Candidate(kernels=Kernels(cudnn_tuning_range=(1, 10), memory_format="auto")),
            "dp1 mbs1 O0 cudnn1-10 format-auto",
        ),
    ],
)
def test_short_names(candidate, name):
    assert short_name(candidate) == name


def test_diff_tells_baseline_and_candidate():
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


def test_enumeration_has_a_fixed_order_and_tells_knob_values(tmp_path):
    spec = load_sweep(write(tmp_path, FULL))
    found = list(space_of(spec))
    assert found == list(space_of(SweepSpec.from_json(spec.to_json())))
    assert all(build_candidate(knob_values(candidate), spec.to_workload().model) == candidate for candidate in found)
    assert len(found) > 100
