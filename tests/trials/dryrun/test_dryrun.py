"""Simulated ranks against real ones, against the world's size, and what becomes of simulations that go wrong."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import time
from typing import Any

import pytest

from benchmarks.dryrun.allocator import peak_bytes
from benchmarks.dryrun.cases import FAMILIES, LARGE
from benchmarks.dryrun.gang import measured_peaks
from trials.dryrun.__main__ import run_children
from trials.dryrun.extrapolate import Extrapolation, extrapolate, plan_small_runs
from trials.dryrun.microbatches import enough_microbatches, with_microbatches
from trials.dryrun.records import Category, DryRunRequest, RankRun, Reply
from trials.dryrun.simulate import simulate
from trials.flops import num_parameters
from trials.legality.rules import violations
from trials.spec import Kernels, Layout, LlamaModel, Precision, Recompute, TrialSpec

TOLERANCE = 0.02


def _replies(requests: list[DryRunRequest], work: object = simulate, timeout_s: float = 120.0) -> list[Reply]:
    # Loaders of other tests, if a child were to collect them, would raise there and keep the child's tensors alive.
    gc.collect()
    replies = dict(run_children(requests, work, timeout_s=timeout_s, max_children=2))  # type: ignore[arg-type]
    return [replies[i] for i in range(len(requests))]


def _runs(requests: list[DryRunRequest]) -> list[RankRun]:
    runs = []
    for reply in _replies(requests):
        assert reply.run is not None, reply.failure
        runs.append(reply.run)
    return runs


def _layer_size(model: object) -> int:
    assert isinstance(model, LlamaModel)
    return num_parameters(dataclasses.replace(model, num_layers=2)) - num_parameters(
        dataclasses.replace(model, num_layers=1)
    )


@pytest.mark.representative("ZeRO-3 x2")
@pytest.mark.parametrize("name", ["single, O1 bf16, full recompute", "ZeRO-1 x2", "ZeRO-3 x2", "PP2 1F1B"])
def test_peak_is_that_of_a_real_run(name: str) -> None:
    spec = FAMILIES[name]
    layout = spec.candidate.layout
    ranks = [stage * layout.world_size // layout.pp for stage in range(layout.pp)]
    runs = _runs([DryRunRequest(spec=spec, rank=rank, mode="cpu") for rank in ranks])
    real = measured_peaks(spec)
    # gloo works on a clone of what it reduces and scatters, a layer at a time, and lets go of it when it likes.
    layer = 4 * _layer_size(spec.workload.model) if layout.zero_stage >= 2 else 0
    for rank, run in zip(ranks, runs, strict=True):
        assert real[rank] - layer <= run.peak_bytes * (1 + TOLERANCE) and run.peak_bytes <= real[rank] * (1 + TOLERANCE)


def test_attention_is_that_of_the_device_that_is_meant() -> None:
    """Scores are held where a kernel holds them; keys and values are repeated where CUDA's would not be shared."""
    base = FAMILIES["single, fp32"]
    by_math = dataclasses.replace(base.candidate, kernels=Kernels(attention="math"))
    specs = (base, dataclasses.replace(base, device="cuda"), dataclasses.replace(base, candidate=by_math))
    here, on_cuda, math = (run.peak_bytes for run in _runs([DryRunRequest(spec=spec, rank=0) for spec in specs]))
    model, workload = base.workload.model, base.workload
    assert isinstance(model, LlamaModel)
    num_scores = base.candidate.micro_batch_size * model.num_heads * workload.seq_length**2
    repeated = base.candidate.micro_batch_size * workload.seq_length * model.hidden_size
    assert math - here >= model.num_layers * num_scores * 4
    assert on_cuda - here >= model.num_layers * 2 * repeated * 4 / 2


def _assert_extrapolation_is_exact(spec: TrialSpec, plan: Extrapolation) -> None:
    """Compare what is extrapolated for stage 0 with its simulation in full."""
    *small, full = _runs([DryRunRequest(spec=one, rank=0) for one in (*plan.specs, spec)])
    made = extrapolate(plan, small)
    assert made.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-3)
    assert made.flops == full.flops
    assert made.collectives == full.collectives
    assert made.num_parameters == full.num_parameters


