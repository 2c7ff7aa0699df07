"""Simulated ranks against real ones, against the world's size, and what becomes of simulations that go wrong."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
import warnings
from types import SimpleNamespace

import pytest

from benchmarks.dryrun.allocator import peak_bytes
from benchmarks.dryrun.cases import LARGE
from benchmarks.dryrun.gang import measured_peaks
from benchmarks.dryrun.pipelines import PIPELINES, pipeline
from orchestrator.planning.dry_runs import representative_rank
from tests.trials.simulated import FAMILIES, replies_of, simulated_peaks, simulated_runs
from tests.trials.test_own_parity import spec_of
from trials.dryrun.__main__ import run_children
from trials.dryrun.estimate import BUILD, DryRunRequest, StageEstimate
from trials.dryrun.small import (
    Pass,
    UnknownOrderError,
    order_of_passes,
    plan_small_runs,
    shorter_ranks,
    with_microbatches,
)
from trials.legality import violations
from trials.sizes import num_parameters, virtual_stage
from trials.spec import (
    Candidate,
    Experts,
    Kernels,
    LatentAttention,
    Layout,
    LinearModel,
    LlamaModel,
    Precision,
    RandomData,
    Recompute,
    TrialSpec,
    Workload,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.pipelining import schedules

TOLERANCE = 0.02


def _layer_size(model):
    assert isinstance(model, LlamaModel)
    return num_parameters(dataclasses.replace(model, num_layers=2)) - num_parameters(
        dataclasses.replace(model, num_layers=1)
    )


def _least_peaks(spec, runs):
    """Measure peaks by rank; again if one is above that of ``runs``, at most three times. On a busy machine gloo keeps
    its clones longer, which only adds memory."""
    real = measured_peaks(spec)
    for _ in range(2):
        if all(real[rank] <= run.peak_bytes * (1 + TOLERANCE) for rank, run in runs.items()):
            break
        real = [min(pair) for pair in zip(real, measured_peaks(spec), strict=True)]
    return real


@pytest.mark.representative("ZeRO-3 x2")
@pytest.mark.parametrize(
    "name",
    [
        *("single, O1 bf16, full recompute", "single, O1 fp8", "ZeRO-1 x2", "ZeRO-3 x2", "ZeRO-3 x2, O2 fp8"),
        *("ZeRO-3 x2, O2, norms and head in fp32", "PP2 1F1B"),
    ],
)
def test_peak_matches_a_real_run(name):
    spec = FAMILIES[name]
    layout = spec.candidate.layout
    ranks = [stage * layout.world_size // layout.pp for stage in range(layout.pp)]
    runs = simulated_runs([DryRunRequest(spec=spec, rank=rank, mode="cpu") for rank in ranks])
    real = _least_peaks(spec, dict(zip(ranks, runs, strict=True)))
    # gloo works on a clone of what it reduces and scatters, a layer at a time, and lets go of it when it likes.
    layer = 4 * _layer_size(spec.workload.model) if layout.zero_stage >= 2 else 0
    for rank, run in zip(ranks, runs, strict=True):
        assert real[rank] - layer <= run.peak_bytes * (1 + TOLERANCE) and run.peak_bytes <= real[rank] * (1 + TOLERANCE)


@pytest.mark.representative("llama/pp")
@pytest.mark.parametrize("case", ["llama/pp", "encoder/one", "encoder/zero3"])
def test_peak_of_an_imported_module_matches_a_real_run(case):
    spec = spec_of(case)
    layout = spec.candidate.layout
    ranks = [stage * layout.world_size // layout.pp for stage in range(layout.pp)]
    runs = simulated_runs([DryRunRequest(spec=spec, rank=rank, mode="cpu") for rank in ranks])
    real = _least_peaks(spec, dict(zip(ranks, runs, strict=True)))
    gathered = 0.05 if layout.zero_stage == 3 else 0  # gloo's clones
    for rank, run in zip(ranks, runs, strict=True):
        assert run.peak_bytes == pytest.approx(real[rank], rel=TOLERANCE + gathered)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["TP2 local"])
def test_peak_with_latent_attention_matches_a_real_run(name):
    spec = FAMILIES[name]
    latent = LatentAttention(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    model = dataclasses.replace(spec.workload.model, num_kv_heads=spec.workload.model.num_heads, latent=latent)
    spec = dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=model))
    (run,) = simulated_runs([DryRunRequest(spec=spec, rank=0, mode="cpu")])
    assert run.peak_bytes == pytest.approx(_least_peaks(spec, {0: run})[0], rel=TOLERANCE)


def _split_experts(name):
    spec = FAMILIES[name]
    experts = Experts(num_experts=4, top_k=2, ffn_hidden_size=176, num_dense_layers=1, routing="balanced")
    model = dataclasses.replace(spec.workload.model, experts=experts)
    layout = dataclasses.replace(spec.candidate.layout, ep=2)
    return dataclasses.replace(
        spec,
        workload=dataclasses.replace(spec.workload, model=model),
        candidate=dataclasses.replace(spec.candidate, layout=layout),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ZeRO-3 x2", "ZeRO-3 x2, full recompute", "ZeRO-1 x2"])
def test_peak_of_split_experts_matches_a_real_run(name):
    """With equal shares, as the real router gives here; all tokens on one rank take more."""
    spec = _split_experts(name)
    even, crowded = simulated_runs(
        [DryRunRequest(spec=spec, rank=0, mode="cpu", crowded=crowded) for crowded in (False, True)]
    )
    real = measured_peaks(spec)[0]
    clones = 4 * num_parameters(spec.workload.model) // spec.workload.num_layers
    assert real - clones <= even.peak_bytes * (1 + TOLERANCE) and even.peak_bytes <= real * (1 + TOLERANCE)
    assert (crowded.peak_bytes > even.peak_bytes) == ("recompute" not in name)  # else the peak is at the head
    assert crowded.flops["forward"] > even.flops["forward"]


@pytest.mark.representative("ZeRO-1 x2")
@pytest.mark.parametrize("name", ["ZeRO-1 x2", "DDP x2", "ZeRO-3 x2, O2 bf16", "PP2 interleaved", "TP2 DTensor"])
def test_building_takes_the_memory_of_a_real_rank(name):
    """Of a model of some layers every rank; stages with fewer parameters than a tile has temporaries aside."""
    spec = FAMILIES[name]
    (run,) = simulated_runs([DryRunRequest(spec=spec, rank=0, mode="cpu")])
    real = measured_peaks(spec, of="build")
    assert run.peaks[BUILD].total_bytes == pytest.approx(real[0], rel=1e-3)


def test_a_rank_that_takes_most_while_it_is_built_is_estimated_by_that():
    """One layer of a million weights, one row: the temporaries of drawing it are more than gradients and states."""
    workload = Workload(
        model=LinearModel(size=1024, num_layers=1), data=RandomData(), seq_length=1, global_batch_size=1
    )
    spec = TrialSpec(workload=workload, candidate=Candidate(layout=Layout(), micro_batch_size=1))
    (run,) = simulated_runs([DryRunRequest(spec=spec, rank=0)])
    estimate = StageEstimate.of_run(0, run)
    assert estimate.peak_phase == "build" and estimate.peak_bytes > 5 * 4 * 1024 * 1024


@pytest.mark.exhaustive
def test_attention_is_that_of_the_target_device():
    """Scores are held where a kernel holds them; keys and values are repeated where CUDA's would not be shared."""
    base = FAMILIES["single, fp32"]
    by_math = dataclasses.replace(base.candidate, kernels=Kernels(attention="math"))
    specs = (base, dataclasses.replace(base, device="cuda"), dataclasses.replace(base, candidate=by_math))
    here, on_cuda, math = simulated_peaks(specs)
    model, workload = base.workload.model, base.workload
    assert isinstance(model, LlamaModel)
    num_scores = base.candidate.micro_batch_size * model.num_heads * workload.seq_length**2
    repeated = base.candidate.micro_batch_size * workload.seq_length * model.hidden_size
    assert math - here >= model.num_layers * num_scores * 4
    assert on_cuda - here >= model.num_layers * 2 * repeated * 4 / 2


