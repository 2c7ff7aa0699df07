"""Terms of time and memory sum to what they explain, and move the way that hardware, experts, offloading, schedules and
habits require."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cost.cost_model import Calibrated, CostModel, cost_model, derivatives
from cluster.cost.inputs import MEMORY, SCHEDULES, TIME, WORKSPACE_BYTES, assumed, assumed_prior
from cluster.cost.peak_memory import (
    HABITS,
    KNOWN,
    MAX_SURPRISES,
    SOFTWARE,
    Structure,
    copied_updates,
    distinct_structures,
    log_slopes,
    passes_bytes,
    stage_bytes,
    structures_of_software,
)
from cluster.cost.step_time import HOST_LINK_SHARE, HOST_UPDATES_PER_S, gather_seconds, step_seconds
from cluster.cost.work import (
    _operations,
    _simulate,
    closed_form_seconds,
    exchanged_bytes,
    experts_params,
    in_flight,
    in_flight_peaks,
    layers_params,
    per_round,
    pipeline_seconds,
    simulated_seconds,
    tables_params,
    work_of,
)
from tests.cluster.cost.rows import inputs, row, varied

MODEL = CostModel(Calibrated.of_prior(assumed_prior(TIME, 0.1)), Calibrated.of_prior(assumed_prior(MEMORY, 0.1)))

AT_STEP = {"num_microbatches": 1, "keeps_gradients": 0, "gradient_bytes": 2, "recompute": "full"}
"""The peak is in the optimiser step."""


def estimate(*rows):
    return MODEL.estimate(inputs(*rows))


def test_terms_sum_to_step_and_peak_and_none_is_negative():
    found = cost_model().estimate(varied(300))
    for total, terms in ((found.step_s, found.step_terms_s), (found.peak_bytes, found.peak_terms_bytes)):
        np.testing.assert_allclose(np.sum(list(terms.values()), axis=0), total)
        assert all((values >= -1e-9 * total).all() for values in terms.values())
        assert np.isfinite(total).all()
        assert (total > 0).all()


def test_attention_hides_a_ring_as_long_in_8_bits_as_in_16():
    plain = {"cp": 4, "seq_length": 2**14, "peak_flops_per_s": 1e15, "base_flops_per_s": 1e15}
    seconds = estimate(row(**plain), row(**plain | {"peak_flops_per_s": 2e15})).step_terms_s
    assert seconds["context_parallel"][0] == pytest.approx(seconds["context_parallel"][1])
    assert seconds["forward"][0] > seconds["forward"][1]


def test_estimates_do_not_depend_on_the_other_rows():
    x = varied(40)
    together = MODEL.estimate(x)
    for i in (0, 13, 39):
        alone = MODEL.estimate(x.take(np.array([i])))
        assert alone.step_s[0] == pytest.approx(together.step_s[i])
        assert alone.peak_bytes[0] == pytest.approx(together.peak_bytes[i])


LONG = {"seq_length": 2**18, "recompute": "full"}


@pytest.mark.parametrize(
    ("term", "less", "more"),
    [
        ("weights", {"tp": 2}, {}),
        ("weights", {"pp": 4}, {}),
        ("weights", {"zero_stage": 3}, {"zero_stage": 2}),
        ("gradients", {"zero_stage": 2}, {"zero_stage": 1}),
        ("gradients", {"zero_stage": 2}, {"zero_stage": 2, "reduces_last": 1}),
        ("gradients", {"zero_stage": 3}, {"zero_stage": 3, "reduces_last": 1}),
        ("workspace", {"workspace_limit_bytes": WORKSPACE_BYTES, **AT_STEP}, AT_STEP),
        ("optimizer", {"dp_shard": 8}, {"dp_shard": 4}),
        ("activations", {"recompute": "full"}, {}),
        ("activations", {"tp": 4, "sequence_parallel": 1}, {"tp": 4}),
        ("activations", {"cp": 2}, {}),
        ("activations", {"flash": 1}, {"flash": 0}),
        ("activations", {"peak_flops_per_s": 624e12}, {}),
        ("weights", {"shard_embedding": 1}, {}),
        ("gradients", {"shard_embedding": 1}, {}),
        ("activations", {"fused": 1}, {"fused": 0}),
        ("activations", {"selective_share": 0.3}, {}),
        ("activations", {"micro_batch_size": 1}, {"micro_batch_size": 2}),
        ("activations", {"pp": 4}, {"pp": 4, "num_virtual_stages": 2, "schedule": 2}),
        ("activations", {"pp": 4}, {"pp": 4, "schedule": 0}),
        ("activations", {"tp": 2, "sequence_parallel": 1}, {"tp": 2, "sequence_parallel": 1, "keeps_gathered": 1}),
        ("activations", {}, {"loose_norms": 1}),
        ("activations", {"recompute": "full"}, {"recompute": "full", "stream_bytes": 4}),
        ("workspace", AT_STEP, {"update_bytes": 8, **AT_STEP}),
        ("head", {"tp": 2}, {}),
        ("gathered", {**LONG, "cp": 8}, {**LONG, "cp": 8, "cp_method": 0}),
        ("gathered", {"zero_stage": 3, "pp": 2}, {"zero_stage": 3, "pp": 2, "stays_gathered": 1}),
        ("gathered", {"zero_stage": 3, "dp_shard": 64}, {"zero_stage": 3, "dp_shard": 64, "gathered_bytes": 4}),
        ("gathered", {"zero_stage": 2}, {"zero_stage": 2, "shard_embedding": 1}),
        ("head", {"loss_bytes": 0}, {}),
        ("head", {"loss_chunks": 4}, {}),
        ("head", {"loss_chunks": 4}, {"loss_chunks": 4, "head_sums_bytes": 4}),
        ("communication", {}, {"bucket_bytes": 1e9}),
        ("constant", {}, {"tp": 2}),
    ],
)
def test_memory_changes_in_the_right_direction(term, less, more):
    terms = estimate(row(**less), row(**more)).peak_terms_bytes[term]
    assert terms[0] < terms[1]


HYBRID = {"cp": 16, "seq_length": 2**14, "cp_method": 3, "ulysses_degree": 8, "domain_size": 8}
"""Heads exchanged inside domains, keys and values passed between two."""


def heads(number, size, **changes):
    """Heads that are as wide together as others with the same product."""
    return {"num_heads": number, "num_kv_heads": number, "head_dim": size, **changes}


@pytest.mark.parametrize(
    ("term", "less", "more"),
    [
        ("recompute", {}, {"recompute": "full"}),
        ("data", {}, {"data_wait_s": 0.5}),
        ("tensor_parallel", {"tp": 4, "domain_size": 8}, {"tp": 4, "domain_size": 2}),
        ("tensor_parallel", {"tp": 4, "num_copies": 2}, {"tp": 4}),
        ("tensor_parallel", {"tp": 4, "hides_sums": 1}, {"tp": 4}),
        ("tensor_parallel", {"tp": 4, "hides_sums": 1}, {"tp": 4, "sequence_parallel": 1, "hides_sums": 1}),
        ("forward", {}, {"loss_chunks": 4}),
        ("forward", {"loss_chunks": 4}, {"loss_chunks": 4, "head_sums_bytes": 4}),
        ("bubble", {"pp": 4, "num_virtual_stages": 4, "schedule": 2}, {"pp": 4}),
        (
            "bubble",
            {"pp": 4, "schedule": 3, "num_virtual_stages": 2},
            {"pp": 4, "num_virtual_stages": 2, "schedule": 2},
        ),
        ("context_parallel", {"cp": 4, "seq_length": 2**14}, {"cp": 4, "seq_length": 2**14, "cp_method": 0}),
        ("context_parallel", {"cp": 4, "seq_length": 2**16}, {"cp": 4, "seq_length": 2**16, "cp_method": 1}),
        ("context_parallel", {"cp": 4}, {"cp": 4, "recompute": "full"}),
        ("context_parallel", HYBRID, {**HYBRID, "ulysses_degree": 4}),
        ("context_parallel", HYBRID, {**HYBRID, "cp_method": 2}),
        ("context_parallel", HYBRID, {**HYBRID, "cp_method": 1}),
        ("forward", heads(33, 128, flash=0), heads(32, 132, flash=0)),
        ("forward", heads(33, 140, flash=0), heads(30, 154, flash=0)),
        ("forward", heads(48, 96), heads(64, 72)),
        ("forward", {}, {"loose_norms": 1}),
        ("forward", {}, {"aged_attention": 1}),
        ("tensor_parallel", {"tp": 4, "hides_collectives": 1}, {"tp": 4}),
        (
            "stage_transfers",
            {"pp": 4, "num_virtual_stages": 4, "schedule": 2, "hides_transfers": 1},
            {"pp": 4, "num_virtual_stages": 4, "schedule": 2},
        ),
        ("gradient_reduction", {"dp_shard": 64, "hides_gathering": 1}, {"dp_shard": 64}),
        ("gradient_reduction", {"dp_shard": 64, "hides_reduction": 1}, {"dp_shard": 64}),
        ("sharding", {"zero_stage": 3, "dp_shard": 64}, {"zero_stage": 3, "dp_shard": 1024}),
        ("launch", {"compiled": 1, "hidden": 512}, {"hidden": 512}),
        ("sharding", {"dp_shard": 8, "zero_stage": 3}, {"dp_shard": 16, "zero_stage": 3}),
        ("sharding", {"zero_stage": 3, "reduces_last": 1}, {"zero_stage": 3}),
        ("sharding", {"zero_stage": 3, "gathers_once": 1}, {"zero_stage": 3}),
        ("sharding", {"zero_stage": 3, "stays_gathered": 1}, {"zero_stage": 3}),
        ("sharding", {"zero_stage": 3, "gathered_bytes": 1}, {"zero_stage": 3}),
        ("gradient_reduction", {}, {"gathered_bytes": 4}),
        ("gradient_reduction", {"zero_stage": 2, "reduces_last": 1}, {"zero_stage": 2}),
        ("gradient_reduction", {"network_bytes_per_s": 50e9, "dp_shard": 64}, {"dp_shard": 64}),
        # Weights are gathered among ranks that share states; only gradients' reduction hides.
        ("gradient_reduction", {"dp_replicate": 8, "gradient_bytes": 2}, {"dp_shard": 64, "gradient_bytes": 2}),
        ("optimizer", {"dp_shard": 8}, {"dp_shard": 1, "dp_replicate": 8, "zero_stage": 0}),
        ("forward", {"peak_flops_per_s": 600e12}, {}),
    ],
)
def test_time_changes_in_the_right_direction(term, less, more):
    terms = estimate(row(**less), row(**more)).step_terms_s[term]
    assert terms[0] < terms[1]


def test_gradients_and_activations_share_memory_when_gradients_are_freed():
    single = {"num_microbatches": 1, "keeps_gradients": 0, "recompute": "full", "micro_batch_size": 4}
    found = estimate(row(**single), row(**{**single, "num_microbatches": 8}))
    assert found.peak_bytes[0] < found.peak_bytes[1]
    assert found.peak_terms_bytes["activations"][0] == 0, "the peak is in the optimiser step"


def test_logits_and_a_repeated_layer_share_memory():
    """The loss is over before the first layer is computed again: whichever takes more counts."""
    big = {"micro_batch_size": 8, "dp_shard": 64, "zero_stage": 3}
    found = estimate(row(**big, recompute="full", vocab=200000), row(**big, recompute="full", vocab=1000))
    terms = found.peak_terms_bytes
    assert terms["head"][0] > 0 == terms["head"][1]
    assert terms["recomputed"][0] == 0 < terms["recomputed"][1], "no repeated layer while the logits are there"


def test_every_coefficient_matters_somewhere():
    x = inputs(
        row(tp=2, cp=2, pp=2, recompute="full", peak_flops_per_s=600e12, vocab=32000, loose_norms=1),
        row(dp_shard=64, zero_stage=3, hidden=512),
        row(vocab=50257, dp_shard=16, num_reads=1e6),
        row(recompute="full", dp_shard=1, vocab=1000),
        row(expert_share=1, num_experts=8, experts_per_token=2, expert_ffn=4096),
    )
    for group, attribute in ((TIME, "step_s"), (MEMORY, "peak_bytes")):
        for i, coefficient in enumerate(group):
            values = []
            for factor in (1.0, 1.5):
                log_values = assumed(group).log_values.copy()
                log_values[i] += np.log(factor)
                prior = assumed_prior(group, 0.1)
                moved = Calibrated.of_prior(type(prior)(group, log_values, prior.covariance, 0.1))
                model = CostModel(moved, MODEL.memory) if group is TIME else CostModel(MODEL.time, moved)
                values.append(getattr(model.estimate(x), attribute))
            if coefficient.name != "peak_exponent":
                assert (values[0] != values[1]).any(), coefficient.name


def test_slopes_of_memory_are_its_derivatives():
    x, at = varied(300), assumed(MEMORY)
    terms = {name: values[:, 0] for name, values in stage_bytes(x, work_of(x), at).items()}

    def log_first_rank(coefficients):
        return np.log(np.sum(list(stage_bytes(x, work_of(x), coefficients).values()), axis=0)[:, 0])

    np.testing.assert_allclose(log_slopes(x, terms, at), derivatives(log_first_rank, at), atol=1e-4)


def test_slopes_are_finite_if_updates_on_the_host_are_copied():
    x, at = copied_updates(inputs(row(offload_optimizer=1))), assumed(MEMORY)
    terms = {name: values[:, 0] for name, values in stage_bytes(x, work_of(x), at).items()}
    assert np.isfinite(log_slopes(x, terms, at)).all()


def test_cores_need_neither_many_tiles_nor_long_products():
    """On the two cores of the quickstart sweep, micro-batches of 8 without recompute ran 2.0 to 3.0 times as fast as of
    1 with it, in several recordings; tiles of an accelerator's hundred units would make that more than sixfold."""
    small = {"num_layers": 4, "hidden": 192, "ffn": 512, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32} | {
        "vocab": 2048,
        "seq_length": 128,
        "zero_stage": 0,
        "dp_replicate": 2,
        "dp_shard": 1,
        "peak_flops_per_s": 8e10,
        "base_flops_per_s": 8e10,
        "memory_bytes_per_s": 1e10,
        "link_bytes_per_s": 5e9,
        "on_cores": 1,
        "stage_layers": [4],
    }
    few = small | {"micro_batch_size": 1, "num_microbatches": 8, "stage_full": [4]}
    many = small | {"micro_batch_size": 8, "num_microbatches": 1}
    found = cost_model().estimate(inputs(row(**few), row(**many)))
    assert 1.7 < found.step_s[0] / found.step_s[1] < 3.0
    seconds = found.step_terms_s
    assert seconds["launch"][0] > 5 * seconds["launch"][1] > 0, "cores launch what they compute: nothing hides it"


