"""Every layout, recompute policy and precision trains like one process in fp32.

The loss alone is blind to gradients of the wrong size under AdamW, so the global gradient norm is compared too.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.trials.gang import RankFailure, Result, run_gang
from tests.trials.tiny import WORKLOAD, tiny_spec
from trials.legality import violations
from trials.outcome import RankReport
from trials.spec import FullRecompute, Kernels, Layout, Loader, LossScale, NoRecompute, Precision, Recompute, TrialSpec

LAYOUTS = {
    "single": Layout(),
    "ddp2": Layout(dp_replicate=2),
    "fsdp2-replicate2": Layout(dp_replicate=2, replicate_with="fsdp2"),
    "zero1x2": Layout(dp_shard=2, zero_stage=1),
    "zero2x2": Layout(dp_shard=2, zero_stage=2),
    "zero3x2": Layout(dp_shard=2, zero_stage=3),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "zero1-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=1),
    "hsdp2-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=2),
    "hsdp3-2x2": Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
    "zero3x4": Layout(dp_shard=4, zero_stage=3),
    "replicate2-tp2": Layout(dp_replicate=2, replicate_with="fsdp2", tp=2),
    "replicate2-tp2-sp": Layout(dp_replicate=2, replicate_with="fsdp2", tp=2, sequence_parallel=True),
    "zero2x2-tp2": Layout(dp_shard=2, zero_stage=2, tp=2),
    "zero2x2-tp2-sp": Layout(dp_shard=2, zero_stage=2, tp=2, sequence_parallel=True),
    "zero3x2-tp2": Layout(dp_shard=2, zero_stage=3, tp=2),
    "zero3x2-tp2-sp": Layout(dp_shard=2, zero_stage=3, tp=2, sequence_parallel=True),
}
RECOMPUTES: dict[str, Recompute] = {"keep": NoRecompute(), "recompute1": FullRecompute(num_layers=1)}
PRECISIONS = {
    "O0": Precision(),
    "O1-bf16": Precision(level="O1", dtype="bfloat16"),
    "O1-fp16": Precision(level="O1", dtype="float16", loss_scale=LossScale()),
    "O2-bf16": Precision(level="O2", dtype="bfloat16"),
    "O2-fp16": Precision(level="O2", dtype="float16", loss_scale=LossScale()),
}
AXES: tuple[dict[str, Any], ...] = (LAYOUTS, RECOMPUTES, PRECISIONS)
GRAPH = Kernels(compile="block", backend="aot_eager")
GRAPH_LAYOUTS = ("single", "ddp2", "zero3x2", "tp2-sp", "zero3x2-tp2-sp")


def matrix() -> dict[str, TrialSpec]:
    """All combinations, and a few more knobs on some; each must be one the runner accepts."""
    specs = {}
    for names in itertools.product(LAYOUTS, RECOMPUTES, PRECISIONS):
        layout, recompute, precision = (table[name] for table, name in zip(AXES, names, strict=True))
        # Accumulation multiplies the collectives; the fp32 rows show it right, the others need not repeat it.
        num_microbatches = 2 if precision.level == "O0" else 1
        specs["/".join(names)] = tiny_spec(
            layout, recompute=recompute, precision=precision, num_microbatches=num_microbatches
        )
    for name in GRAPH_LAYOUTS:
        specs[f"{name}/keep/O0/graph"] = tiny_spec(LAYOUTS[name], kernels=GRAPH)
    specs["single/recompute1/O1-bf16/graph"] = tiny_spec(
        recompute=RECOMPUTES["recompute1"], precision=PRECISIONS["O1-bf16"], kernels=GRAPH
    )
    specs["ddp2/keep/O0/workers"] = tiny_spec(
        LAYOUTS["ddp2"], loader=Loader(num_workers=1, prefetch_factor=2), num_microbatches=2
    )
    return specs


MATRIX = matrix()


@functools.cache
def results(world_size: int) -> dict[str, Result]:
    """Run every trial of this size, in one gang as long as all goes well."""
    chosen = {name: spec for name, spec in MATRIX.items() if spec.candidate.layout.world_size == world_size}
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(chosen, run_gang(list(chosen.values()), Path(folder)), strict=True))


def tolerances(precision: Precision) -> tuple[float, float]:
    """Absolute on the loss, relative on the gradient norm."""
    return (1e-5, 1e-5) if precision.level == "O0" else (2e-3, 2e-2)


def differences(result: Result, baseline: Result) -> tuple[float, float]:
    """Largest loss difference and largest relative gradient-norm difference over all steps."""
    assert isinstance(baseline, RankReport), baseline
    assert isinstance(result, RankReport), result
    assert len(result.losses) == len(baseline.losses) == 5
    loss = max(abs(a - b) for a, b in zip(result.losses, baseline.losses, strict=True))
    norm = max(abs(a - b) / b for a, b in zip(result.grad_norms, baseline.grad_norms, strict=True))
    return loss, norm


def test_every_combination_is_legal() -> None:
    assert not [name for name, spec in MATRIX.items() if list(violations(WORKLOAD, spec.candidate))]


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(MATRIX, key=lambda name: MATRIX[name].candidate.layout.world_size))
def test_trains_like_a_single_process(name: str) -> None:
    spec = MATRIX[name]
    result = results(spec.candidate.layout.world_size)[name]
    loss, norm = differences(result, results(1)["single/keep/O0"])
    loss_limit, norm_limit = tolerances(spec.candidate.precision)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("name", ["single/recompute1/O0", "ddp2/keep/O0/workers"])
def test_same_arithmetic_is_bit_exact(name: str) -> None:
    spec = MATRIX[name]
    reference = {"single/recompute1/O0": "single/keep/O0", "ddp2/keep/O0/workers": "ddp2/keep/O0"}[name]
    all_results = results(spec.candidate.layout.world_size)
    assert not isinstance(all_results[name], RankFailure)
    assert differences(all_results[name], all_results[reference]) == (0.0, 0.0)