def _assert_extrapolation_is_exact(spec, stages):
    """Compare what is extrapolated for these stages with their simulation in full."""
    planned = plan_small_runs(spec)
    assert planned is not None and len(planned) == spec.candidate.layout.pp
    plans = [planned[stage] for stage in stages]
    small = {(one, representative_rank(one.candidate, plan.small.stage)): None for plan in plans for one in plan.specs}
    full = [(spec, representative_rank(spec.candidate, stage)) for stage in stages]
    runs = simulated_runs([DryRunRequest(spec=one, rank=rank) for one, rank in (*small, *full)])
    known = dict(zip(small, runs, strict=False))
    for plan, exact in zip(plans, runs[len(small) :], strict=True):
        made = plan.extrapolate(
            [known[one, representative_rank(one.candidate, plan.small.stage)] for one in plan.specs]
        )
        assert made.peak_bytes == pytest.approx(exact.peak_bytes, rel=5e-3)
        assert made.host_bytes == pytest.approx(exact.host_bytes, rel=5e-3)
        assert made.flops == exact.flops
        assert made.num_parameters == exact.num_parameters
        assert made.collectives == exact.collectives


@pytest.mark.exhaustive
def test_layers_are_extrapolated():
    """Layers are of two kinds, so there are three small models."""
    base = FAMILIES["ZeRO-3 x2"]
    assert isinstance(base.workload.model, LlamaModel)
    model = dataclasses.replace(base.workload.model, num_layers=33)
    candidate = dataclasses.replace(base.candidate, recompute=Recompute(full=((5,),)))
    spec = dataclasses.replace(base, workload=dataclasses.replace(base.workload, model=model), candidate=candidate)
    spec = with_microbatches(spec, 3)
    plans = plan_small_runs(spec)
    assert plans is not None and plans[0].wanted == (28, 5) and plans[0].lengths == ((3, 3), (4, 3), (3, 4))
    _assert_extrapolation_is_exact(spec, [0])