def terms(*rows):
    x = inputs(*rows)
    work = work_of(x)
    return step_seconds(x, work, assumed(TIME)), passes_bytes(x, work, assumed(MEMORY))


def test_activations_on_the_host_cost_what_their_copies_stick_out():
    """Over a link without end nothing sticks out but what computation loses to the copies; over a slow one, all."""
    kept, fast, slow = row(), row(offload_activations=1, host_bytes_per_s=1e15), row(offload_activations=1)
    slow["host_bytes_per_s"] = 1e8
    seconds, memory = terms(kept, fast, slow)
    assert seconds["host_copies"][0] == 0 < seconds["host_copies"][1] < 1e-3 * seconds["forward"][1]
    held = memory["activations"][0, 0]
    both_ways = 2 * held * 8 / (1e8 * HOST_LINK_SHARE)
    computing = seconds["forward"][2] + seconds["backward"][2]
    assert both_ways - computing < seconds["host_copies"][2] < both_ways
    assert memory["activations"][1, 0] == held * 3 / 32


def test_states_on_the_host_are_not_on_the_device_and_take_its_processors_time():
    """Of 8 ranks each updates an eighth of 6.7e9 parameters, but they share the processors."""
    seconds, memory = terms(row(), row(offload_optimizer=1), row(offload_optimizer=1, dp_shard=1, micro_batch_size=8))
    assert memory["optimizer"][1, 0] == 0 < memory["optimizer"][0, 0]
    assert memory["weights"][1, 0] == memory["weights"][0, 0]
    assert seconds["optimizer"][1] >= 6.7e9 / HOST_UPDATES_PER_S > 50 * seconds["optimizer"][0]


