"""The trials of the benchmark: a Llama of 1.1 billion parameters at 4,096 tokens, and a tiny one for CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.parts import Setting
from trials.spec import (
    AdamW,
    Candidate,
    Kernels,
    Layout,
    LlamaModel,
    Offload,
    Precision,
    Protocol,
    Recompute,
    TextData,
    TrialSpec,
    Workload,
)

LLAMA = LlamaModel(
    hidden_size=2048, num_layers=22, num_heads=32, num_kv_heads=4, ffn_hidden_size=5632, vocab_size=32000
)
"""The shape of TinyLlama (Zhang et al., arXiv 2401.02385)."""
TINY = LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=128, vocab_size=256)

O0 = Precision()
O1 = Precision(level="O1", dtype="bfloat16")
O2 = Precision(level="O2", dtype="bfloat16")
FP8 = Precision(level="O1-fp8", dtype="bfloat16")
PRECISIONS = {"O1": O1, "O2": O2, "O0": O0}
"""The slowest comes last, as time may run out."""


def workload(setting: Setting) -> Workload:
    if setting.is_small:
        return Workload(model=TINY, data=TextData(), seq_length=64, global_batch_size=8)
    return Workload(model=LLAMA, data=TextData(), seq_length=4096, global_batch_size=8, optimizer=AdamW(lr=1e-4))


def trial(setting: Setting, **candidate: Any) -> TrialSpec:
    """A trial of few steps; single measurements on a machine of one's own scatter little."""
    steps = 2 if setting.quick else 4
    protocol = Protocol(min_warmup_steps=2, max_warmup_steps=3, num_steps=steps, max_steps=2 * steps)
    spec = TrialSpec(workload=workload(setting), candidate=Candidate(**candidate), protocol=protocol)
    return dataclasses.replace(spec, device=setting.device)  # type: ignore[arg-type]


def matrix(setting: Setting) -> Iterator[tuple[str, TrialSpec]]:
    """Precision by compilation by micro-batch."""
    sizes = (2,) if setting.quick else (2, 8)
    graphs = {"eager": Kernels()} if setting.quick else {"eager": Kernels(), "block": Kernels(compile="block")}
    for level, precision in PRECISIONS.items():
        for graph, kernels in graphs.items():
            for size in sizes:
                yield (
                    f"{level} {graph} b{size}",
                    trial(setting, precision=precision, kernels=kernels, micro_batch_size=size),
                )


def knobs(setting: Setting) -> Iterator[tuple[str, TrialSpec, dict[str, str]]]:
    """One thing at a time that differs from O2 in eager mode, with the variables it is set by."""
    usual: dict[str, Any] = {"precision": O2, "micro_batch_size": 2}
    fixed_segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    num_layers = workload(setting).num_layers
    turned: dict[str, dict[str, Any]] = {
        "as it is": {},
        "recompute in full": {"recompute": Recompute(full=((num_layers,),))},
        "loss in 8 chunks": {"kernels": Kernels(loss_chunks=8)},
        "optimizer offloaded": {"offload": Offload(optimizer=True)},
        "activations offloaded": {"offload": Offload(activations=True)},
        "fp8": {"precision": FP8},
        "fp8, compiled": {"precision": FP8, "kernels": Kernels(compile="block")},
        "flash attention": {"kernels": Kernels(attention="flash")},
        "cuDNN attention": {"kernels": Kernels(attention="cudnn")},
        "reduce-overhead": {"kernels": Kernels(compile="block", compile_mode="reduce-overhead")},
    }
    if setting.quick:
        turned = {name: turned[name] for name in ("as it is", "recompute in full", "loss in 8 chunks")}
    elif setting.device == "cpu":
        turned = {name: values for name, values in turned.items() if "cuDNN" not in name and "overhead" not in name}
    for name, values in turned.items():
        yield name, trial(setting, **(usual | values)), {}
    if setting.device in ("cuda", "rocm"):
        yield "segments that do not grow", trial(setting, **usual), fixed_segments


def layouts(setting: Setting) -> Iterator[tuple[str, TrialSpec]]:
    """All devices in one layout after the other, in O2, with the same global batch."""
    n = setting.num_devices
    num_layers = workload(setting).num_layers
    stages = tuple(num_layers // n + (stage < num_layers % n) for stage in range(n))
    wanted = {
        "ddp": Layout(dp_replicate=n),
        "zero1": Layout(dp_shard=n, zero_stage=1),
        "zero2": Layout(dp_shard=n, zero_stage=2),
        "zero3": Layout(dp_shard=n, zero_stage=3),
        "zero2, reduced last": Layout(dp_shard=n, zero_stage=2, gradient_reduction="last"),
        "tp dtensor": Layout(tp=n, sequence_parallel=True),
        "tp local": Layout(tp=n, sequence_parallel=True, tp_engine="local"),
        "cp all_gather": Layout(cp=n, dp_shard=1),
        "cp ulysses": Layout(cp=n, cp_method="ulysses"),
        "cp ring": Layout(cp=n, cp_method="ring"),
        "pp": Layout(pp=n, stage_layers=(stages,)),
    }
    if setting.quick:
        wanted = {name: wanted[name] for name in ("zero3", "tp local")}
    rows = workload(setting).global_batch_size
    for name, layout in wanted.items():
        size = max(1, rows // layout.dp // max(2, layout.pp))
        yield name, trial(setting, layout=layout, precision=O2, micro_batch_size=size)