EVERY_STAGE = ("1f1b, uneven", "1f1b, an empty stage")
"""Pipelines with unlike stages, of which all stages are compared."""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_are_extrapolated(name):
    """Of most pipelines one stage, which differs between them: a full simulation takes seconds."""
    spec, first = PIPELINES[name], list(PIPELINES).index(name)
    pp = spec.candidate.layout.pp
    chosen = range(pp) if name in EVERY_STAGE else [first % pp]
    _assert_extrapolation_is_exact(spec, chosen)


def test_middle_stages_share_one_small_trial():
    """Whatever is in flight on them, so that a pipeline of 16 ranks takes as many simulations as one of 4."""
    spec = pipeline(((2,) * 16,), 40, dp_shard=2, zero_stage=1)
    plans = plan_small_runs(spec)
    assert plans is not None and len(plans) == 16
    ranks = {plan.small for plan in plans}
    assert len(ranks) == 3 and all(rank.num_microbatches <= 5 for rank in ranks)


def _torch_order(layout, stage, number):
    """What torch's own schedule has pipeline rank ``stage`` compute."""
    chunks = layout.num_virtual_stages
    numbers = [virtual_stage(layout, chunk, stage) for chunk in range(chunks)]
    rank = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=layout.pp,
        num_stages=layout.pp * chunks,
        _num_stages=layout.pp * chunks,
        _n_microbatches=number,
        _stages=numbers,
        microbatches_per_round=number // max(1, number // layout.pp),
    )
    if layout.schedule in ("interleaved", "zbv") or chunks > 1:
        looped = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zbv": schedules.ScheduleZBVZeroBubble,
            "gpipe": schedules.ScheduleLoopedBFS,
        }[layout.schedule]
        actions = looped._calculate_single_rank_operations(rank, stage)
    else:
        single = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}[layout.schedule]
        actions = single._get_pipeline_order(rank)[stage]
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weights"}
    return [
        Pass(kinds[one.computation_type.name], numbers.index(one.stage_index))
        for one in actions
        if one is not None and one.computation_type.name in kinds
    ]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)],
)
def test_passes_are_in_the_order_of_torch(schedule, chunks):
    """Every rank's; and those of the small pipelines that stand for them are orders that the schedule takes."""
    for pp, number in itertools.product((2, 3, 5), range(1, 14)):
        layout = Layout(pp=pp, stage_layers=((1,) * pp,) * chunks, num_virtual_stages=chunks, schedule=schedule)
        if not _is_legal(pipeline(layout.stage_layers, number, schedule=schedule)):
            continue
        for stage in range(pp):
            assert list(order_of_passes(layout, stage, number)) == _torch_order(layout, stage, number)
        for small in shorter_ranks(layout, number):
            short = pipeline(small.layout.stage_layers, small.num_microbatches, schedule=schedule)
            assert _is_legal(short)