def test_recomputed_8_bit_operands_keep_no_less_than_16_bits_and_spare_the_head():
    wide, kept = row(), row(peak_flops_per_s=2 * 312e12)
    cast = {**kept, "casts_operands": 1}
    seconds, memory = terms(wide, kept, cast)
    assert memory["activations"][2, 0] == memory["activations"][0, 0] > memory["activations"][1, 0]
    assert seconds["forward"][1] < seconds["forward"][2] < seconds["forward"][0]


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
    recomputed = figures(**MIXTRAL, ep=8, recompute="full")
    assert recomputed[2]["expert_parallel"][0] == pytest.approx(1.5 * spread[2]["expert_parallel"][0])


def test_copies_hide_the_exchange_of_experts_all_of_it_behind_shared_ones():
    layout = {**MIXTRAL, "ep": 8, "tp": 2, "whole_experts": 1, "sequence_parallel": 1}
    alone, copies, shared = (
        figures(**layout, **changes)[2]["expert_parallel"][0]
        for changes in ({}, {"num_copies": 2}, {"num_copies": 2, "shared_ffn": 4096})
    )
    assert alone / 4 < copies < alone
    assert shared < alone / 4


def test_optimiser_states_of_experts_are_sharded_over_ranks_with_the_same_experts():
    states = []
    for ep in (1, 8):
        x = inputs(row(**MIXTRAL, ep=ep, dp_shard=8, zero_stage=1))
        states.append(stage_bytes(x, work_of(x), assumed(MEMORY))["optimizer"][0, 0])
    assert states[0] == pytest.approx(states[1], rel=1e-9)