def test_layers_are_extrapolated() -> None:
    """Layers are of two kinds, so there are three small models."""
    base = FAMILIES["ZeRO-3 x2"]
    assert isinstance(base.workload.model, LlamaModel)
    model = dataclasses.replace(base.workload.model, num_layers=23)
    candidate = dataclasses.replace(base.candidate, recompute=Recompute(full=((5,),)))
    spec = dataclasses.replace(base, workload=dataclasses.replace(base.workload, model=model), candidate=candidate)
    plan = plan_small_runs(spec, 0)
    assert plan is not None and plan.wanted == (18, 5) and plan.lengths == ((3, 3), (4, 3), (3, 4))
    _assert_extrapolation_is_exact(spec, plan)


@pytest.mark.representative("PP2 1F1B-changes1-3")
@pytest.mark.parametrize(
    ("name", "changes", "simulated"),
    [
        ("ZeRO-3 x2", {}, 3),
        ("PP2 1F1B", {"dp_replicate": 2}, 3),
        ("PP2 interleaved", {"dp_shard": 2, "zero_stage": 3}, 6),
    ],
)
def test_micro_batches_are_extrapolated(name: str, changes: dict[str, int], simulated: int) -> None:
    base = FAMILIES[name]
    layout = dataclasses.replace(base.candidate.layout, **changes)  # type: ignore[arg-type]
    spec = with_microbatches(dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, layout=layout)), 8)
    plan = plan_small_runs(spec, 0)
    assert plan is not None and plan.num_microbatches == simulated and len(plan.specs) == 1
    _assert_extrapolation_is_exact(spec, plan)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zbv"])
def test_the_schedule_takes_so_few_micro_batches(schedule: Any) -> None:
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    base = FAMILIES["PP2 1F1B"]
    assert isinstance(base.workload.model, LlamaModel)
    model = dataclasses.replace(base.workload.model, num_layers=4 * chunks)
    layout = Layout(pp=4, stage_layers=((1,) * 4,) * chunks, num_virtual_stages=chunks, schedule=schedule)
    candidate = dataclasses.replace(base.candidate, layout=layout)
    workload = dataclasses.replace(base.workload, model=model)
    trials = [with_microbatches(TrialSpec(workload=workload, candidate=candidate), wanted) for wanted in range(4, 40)]
    legal = [spec for spec in trials if _is_legal(spec)]
    assert len(legal) > 10
    for spec, stage in itertools.product(legal, range(4)):
        number = enough_microbatches(layout, stage, candidate.num_microbatches(spec.workload.global_batch_size))
        assert _is_legal(with_microbatches(spec, number))


def _is_legal(spec: TrialSpec) -> bool:
    return not list(violations(spec.workload, spec.candidate))


@pytest.mark.exhaustive
def test_a_world_of_1024_ranks() -> None:
    """A stage of Llama2-13B; its shards are a 1024th of nothing but the four stages' share."""
    spec = LARGE["13B, 1024 ranks: ZeRO-3 x32, TP8, PP4, full recompute"]
    assert spec.candidate.layout.world_size == 1024
    plan = plan_small_runs(spec, 3)
    assert plan is not None
    run = extrapolate(plan, _runs([DryRunRequest(spec=one, rank=1000) for one in plan.specs]))
    model_parameters = 13_015_864_320
    assert run.num_parameters * 1024 == pytest.approx(model_parameters, rel=0.05)
    assert 1e9 < run.peak_bytes < 4e9
    assert {"all_gather", "reduce_scatter", "recv", "send"} <= set(run.collectives)


def test_what_a_real_run_refuses_is_refused() -> None:
    spec = dataclasses.replace(
        FAMILIES["single, fp32"], candidate=dataclasses.replace(FAMILIES["single, fp32"].candidate, layout=Layout(tp=3))
    )
    (reply,) = _replies([DryRunRequest(spec=spec, rank=0)])
    assert reply.failure is not None and reply.failure.reason == "infeasible"
    assert "not divisible by tp 3" in reply.failure.message


def _abort(_request: DryRunRequest) -> RankRun:
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError


def _hang(_request: DryRunRequest) -> RankRun:
    time.sleep(60)
    raise AssertionError


