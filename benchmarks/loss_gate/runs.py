"""Runs that the loss gate is calibrated on: real gangs that train small models in every class of number formats."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.proof.loss_gate import Trajectory
from tests.trials.gang import run_gang
from tests.trials.tiny import WORKLOAD as TINY
from trials.legality import violations
from trials.outcome import RankReport
from trials.spec import (
    Candidate,
    ImageFolderData,
    Kernels,
    Layout,
    LlamaModel,
    LossScale,
    Precision,
    Protocol,
    Recompute,
    ResNetModel,
    TextData,
    TrialSpec,
    Workload,
)

NUM_STEPS = 20
LLAMA_TINY = Workload(
    model=LlamaModel(hidden_size=192, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=512),
    data=TextData(),
    seq_length=64,
    global_batch_size=8,
)
RESNET = Workload(
    model=ResNetModel(depth=18, num_classes=10, image_size=64, width=8),
    data=ImageFolderData(),
    seq_length=1,
    global_batch_size=32,
    optimizer=dataclasses.replace(TINY.optimizer, lr=2e-4),
)
WORKLOADS = {"tiny": TINY, "llama-tiny": LLAMA_TINY, "resnet": RESNET}
"""Workloads: 32 and 192 wide Llamas (the parity tests' and the quickstart's), a narrow ResNet-18. Only with the last do
micro-batches matter: batch norm takes its statistics over them."""


def _fp16(level: Any) -> Precision:
    return Precision(level=level, dtype="float16", loss_scale=LossScale())


CLASSES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32 high": {"kernels": Kernels(matmul_precision="high", attention="math")},
    "float32 medium": {"kernels": Kernels(matmul_precision="medium", attention="math")},
    "bfloat16 O1": {"precision": Precision(level="O1", dtype="bfloat16")},
    "bfloat16 O1-fp8": {"precision": Precision(level="O1-fp8", dtype="bfloat16")},
    "bfloat16 O2": {"precision": Precision(level="O2", dtype="bfloat16")},
    "bfloat16 O2-fp8": {"precision": Precision(level="O2-fp8", dtype="bfloat16")},
    "float16 O1": {"precision": _fp16("O1")},
    "float16 O2": {"precision": _fp16("O2")},
}
"""Knobs of each class of :mod:`orchestrator.proof.loss_gate`."""
EMULATED = ("float32 high", "float32 medium")
"""Classes whose matmuls are emulated: what tensor cores do to fp32 operands is done to them here, as CPUs do not."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "m4": {"num_microbatches": 4},
    "zero3": {"layout": Layout(dp_shard=2, zero_stage=3), "num_microbatches": 2},
    "tp-local": {"layout": Layout(tp=2, sequence_parallel=True, tp_engine="local")},
    "pp": {"layout": Layout(pp=2), "num_microbatches": 4},
    "recompute": {"recompute": "full"},
    "inductor": {"kernels": Kernels(compile="block")},
    "ddp": {"layout": Layout(dp_replicate=2), "num_microbatches": 2},
    "zero1": {"layout": Layout(dp_shard=2, zero_stage=1)},
    "tp": {"layout": Layout(tp=2, sequence_parallel=True)},
    "cp": {"layout": Layout(cp=2)},
}
"""Legitimate ways to train the same; every one of them on two ranks at most."""
FEW = ("plain", "m4", "zero3", "tp-local")
"""Variants of the larger workloads, which take their time; so does float16, which CPUs only imitate."""


def spec_of(
    workload: Workload, class_name: str, *, num_steps: int = NUM_STEPS, num_microbatches: int = 1, **knobs: Any
) -> TrialSpec:
    """A gate run of this class; ``recompute="full"`` recomputes all layers, and pipelines split them evenly."""
    own = CLASSES[class_name]
    layout: Layout = knobs.pop("layout", Layout())
    num_layers = workload.num_layers
    if layout.pp > 1 and not layout.stage_layers:
        layout = dataclasses.replace(layout, stage_layers=((num_layers // 2, num_layers - num_layers // 2),))
    if knobs.get("recompute") == "full":
        knobs["recompute"] = Recompute(full=((num_layers,),))
    candidate = Candidate(
        layout=layout,
        micro_batch_size=workload.global_batch_size // (layout.dp * num_microbatches),
        **(own | knobs),
    )
    measured = {"num_steps": num_steps - 1, "max_steps": num_steps - 1}
    protocol = Protocol(min_warmup_steps=1, max_warmup_steps=1, **measured)
    return TrialSpec(workload=workload, candidate=candidate, protocol=protocol)


def is_legal(spec: TrialSpec) -> bool:
    return not any(violations(spec.workload, spec.candidate))


def train(specs: list[TrialSpec], before: Callable[[], None] | None = None) -> list[Trajectory | str]:
    """The trajectory of each run, or why there is none; those of one world size share a gang."""
    found: dict[int, Trajectory | str] = {}
    for world_size in sorted({spec.candidate.layout.world_size for spec in specs}):
        numbers = [i for i, spec in enumerate(specs) if spec.candidate.layout.world_size == world_size]
        options = {} if before is None else {"before": before}
        with tempfile.TemporaryDirectory() as folder:
            results = run_gang([specs[i] for i in numbers], Path(folder), timeout_s=600.0, **options)
        for i, result in zip(numbers, results, strict=True):
            if isinstance(result, RankReport):
                found[i] = trajectory_of(result, specs[i].candidate)
            else:
                found[i] = f"{result.kind}: {result.message.strip().splitlines()[-1]}"
    return [found[i] for i in range(len(specs))]


def trajectory_of(report: RankReport, candidate: Candidate) -> Trajectory:
    return Trajectory(
        losses=report.losses,
        grad_norms=report.grad_norms,
        num_skipped_steps=report.num_skipped_steps,
        precision=candidate.precision,
        matmul_precision=candidate.kernels.matmul_precision,
        micro_batch_size=candidate.micro_batch_size,
    )


def _rounding_operands(num_mantissa_bits: int) -> None:
    """Have every matrix multiplication round its fp32 operands to this many bits, forward and backward.

    For the rest of the process: dispatch modes stay until they are left.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    dropped = 23 - num_mantissa_bits
    half, mask = (1 << (dropped - 1)) - 1, -(1 << dropped)

    def rounded(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        bits = value.contiguous().view(torch.int32)
        return ((bits + half + ((bits >> dropped) & 1)) & mask).view(torch.float32)

    aten = torch.ops.aten
    products = {aten.mm.default, aten.bmm.default}

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in products:
                args = tuple(rounded(arg) for arg in args)
            elif func in (aten.addmm.default, aten.baddbmm.default):
                args = (args[0], rounded(args[1]), rounded(args[2]), *args[3:])
            return func(*args, **(kwargs or {}))

    Rounding().__enter__()


def like_tf32() -> None:
    _rounding_operands(10)


def like_bfloat16() -> None:
    _rounding_operands(7)


HOOKS: dict[str, Callable[[], None]] = {"float32 high": like_tf32, "float32 medium": like_bfloat16}


def variants(workload: Workload, class_name: str) -> Iterator[tuple[str, TrialSpec]]:
    """The legal variants. Emulated classes run eagerly on one rank: DTensor and the compiler dispatch by themselves."""
    for name, knobs in VARIANTS.items():
        spec = spec_of(workload, class_name, **knobs)
        if class_name in EMULATED and name not in ("plain", "m4", "recompute"):
            continue
        if workload.model != TINY.model and (name not in FEW or class_name.startswith("float16")):
            continue
        if is_legal(spec):
            yield name, spec
