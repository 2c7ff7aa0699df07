"""Candidates as columns: found again, judged once per combination, and inputs of the cost model."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings

from cluster.candidate_table import CandidateTable
from cluster.cost.cost_model import cost_model, inputs_of, inputs_of_table
from cluster.cost.generic import GenericInputs, generic_peak_bytes, generic_step_seconds
from cluster.cost.inputs import CostInputs
from cluster.cost.step_time import step_seconds
from cluster.cost.usual import KnobColumns
from cluster.cost.work import gathers_repeated, layers_params, selective_shares, tables_params, work_of
from cluster.hardware.topology import load_cluster
from orchestrator.space.notation import feature_columns, flat_params
from orchestrator.space.rules import RULES, Case, first_broken
from tests.orchestrator.space.candidate_strategies import SEEDS, random_candidate
from tests.support.sweep_files import topology
from trials.sizes import model_flops_per_token, num_parameters
from trials.spec import (
    Candidate,
    CustomChoice,
    Experts,
    ImageFolderData,
    Kernels,
    LatentAttention,
    Layout,
    LinearModel,
    LlamaModel,
    Offload,
    Precision,
    RandomData,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    TextData,
    Workload,
    gather_pattern,
)

MODEL = LlamaModel(vocab_size=512, hidden_size=64, ffn_hidden_size=128, num_layers=4, num_heads=8, num_kv_heads=4)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=64, global_batch_size=48)
CLUSTER = load_cluster("dgx-h100")


def has_good_shape(candidate):
    """The cost model takes no others; some illegal patterns match for ever."""
    ids = ("degrees", "recompute-pattern", "stage-layers", "recompute-shape")
    case = Case(candidate=candidate, workload=WORKLOAD, topology=None)
    return all(rule.check(case) is None for name in ids for rule in RULES if rule.id == name)


def mixed(rng, num):
    """Candidates of which many agree in some fields, as those of a space do, and some are the same."""
    few = [one for one in (random_candidate(rng, fitting=True) for _ in range(40)) if has_good_shape(one)]
    found = []
    for _ in range(num):
        layouts, others = rng.choice(few), rng.choice(few)
        own = rng.choice([(), (CustomChoice(name="--flag", value=rng.randint(0, 2)),)])
        found.append(replace(others, layout=layouts.layout, recompute=layouts.recompute, own=own))
    return tuple(found)


@settings(max_examples=8)
@given(SEEDS)
def test_a_table_is_the_sequence_of_its_candidates(rng):
    listed = mixed(rng, 60)
    table = CandidateTable.of(listed)
    assert tuple(table) == listed and [table[row] for row in range(-60, 60)] == [*listed, *listed]
    assert tuple(table[7:40:3]) == listed[7:40:3]
    for candidate in listed:
        assert table.row_of(candidate) == table.index(candidate) == listed.index(candidate)
    others = mixed(rng, 40)
    assert [row in table for row in others] == [other in listed for other in others]
    whole = table.followed_by(others)
    assert tuple(whole) == (*listed, *dict.fromkeys(other for other in others if other not in listed))
    assert whole.rows_in(table).tolist() == [listed.index(one) if one in listed else -1 for one in whole]


@settings(max_examples=8)
@given(SEEDS)
def test_only_occurring_combinations_are_listed(rng):
    table = CandidateTable.of(mixed(rng, 60))
    reads = rng.sample(["layout", "layout.tp", "layout.dp", "kernels.compile", "loader", "own", "recompute"], 3)

    def read(candidate):
        return tuple(
            getattr(getattr(candidate, name.partition(".")[0]), name.partition(".")[2])
            if "." in name
            else getattr(candidate, name)
            for name in reads
        )

    firsts, places = table.combinations(reads)
    assert [read(candidate) for candidate in table.take(firsts)] == list(dict.fromkeys(map(read, table)))
    assert [read(table[firsts[place]]) for place in places] == list(map(read, table))


def test_combinations_stay_distinct_when_their_numbers_overflow():
    rng = np.random.default_rng(0)
    listed = [Candidate(micro_batch_size=int(size), offload=Offload()) for size in rng.integers(1, 10**9, 3000)]
    table = CandidateTable.of(listed)
    firsts, places = table.combinations(["micro_batch_size"] * 9)
    assert len(firsts) == len(set(listed))
    assert [listed[firsts[place]] for place in places] == listed


@settings(max_examples=8)
@given(SEEDS)
def test_inputs_of_the_cost_model_are_those_of_single_candidates(rng):
    listed = mixed(rng, 60)
    rows = inputs_of([(WORKLOAD, candidate) for candidate in listed], CLUSTER)
    found = inputs_of_table(WORKLOAD, CandidateTable.of(listed), CLUSTER)
    some = np.array(rng.sample(range(60), 20))
    assert len(found) == 60 and isinstance(found, CostInputs)
    for field in fields(CostInputs):
        expected = getattr(rows, field.name)
        np.testing.assert_array_equal(getattr(found, field.name), expected)
        np.testing.assert_array_equal(getattr(found.take(slice(None)), field.name), expected)
        width = getattr(found.take(some), field.name).shape[1:]
        np.testing.assert_array_equal(getattr(found.take(some), field.name), expected[some][(..., *map(slice, width))])
    firsts, places = found.distinct()
    alike = [
        tuple(np.concatenate([np.ravel(getattr(rows.take([i]), f.name)) for f in fields(CostInputs)]))
        for i in range(60)
    ]
    assert [alike[firsts[place]] for place in places] == alike and len(firsts) == len(set(alike))
    longer = found.followed_by(rows.take(some))
    np.testing.assert_array_equal(longer.stage_full, np.concatenate([rows.stage_full, rows.stage_full[some]]))


class Watched(Candidate):
    """A candidate that notes which of its fields, and which attributes of those, are read."""

    __slots__ = ("seen",)

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if name in {field.name for field in fields(Candidate)}:
            object.__getattribute__(self, "seen").add(name)
        return value


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rules_read_no_other_fields_than_they_declare(rule):
    for seed in range(60):
        candidate = random_candidate(random.Random(seed))
        watched = Watched(**{field.name: getattr(candidate, field.name) for field in fields(Candidate)})
        object.__setattr__(watched, "seen", set())
        try:
            rule.check(Case(candidate=watched, workload=WORKLOAD, topology=topology(8)))
        except (ZeroDivisionError, ValueError):  # a rule before it would have refused that
            continue
        assert object.__getattribute__(watched, "seen") <= {name.partition(".")[0] for name in rule.reads}


@settings(max_examples=8)
@given(SEEDS)
def test_rules_judge_a_table_as_they_judge_single_candidates(rng):
    listed, where = mixed(rng, 60), topology(8)
    found = first_broken(RULES, CandidateTable.of(listed), WORKLOAD, where)
    for candidate, number in zip(listed, found, strict=True):
        case = Case(candidate=candidate, workload=WORKLOAD, topology=where)
        broken = next((i for i, rule in enumerate(RULES) if rule.check(case) is not None), -1)
        assert number == broken


@settings(max_examples=8)
@given(SEEDS)
def test_features_are_those_of_single_candidates(rng):
    listed = mixed(rng, 60)
    columns = feature_columns(CandidateTable.of(listed), flat_params)
    for row, candidate in enumerate(listed):
        columns_read = {name: values[places[row]] for name, (values, places) in columns.items()}
        assert columns_read == {"--flag": "inherited", **flat_params(candidate)} or (
            columns_read == flat_params(candidate)
        )


LLAMA = LlamaModel(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=128256
)
CANDIDATES_WORKLOAD = Workload(model=LLAMA, data=TextData(), seq_length=8192, global_batch_size=64)
BF16 = Precision(level="O2", dtype="bfloat16")
CANDIDATES_CLUSTER = load_cluster("dgx-h100")


def test_parameters_and_flops_agree_with_the_trial_runner():
    x = inputs_of([(CANDIDATES_WORKLOAD, Candidate(precision=BF16))], CANDIDATES_CLUSTER)
    work = work_of(x)
    # The cost model counts both norms and biases as 4 h per layer and no final norm.
    assert (layers_params(x, work) + tables_params(x)).sum() == pytest.approx(num_parameters(LLAMA), rel=1e-3)
    forward = 32 * (work.matmul_flops + 2 * work.attention_flops) + work.head_flops
    assert 3 * forward[0] / work.tokens[0] == pytest.approx(model_flops_per_token(LLAMA, 8192), rel=1e-3)


def test_pipelines_keep_what_backward_passes_gather():
    layouts = (Layout(dp_shard=2, zero_stage=3), Layout(pp=2, dp_shard=2, zero_stage=3, stage_layers=((16, 16),)))
    x = inputs_of(
        [(CANDIDATES_WORKLOAD, Candidate(layout=layout, precision=BF16)) for layout in layouts], CANDIDATES_CLUSTER
    )
    assert x.stays_gathered.tolist() == [0, 1]


def test_split_experts_take_less_memory_and_are_sent_tokens():
    experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=14336)
    mixture = replace(CANDIDATES_WORKLOAD, model=replace(LLAMA, experts=experts))
    layouts = [Layout(dp_shard=64, zero_stage=2, ep=ep) for ep in (1, 8)]
    x = inputs_of([(mixture, Candidate(layout=layout, precision=BF16)) for layout in layouts], CANDIDATES_CLUSTER)
    assert x.ep.tolist() == [1, 8]
    whole, split = cost_model().estimate(x).peak_bytes
    assert split < whole
    terms = step_seconds(x, work_of(x), cost_model().time.coefficients)
    assert terms["expert_parallel"][0] == 0 < terms["expert_parallel"][1]


@pytest.mark.parametrize("tp", [1, 4])
def test_narrow_latent_attention_has_fewer_weights_and_its_narrowing_ones_stay_whole(tp):
    sizes = {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 128}
    latents = [LatentAttention(kv_lora_rank=rank, **sizes) for rank in (256, 512)]
    layout = Layout(tp=tp, tp_engine="local", dp_shard=2, zero_stage=2)
    workloads = [replace(CANDIDATES_WORKLOAD, model=replace(LLAMA, latent=latent)) for latent in latents]
    x = inputs_of([(workload, Candidate(layout=layout)) for workload in workloads], CANDIDATES_CLUSTER)
    narrow, wide = x.attention_params
    per_rank = LLAMA.num_heads * (96 + 128) / tp + LLAMA.hidden_size + 1  # of the norm
    assert (wide - narrow) / tp == pytest.approx(256 * per_rank)
    few, many = cost_model().estimate(x).peak_bytes
    assert few < many


def test_layouts_and_recompute_arrive_per_stage():
    layout = Layout(pp=2, dp_shard=2, tp=2, zero_stage=1, schedule="interleaved", num_virtual_stages=2)
    layout = Layout(
        **{**{f: getattr(layout, f) for f in layout.__dataclass_fields__}, "stage_layers": ((9, 8), (9, 6))}
    )
    recompute = Recompute(
        full=((4, 0), (0, 2)),
        selective=(SelectiveRecompute(pattern=r"feed_forward\.mul", num_layers=((9, 8), (9, 6))),),
    )
    x = inputs_of(
        [(CANDIDATES_WORKLOAD, Candidate(layout=layout, recompute=recompute, precision=BF16))], CANDIDATES_CLUSTER
    )
    assert x.stage_layers.tolist() == [[18, 14]]
    assert x.stage_full.tolist() == [[4, 2]]
    assert 0.1 < x.selective_share[0] < 0.3
    assert x.num_microbatches[0] == 32


def test_selective_patterns_by_operator_and_module():
    def shares(pattern, layers=32):
        recompute = Recompute(selective=(SelectiveRecompute(pattern=pattern, num_layers=((layers,),)),))
        (dropped,), (repeated,) = selective_shares(recompute, LLAMA, CANDIDATES_WORKLOAD.seq_length, ((32,),))
        return dropped, repeated

    mul, work = shares(r"feed_forward\.mul")
    module, module_work = shares("feed_forward")
    assert 0 < mul < module < 1
    assert work < 0.1 < module_work
    assert shares(r"feed_forward\.mul", 8) == pytest.approx((mul / 4, work / 4))
    assert shares("nothing") == (0, 0)


def test_gathers_of_one_sub_layer_are_half_a_layer():
    def repeated(*patterns, everywhere=()):
        chosen = tuple(SelectiveRecompute(pattern=pattern, num_layers=((8, 4),)) for pattern in patterns)
        return gathers_repeated(Recompute(selective=chosen, communication=everywhere), ((16, 16),))

    attention, feed_forward = map(gather_pattern, ("attention", "feed_forward"))
    assert repeated() == repeated(r"feed_forward\.mul") == 0
    assert repeated(attention) == repeated(feed_forward) == 6
    assert repeated(attention, feed_forward) == 12
    assert repeated(attention, everywhere=((4, 4),)) == (12 + 8) / 2


def test_precision_levels():
    kernels = Kernels(matmul_precision="high")
    rows = [Candidate(), Candidate(kernels=kernels), Candidate(precision=Precision(level="O1", dtype="bfloat16"))]
    x = inputs_of([(CANDIDATES_WORKLOAD, c) for c in [*rows, Candidate(precision=BF16)]], CANDIDATES_CLUSTER)
    assert x.peak_flops_per_s.tolist() == [66.9e12, 494.7e12, 989.4e12, 989.4e12]
    assert x.cast_bytes.tolist() == [0, 0, 2, 0]
    assert x.gather_bytes.tolist() == [4, 4, 4, 2], "O1 gathers fp32 weights"
    assert (x.weight_bytes + x.gradient_bytes + x.optimizer_bytes == 16).all()


def test_sums_over_tp_hide_where_the_backward_pass_can_be_taken_apart():
    local, zbv = Layout(tp=2, tp_engine="local"), {"schedule": "zbv", "num_virtual_stages": 2}
    layouts = [local, Layout(tp=2), Layout(tp=2, tp_engine="local", pp=2, stage_layers=((8, 8), (8, 8)), **zbv)]
    candidates = [Candidate(layout=layout, precision=BF16) for layout in layouts]
    candidates.append(Candidate(layout=local, precision=Precision(level="O1-fp8", dtype="bfloat16")))
    x = inputs_of([(CANDIDATES_WORKLOAD, candidate) for candidate in candidates], CANDIDATES_CLUSTER)
    assert x.hides_sums.tolist() == [1, 0, 0, 0]


def test_chunks_add_up_gradients_of_the_head_in_fp32():
    candidates = [Candidate(precision=BF16, kernels=Kernels(loss_chunks=chunks)) for chunks in (1, 4)]
    x = inputs_of([(CANDIDATES_WORKLOAD, candidate) for candidate in candidates], CANDIDATES_CLUSTER)
    assert x.head_sums_bytes.tolist() == [0, 4]


def test_other_models_are_refused():
    other = Workload(model=LinearModel(), data=RandomData(), seq_length=1, global_batch_size=8)
    with pytest.raises(NotImplementedError, match="linear"):
        inputs_of([(other, Candidate())], CANDIDATES_CLUSTER)


def test_generic_workloads():
    names = GenericInputs.__dataclass_fields__.keys() - {"knobs", "kind"}
    ones = {name: np.ones(2) for name in names}
    workload = Workload(model=ResNetModel(), data=ImageFolderData(), seq_length=1, global_batch_size=8)
    x = GenericInputs(
        **{
            **ones,
            "knobs": KnobColumns.of_pairs([(workload, Candidate())] * 2),
            "kind": "accelerator",
            "forward_flops": np.full(2, 4e9),
            "activation_bytes": np.full(2, 1e8),
            "num_params": np.full(2, 25e6),
            "num_kernels": np.full(2, 160.0),
            "param_bytes": np.full(2, 16.0),
            "micro_batch_size": np.array([1.0, 1024.0]),
            "dp": np.full(2, 8.0),
            "peak_flops_per_s": np.full(2, 125e12),
            "memory_bytes_per_s": np.full(2, 900e9),
            "link_bytes_per_s": np.full(2, 150e9),
        }
    )
    model = cost_model()
    seconds = generic_step_seconds(x, model.time.coefficients)
    assert seconds["launch"][0] > seconds["compute"][0], "one image is bound by launches"
    assert seconds["launch"][1] < 1e-3 * seconds["compute"][1], "1024 are not"
    assert seconds["compute"][1] == pytest.approx(1024 * seconds["compute"][0])
    peaks = generic_peak_bytes(x, model.memory.coefficients)
    assert peaks["activations"][1] == pytest.approx(1024 * peaks["activations"][0])