def _leave(_request: DryRunRequest) -> RankRun:
    os._exit(7)


@pytest.mark.parametrize(
    ("work", "timeout_s", "kind", "words"),
    [
        (_abort, 60.0, "died", "SIGABRT"),
        (_hang, 0.2, "timeout", "longer than"),
        (_leave, 60.0, "died", "exit status 7"),
    ],
)
def test_a_child_that_goes_wrong_is_contained(work: object, timeout_s: float, kind: str, words: str) -> None:
    request = DryRunRequest(spec=FAMILIES["single, fp32"], rank=0)
    replies = _replies([request, request, request], work, timeout_s)
    for reply in replies:
        assert reply.run is None and reply.failure is not None
        assert reply.failure.reason == kind and words in reply.failure.message


def test_closing_the_iterator_ends_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    fork = os.fork

    def recorded_fork() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", recorded_fork)
    request = DryRunRequest(spec=FAMILIES["single, fp32"], rank=0)

    def work(one: DryRunRequest) -> RankRun:
        return _leave(one) if one.rank == 0 else _hang(one)

    replies = run_children([request, dataclasses.replace(request, rank=1)], work, timeout_s=60.0, max_children=2)
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_unseen_releases_are_inferred_from_addresses() -> None:
    live = {100: 50}
    assert peak_bytes(live, [], [(200, 50), (100, -50), (300, 10)]) == 100
    assert peak_bytes(live, [(120, 40)], [(300, 10)]) == 50, "the first must be gone where the second lies"
    assert peak_bytes(live, [(200, 50), (200, -50)], [(400, 20)]) == 70, "what was released before does not count"


def _simulated(name: str, num_microbatches: int, precision: Precision | None = None, **layout: Any) -> RankRun:
    base = FAMILIES[name]
    changed = dataclasses.replace(base.candidate.layout, **layout)
    candidate = dataclasses.replace(base.candidate, layout=changed, precision=precision or base.candidate.precision)
    (run,) = _runs(
        [
            DryRunRequest(
                spec=with_microbatches(dataclasses.replace(base, candidate=candidate), num_microbatches), rank=0
            )
        ]
    )
    return run


def _most(run: RankRun, category: Category, phase: str = "") -> int:
    return max(peak.by_category.get(category, 0) for place, peak in run.peaks.items() if place.startswith(phase))


def test_accumulating_shards_holds_no_whole_gradients() -> None:
    """Between micro-batches ZeRO-3 holds half the gradients on two ranks, unless asked to keep them whole."""
    each, last = (_simulated("ZeRO-3 x2", 3, gradient_reduction=when) for when in ("each", "last"))
    whole = 2 * 4 * each.num_parameters
    assert _most(last, "grad") >= whole
    assert whole / 2 <= _most(each, "grad", "forward") < 0.55 * whole
    assert each.collectives["reduce_scatter"].num_calls == 3 * last.collectives["reduce_scatter"].num_calls


def test_weights_that_stay_whole_are_gathered_once_a_step() -> None:
    one, three = (_simulated("ZeRO-2 x2", number) for number in (1, 3))
    assert one.collectives["all_gather"] == three.collectives["all_gather"]


def test_a_step_of_zero_1_reduces_and_gathers_buckets() -> None:
    """It sends the bytes of one all-reduce, in as many collectives as there are buckets; the norm is one more."""
    run = _simulated("ZeRO-1 x2", 3)
    assert set(run.collectives) == {"reduce_scatter", "all_gather", "all_reduce"}
    assert run.collectives["all_reduce"].num_bytes == 16
    sent = run.collectives["reduce_scatter"]
    assert sent == run.collectives["all_gather"] and sent.num_calls <= 3
    assert sent.num_bytes == pytest.approx(4 * run.num_parameters, rel=0.01)


def test_an_update_of_16_bits_takes_a_bounded_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.training.optimizer.adamw.WORKSPACE_BYTES", 1 << 20)
    run = _simulated("DDP x2", 1, Precision(level="O2", dtype="bfloat16"))
    assert 4 * run.num_parameters > 8 << 20
    assert 0 < _most(run, "temporary", "optimizer") <= 1 << 20