def test_experts_are_gathered_from_ranks_with_the_same_experts():
    """With as many expert-parallel ranks as shards no two ranks hold the same experts, so none are gathered."""
    spread = {**MIXTRAL, "dp_shard": 8, "zero_stage": 3}
    x = inputs(row(**spread, ep=8), row(**{**spread, "expert_ffn": 0}, ep=8), row(**spread, ep=4), row(**spread, ep=1))
    unhidden = np.zeros(len(x))
    seconds = gather_seconds(x, work_of(x), assumed(TIME), unhidden, unhidden)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
    assert seconds[0] < seconds[2] < seconds[3]


@given(
    ep=st.sampled_from([2, 4, 8]),
    top_k=st.integers(1, 4),
    hidden=st.sampled_from([1024, 4096]),
    tp=st.sampled_from([1, 2]),
)
def test_the_exchange_grows_with_chosen_experts_width_and_ranks(ep, top_k, hidden, tp):
    shape = {**MIXTRAL, "ep": ep, "experts_per_token": top_k, "hidden": hidden, "tp": tp, "domain_size": 64}
    shape |= {"whole_experts": float(tp > 1)}
    x = inputs(*(row(**shape | more) for more in ({}, {"experts_per_token": 2 * top_k}, {"hidden": 2 * hidden})))
    plain, chosen, wide = exchanged_bytes(x, work_of(x).tokens)[0]
    assert (chosen, wide) == pytest.approx((2 * plain, 2 * plain))
    others = ep * tp if tp > 1 else ep
    assert plain == pytest.approx(
        float(work_of(x).tokens[0]) / tp * top_k * hidden * x.compute_bytes[0] * (others - 1) / others
    )