def _is_legal(spec):
    return not list(violations(spec.workload, spec.candidate))


def test_a_schedule_in_another_order_is_not_extrapolated():
    spec = PIPELINES["1f1b"]
    plans = plan_small_runs(spec)
    assert plans is not None
    (small,) = plans[0].specs
    (run,) = simulated_runs([DryRunRequest(spec=small, rank=0)])
    with pytest.raises(UnknownOrderError):
        plans[0].extrapolate([dataclasses.replace(run, passes=run.passes[::-1])])


@pytest.mark.exhaustive
def test_a_world_of_1024_ranks():
    """A stage of Llama2-13B; its shards are a 1024th of nothing but the four stages' share."""
    spec = LARGE["13B, 1024 ranks: ZeRO-3 x32, TP8, PP4, full recompute"]
    assert spec.candidate.layout.world_size == 1024
    plans = plan_small_runs(spec)
    assert plans is not None
    rank = representative_rank(plans[3].specs[0].candidate, plans[3].small.stage)
    run = plans[3].extrapolate(simulated_runs([DryRunRequest(spec=one, rank=rank) for one in plans[3].specs]))
    model_parameters = 13_015_864_320
    assert run.num_parameters * 1024 == pytest.approx(model_parameters, rel=0.05)
    assert 1e9 < run.peak_bytes < 4e9
    assert {"all_gather", "reduce_scatter", "recv", "send"} <= set(run.collectives)


def test_what_a_real_run_refuses_is_refused():
    spec = dataclasses.replace(
        FAMILIES["single, fp32"], candidate=dataclasses.replace(FAMILIES["single, fp32"].candidate, layout=Layout(tp=3))
    )
    (reply,) = replies_of([DryRunRequest(spec=spec, rank=0)])
    assert reply.failure is not None and reply.failure.reason == "infeasible"
    assert "not divisible by tp 3" in reply.failure.message


def _abort(_request):
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError


def _hang(_request):
    time.sleep(60)
    raise AssertionError


def _leave(_request):
    os._exit(7)


@pytest.mark.parametrize(
    ("work", "timeout_s", "kind", "words"),
    [
        (_abort, 60.0, "died", "SIGABRT"),
        (_hang, 0.2, "timeout", "longer than"),
        (_leave, 60.0, "died", "exit status 7"),
    ],
)
def test_a_failing_child_is_contained(work, timeout_s, kind, words):
    request = DryRunRequest(spec=FAMILIES["single, fp32"], rank=0)
    replies = replies_of([request, request, request], work, timeout_s)
    for reply in replies:
        assert reply.run is None and reply.failure is not None
        assert reply.failure.reason == kind and words in reply.failure.message


