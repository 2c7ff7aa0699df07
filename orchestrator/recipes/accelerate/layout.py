"""Accelerate's launcher: data, tensor and context parallelism, batches and recompute."""

from __future__ import annotations

from typing import Any, Literal

from orchestrator.recipes.base import Draft, Setting, Settings, custom, fixed, lacking
from orchestrator.recipes.gaps import WHOLE_BETWEEN, no_pipeline, unable
from orchestrator.recipes.hugging_face import model_file
from trials.spec import Layout, LlamaModel

FILE = "accelerate.yaml"
ARGUMENTS = "training_args.json"
TYPE, NUM_PROCESSES = f"{FILE}:distributed_type", f"{FILE}:num_processes"
_PARALLELISM = f"{FILE}:parallelism_config.parallelism_config_"
SIZES = {name: f"{_PARALLELISM}{name}_size" for name in ("dp_replicate", "dp_shard", "cp", "tp")}
_CP_STRATEGY = f"{_PARALLELISM}cp_comm_strategy"
_FSDP = f"{FILE}:fsdp_config.fsdp_"
_MIRROR = f"{ARGUMENTS}:fsdp_config."
"""Prefix of the Trainer's arguments that repeat what the launcher is told."""
_WRAP = tuple(
    f"{prefix}{name}"
    for prefix in (_FSDP, _MIRROR)
    for name in (
        "version",
        "reshard_after_forward",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "min_num_params",
        "cpu_ram_efficient_loading",
        "state_dict_type",
    )
)
_RESHARD, _RECOMPUTE = f"{_FSDP}reshard_after_forward", f"{_FSDP}activation_checkpointing"
_PLAIN_RECOMPUTE = f"{ARGUMENTS}:activation_checkpointing"
_SYNC_EACH = f"{ARGUMENTS}:accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
_BATCH, _ACCUMULATION = f"{ARGUMENTS}:per_device_train_batch_size", f"{ARGUMENTS}:gradient_accumulation_steps"


# ---- layout ----


def _engine(layout: Layout) -> Literal["NO", "MULTI_GPU", "FSDP"]:
    """The engine to use: FSDP shards over ``dp_shard`` and ``cp`` together and refuses to work where both are 1."""
    if layout.dp_shard > 1 or layout.cp > 1:
        return "FSDP"
    return "MULTI_GPU" if layout.dp_replicate > 1 else "NO"


def _write_layout(draft: Draft) -> None:
    layout = draft.candidate.layout
    engine = _engine(layout)
    draft.settings |= {
        TYPE: engine,
        NUM_PROCESSES: layout.dp * layout.cp * (layout.tp if engine == "FSDP" else 1),
    }
    if engine == "FSDP":
        _write_fsdp(draft, layout)
    elif layout.tp > 1:
        draft.refuse("layout.tp", "Accelerate's launcher takes tp only beside dp_shard or cp above 1")
    _note_engine(draft, layout, engine)


