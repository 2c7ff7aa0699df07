"""The trials that dry runs are held against."""

from __future__ import annotations

import dataclasses
from typing import Any

from trials.spec import (
    Candidate,
    Layout,
    LlamaModel,
    Precision,
    Recompute,
    SelectiveRecompute,
    TextData,
    TrialSpec,
    Workload,
)

O1, O2 = Precision(level="O1", dtype="bfloat16"), Precision(level="O2", dtype="bfloat16")


def _trial(workload: Workload, micro_batch_size: int, given: dict[str, Any]) -> TrialSpec:
    knobs = {name: given.pop(name) for name in ("recompute", "precision") if name in given}
    candidate = Candidate(layout=Layout(**given), micro_batch_size=micro_batch_size, **knobs)
    return TrialSpec(workload=workload, candidate=candidate)


SMALL = Workload(
    model=LlamaModel(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_hidden_size=704, vocab_size=4096),
    data=TextData(),
    seq_length=256,
    global_batch_size=8,
)


_FULL = Recompute(full=((4,),))
_FEED_FORWARD = Recompute(selective=(SelectiveRecompute(pattern="feed_forward", num_layers=((4,),)),))
_ZERO2 = {"dp_shard": 2, "zero_stage": 2}
_ZERO3 = {"dp_shard": 2, "zero_stage": 3}
_PP2 = {"pp": 2, "stage_layers": ((2, 2),)}
_PP2_CHUNKS = {"pp": 2, "stage_layers": ((1, 1), (1, 1)), "num_virtual_stages": 2}


def families(workload: Workload) -> dict[str, TrialSpec]:
    """Trials that run on this machine, for real and simulated."""

    def small(micro_batch_size: int = 2, **given: Any) -> TrialSpec:
        return _trial(workload, micro_batch_size, given)

    return {
        "single, fp32": small(),
        "single, full recompute": small(recompute=_FULL),
        "single, selective recompute": small(recompute=_FEED_FORWARD),
        "single, O1 bf16": small(precision=O1),
        "single, O1 bf16, full recompute": small(precision=O1, recompute=_FULL),
        "single, O1 fp8": small(precision=Precision(level="O1-fp8", dtype="bfloat16")),
        "single, O2 bf16": small(precision=O2),
        "ZeRO-3 x2, O2, norms and head in fp32": small(
            **_ZERO3, precision=Precision(level="O2", dtype="bfloat16", keep_fp32=(".*norm", "output"))
        ),
        "ZeRO-3 x2, O2 fp8": small(**_ZERO3, precision=Precision(level="O2-fp8", dtype="bfloat16")),
        "DDP x2": small(dp_replicate=2),
        "ZeRO-1 x2": small(dp_shard=2, zero_stage=1),
        "ZeRO-2 x2": small(**_ZERO2),
        "ZeRO-3 x2": small(**_ZERO3),
        "ZeRO-3 x2, full recompute": small(**_ZERO3, recompute=_FULL),
        "ZeRO-3 x2, O2 bf16": small(**_ZERO3, precision=O2),
        "PP2 1F1B": small(1, **_PP2),
        "PP2 GPipe": small(1, **_PP2, schedule="gpipe"),
        "PP2 interleaved": small(1, **_PP2_CHUNKS, schedule="interleaved"),
        "PP2 ZBV": small(1, **_PP2_CHUNKS, schedule="zbv"),
        "TP2 DTensor": small(tp=2),
        "TP2 DTensor, sequence parallel": small(tp=2, sequence_parallel=True),
        "TP2 local": small(tp=2, tp_engine="local"),
        "TP2 local, sequence parallel": small(tp=2, tp_engine="local", sequence_parallel=True),
        "TP2 local, sequence parallel, copies of positions": small(
            1, tp=2, tp_engine="local", sequence_parallel=True, num_copies=2
        ),
        "CP2 all-gather": small(cp=2),
        "CP2 Ulysses": small(cp=2, cp_method="ulysses"),
        "CP2 ring": small(cp=2, cp_method="ring"),
        "CP4 hybrid": small(cp=4, cp_method="hybrid", ulysses_degree=2),
        "ZeRO-3 x2, TP2": small(**_ZERO3, tp=2),
        "ZeRO-3 x2, PP2": small(1, **_ZERO3, **_PP2),
    }