def test_closing_the_iterator_ends_the_children(monkeypatch):
    pids = []
    fork = os.fork

    def recorded_fork():
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", recorded_fork)
    request = DryRunRequest(spec=FAMILIES["single, fp32"], rank=0)

    def work(one):
        return _leave(one) if one.rank == 0 else _hang(one)

    replies = run_children([request, dataclasses.replace(request, rank=1)], work, timeout_s=60.0, max_children=2)
    next(replies)
    replies.close()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_unseen_releases_are_inferred_from_addresses():
    live = {100: 50}
    assert peak_bytes(live, [], [(200, 50), (100, -50), (300, 10)]) == 100
    assert peak_bytes(live, [(120, 40)], [(300, 10)]) == 50, "the first must be freed where the second is"
    assert peak_bytes(live, [(200, 50), (200, -50)], [(400, 20)]) == 70, "what was released before does not count"


def _simulated(name, num_microbatches, precision=None, **layout):
    base = FAMILIES[name]
    changed = dataclasses.replace(base.candidate.layout, **layout)
    candidate = dataclasses.replace(base.candidate, layout=changed, precision=precision or base.candidate.precision)
    (run,) = simulated_runs(
        [
            DryRunRequest(
                spec=with_microbatches(dataclasses.replace(base, candidate=candidate), num_microbatches), rank=0
            )
        ]
    )
    return run


def _most(run, category, phase=""):
    return max(peak.by_category.get(category, 0) for place, peak in run.peaks.items() if place.startswith(phase))


def test_accumulating_shards_holds_no_whole_gradients():
    """Between micro-batches ZeRO-3 holds half the gradients on two ranks, unless configured to keep them whole."""
    each, last = (_simulated("ZeRO-3 x2", 2, gradient_reduction=when) for when in ("each", "last"))
    whole = 2 * 4 * each.num_parameters
    assert _most(last, "grad") >= whole
    assert whole / 2 <= _most(each, "grad", "forward") < 0.55 * whole
    assert each.collectives["reduce_scatter"].num_calls == 2 * last.collectives["reduce_scatter"].num_calls


def test_weights_of_8_bit_matmuls_are_gathered_in_8_bits_and_scaled_at_once():
    spec = FAMILIES["ZeRO-3 x2, O2 fp8"]
    precision = dataclasses.replace(spec.candidate.precision, fp8_gather=True)
    short = dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, precision=precision))
    plain, made = simulated_runs([DryRunRequest(spec=one, rank=0, mode="cpu") for one in (spec, short)])
    model = spec.workload.model
    kv_width = model.num_kv_heads * model.head_size
    matrices = (
        model.num_layers
        * model.hidden_size
        * (2 * model.num_heads * model.head_size + 2 * kv_width + 3 * model.ffn_hidden_size)
    )
    before, after = (run.collectives["all_gather"] for run in (plain, made))
    # Before the forward and before the backward pass of each micro-batch.
    gathers = 2 * spec.candidate.num_microbatches(spec.workload.global_batch_size)
    assert before.num_bytes - after.num_bytes == gathers * matrices and before.num_calls == after.num_calls
    assert made.collectives["all_reduce"].num_calls == plain.collectives["all_reduce"].num_calls + 1


def test_weights_that_stay_whole_are_gathered_once_a_step():
    one, two = (_simulated("ZeRO-2 x2", number) for number in (1, 2))
    assert one.collectives["all_gather"] == two.collectives["all_gather"]


def test_a_step_of_zero_1_reduces_and_gathers_buckets():
    """It sends the bytes of one all-reduce, in as many collectives as there are buckets; the norm is one more."""
    run = _simulated("ZeRO-1 x2", 3)
    assert set(run.collectives) == {"reduce_scatter", "all_gather", "all_reduce"}
    assert run.collectives["all_reduce"].num_bytes == 16
    sent = run.collectives["reduce_scatter"]
    assert sent == run.collectives["all_gather"] and sent.num_calls <= 3
    assert sent.num_bytes == pytest.approx(4 * run.num_parameters, rel=0.01)


def test_an_update_of_16_bits_takes_a_bounded_workspace(monkeypatch):
    monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 1 << 18)
    run = _simulated("DDP x2", 1, Precision(level="O2", dtype="bfloat16"))
    assert 4 * run.num_parameters > 8 << 18
    assert 0 < _most(run, "temporary", "optimizer") <= 1 << 18
