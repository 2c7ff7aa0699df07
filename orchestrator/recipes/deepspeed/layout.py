"""DeepSpeed's JSON: batch sizes, ZeRO, tensor and sequence parallelism, recompute."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking
from orchestrator.recipes.gaps import WHOLE_BETWEEN, no_pipeline, sharded_from, unable
from trials.spec import LlamaModel

FILE = "deepspeed.json"
_BATCH = f"{FILE}:train_batch_size"
_MICRO = f"{FILE}:train_micro_batch_size_per_gpu"
_ACCUMULATION = f"{FILE}:gradient_accumulation_steps"
_STAGE = f"{FILE}:zero_optimization.stage"
_AUTOTP, _PRESET = f"{FILE}:tensor_parallel.autotp_size", f"{FILE}:tensor_parallel.preset_model"
_SEQUENCE, _DATA = f"{FILE}:sequence_parallel_size", f"{FILE}:data_parallel_size"
_OFFLOAD_DEVICE = f"{FILE}:zero_optimization.offload_optimizer.device"
_OFFLOAD_PINNED = f"{FILE}:zero_optimization.offload_optimizer.pin_memory"
_CHECKPOINTS = f"{FILE}:activation_checkpointing.number_checkpoints"
_PARTITION = f"{FILE}:activation_checkpointing.partition_activations"


# ---- batch and layout ----


def _write_batch(draft: Draft) -> None:
    total = draft.workload.global_batch_size
    draft.settings |= {
        _BATCH: total,
        _MICRO: draft.candidate.micro_batch_size,
        _ACCUMULATION: draft.candidate.num_microbatches(total),
    }


def _write_layout(draft: Draft) -> None:
    layout = draft.candidate.layout
    draft.settings[_STAGE] = layout.zero_stage
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        message = f"ZeRO shards over all {layout.dp} data-parallel ranks, not over {layout.dp_shard} of them"
        draft.warn("layout.dp_shard", message)
        draft.warn("layout.dp_replicate", message)
    if layout.zero_stage == 0 and layout.dp > 1 and layout.replicate_with != "ddp":
        draft.warn("layout.replicate_with", "replicas are DeepSpeed's own, as with DDP")


def _read_layout(settings: Settings) -> dict[str, Any]:
    dp = settings[_BATCH] // (settings[_MICRO] * settings[_ACCUMULATION])
    stage = settings[_STAGE]
    return {
        "micro_batch_size": settings[_MICRO],
        "workload.global_batch_size": settings[_BATCH],
        "layout.zero_stage": stage,
        "layout.dp_replicate": 1 if stage else dp,
        "layout.dp_shard": dp if stage else 1,
    }


def _write_tensor_parallel(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.tp == 1:
        return
    draft.settings[_AUTOTP] = layout.tp
    if isinstance(draft.workload.model, LlamaModel):
        draft.settings[_PRESET] = "llama"
    if layout.tp_engine != "local":
        draft.warn("layout.tp_engine", "AutoTP works on plain tensors with explicit collectives, without DTensor")


def _read_tensor_parallel(settings: Settings) -> dict[str, Any]:
    tp = settings.get(_AUTOTP, 1)
    return {"layout.tp": tp, "layout.tp_engine": "local" if tp > 1 else "dtensor"}


def _write_sequence(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.cp == 1:
        return
    draft.settings |= {_SEQUENCE: layout.cp, _DATA: layout.dp}
    if layout.tp > 1:
        draft.refuse("layout.cp", "Ulysses and AutoTP do not go together")
    if layout.cp_method != "ulysses":
        draft.refuse("layout.cp_method", "DeepSpeed splits sequences by Ulysses only")
    draft.warn(
        "layout.cp", "your script gives the model Ulysses' attention (UlyssesSPAttentionHF or DistributedAttention)"
    )
    if layout.zero_stage == 0 and layout.replicate_with != "ddp":
        draft.warn("layout.replicate_with", "replicas are DeepSpeed's own, as with DDP")


def _read_sequence(settings: Settings) -> dict[str, Any]:
    cp = settings.get(_SEQUENCE, 1)
    return {"layout.cp": cp, "layout.cp_method": "ulysses" if cp > 1 else "all_gather"}


# ---- recompute ----


def _write_recompute(draft: Draft) -> None:
    num_layers = sum(map(sum, draft.candidate.recompute.full))
    draft.settings |= {_CHECKPOINTS: num_layers or None, _PARTITION: False}
    if num_layers == draft.workload.num_layers:
        draft.warn("recompute.full", "your script switches it on: model.gradient_checkpointing_enable()")
    elif num_layers:
        call = "deepspeed.checkpointing.checkpoint"
        draft.warn("recompute.full", f"your model's code runs its first {num_layers} layers through {call}")


def _read_recompute(settings: Settings) -> dict[str, Any]:
    num_layers = settings.get(_CHECKPOINTS)
    return {"recompute.full": ((num_layers,),) if num_layers else ()}


# ---- host memory ----


def _write_offload(draft: Draft) -> None:
    if not draft.candidate.offload.optimizer:
        return
    if draft.candidate.layout.zero_stage == 0:
        draft.refuse("offload.optimizer", "DeepSpeed offloads states that ZeRO shards: stages 1 to 3")
        return
    draft.settings |= {_OFFLOAD_DEVICE: "cpu", _OFFLOAD_PINNED: True}
    draft.warn("offload.optimizer", "torch's AdamW updates on the host; without torch_adam DeepSpeed's own does")


OFFLOAD_OPTIMIZER = custom(
    ("offload.optimizer",),
    (_OFFLOAD_DEVICE, _OFFLOAD_PINNED),
    _write_offload,
    lambda settings: {"offload.optimizer": settings.get(_OFFLOAD_DEVICE, "none") == "cpu"},
)

SETTINGS: tuple[Setting, ...] = (
    custom(("micro_batch_size", "workload.global_batch_size"), (_BATCH, _MICRO, _ACCUMULATION), _write_batch),
    custom(
        ("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage", "layout.replicate_with"),
        (_STAGE,),
        _write_layout,
        _read_layout,
    ),
    custom(("layout.tp", "layout.tp_engine"), (_AUTOTP, _PRESET), _write_tensor_parallel, _read_tensor_parallel),
    custom(("layout.cp", "layout.cp_method"), (_SEQUENCE, _DATA), _write_sequence, _read_sequence),
    no_pipeline("a pipeline is code: PipelineModule(layers, num_stages=...), which takes ZeRO stage 0 or 1"),
    unable("layout.sequence_parallel", message=WHOLE_BETWEEN),
    sharded_from(
        3,
        refused="only stage 3 shards embedding and head",
        warned="stage 3 shards embedding and head like everything else",
    ),
    lacking("layout.num_copies", "Domino is another training loop, not configuration"),
    custom(("recompute.full",), (_CHECKPOINTS, _PARTITION), _write_recompute, _read_recompute),
    unable("recompute.selective", "recompute.communication", message="DeepSpeed recomputes whole layers only"),
)
