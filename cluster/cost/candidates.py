"""Turns candidates of decoder workloads into inputs of the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.cost.inputs import BUCKET_BYTES, CP_METHODS, SCHEDULES, WORKSPACE_BYTES, CostInputs, from_rows
from cluster.cost.layers.operators import selective_shares
from cluster.hardware.accelerators import Accelerator, ClusterDescription
from trials.flops import matmul_format
from trials.legality.rules import holds_plain
from trials.spec import Candidate, Counts, Layout, LlamaModel, Precision, Recompute, Workload


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
        **_recompute(candidate.recompute, layout, model, workload.seq_length),
        **_precision(candidate, cluster),
        **_loss(candidate),
        "hides_sums": float(layout.tp > 1 and layout.tp_engine == "local" and layout.schedule != "zbv"),
        "offload_activations": float(candidate.offload.activations),
        "offload_optimizer": float(candidate.offload.optimizer),
        "micro_batch_size": candidate.micro_batch_size,
        "num_microbatches": max(1, candidate.num_microbatches(workload.global_batch_size)),
        "fused": float(candidate.kernels.compile != "off"),
        "flash": float(candidate.kernels.attention != "math"),
        "compiled": float(candidate.kernels.compile != "off"),
        "memory_bytes": cluster.accelerator.usable_memory_bytes,
        "memory_bytes_per_s": cluster.accelerator.memory_bytes_per_s,
        "host_bytes_per_s": cluster.accelerator.host_bytes_per_s,
        "node_size": cluster.devices_per_node,
        "link_bytes_per_s": cluster.accelerator.link_bytes_per_s,
        "network_bytes_per_s": cluster.network_bytes_per_s,
        "domain_size": cluster.domain_size,
        **_reading(workload, candidate),
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
        "cp_method": CP_METHODS.index(layout.cp_method),
        "tp": layout.tp,
        "zero_stage": layout.zero_stage,
        "reduces_last": float(layout.gradient_reduction == "last"),
        "sequence_parallel": float(layout.sequence_parallel),
        "num_copies": layout.num_copies,
        "shard_embedding": float(layout.shard_embedding),
        "schedule": SCHEDULES.index(layout.schedule),
        "num_virtual_stages": layout.num_virtual_stages,
        "stage_layers": _per_stage(layout.stage_layers, layout) if layout.stage_layers else [num_layers],
    }


def _per_stage(counts: Counts, layout: Layout) -> list[int]:
    """Layers of each pipeline rank, all its chunks together."""
    if not counts:
        return [0] * layout.pp
    return [sum(chunk[stage] for chunk in counts) for stage in range(layout.pp)]


def _precision(candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    """Bytes per element or parameter: O0 keeps all in fp32, O1 adds a 16-bit copy of the weights, O2 keeps 16-bit
    weights with fp32 masters. O1-fp8 casts weights in every matmul instead, and keeps no copy of them."""
    precision: Precision = candidate.precision
    peak = matmul_peak(candidate, cluster.accelerator)
    is_float8 = precision.level == "O1-fp8"
    base = cluster.accelerator.peak(precision.dtype) if is_float8 else None
    low = precision.level == "O2"
    # FSDP2 reduces in fp32, what holds plain 16-bit parameters in their own format.
    is_short = low and (holds_plain(candidate.layout) or candidate.layout.dp * candidate.layout.cp == 1)
    return {
        "compute_bytes": 4.0 if precision.level == "O0" else 2.0,
        "weight_bytes": 2.0 if low else 4.0,
        "gradient_bytes": 2.0 if is_short else 4.0,
        "optimizer_bytes": 12.0 if low else 8.0,
        "cast_bytes": 2.0 if precision.level == "O1" else 0.0,
        "casts_operands": float(is_float8),
        "bucket_bytes": BUCKET_BYTES,
        "keeps_gradients": 0.0,
        "workspace_limit_bytes": WORKSPACE_BYTES if is_short else 0.0,
        "peak_flops_per_s": peak,
        "base_flops_per_s": base or peak,
    }


def _loss(candidate: Candidate) -> dict[str, float]:
    """Where one rank computes the loss of all logits, two fp32 copies exist, read or written in turn with the logits.

    In parts, by tp or in chunks, gradients are written in the place of the logits; by count of the operators of
    :mod:`trials.parallel.tensor.vocabulary`, 7 times the logits themselves are read or written and 10 times their
    values in fp32.
    """
    size = 4.0 if candidate.precision.level == "O0" else 2.0
    chunks = candidate.kernels.loss_chunks
    if candidate.layout.tp == 1 and chunks == 1:
        return {"loss_bytes": 8.0, "loss_traffic": 3 * (size + 8), "loss_chunks": 1.0}
    return {"loss_bytes": 0.0, "loss_traffic": 7 * size + 10 * 4, "loss_chunks": chunks}


def matmul_peak(candidate: Candidate, accelerator: Accelerator) -> float:
    """Peak FLOPs per second in the number format of the candidate's matmuls.

    Raises:
        NotImplementedError: the catalogue has none.
    """
    name = matmul_format(candidate)
    peak = accelerator.peak(name) or accelerator.peak("float32")
    if peak is None:
        raise NotImplementedError(f"{accelerator.name} has no peak for {name}")
    return peak


def _recompute(recompute: Recompute, layout: Layout, model: LlamaModel, seq_length: int) -> dict[str, Any]:
    layers = layout.stage_layers or ((model.num_layers,),)
    full = recompute.full or tuple((0,) * len(row) for row in layers)
    plain = tuple(tuple(n - done for n, done in zip(*rows, strict=True)) for rows in zip(layers, full, strict=True))
    dropped, repeated = selective_shares(recompute, model, seq_length, plain)
    again = sum(map(sum, recompute.communication)) / model.num_layers
    return {
        "stage_full": _per_stage(recompute.full, layout),
        "stage_dropped": dropped,
        "stage_repeated": repeated,
        "recompute_communication": again,
        "keeps_gathered": (1 - again) if layout.sequence_parallel else 0.0,
    }


def _reading(workload: Workload, candidate: Candidate) -> dict[str, float]:
    """Reading of records: every rank reads its data-parallel share of the batch, or all of it."""
    loader, layout = candidate.loader, candidate.layout
    records = workload.global_batch_size / (1 if loader.full_batch else layout.dp)
    return {
        "num_reads": records * layout.world_size,
        "reads_ahead": float(loader.num_workers > 0 or loader.tuning is not None),
        "data_wait_s": 0.0,
    }
