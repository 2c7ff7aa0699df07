"""Turns candidates of decoder workloads into inputs of the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import (
    BUCKET_BYTES,
    CP_METHODS,
    DEFAULTS,
    SCHEDULES,
    WORKSPACE_BYTES,
    CostInputs,
    FactoredInputs,
    InputBlock,
    from_rows,
)
from cluster.cost.work import selective_shares
from cluster.hardware.accelerators import Accelerator, ClusterDescription, outruns_flash_attention_2
from trials.legality import holds_plain
from trials.sizes import matmul_format
from trials.spec import Candidate, Counts, Layout, LlamaModel, Workload


@dataclass(frozen=True, slots=True)
class _Part:
    """Some fields of the inputs, and all that they depend on besides workload and cluster."""

    reads: tuple[str, ...]
    """Fields of the candidate, or attributes of theirs like ``layout.tp``."""
    fields_of: Callable[[Workload, Candidate, ClusterDescription], dict[str, Any]]


def inputs_of(pairs: Sequence[tuple[Workload, Candidate]], cluster: ClusterDescription) -> CostInputs:
    """One row per (workload, candidate), all on the same cluster.

    Raises:
        NotImplementedError: a workload is no decoder; see ``generic.py`` for those.
    """
    return from_rows([_row(workload, candidate, cluster) for workload, candidate in pairs])


def inputs_of_table(workload: Workload, table: CandidateTable, cluster: ClusterDescription) -> FactoredInputs:
    """As :func:`inputs_of` for many candidates of one workload: each part of a row is made once for every combination
    of what it depends on.

    Raises:
        NotImplementedError: the workload is no decoder.
    """
    _check(workload)
    blocks = []
    for part in _PARTS:
        firsts, places = table.combinations(part.reads)
        rows = [part.fields_of(workload, candidate, cluster) for candidate in table.take(firsts)]
        blocks.append(InputBlock.of_rows(rows, places))
    known = {name for block in blocks for name in block.columns}
    rest = {name: value for name, value in DEFAULTS.items() if name not in known}
    return FactoredInputs([*blocks, InputBlock.of_rows([rest], np.zeros(len(table), dtype=np.int32))])


def _row(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, Any]:
    _check(workload)
    found: dict[str, Any] = {}
    for part in _PARTS:
        found |= part.fields_of(workload, candidate, cluster)
    return found


def _check(workload: Workload) -> None:
    if not isinstance(workload.model, LlamaModel):
        raise NotImplementedError(f"{workload.model.kind} is no decoder")


def _hardware(_workload: Workload, _candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    return {
        "memory_bytes": cluster.accelerator.usable_memory_bytes,
        "memory_bytes_per_s": cluster.accelerator.memory_bytes_per_s,
        "host_bytes_per_s": cluster.accelerator.host_bytes_per_s,
        "on_cores": float(cluster.accelerator.is_core),
        "node_size": cluster.devices_per_node,
        "link_bytes_per_s": cluster.accelerator.link_bytes_per_s,
        "network_bytes_per_s": cluster.network_bytes_per_s,
        "domain_size": cluster.domain_size,
    }


def _model(workload: Workload, _candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    model = _decoder(workload)
    return {
        "num_layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "vocab": model.vocab_size,
        "seq_length": workload.seq_length,
        "gated": 1.0,
        "dropout": 0.0,
        "tied": 0.0,
        "trained_share": 1.0,
    }


def _decoder(workload: Workload) -> LlamaModel:
    assert isinstance(workload.model, LlamaModel)
    return workload.model


def _layout(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, Any]:
    layout = candidate.layout
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
        # Stages of torch's pipelines free weights after forward passes only.
        "stays_gathered": float(layout.pp > 1),
        "num_copies": layout.num_copies,
        "shard_embedding": float(layout.shard_embedding),
        "schedule": SCHEDULES.index(layout.schedule),
        "num_virtual_stages": layout.num_virtual_stages,
        "stage_layers": _per_stage(layout.stage_layers, layout) if layout.stage_layers else [workload.num_layers],
    }


def _gathering(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Layers wait for their own new weights of ZeRO-1, but a model that is one graph waits for all."""
    return {"hides_gathering": float(candidate.layout.zero_stage == 1 and candidate.kernels.compile != "model")}


