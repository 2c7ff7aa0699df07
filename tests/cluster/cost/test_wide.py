"""Modules in fp32 at level O2, and fused operators: the cost model against the dry run, and the speed of fp32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.dryrun.cases import SMALL
from cluster.cost.cost_model import cost_model, inputs_of
from cluster.cost.inputs import MEMORY, Coefficients
from cluster.cost.peak_memory import _communicator_bytes, passes_bytes
from cluster.cost.step_time import busiest_params, gather_seconds, reduction_seconds
from cluster.cost.wide import mean_bytes, wide_columns
from cluster.cost.work import work_of
from tests.cluster.cost.test_tables import CANDIDATES_CLUSTER
from tests.trials.simulated import simulated_runs
from trials.dryrun.estimate import COMMUNICATOR_BYTES, DryRunRequest, num_communicators
from trials.sizes import num_parameters
from trials.spec import (
    Candidate,
    Experts,
    Layout,
    LlamaModel,
    Precision,
    Protocol,
    Recompute,
    TrialSpec,
)

MODEL = LlamaModel(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=192, vocab_size=512)
WORKLOAD = dataclasses.replace(SMALL, model=MODEL, seq_length=128, global_batch_size=16)
PATTERNS = (r"layers\.0", r"layers\.1\.feed_forward", r"layers\.2\.attention", r"layers\.3.*\.w.*")
ONES = Coefficients(MEMORY, np.zeros(len(MEMORY)))
"""Bytes as counted."""


def candidate(patterns=(), **layout):
    precision = Precision(level="O2", dtype="bfloat16", keep_fp32=patterns)
    return Candidate(layout=Layout(**layout), precision=precision, micro_batch_size=4)


def memory(*candidates, workload=WORKLOAD):
    """Terms of forward and backward passes."""
    x = inputs_of([(workload, one) for one in candidates], CANDIDATES_CLUSTER)
    return {name: values[:, 0] for name, values in passes_bytes(x, work_of(x), ONES).items()}


def seconds(*candidates, workload=WORKLOAD):
    return cost_model().estimate(inputs_of([(workload, one) for one in candidates], CANDIDATES_CLUSTER)).step_terms_s


def test_modules_in_fp32_take_the_memory_that_dry_runs_count():
    pair = [candidate(patterns, dp_shard=2, zero_stage=1) for patterns in ((), PATTERNS)]
    specs = [TrialSpec(workload=WORKLOAD, candidate=one, protocol=Protocol()) for one in pair]
    runs = simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in specs])
    found = memory(*pair)
    for term, category, tolerance in (
        ("gradients", "grad", 0.01),
        ("optimizer", "optimizer", 0.01),
        ("activations", "activation", 0.02),
    ):
        narrow, wide = (
            max(peak.by_category.get(category, 0) for place, peak in run.peaks.items() if not place.startswith("build"))
            for run in runs
        )
        predicted = found[term][1] - found[term][0]
        assert predicted == pytest.approx(wide - narrow, rel=tolerance), term
    # ZeRO-1 scatters gradients and gathers weights in the format of each parameter.
    sent = [run.collectives["all_gather"].num_bytes for run in runs]
    assert found["weights"][1] - found["weights"][0] == pytest.approx(sent[1] - sent[0], rel=0.01)


def test_products_in_fp32_take_longer_and_head_and_tables_count():
    model = dataclasses.replace(MODEL, hidden_size=1024, num_heads=8, num_kv_heads=8, ffn_hidden_size=4096)
    workload = dataclasses.replace(WORKLOAD, model=model, seq_length=2048)
    names = ((), (r"layers\.0",), ("Block",), ("output",))
    found = seconds(*map(candidate, names), workload=workload)
    plain, first, every, head = ({name: values[i] for name, values in found.items()} for i in range(4))
    shape = dataclasses.replace(workload, model=dataclasses.replace(model, num_layers=1))
    assert every["forward"] - plain["forward"] == pytest.approx(4 * (first["forward"] - plain["forward"]))
    assert every["backward"] > first["backward"] > plain["backward"]
    assert head["forward"] > plain["forward"]
    in_one, by_head = memory(candidate(), candidate(("output",)), workload=shape)["weights"]
    assert by_head - in_one == 2 * model.vocab_size * model.hidden_size


def test_autocast_keeps_inputs_of_layers_in_fp32():
    layout = Layout(dp_shard=2, zero_stage=3)
    pairs = []
    for num_layers in (2, 4):
        model = dataclasses.replace(MODEL, num_layers=num_layers)
        recompute = Recompute(full=((num_layers,),))
        precision = Precision(level="O1", dtype="bfloat16")
        one = Candidate(layout=layout, precision=precision, micro_batch_size=4, recompute=recompute)
        pairs.append((dataclasses.replace(WORKLOAD, model=model), one))
    specs = [TrialSpec(workload=workload, candidate=one, protocol=Protocol()) for workload, one in pairs]
    kept = [
        max(peak.by_category.get("activation", 0) for place, peak in run.peaks.items() if place.startswith("backward"))
        for run in simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in specs])
    ]
    x = inputs_of(pairs, CANDIDATES_CLUSTER)
    predicted = passes_bytes(x, work_of(x), ONES)["activations"][:, 0]
    assert predicted[1] - predicted[0] == kept[1] - kept[0] == 2 * 4 * 128 * 64 * 4


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 2, "ep": 2},
        {"dp_shard": 4, "zero_stage": 1, "ep": 2, "pp": 2, "stage_layers": ((2, 2),)},
        {"tp": 2, "tp_engine": "local", "sequence_parallel": True, "dp_shard": 2, "zero_stage": 2, "ep": 4},
        {"tp": 2, "tp_engine": "local", "cp": 2},
        {"cp": 4, "cp_method": "hybrid", "ulysses_degree": 2},
    ],
)
def test_communicators_are_those_that_dry_runs_count(layout):
    model = MODEL
    if "ep" in layout:
        model = dataclasses.replace(MODEL, experts=Experts(num_experts=4, top_k=2, ffn_hidden_size=96))
    one = Candidate(layout=Layout(**layout))
    x = inputs_of([(dataclasses.replace(WORKLOAD, model=model), one)], CANDIDATES_CLUSTER)
    assert _communicator_bytes(x) == [COMMUNICATOR_BYTES * num_communicators(one.layout)]


@pytest.mark.parametrize(("zero_stage", "short"), [(0, 2), (1, 2), (2, 4), (3, 4)])
def test_weights_in_fp32_are_sent_in_fp32(zero_stage, short):
    """FSDP reduces gradients in fp32 anyway, and gathers weights in the format of their module."""
    layout = {"dp_shard": 8, "zero_stage": zero_stage} if zero_stage else {"dp_replicate": 8}
    workload = dataclasses.replace(WORKLOAD, model=dataclasses.replace(MODEL, num_layers=64), global_batch_size=64)
    pair = [candidate(**layout), candidate(("Block", "output", "tok_embeddings"), **layout)]
    x = inputs_of([(workload, one) for one in pair], CANDIDATES_CLUSTER)
    work, k, none = work_of(x), cost_model().time.coefficients, np.full(2, 1e-12)
    held = busiest_params(x, work)
    assert x.gradient_bytes.tolist() == [short, short]
    np.testing.assert_allclose(mean_bytes(x, x.gradient_bytes, held), [short, 4], rtol=0.01)
    np.testing.assert_allclose(mean_bytes(x, x.gather_bytes, held), [2, 4], rtol=0.01)
    found = gather_seconds(x, work, k, none, none)[:, 0] if zero_stage == 3 else reduction_seconds(x, work, k, none)
    assert found[1] > found[0]


def test_patterns_match_the_outermost_modules_of_mixtures_and_latent_attention():
    experts = Experts(num_experts=4, top_k=2, ffn_hidden_size=96, shared_ffn_hidden_size=32, num_dense_layers=1)
    model = dataclasses.replace(MODEL, experts=experts)
    layout = Layout(pp=2, stage_layers=((2, 2),))

    def weights(*patterns):
        return wide_columns(model, 128, layout, patterns, plain_attention=False)["stage_wide_weights"]

    assert weights("RoutedExperts") == [3 * 64 * 96 * 4, 2 * 3 * 64 * 96 * 4]
    assert weights("MixtureOfExperts", "RoutedExperts") == weights("MixtureOfExperts")
    assert weights("FeedForward") == [3 * 64 * 192, 0]
    assert sum(weights("Block")) == num_parameters(model) - 2 * 512 * 64 - 64
    assert weights("unknown", "(") == [0, 0]
