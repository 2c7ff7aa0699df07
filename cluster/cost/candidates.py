"""Candidates of the trial runner as inputs of the cost model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cluster.accelerators import ClusterDescription
from cluster.cost.inputs import SCHEDULES, CostInputs, from_rows
from trials.spec import Candidate, Counts, Layout, LlamaModel, Precision, Recompute, Workload

NUMBER_FORMATS = {"highest": "float32", "high": "tf32", "medium": "tf32"}


def inputs_of(pairs: Sequence[tuple[Workload, Candidate]], cluster: ClusterDescription) -> CostInputs:
    """One row per (workload, candidate), all on the same cluster.

    Raises:
        NotImplementedError: a workload is no decoder; see ``generic.py`` for those.
    """
    return from_rows([_row(workload, candidate, cluster) for workload, candidate in pairs])


def _row(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, Any]:
    model, layout = workload.model, candidate.layout
    if not isinstance(model, LlamaModel):
        raise NotImplementedError(f"{model.kind} is no decoder")
    return {
        **_model(model, workload.seq_length),
        **_layout(layout, model.num_layers),
        **_recompute(candidate.recompute, layout, model),
        **_precision(candidate, cluster),
        "micro_batch_size": candidate.micro_batch_size,
        "num_microbatches": max(1, candidate.num_microbatches(workload.global_batch_size)),
        "fused": float(candidate.kernels.compile != "off"),
        "flash": float(candidate.kernels.attention != "math"),
        "compiled": float(candidate.kernels.compile != "off"),
        "memory_bytes": cluster.accelerator.usable_memory_bytes,
        "memory_bytes_per_s": cluster.accelerator.memory_bytes_per_s,
        "link_bytes_per_s": cluster.accelerator.link_bytes_per_s,
        "network_bytes_per_s": cluster.network_bytes_per_s,
        "domain_size": cluster.domain_size,
        "data_wait_s": 0.0,
    }


def _model(model: LlamaModel, seq_length: int) -> dict[str, float]:
    return {
        "num_layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "vocab": model.vocab_size,
        "seq_length": seq_length,
        "gated": 1.0,
        "dropout": 0.0,
        "tied": 0.0,
        "trained_share": 1.0,
    }


def _layout(layout: Layout, num_layers: int) -> dict[str, Any]:
    return {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "zero_stage": layout.zero_stage,
        "sequence_parallel": float(layout.sequence_parallel),
        "num_copies": layout.num_copies,
        "schedule": SCHEDULES.index(layout.schedule),
        "num_virtual_stages": layout.num_virtual_stages,
        "stage_layers": _per_stage(layout.stage_layers, layout) if layout.stage_layers else [num_layers],
    }


def _per_stage(counts: Counts, layout: Layout) -> list[int]:
    """Sum over the chunks of each pipeline rank."""
    if not counts:
        return [0] * layout.pp
    return [sum(chunk[stage] for chunk in counts) for stage in range(layout.pp)]


def _precision(candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    """O0 keeps all in fp32; O1 fp32 with a 16-bit copy of the weights; O2 16-bit weights with fp32 masters."""
    precision: Precision = candidate.precision
    fp32_format = NUMBER_FORMATS[candidate.kernels.matmul_precision]
    name = fp32_format if precision.level == "O0" else precision.dtype
    peak = cluster.accelerator.peak(name) or cluster.accelerator.peak("float32")
    if peak is None:
        raise NotImplementedError(f"{cluster.accelerator.name} has no peak for {name}")
    low = precision.level == "O2"
    return {
        "compute_bytes": 4.0 if precision.level == "O0" else 2.0,
        "weight_bytes": 2.0 if low else 4.0,
        "gradient_bytes": 2.0 if low else 4.0,
        "optimizer_bytes": 12.0 if low else 8.0,
        "cast_bytes": 2.0 if precision.level == "O1" else 0.0,
        "keeps_gradients": 0.0,
        "peak_flops_per_s": peak,
        "base_flops_per_s": peak,
    }


def _recompute(recompute: Recompute, layout: Layout, model: LlamaModel) -> dict[str, Any]:
    """Selective patterns as shares: of the activation bytes they drop and the forward work they repeat, on average."""
    drops, costs = 0.0, 0.0
    again = sum(map(sum, recompute.communication)) / model.num_layers
    for selective in recompute.selective:
        share = sum(map(sum, selective.num_layers)) / model.num_layers
        dropped, cost = selective_share(selective.pattern, model)
        drops, costs = drops + share * dropped, costs + share * cost
    return {
        "stage_full": _per_stage(recompute.full, layout),
        "selective_share": min(drops, 0.9),
        "selective_cost": min(costs / drops, 1.0) if drops else 0.0,
        "recompute_communication": again,
        "keeps_gathered": (1 - again) if layout.sequence_parallel else 0.0,
    }


def selective_share(pattern: str, model: LlamaModel) -> tuple[float, float]:
    """Share of a block's kept activation bytes, and of its forward FLOPs, that ``pattern`` drops and repeats.

    Operators by their usual paths inside a block; a pattern that names a module stands for all operators in it.
    """
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    kv_size = hidden // model.num_heads * model.num_kv_heads
    # path -> (elements kept per token, multiply-adds per token)
    operators = {
        "attention_norm": (hidden, 0),
        "attention.qkv": (hidden + 2 * kv_size, hidden * (hidden + 2 * kv_size)),
        "attention.sdpa": (hidden, 0),
        "attention.output": (0, hidden * hidden),
        "feed_forward_norm": (hidden, 0),
        "feed_forward.gate": (ffn, hidden * ffn),
        "feed_forward.up": (ffn, hidden * ffn),
        "feed_forward.silu": (ffn, 0),
        "feed_forward.mul": (ffn, 0),
        "feed_forward.down": (0, hidden * ffn),
    }
    kept = sum(elements for elements, _ in operators.values()) + 2 * hidden
    work = sum(flops for _, flops in operators.values())
    matched = [path for path in operators if _matches(pattern, path)]
    return sum(operators[path][0] for path in matched) / kept, sum(operators[path][1] for path in matched) / work + 0.01


def _matches(pattern: str, path: str) -> bool:
    return bool(re.fullmatch(pattern, path) or re.fullmatch(pattern, path.split(".")[0]))