def test_more_experts_on_a_rank_take_more_memory_and_whole_ones_repeat_the_router_and_shared_experts():
    peaks = [figures(**MIXTRAL | {"num_experts": number}, ep=4)[1] for number in (8, 16, 32)]
    assert peaks == sorted(set(peaks))
    layout = {**MIXTRAL, "shared_ffn": 4096, "ep": 4, "tp": 2, "sequence_parallel": 1}
    x = inputs(row(**layout), row(**layout, whole_experts=1), row(**layout | {"shared_ffn": 8192}, whole_experts=1))
    split, whole, wide = work_of(x).layer_params
    assert split < whole < wide


SHAPED = {"dp_shard": 4, "zero_stage": 3, "tp": 2, "pp": 2, "sequence_parallel": 1, "num_microbatches": 8}
"""A layout in which every habit shows."""
LESS = {"short gradients", "short states", "fused loss", "updates in place"}
"""Habits that need less memory than what is described."""


def peak_bytes(x):
    return np.sum(list(stage_bytes(x, work_of(x), assumed(MEMORY)).values()), axis=0).max(axis=1)


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
def test_a_habit_changes_the_peak_in_its_direction(habit):
    """Where logits are no concern they are made one: a large vocabulary, no chunks; likewise the optimiser step."""
    gradient_bytes = 2 if habit.name == "long gradients" else 4
    vocab = 1_000_000 if habit.name.endswith(("logits", "loss")) else 32_000
    one = {"num_microbatches": 1, "keeps_gradients": 0}
    moment = AT_STEP if "updates" in habit.name else one if habit.name == "kept gradients" else {}
    shape = {**SHAPED, "gradient_bytes": gradient_bytes, "vocab": vocab, "optimizer_bytes": 12, "weight_bytes": 2}
    x = inputs(row(**shape | moment))
    before, after = float(peak_bytes(x)[0]), float(peak_bytes(habit.change(x))[0])
    assert (after < before) == (habit.name in LESS)
    assert after != before