FAMILIES = families(SMALL)


def compiled(spec: TrialSpec) -> TrialSpec:
    """The same trial with compiled layers, head and loss."""
    kernels = dataclasses.replace(spec.candidate.kernels, compile="block")
    return dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, kernels=kernels))


COMPILED: dict[str, TrialSpec] = {
    f"{name}, compiled": compiled(FAMILIES[name])
    for name in (
        *(
            "single, fp32",
            "single, full recompute",
            "single, selective recompute",
            "single, O1 bf16",
            "single, O2 bf16",
        ),
        *(
            "ZeRO-1 x2",
            "ZeRO-3 x2, O2 bf16",
            "PP2 1F1B",
            "TP2 local",
            "TP2 DTensor",
            "CP2 all-gather",
            "CP2 ring",
            "CP4 hybrid",
        ),
    )
}
"""Some of them compiled by inductor, for real and simulated."""

LLAMA2_13B = LlamaModel(
    hidden_size=5120, num_layers=40, num_heads=40, num_kv_heads=40, ffn_hidden_size=13824, vocab_size=32000
)


def _large(global_batch_size: int, **given: Any) -> TrialSpec:
    workload = Workload(model=LLAMA2_13B, data=TextData(), seq_length=4096, global_batch_size=global_batch_size)
    return _trial(workload, 1, given)


_TP8 = {"tp": 8, "sequence_parallel": True}
_PP4 = {"pp": 4, "stage_layers": ((10, 10, 10, 10),)}
_PP4_CHUNKS = {"pp": 4, "stage_layers": ((5, 5, 5, 5), (5, 5, 5, 5)), "num_virtual_stages": 2}

LARGE: dict[str, TrialSpec] = {
    "13B, DDP x8, O1": _large(8, dp_replicate=8, precision=O1),
    "13B, ZeRO-3 x64, O2": _large(64, dp_shard=64, zero_stage=3, precision=O2),
    "13B, ZeRO-3 x64, O2, full recompute": _large(
        64, dp_shard=64, zero_stage=3, precision=O2, recompute=Recompute(full=((40,),))
    ),
    "13B, ZeRO-3 x64, O2, 20 layers recomputed": _large(
        64, dp_shard=64, zero_stage=3, precision=O2, recompute=Recompute(full=((20,),))
    ),
    "13B, ZeRO-3 x8, TP8, O2": _large(8, dp_shard=8, zero_stage=3, precision=O2, **_TP8),
    "13B, 1024 ranks: ZeRO-3 x32, TP8, PP4, full recompute": _large(
        32 * 8,
        dp_shard=32,
        zero_stage=3,
        precision=O2,
        recompute=Recompute(full=((10, 10, 10, 10),)),
        **_TP8,
        **_PP4,
    ),
    "13B, TP8, PP4 GPipe, O2": _large(12, precision=O2, **_TP8, **_PP4, schedule="gpipe"),
    "13B, ZeRO-2 x8, PP4 interleaved, O2": _large(
        16 * 8, dp_shard=8, zero_stage=2, precision=O2, **_PP4_CHUNKS, schedule="interleaved"
    ),
    "13B, ZeRO-2 x8, PP4 ZBV, O2": _large(
        16 * 8, dp_shard=8, zero_stage=2, precision=O2, **_PP4_CHUNKS, schedule="zbv"
    ),
}
"""Trials that are only simulated."""

LLAMA3_70B = LlamaModel(
    hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_hidden_size=28672, vocab_size=128256
)


def deep_pipeline(pp: int, num_microbatches: int) -> TrialSpec:
    """Five layers of Llama3-70B on each of ``pp`` stages; the whole model on 1,024 ranks where they are 16."""
    layout = {"pp": pp, "stage_layers": ((5,) * pp,), "dp_shard": 8, "zero_stage": 1, "tp_engine": "local", **_TP8}
    model = dataclasses.replace(LLAMA3_70B, num_layers=5 * pp)
    workload = Workload(model=model, data=TextData(), seq_length=4096, global_batch_size=8 * num_microbatches)
    return _trial(workload, 1, {**layout, "precision": O2})
