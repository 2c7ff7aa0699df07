"""Mixtures of experts: the same as a dense model where they should be, known models' sizes, and what texts say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published.experts import NotModelledError, expert_fields, mixture_shape
from cluster.cost.inputs import MEMORY, TIME, assumed
from cluster.cost.peak_memory import stage_bytes
from cluster.cost.step_time import gather_seconds, step_seconds
from cluster.cost.work import exchanged_bytes, experts_params, layers_params, tables_params, work_of
from tests.cluster.cost.rows import inputs, row

MIXTRAL = {"expert_share": 1, "num_experts": 8, "experts_per_token": 2, "expert_ffn": 14336, "num_kv_heads": 8}


def figures(**changes):
    x = inputs(row(**changes))
    seconds = step_seconds(x, work_of(x), assumed(TIME))
    return sum(seconds.values())[0], sum(stage_bytes(x, work_of(x), assumed(MEMORY)).values()).max(), seconds


def num_params(**changes):
    x = inputs(row(**changes))
    work = work_of(x)
    return float(np.sum(layers_params(x, work) + experts_params(x, work) * x.ep[:, None] + tables_params(x)))


def test_an_expert_that_all_tokens_pass_is_a_dense_layer():
    dense = figures(ffn=8192)
    shared = figures(ffn=1, expert_share=1, shared_ffn=8192)
    assert shared[:2] == pytest.approx(dense[:2], rel=1e-6)


@pytest.mark.parametrize(
    ("billions", "changes"),
    [
        pytest.param(46.7, {**MIXTRAL, "ffn": 0}, id="mixtral-8x7b"),
        pytest.param(46.7, {**MIXTRAL, "ffn": 0, "ep": 8}, id="spread"),
        pytest.param(
            235.1,
            {
                "num_layers": 94,
                "hidden": 4096,
                "num_heads": 64,
                "num_kv_heads": 4,
                "vocab": 151936,
                "ffn": 0,
                "expert_share": 1,
                "num_experts": 128,
                "experts_per_token": 8,
                "expert_ffn": 1536,
            },
            id="qwen3-235b",
        ),
    ],
)
def test_the_parameters_of_known_models(billions, changes):
    assert num_params(**changes) / 1e9 == pytest.approx(billions, rel=0.01)


def test_spreading_experts_saves_memory_and_costs_communication():
    whole, spread = figures(**MIXTRAL), figures(**MIXTRAL, ep=8)
    assert spread[1] < 0.5 * whole[1]
    assert whole[2]["expert_parallel"][0] == 0 < spread[2]["expert_parallel"][0]


def test_optimiser_states_of_experts_are_shared_by_those_who_hold_the_same():
    states = []
    for ep in (1, 8):
        x = inputs(row(**MIXTRAL, ep=ep, dp_shard=8, zero_stage=1))
        states.append(stage_bytes(x, work_of(x), assumed(MEMORY))["optimizer"][0, 0])
    assert states[0] == pytest.approx(states[1], rel=1e-9)


def test_a_token_goes_to_another_domain_once():
    x = inputs(
        row(**MIXTRAL, ep=8, domain_size=8), row(**MIXTRAL, ep=8, domain_size=1), row(**MIXTRAL, ep=8, domain_size=2)
    )
    inside, beyond = exchanged_bytes(x, np.full(3, 1000.0))
    vector = 1000.0 * 4096 * 2
    assert inside == pytest.approx([vector * 2 * 7 / 8, 0, vector * 2 / 2])
    assert beyond == pytest.approx([0, vector * 7 * (1 - (7 / 8) ** 2), vector * 3 * (1 - (3 / 4) ** 2)])


def said(moe, **others):
    f = {"moe": moe, "model": others.pop("model", "model"), "notes": ""}
    n = {"layers": 61.0, "hidden": 7168.0, "ffn": 18432.0, "ep": 8.0, "n_params": None, **others}
    model = {"num_layers": n["layers"], "hidden": n["hidden"], "num_heads": 128, "head_dim": 56, "ffn": n["ffn"]}
    model |= mixture_shape(f, n, model)
    return model | expert_fields(f, n, model)


@pytest.mark.parametrize(
    ("moe", "others", "wanted"),
    [
        ("8 experts top-2", {}, {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 18432, "expert_share": 1}),
        ("experts=8 topk=3", {}, {"num_experts": 8, "experts_per_token": 3}),
        ("expert_num=16 topk=4", {}, {"num_experts": 16, "experts_per_token": 4, "ep": 8}),
        (
            "256 routed top-8 + 1 shared, moe_ffn 2048, MLA, 3 dense layers",
            {},
            {"num_experts": 256, "expert_ffn": 2048, "shared_ffn": 2048, "expert_share": 58 / 61, "num_kv_heads": 1},
        ),
        (
            "160 experts top-6",
            {"model": "Name-236B", "layers": 60.0, "hidden": 5120.0, "ffn": 12288.0},
            {"expert_ffn": 1600},
        ),
        (
            "4 experts top-2",
            {"model": "4x13B", "layers": 10.0, "hidden": 12288.0, "ffn": 49152.0, "ep": None},
            {"gated": 0},
        ),
        ("128 experts top-4", {"layers": 36.0, "hidden": 2880.0, "ffn": 2880.0}, {"head_dim": 64}),
    ],
)
def test_what_a_row_says_of_its_experts(moe, others, wanted):
    found = said(moe, **others)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("moe", "others", "reason"),
    [
        ("a hybrid", {}, "number of experts"),
        ("8 experts", {"hidden": None}, "hidden size"),
        ("12 experts", {}, "do not split into ep 8"),
    ],
)
def test_a_mixture_that_cannot_be_modelled(moe, others, reason):
    f, n = (
        {"moe": moe, "model": "", "notes": ""},
        {"layers": 2.0, "hidden": 64.0, "ffn": 64.0, "ep": 8.0, "n_params": None},
    )
    with pytest.raises(NotModelledError, match=reason):
        expert_fields(f, {**n, **others}, {"num_layers": 2.0, "hidden": 64.0, "gated": 1.0})


def test_experts_are_gathered_from_those_who_hold_the_same():
    """With as many expert-parallel ranks as shards nobody else holds a rank's experts, so none are gathered."""
    spread = {**MIXTRAL, "dp_shard": 8, "zero_stage": 3}
    x = inputs(row(**spread, ep=8), row(**{**spread, "expert_ffn": 0}, ep=8), row(**spread, ep=4), row(**spread, ep=1))
    unhidden = np.zeros(len(x))
    seconds = gather_seconds(x, work_of(x), assumed(TIME), unhidden, unhidden)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
    assert seconds[0] < seconds[2] < seconds[3]