def test_habits_do_not_affect_time_and_layout():
    x = varied(50)
    for habit in HABITS:
        after = habit.change(x)
        for name in ("tp", "pp", "dp_shard", "micro_batch_size", "num_microbatches", "stage_layers"):
            np.testing.assert_array_equal(getattr(after, name), getattr(x, name))


def test_structures_that_do_not_differ_are_one():
    """Without any parallelism most habits show nowhere; their structures' probabilities are added up."""
    x = inputs(row(dp_shard=1, zero_stage=0, num_microbatches=1))
    structures = structures_of_software("unknown")
    different = distinct_structures(structures, x)
    assert len(different) < len(structures) / 2
    total = sum(structure.probability for structure in structures)
    assert sum(structure.probability for structure, _ in different) == pytest.approx(total)
    columns = {tuple(float(peak) for peak in peak_bytes(x)) for _, x in different}
    assert len(columns) > 1


def test_structures_are_sets_of_habits_that_may_come_together():
    names = [{habit.name for habit in structure.habits} for structure in structures_of_software("unknown")]
    assert set() in names
    assert max(map(len, names)) == MAX_SURPRISES
    assert {"long gradients", "short gradients"} not in names
    assert (Structure("as described"),) == KNOWN
    assert KNOWN[0].of(x := varied(3)) is x


def test_what_is_likely_for_software_is_what_its_structures_differ_from():
    names = [{habit.name for habit in structure.habits} for structure in structures_of_software("OneFlow")]
    likely = {"deep buffers", "fused loss", "updates in place"}
    assert {len(likely ^ chosen) for chosen in names} == set(range(MAX_SURPRISES + 1))
    structures = structures_of_software("OneFlow")
    best = max(structures, key=lambda structure: structure.probability)
    assert {habit.name for habit in best.habits} == likely
    # Without a pipeline deep buffers have no effect: structures with and without them are one.
    x = inputs(row(dp_shard=1, zero_stage=0, num_microbatches=1))
    total = sum(structure.probability for structure in structures)
    assert sum(structure.probability for structure, _ in distinct_structures(structures, x)) == pytest.approx(total)


def test_known_software_moves_the_odds_of_its_habits_only():
    def odds(name):
        return {structure.name: structure.probability for structure in structures_of_software(name)}

    assert odds("software of my own") == odds("custom")
    assert odds("transformers")["loose norms"] > odds("custom")["loose norms"] > odds("NeMo/Megatron")["loose norms"]
    names = {habit.name for habit in HABITS}
    assert all(habits.keys() <= names for habits in SOFTWARE.values())


@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize(("pp", "num"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 64)])
def test_closed_form_is_exact_for_equal_stages(schedule, pp, num):
    x = inputs(row(pp=pp, schedule=schedule, num_microbatches=num))
    stages = np.full((1, pp), 0.3)
    assert closed_form_seconds(x, stages)[0] == pytest.approx((num + pp - 1) * 0.3)
    assert simulated_seconds(x, stages)[0] == pytest.approx((num + pp - 1) * 0.3)


@pytest.mark.parametrize(("pp", "chunks", "num"), [(2, 2, 4), (4, 2, 8), (4, 4, 16)])
def test_closed_form_is_exact_for_interleaved_stages(pp, chunks, num):
    x = inputs(row(pp=pp, schedule=2, num_virtual_stages=chunks, num_microbatches=num))
    stages = np.full((1, pp), 0.6)
    expected = (num + (pp - 1) / chunks) * 0.6
    assert closed_form_seconds(x, stages)[0] == pytest.approx(expected)
    assert simulated_seconds(x, stages)[0] == pytest.approx(expected)


