"""Predicted peak memory against the peak of a real step, ours and by the estimators of Accelerate and DeepSpeed.

Both estimators count weights, gradients and optimiser states; neither knows the batch. Ours runs the step without data.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout

from benchmarks.against.rows import Row
from benchmarks.dryrun.accuracy import estimated
from benchmarks.dryrun.cases import FAMILIES
from benchmarks.dryrun.gang import measured_peaks
from trials.sizes import num_parameters
from trials.spec import TrialSpec

CASES = ("single, fp32", "single, O2 bf16", "ZeRO-2 x2", "ZeRO-3 x2, O2 bf16")


def rows() -> Iterator[Row]:
    ours: list[tuple[float, float]] = []
    peers: dict[str, list[tuple[float, float]]] = {}
    for estimate in _PEERS.values():  # imports are no part of an estimate
        estimate(FAMILIES[CASES[0]])
    for name in CASES:
        spec = FAMILIES[name]
        reference = min(measured_peaks(spec))
        ours.append(_judged(lambda spec=spec: _dry_run(spec), reference))
        for peer, estimate in _PEERS.items():
            peers.setdefault(peer, []).append(_judged(lambda spec=spec, estimate=estimate: estimate(spec), reference))
    for peer, judged in peers.items():
        for place, (what, unit) in enumerate((("memory estimate, error", "%"), ("memory estimate, time", "s"))):
            yield Row(
                what=what,
                peer_name=peer,
                unit=unit,
                ours=tuple(max(one[place], 0.01 if unit == "%" else 0.0) for one in ours),
                peer=tuple(one[place] for one in judged),
            )


def _judged(estimate: Callable[[], float], reference: int) -> tuple[float, float]:
    """Error in percent, and seconds."""
    start = time.perf_counter()
    found = estimate()
    return 100 * abs(found / reference - 1), time.perf_counter() - start


def _dry_run(spec: TrialSpec) -> float:
    estimate = estimated(spec.workload, spec.candidate, mode="cpu", exact=True)
    return max(stage.peak_bytes for stage in estimate.stages)


def _accelerate(spec: TrialSpec) -> float:
    from accelerate.commands.estimate import estimate_training_usage

    precision = "float32" if spec.candidate.precision.level == "O0" else "bfloat16"
    usage = estimate_training_usage(4 * num_parameters(spec.workload.model), precision)
    return float(max(usage.values()))


def _deepspeed(spec: TrialSpec) -> float:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    layout, weights = spec.candidate.layout, num_parameters(spec.workload.model)
    with redirect_stdout(io.StringIO()):
        if layout.zero_stage == 3 and layout.dp_shard > 1:
            largest = spec.workload.model.vocab_size * spec.workload.model.hidden_size  # type: ignore[union-attr]
            _, on_device, _ = estimate_zero3_model_states_mem_needs(
                weights, largest, num_gpus_per_node=layout.world_size, cpu_offload=False,
                cpu_offload_params=False, zero_init=True, additional_buffer_factor=1.5,
            )  # fmt: skip
        else:
            _, on_device = estimate_zero2_model_states_mem_needs(
                weights, num_gpus_per_node=layout.world_size, cpu_offload=False, additional_buffer_factor=1.5
            )
    return float(on_device)


_PEERS: dict[str, Callable[[TrialSpec], float]] = {
    "accelerate estimate-memory": _accelerate,
    "DeepSpeed's estimators": _deepspeed,
}