def _sums(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Whether sums over tp hide behind matmuls, see :mod:`trials.parallel.tensor`: zbv takes the backward pass
    apart itself, and in 8-bit matmuls gradients of input and weight are one operator."""
    layout, takes_apart = candidate.layout, candidate.precision.level != "O1-fp8"
    hides = layout.tp > 1 and layout.tp_engine == "local" and layout.schedule != "zbv" and takes_apart
    return {"hides_sums": float(hides)}


def _per_stage(counts: Counts, layout: Layout) -> list[int]:
    """Layers of each pipeline rank, all its chunks together."""
    if not counts:
        return [0] * layout.pp
    return [sum(chunk[stage] for chunk in counts) for stage in range(layout.pp)]


def _precision(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Bytes per element or parameter: O0 keeps all in fp32, O1 adds a 16-bit copy of the weights, O2 keeps 16-bit
    weights with fp32 masters. O1-fp8 casts weights in every matmul instead, and keeps no copy of them."""
    level, layout = candidate.precision.level, candidate.layout
    low = level == "O2"
    # FSDP2 reduces in fp32, what holds plain 16-bit parameters in their own format.
    is_short = low and (holds_plain(layout) or layout.dp * layout.cp == 1)
    return {
        "compute_bytes": 4.0 if level == "O0" else 2.0,
        "weight_bytes": 2.0 if low else 4.0,
        "gradient_bytes": 2.0 if is_short else 4.0,
        "optimizer_bytes": 12.0 if low else 8.0,
        "cast_bytes": 2.0 if level == "O1" else 0.0,
        "casts_operands": float(level == "O1-fp8"),
        "bucket_bytes": BUCKET_BYTES,
        "keeps_gradients": 0.0,
        "workspace_limit_bytes": WORKSPACE_BYTES if is_short else 0.0,
    }


def _peaks(_workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    precision, peak = candidate.precision, matmul_peak(candidate, cluster.accelerator)
    base = cluster.accelerator.peak(precision.dtype) if precision.level == "O1-fp8" else None
    return {"peak_flops_per_s": peak, "base_flops_per_s": base or peak}


def _loss(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Where one rank computes the loss of all logits, two fp32 copies exist, read or written in turn with the logits.

    In parts, by tp or in chunks, gradients are written in the place of the logits; by count of the operators of
    :mod:`trials.parallel.tensor`, 7 times the logits themselves are read or written and 10 times their
    values in fp32. Chunks add up the gradient of the head's weights in fp32.
    """
    size = 4.0 if candidate.precision.level == "O0" else 2.0
    chunks = candidate.kernels.loss_chunks
    if candidate.layout.tp == 1 and chunks == 1:
        return {"loss_bytes": 8.0, "loss_traffic": 3 * (size + 8), "loss_chunks": 1.0, "head_sums_bytes": 0.0}
    sums = 4.0 if chunks > 1 else 0.0
    return {"loss_bytes": 0.0, "loss_traffic": 7 * size + 10 * 4, "loss_chunks": chunks, "head_sums_bytes": sums}


def _offload(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    offload = candidate.offload
    return {"offload_activations": float(offload.activations), "offload_optimizer": float(offload.optimizer)}


def _kernels(_workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    is_compiled, attention = float(candidate.kernels.compile != "off"), candidate.kernels.attention
    return {
        "fused": is_compiled,
        "compiled": is_compiled,
        "flash": float(attention != "math"),
        "aged_attention": float(attention != "cudnn" and outruns_flash_attention_2(cluster.accelerator.name)),
    }


def _batch(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "num_microbatches": max(1, candidate.num_microbatches(workload.global_batch_size)),
    }


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


def _recompute(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, Any]:
    model, layout, recompute = _decoder(workload), candidate.layout, candidate.recompute
    layers = layout.stage_layers or ((model.num_layers,),)
    full = recompute.full or tuple((0,) * len(row) for row in layers)
    plain = tuple(tuple(n - done for n, done in zip(*rows, strict=True)) for rows in zip(layers, full, strict=True))
    dropped, repeated = selective_shares(recompute, model, workload.seq_length, plain)
    again = sum(map(sum, recompute.communication)) / model.num_layers
    return {
        "stage_full": _per_stage(recompute.full, layout),
        "stage_dropped": dropped,
        "stage_repeated": repeated,
        "recompute_communication": again,
        "keeps_gathered": (1 - again) if layout.sequence_parallel else 0.0,
    }


def _reading(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Reading of records: every rank reads its data-parallel share of the batch, or all of it."""
    layout = candidate.layout
    records = workload.global_batch_size / (1 if candidate.loader.full_batch else layout.dp)
    return {"num_reads": records * layout.world_size, "data_wait_s": 0.0}


def _reading_ahead(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    return {"reads_ahead": float(candidate.loader.num_workers > 0 or candidate.loader.tuning is not None)}


_PARTS = (
    _Part((), _model),
    _Part((), _hardware),
    _Part(("layout",), _layout),
    _Part(("layout.zero_stage", "kernels.compile"), _gathering),
    _Part(("layout.tp", "layout.tp_engine", "layout.schedule", "precision.level"), _sums),
    _Part(("layout", "recompute"), _recompute),
    _Part(("layout", "precision.level"), _precision),
    _Part(("precision", "kernels.matmul_precision"), _peaks),
    _Part(("layout.tp", "precision.level", "kernels.loss_chunks"), _loss),
    _Part(("layout.dp", "micro_batch_size"), _batch),
    _Part(("kernels.compile", "kernels.attention"), _kernels),
    _Part(("offload",), _offload),
    _Part(("layout.dp", "layout.world_size", "loader.full_batch"), _reading),
    _Part(("loader.num_workers", "loader.tuning"), _reading_ahead),
)
"""All fields, each once. What a function reads of the candidate and does not declare here would be another one's."""