def test_simulation_of_many_equals_one_by_one():
    rng = np.random.default_rng(0)
    x = inputs(*[row(pp=4, num_microbatches=num) for num in (4, 8, 40, 200)])
    stages = rng.uniform(0.1, 0.5, (4, 4))
    together = simulated_seconds(x, stages)
    for i in range(4):
        alone = simulated_seconds(x.take(np.array([i])), stages[[i]])
        assert alone[0] == pytest.approx(together[i])
    # A slower stage delays every micro-batch; nothing is quicker than the slowest stage's own work.
    assert (together >= x.num_microbatches * stages.max(axis=1) - 1e-9).all()
    assert (together <= closed_form_seconds(x, stages) * 1.05).all()


@pytest.mark.parametrize(("schedule", "chunks"), [(0, 1), (1, 1), (2, 2), (2, 4)])
def test_extrapolation_agrees_with_simulating_every_micro_batch(schedule, chunks):
    x = inputs(*[row(pp=4, schedule=schedule, num_virtual_stages=chunks, num_microbatches=40)] * 10)
    stages = np.random.default_rng(1).uniform(0.7, 1.3, (10, 4))
    whole = _simulate(_operations(schedule, 4, chunks, 40), stages / chunks, 4, chunks)
    assert simulated_seconds(x, stages) == pytest.approx(whole, rel=0.02)


def test_uneven_stages_are_simulated():
    x = inputs(row(pp=4, stage_layers=[14, 6, 6, 6]), row(pp=4))
    stages = np.array([[1.4, 0.6, 0.6, 0.6], [0.8, 0.8, 0.8, 0.8]])
    seconds = pipeline_seconds(x, stages)
    assert seconds[0] == pytest.approx(simulated_seconds(x.take([0]), stages[:1])[0])
    assert seconds[0] > seconds[1]


def test_interleaved_schedules_with_any_number_of_micro_batches_end():
    for pp, v in itertools.product(range(2, 9), range(2, 5)):
        for m in range(1, 2 * pp + 1):
            assert len(_operations(SCHEDULES.index("interleaved"), pp, v, m)) == 2 * pp * v * m


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 6))
    v = {"interleaved": draw(st.integers(2, 4)), "zbv": 2}.get(schedule, 1)
    m = draw(st.integers(1, 24))
    if schedule == "interleaved":
        m = draw(st.integers(1, 24 * pp).filter(lambda m: m % per_round(pp, m) == 0))
    return schedule, pp, v, m


@given(layouts())
def test_the_total_is_the_largest_sum_over_chunks(layout):
    schedule, pp, v, m = layout
    x = inputs(row(pp=pp, num_virtual_stages=v, num_microbatches=m, schedule=SCHEDULES.index(schedule)), row(pp=8))
    peaks = in_flight_peaks(schedule, pp=pp, num_virtual_stages=v, num_microbatches=m)
    largest = [max(sum(moment) for moment in moments) / v for moments in peaks]
    np.testing.assert_allclose(in_flight(x)[0, :pp], largest)


def test_short_gradients_are_copied_for_the_optimizer_step():
    alone = {"recompute": "full", "dp_shard": 1, "seq_length": 256}
    short, long = row(**alone, gradient_bytes=2, weight_bytes=4), row(**alone, gradient_bytes=4, weight_bytes=4)
    workspace = estimate(short, long).peak_terms_bytes["workspace"]
    assert workspace[0] - workspace[1] == pytest.approx(4 * 6.74e9, rel=0.01)


def test_a_token_goes_to_another_domain_once():
    x = inputs(
        row(**MIXTRAL, ep=8, domain_size=8), row(**MIXTRAL, ep=8, domain_size=1), row(**MIXTRAL, ep=8, domain_size=2)
    )
    inside, beyond = exchanged_bytes(x, np.full(3, 1000.0))
    vector = 1000.0 * 4096 * 2
    assert inside == pytest.approx([vector * 2 * 7 / 8, 0, vector * 2 / 2])
    assert beyond == pytest.approx([0, vector * 7 * (1 - (7 / 8) ** 2), vector * 3 * (1 - (3 / 4) ** 2)])