def _write_fsdp(draft: Draft, layout: Layout) -> None:
    for name, size in SIZES.items():
        draft.settings[size] = getattr(layout, name)
    if layout.cp > 1:
        draft.settings[_CP_STRATEGY] = "allgather"
    is_llama = isinstance(draft.workload.model, LlamaModel)
    shared: dict[str, Any] = {
        "reshard_after_forward": layout.zero_stage == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if is_llama else "SIZE_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    shared |= {} if is_llama else {"min_num_params": 1_000_000}
    draft.settings |= {f"{_FSDP}{name}": value for name, value in {"version": 2, **shared}.items()}
    draft.settings |= {f"{_MIRROR}{name}": value for name, value in {"version": 2, **shared}.items()}
    draft.settings[f"{ARGUMENTS}:fsdp"] = True
    draft.settings[_SYNC_EACH] = layout.gradient_reduction == "each"
    if is_llama:
        draft.settings[f"{_FSDP}transformer_layer_cls_to_wrap"] = model_file.LAYER_CLASS
        draft.settings[f"{_MIRROR}transformer_layer_cls_to_wrap"] = [model_file.LAYER_CLASS]


def _note_engine(draft: Draft, layout: Layout, engine: str) -> None:
    """Warn where what Accelerate's engine does is near what was asked for, but not the same."""
    if engine == "FSDP" and layout.tp > 1:
        draft.warn("layout.tp", f"your script loads the model split over {layout.tp} ranks: tp_plan='auto'")
    if engine == "FSDP" and layout.dp_replicate > 1 and layout.dp_shard == 1:
        draft.refuse("layout.dp_replicate", "beside cp or tp, Accelerate has no replicas without dp_shard above 1")
    if layout.zero_stage == 1:
        draft.warn("layout.zero_stage", "FSDP2 has no stage 1; this is stage 2, which computes the same")
    if engine == "FSDP" and layout.dp_shard == 1:
        draft.warn("layout.zero_stage", "FSDP shards the weights over the cp ranks, where replicas were measured")
    if layout.replicate_with != _replicates_with(layout):
        name = "FSDP2" if engine == "FSDP" else "DDP"
        draft.warn("layout.replicate_with", f"plain replicas are {name} here")


def _replicates_with(layout: Layout) -> str:
    """The engine that Accelerate gives plain replicas; in canonical form where there is no choice."""
    return "fsdp2" if layout.zero_stage == 0 and layout.cp > 1 else "ddp"


def _read_layout(settings: Settings) -> dict[str, Any]:
    if settings[TYPE] != "FSDP":
        sizes = {"dp_replicate": settings[NUM_PROCESSES], "dp_shard": 1, "cp": 1, "tp": 1}
    else:
        sizes = {name: settings[size] for name, size in SIZES.items()}
    stage: Literal[0, 2, 3] = 0 if sizes["dp_shard"] == 1 else 3 if settings[_RESHARD] else 2
    layout = Layout(**sizes, zero_stage=stage)
    said = {"zero_stage": stage, "replicate_with": _replicates_with(layout), "cp_method": "all_gather"}
    said["gradient_reduction"] = "each" if stage < 2 or settings[_SYNC_EACH] else "last"
    return {f"layout.{name}": value for name, value in {**sizes, **said}.items()}


# ---- batch, recompute ----


def _write_batch(draft: Draft) -> None:
    draft.settings |= {
        _BATCH: draft.candidate.micro_batch_size,
        _ACCUMULATION: draft.candidate.num_microbatches(draft.workload.global_batch_size),
    }


def _read_batch(settings: Settings) -> dict[str, Any]:
    layout = _read_layout(settings)
    dp = layout["layout.dp_replicate"] * layout["layout.dp_shard"]
    return {
        "micro_batch_size": settings[_BATCH],
        "workload.global_batch_size": settings[_BATCH] * settings[_ACCUMULATION] * dp,
    }


def _write_recompute(draft: Draft) -> None:
    num_layers = sum(map(sum, draft.candidate.recompute.full))
    is_fsdp = draft.settings[TYPE] == "FSDP"
    draft.settings[_PLAIN_RECOMPUTE] = num_layers > 0 and not is_fsdp
    if is_fsdp:
        draft.settings |= {_RECOMPUTE: num_layers > 0, f"{_MIRROR}activation_checkpointing": num_layers > 0}
    if num_layers and draft.candidate.recompute.full != ((draft.workload.num_layers,),):
        draft.warn("recompute.full", f"it is all layers or none: these files say all, instead of {num_layers}")
    elif num_layers and not isinstance(draft.workload.model, LlamaModel):
        draft.warn("recompute.full", "your model needs activation_checkpointing_enable(), as transformers' models have")


def _read_recompute(settings: Settings) -> dict[str, Any]:
    num_layers = model_file.num_layers(settings)
    is_on = settings[_PLAIN_RECOMPUTE] or settings.get(_RECOMPUTE, False)
    return {"recompute.full": ((num_layers,),) if is_on and num_layers else ()}


SETTINGS: tuple[Setting, ...] = (
    fixed(f"{FILE}:compute_environment", "LOCAL_MACHINE"),
    fixed(f"{FILE}:main_training_function", "main"),
    custom(
        (
            *(f"layout.{name}" for name in SIZES),
            *("layout.zero_stage", "layout.replicate_with", "layout.gradient_reduction"),
        ),
        (TYPE, NUM_PROCESSES, *SIZES.values(), _CP_STRATEGY, f"{ARGUMENTS}:fsdp", _SYNC_EACH, *_WRAP),
        _write_layout,
        _read_layout,
    ),
    unable(
        "layout.cp_method",
        message="keys and values are gathered; Ulysses needs DeepSpeed as the engine: see the format deepspeed",
    ),
    no_pipeline("Accelerate has pipelines only through Megatron-LM"),
    lacking("layout.tp_engine", "tensor parallelism is by DTensor"),
    unable("layout.sequence_parallel", message=WHOLE_BETWEEN),
    unable("layout.shard_embedding", message="embedding and head belong to the root's unit, which stays gathered"),
    lacking("layout.num_copies", "micro-batches are not halved to overlap collectives"),
    custom(("micro_batch_size", "workload.global_batch_size"), (_BATCH, _ACCUMULATION), _write_batch, _read_batch),
    custom(
        ("recompute.full",),
        (_PLAIN_RECOMPUTE, _RECOMPUTE, f"{_MIRROR}activation_checkpointing"),
        _write_recompute,
        _read_recompute,
    ),
    unable("recompute.selective", "recompute.communication", message="Accelerate recomputes whole layers only"),
)
