"""The trials of the benchmark: four layers of Llama 3 8B at 8,192 tokens, and a tiny model for CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    hidden_size=4096, num_layers=4, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=128256
)
"""Four layers of Llama 3 8B (arXiv 2407.21783): head, loss, attention and memory of real proportions on one device."""
TINY = LlamaModel(hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, ffn_hidden_size=128, vocab_size=256)
ROWS = 8
"""Sequences of a step."""

O0 = Precision()
O1 = Precision(level="O1", dtype="bfloat16")
O2 = Precision(level="O2", dtype="bfloat16")
FP8 = Precision(level="O2-fp8", dtype="bfloat16")
PRECISIONS = {"O0": O0, "O1": O1, "O2": O2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trial with the name of its row."""

    name: str
    spec: TrialSpec
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that it is tried with, of which the dry run knows nothing."""


def workload(setting: Setting, *, global_batch_size: int = ROWS) -> Workload:
    if setting.is_small:
        return Workload(model=TINY, data=TextData(), seq_length=64, global_batch_size=global_batch_size)
    return Workload(
        model=LLAMA,
        data=TextData(),
        seq_length=8192,
        global_batch_size=global_batch_size,
        optimizer=AdamW(lr=1e-4),
    )


def trial(setting: Setting, *, global_batch_size: int = ROWS, **candidate: Any) -> TrialSpec:
    """A trial of few steps; single measurements on a machine of one's own scatter little."""
    steps = 2 if setting.quick else 3
    protocol = Protocol(min_warmup_steps=2, max_warmup_steps=3, num_steps=steps, max_steps=2 * steps)
    spec = TrialSpec(
        workload=workload(setting, global_batch_size=global_batch_size),
        candidate=Candidate(**candidate),
        protocol=protocol,
    )
    return dataclasses.replace(spec, device=setting.device)  # type: ignore[arg-type]


def matrix(setting: Setting) -> Iterator[Case]:
    """Compilation by micro-batch by precision, the levels that are used most first. fp32 is slow, and comes last, with
    the smaller micro-batch."""
    sizes = (2,) if setting.quick else (1, 2)
    graphs = {"eager": Kernels()} if setting.quick else {"eager": Kernels(), "block": Kernels(compile="block")}
    for level in ("O2", "O1", "O0"):
        for size in sizes if level != "O0" else sizes[:1]:
            for graph, kernels in graphs.items():
                spec = trial(setting, precision=PRECISIONS[level], kernels=kernels, micro_batch_size=size)
                yield Case(name=f"{level} {graph} b{size}", spec=spec)


def knobs(setting: Setting) -> Iterator[Case]:
    """One thing at a time that differs from O2 in eager mode."""
    usual: dict[str, Any] = {"precision": O2, "micro_batch_size": 1}
    alone = {"global_batch_size": 1}  # one micro-batch per step, as CUDA graphs ask for
    block, graphs = Kernels(compile="block"), Kernels(compile="block", compile_mode="reduce-overhead")
    yield Case(name="as it is", spec=trial(setting, **usual))
    if setting.device in ("cuda", "rocm"):
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        yield Case(name="segments that do not grow", spec=trial(setting, **usual), env=env)
    turned: dict[str, dict[str, Any]] = {
        "recompute in full": {"recompute": Recompute(full=((workload(setting).num_layers,),))},
        "loss in 8 chunks": {"kernels": Kernels(loss_chunks=8)},
        "optimizer offloaded": {"offload": Offload(optimizer=True)},
        "activations offloaded": {"offload": Offload(activations=True)},
        "block, one micro-batch": {"kernels": block, **alone},
        "reduce-overhead, one micro-batch": {"kernels": graphs, **alone},
        "flash attention": {"kernels": Kernels(attention="flash")},
        "cuDNN attention": {"kernels": Kernels(attention="cudnn")},
        "fp8": {"precision": FP8},
        "fp8, compiled": {"precision": FP8, "kernels": block},
    }
    if setting.quick:
        turned = {name: turned[name] for name in ("recompute in full", "loss in 8 chunks")}
    elif setting.device == "cpu":
        turned = {name: values for name, values in turned.items() if "cuDNN" not in name and "overhead" not in name}
    for name, values in turned.items():
        yield Case(name=name, spec=trial(setting, **(usual | values)))


def layouts(setting: Setting) -> Iterator[Case]:
    """All devices in one layout after the other, in O2, with the same global batch."""
    n = setting.num_devices
    num_layers = workload(setting).num_layers
    stages = tuple(num_layers // n + (stage < num_layers % n) for stage in range(n))
    wanted = {
        "zero3": Layout(dp_shard=n, zero_stage=3),
        "ddp": Layout(dp_replicate=n),
        "tp local": Layout(tp=n, sequence_parallel=True, tp_engine="local"),
        "zero2": Layout(dp_shard=n, zero_stage=2),
        "zero1": Layout(dp_shard=n, zero_stage=1),
        "cp ring": Layout(cp=n, cp_method="ring"),
        "pp": Layout(pp=n, stage_layers=(stages,)),
        "tp dtensor": Layout(tp=n, sequence_parallel=True),
        "cp all_gather": Layout(cp=n, dp_shard=1),
        "cp ulysses": Layout(cp=n, cp_method="ulysses"),
        **({"cp hybrid": Layout(cp=n, cp_method="hybrid", ulysses_degree=n // 2)} if n >= 4 and n % 2 == 0 else {}),
        "zero2, reduced last": Layout(dp_shard=n, zero_stage=2, gradient_reduction="last"),
    }
    if setting.quick:
        wanted = {name: wanted[name] for name in ("zero3", "ddp", "tp local", "pp")}
    rows = n * max(1, ROWS // n)
    for name, layout in wanted.items():
        size = max(1, rows // layout.dp // max(2, layout.pp))
        spec = trial(setting, global_batch_size=rows, layout=layout, precision=O2, micro_batch_size=size)
        yield Case(name=name, spec=spec)
        if name in _WITH and setting.device in ("cuda", "rocm"):
            words, env = _WITH[name]
            yield Case(name=f"{name}, {words}", spec=spec, env=env)


_WITH = {
    "zero3": ("collectives timed", {"TORCH_NCCL_ENABLE_TIMING": "1"}),
    "tp local": ("one connection", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
}
"""Variables to compare with and without, by the layout that they concern most."""

TRAINED = {"training": matrix, "knobs": knobs, "layouts": layouts}
"""The trials of each part that trains."""
