"""torchtitan 0.3: ``python -m torchtitan.train --module M --config F --section.key value``; an export is such a module.

Names, defaults and rules are those of release 0.3.0 (``config/configs.py``, ``trainer.py``, ``distributed/fsdp.py``,
``distributed/pipeline_parallel.py``, ``distributed/compile.py``). It always uses FSDP2, trains language models with
FlexAttention, and computes in bfloat16 or fp32. Earlier releases have TOML configurations; later ones count batches in
tokens under other names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from orchestrator.frameworks import arguments, torchtitan_experts
from orchestrator.frameworks.arguments import Argument, ArgumentValue, Words, either_dash, is_specified
from orchestrator.frameworks.edit import Edit, FrameworkTable, Overlay, OverlayRequest, Run, Training
from orchestrator.frameworks.gaps import (
    NO_FLOAT8_GATHER,
    NO_FP32_MODULES,
    NO_LATENT,
    OWN_FUSED,
    VARYING_LENGTHS,
    all_of,
    betas,
    first_layers_of,
    in_rows,
    layer_ids,
    left_to_script,
    memory_savers,
    num_microbatches,
    own_data,
    present,
    refuse_fp8,
    unable,
    without_pipeline,
)
from orchestrator.frameworks.spelling import (
    Found,
    Recipe,
    Setting,
    SettingsBuilder,
    comments,
    custom,
    fixed,
    lacking,
    option,
    row,
)
from orchestrator.frameworks.torchtitan_config import (
    ACTIVATION_CHECKPOINT,
    ELSEWHERE,
    FILE,
    FUNCTION,
    MODEL,
    SELECTED,
    UNKNOWN,
    base_of,
    find,
    module_settings,
    module_text,
    settings_of,
)
from trials.layout_rules import has_experts
from trials.script.command import Expected, LogFormat
from trials.sizes import all_chunks
from trials.spec import Layout, LlamaModel, SelectiveRecompute

RESHARD = "parallelism.fsdp_reshard_after_forward"
REPLICAS, SHARDS = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
TP, CP, PP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline"))
SEQUENCE, BACKEND = "parallelism.enable_sequence_parallel", "parallelism.spmd_backend"
SCHEDULE, PARTS = "parallelism.pipeline_parallel_schedule", "parallelism.module_fqns_per_model_part"
LOCAL, GLOBAL = "training.local_batch_size", "training.global_batch_size"
MICRO = "parallelism.pipeline_parallel_microbatch_size"
LENGTH, SEED = "training.seq_len", "debug.seed"
DTYPE, COMPUTE = "training.dtype", "training.mixed_precision_param"
COMPILE, COMPONENTS, COMPILER = "compile.enable", "compile.components", "compile.backend"
FLOAT8 = "model_spec.float8"
VOCAB, NUM_LAYERS = "model_spec.vocab_size", "model_spec.n_layers"
LLAMA, OPTIMIZER = "workload.model.llama", "workload.optimizer"
SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble", "gpipe": "GPipe"}
LOOPED_GPIPE = "LoopedBFS"
ENGINES = {"dtensor": "partial_dtensor", "local": "spmd_types"}
COMPILERS = ("inductor", "aot_eager")
"""Backends that compile FlexAttention there."""
DEFAULTS: Mapping[str, Any] = {
    LOCAL: 8,
    GLOBAL: -1,
    LENGTH: 2048,
    "training.steps": 10000,
    DTYPE: "float32",
    COMPUTE: "bfloat16",
    "training.disable_cuda_graphs": False,
    "training.enable_cpu_offload": False,
    "lr_scheduler.total_steps": None,
    REPLICAS: 1,
    SHARDS: -1,
    RESHARD: "default",
    TP: 1,
    SEQUENCE: True,
    PP: 1,
    SCHEDULE: "1F1B",
    MICRO: 1,
    PARTS: None,
    CP: 1,
    torchtitan_experts.PARALLEL_SIZE: 1,
    COMPILE: False,
    COMPONENTS: ["model", "loss"],
    COMPILER: "inductor",
    "dataloader.num_workers": 0,
    "dataloader.prefetch_factor": None,
    "dataloader.pin_memory": False,
    "dataloader.persistent_workers": False,
    SEED: None,
    ACTIVATION_CHECKPOINT: "selective",
    MODEL: UNKNOWN,
}
"""Defaults of release 0.3.0 for the settings that are read."""


def _whole(found: Found, knob: str, name: str) -> int | None:
    """A whole number; None if unknown."""
    return None if found.get(name) in (UNKNOWN, "None") else found.whole(knob, name)


def _truth(found: Found, name: str) -> bool | None:
    value = found.get(name)
    return value if isinstance(value, bool) else None


# The model and the run.


def _write_kind(builder: SettingsBuilder) -> None:
    model = builder.workload.model
    builder.settings[LENGTH] = builder.workload.seq_length
    if not isinstance(model, LlamaModel):
        builder.refuse("workload.model", f"torchtitan has no counterpart of this {model.kind} model")
        return
    builder.settings |= {
        "model_spec.max_seq_len": builder.workload.seq_length,
        "loss.global_vocab_size": model.vocab_size,
    }


def _read_kind(found: Found) -> dict[str, Any]:
    if found.is_export:
        found.num_layers = found.get(NUM_LAYERS)
    kind = {"workload.model.kind": "llama"} if found.is_export and VOCAB in found else {}
    return {"workload.seq_length": _whole(found, "workload", LENGTH), **kind}


def _write_seed(builder: SettingsBuilder) -> None:
    builder.settings[SEED] = builder.values["workload.seed"]


def _note_unread(found: Found) -> dict[str, Any]:
    """Note settings of commands that stay unchanged and that no field describes."""
    if found.get("training.enable_cpu_offload") is True:
        found.unread("offload.optimizer", "training.enable_cpu_offload, including weights")
    return {}


# Number formats, kernels, data loading.


def _write_precision(builder: SettingsBuilder) -> None:
    precision = builder.candidate.precision
    if builder.is_export:
        if precision.level == "O2-fp8":
            builder.settings[FLOAT8] = True
        compute = "float32" if precision.level == "O0" else "bfloat16"
        builder.settings |= {DTYPE: "float32", COMPUTE: compute, "training.mixed_precision_reduce": "float32"}
        if precision.dtype == "float16":
            builder.refuse(
                "precision", "torchtitan computes in bfloat16 or fp32, without loss scaling; exported as bfloat16"
            )
        elif precision.base == "O1":
            builder.refuse(
                "precision.level", "torchtitan has no autocast; exported as O2: weights are gathered in 16 bits"
            )
        return
    refuse_fp8(builder, "your configuration function converts the model: model_registry(..., converters=[...])")
    if precision.base == "O1":
        builder.refuse("precision.level", "torchtitan has no level O1; its 16-bit format corresponds to level O2")
    if precision.dtype == "float16":
        builder.refuse("precision.dtype", "torchtitan computes in bfloat16 or float32")
    else:
        builder.settings[COMPUTE] = precision.dtype


def _read_precision(found: Found) -> dict[str, Any]:
    weights, compute = found.get(DTYPE), found.get(COMPUTE)
    if weights == "float32" and compute in ("float32", "bfloat16"):
        level = "O0" if compute == "float32" else "O2-fp8" if found.get(FLOAT8) is True else "O2"
        lists = {"precision.white": (), "precision.black": ()}
        return {"precision.dtype": compute, "precision.level": level, **lists}
    if UNKNOWN not in (weights, compute):
        found.unread("precision", f"--{DTYPE} {weights}, --{COMPUTE} {compute}")
    return {}


def _write_compile(builder: SettingsBuilder) -> None:
    kernels = builder.candidate.kernels
    builder.settings[COMPILE] = kernels.compile != "off"
    by_blocks = "each block is compiled separately, not the full model"
    if kernels.compile == "model":
        builder.note("warning" if builder.is_export else "error", "kernels.compile", by_blocks)
    if not builder.is_export:
        if kernels.compile != "off" and builder.changed("kernels.backend"):
            builder.settings[COMPILER] = kernels.backend
        return
    is_known = kernels.backend in COMPILERS
    builder.settings |= {COMPONENTS: ["model", "loss"], COMPILER: kernels.backend if is_known else "inductor"}
    if not is_known:
        builder.refuse(
            "kernels.backend", f"FlexAttention compiles only with {' or '.join(COMPILERS)}; exported as inductor"
        )


def _read_compile(found: Found) -> dict[str, Any]:
    enabled, components = found.get(COMPILE), found.get(COMPONENTS)
    if not isinstance(enabled, bool) or components in (None, UNKNOWN):
        return {}
    values: dict[str, Any] = {"kernels.compile": "block" if enabled and "model" in components else "off"}
    if enabled or found.is_export:
        values |= {"kernels.backend": found.get(COMPILER), "kernels.compile_mode": "default"}
    return values


_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


def _write_loader(builder: SettingsBuilder) -> None:
    loader = builder.candidate.loader
    for name in _LOADER:
        if name == "prefetch_factor":
            if not loader.num_workers or builder.changed("loader.prefetch_factor"):
                builder.settings["dataloader.prefetch_factor"] = loader.prefetch_factor or None
        elif builder.changed(f"loader.{name}"):
            builder.settings[f"dataloader.{name}"] = getattr(loader, name)


def _read_loader(found: Found) -> dict[str, Any]:
    workers = _whole(found, "loader.num_workers", "dataloader.num_workers")
    values: dict[str, Any] = {"loader.num_workers": workers}
    if workers is not None:
        ahead = _whole(found, "loader.prefetch_factor", "dataloader.prefetch_factor")
        values |= {"loader.prefetch_factor": 0 if workers == 0 else ahead or 2, "loader.full_batch": False}
    return values | {f"loader.{name}": _truth(found, f"dataloader.{name}") for name in _LOADER[2:]}


# The layout, the batch, recompute.


def _write_data_parallel(builder: SettingsBuilder) -> None:
    layout, stage = builder.candidate.layout, builder.candidate.layout.zero_stage
    if builder.changed("layout.dp_replicate"):
        builder.settings[REPLICAS] = layout.dp_replicate
    if builder.changed("layout.dp_shard") or stage == 0:
        builder.settings[SHARDS] = layout.dp_shard
    if stage == 1 and not builder.is_export:
        builder.refuse("layout.zero_stage", "FSDP2 has no stage 1")
    elif builder.is_export or (stage and builder.changed("layout.zero_stage")):
        builder.settings[RESHARD] = "always" if stage == 3 else "never"
    if builder.is_export:
        _note_data_parallel(builder)


def _note_data_parallel(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.zero_stage == 1:
        builder.warn("layout.zero_stage", "FSDP2 has no stage 1; exported as stage 2, which computes the same result")
    if layout.cp > 1 and layout.dp_shard == 1:
        builder.warn("layout.zero_stage", "weights are sharded over the cp ranks; the measurement replicated them")
    if _chooses_engine(layout) and layout.replicate_with == "ddp":
        builder.warn("layout.replicate_with", "replicas are FSDP2's, not DDP's")
    if layout.dp_shard > 1 and layout.zero_stage == 3 and not layout.shard_embedding:
        builder.warn("layout.shard_embedding", "the embedding is gathered again for its backward pass")
    elif layout.shard_embedding and (layout.dp_shard == 1 or layout.dp_replicate > 1):
        builder.refuse("layout.shard_embedding", f"embedding and head are sharded over {layout.dp_shard} ranks only")
    elif layout.shard_embedding and layout.zero_stage < 3:
        builder.warn("layout.shard_embedding", "embedding and head stay gathered from forward to backward pass")


def _chooses_engine(layout: Layout) -> bool:
    return layout.zero_stage == 0 and layout.dp_replicate * layout.cp > 1


def _read_data_parallel(found: Found) -> dict[str, Any]:
    replicas = _whole(found, "layout.dp_replicate", REPLICAS)
    shards, pp = _whole(found, "layout.dp_shard", SHARDS), _whole(found, "layout.pp", PP)
    values: dict[str, Any] = {"layout.dp_replicate": replicas, "layout.dp_shard": None if shards == -1 else shards}
    policy = found.get(RESHARD)
    again = {"always": True, "never": False, "default": pp == 1}.get(str(policy))
    if policy == UNKNOWN or (policy == "default" and pp is None):
        found.warn("layout.zero_stage", "fsdp_reshard_after_forward is unknown: assumed to be the default, stage 3")
        again = True
    if again is not None:
        values["layout.zero_stage"] = 0 if shards == 1 else 3 if again else 2
    if found.is_export:
        layout = Layout(
            dp_replicate=replicas or 1, dp_shard=shards or 1, cp=found[CP], zero_stage=values["layout.zero_stage"]
        )
        values["layout.replicate_with"] = "fsdp2" if _chooses_engine(layout) else "ddp"
        values["layout.shard_embedding"] = layout.dp_shard > 1 and layout.zero_stage == 3
    return values


def _write_reduction(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.gradient_reduction == _reduction(layout.pp, layout.dp_shard):
        return
    when = "after a pipeline's last micro-batch" if layout.pp > 1 else "after every micro-batch"
    builder.warn("layout.gradient_reduction", f"gradients are always reduced {when}")


def _reduction(pp: int, dp_shard: int) -> Literal["each", "last"]:
    """When torchtitan reduces gradients: its loop never postpones it, torch's pipelines always do."""
    return "last" if pp > 1 and dp_shard > 1 else "each"


def _degree(path: str, name: str, **always: Any) -> Setting:
    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = builder.values[path]

    fields = {f"layout.{knob}": value for knob, value in always.items()}
    return row(path, name, write, lambda found: {path: _whole(found, path, name), **fields})


def _write_sequence_parallel(builder: SettingsBuilder) -> None:
    builder.settings[SEQUENCE] = builder.candidate.layout.sequence_parallel


def _write_engine(builder: SettingsBuilder) -> None:
    builder.settings[BACKEND] = ENGINES[builder.candidate.layout.tp_engine]


def _read_engine(found: Found) -> dict[str, Any]:
    return {"layout.tp_engine": next(ours for ours, theirs in ENGINES.items() if theirs == found[BACKEND])}


def _write_pipeline(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    builder.settings[PP] = layout.pp
    if layout.pp == 1:
        return
    chunks = all_chunks(layout, builder.workload.num_layers)
    parts = [[f"layers.{layer}" for layer in chunk.layer_ids] for chunk in chunks]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    is_looped_gpipe = layout.schedule == "gpipe" and layout.num_virtual_stages > 1
    builder.settings |= {SCHEDULE: LOOPED_GPIPE if is_looped_gpipe else SCHEDULES[layout.schedule], PARTS: parts}
    if not all(parts):
        builder.refuse(
            "layout.stage_layers", "torchtitan does not support stages without layers between the first and the last"
        )


def _read_pipeline(found: Found) -> dict[str, Any]:
    pp = _whole(found, "layout.pp", PP)
    if pp == 1:
        found.held = ((found.num_layers or 1,),)
        return {"layout.pp": 1} if found.is_export else without_pipeline()
    named = found.get(SCHEDULE)
    ours = {theirs: ours for ours, theirs in SCHEDULES.items()} | {LOOPED_GPIPE: "gpipe"}
    schedule = ours.get(named) if isinstance(named, str) else None
    if schedule is None:
        if pp is not None:
            found.unread("layout.schedule", f"--{SCHEDULE} {named}")
        return {"layout.pp": pp}
    values = {"layout.pp": pp, "layout.schedule": schedule}
    parts = found.get(PARTS)
    if parts in (None, UNKNOWN) or pp is None:
        found.unread("layout.stage_layers", f"default stages of torchtitan; set them with --{PARTS}")
        return values
    flat = [sum(name.strip().startswith("layers.") for name in _names(part)) for part in parts]
    if len(flat) % pp:
        found.unread("layout.stage_layers", f"{len(flat)} parts for {pp} stages")
        return values
    held = in_rows(flat, pp)
    if schedule == "zbv":
        held = (held[0], *(tuple(reversed(stages)) for stages in held[1:]))
    found.held = held
    return {**values, "layout.num_virtual_stages": len(held), "layout.stage_layers": held}


def _names(part: Any) -> list[str]:
    return part.split(",") if isinstance(part, str) else list(part)


def _write_batch(builder: SettingsBuilder) -> None:
    """Write the batch: a rank's batch is one micro-batch, or in a pipeline all micro-batches of a step."""
    layout, micro, number = builder.candidate.layout, builder.candidate.micro_batch_size, num_microbatches(builder)
    if builder.current(PP) == UNKNOWN:
        builder.settings[PP] = layout.pp
    builder.settings[LOCAL] = micro if layout.pp == 1 else micro * number
    if builder.is_export or layout.pp > 1 or number != 1 or builder.current(GLOBAL) != -1:
        builder.settings[GLOBAL] = builder.workload.global_batch_size
    if layout.pp > 1:
        builder.settings[MICRO] = micro


def _read_batch(found: Found) -> dict[str, Any]:
    """Read the global batch, or the number of micro-batches per step if it is one batch of each rank."""
    knob, pp = "micro_batch_size", found.fields.get("layout.pp")
    local, total = _whole(found, knob, LOCAL), _whole(found, knob, GLOBAL)
    micro = local if pp == 1 else _whole(found, knob, MICRO)
    if total == -1 and local and micro and pp is not None:
        found.num_microbatches = local // micro
    is_specified = total is not None and total > 0
    return {knob: None if pp is None else micro, "workload.global_batch_size": total if is_specified else None}


FULL, MODULES = f"{ACTIVATION_CHECKPOINT}.full", f"{ACTIVATION_CHECKPOINT}.modules"
PATTERNS = ("attention", "feed_forward")
"""Modules that exports can recompute: their outputs are not kept for the backward pass."""


def _write_recompute(builder: SettingsBuilder) -> None:
    recompute, layout, number = builder.candidate.recompute, builder.candidate.layout, builder.workload.num_layers
    is_partial = recompute.full not in ((), present(builder))
    if not builder.is_export and (recompute.selective or is_partial):
        builder.refuse("recompute", "torchtitan recomputes all layers or none; selective uses a fixed list")
        return
    builder.settings[ACTIVATION_CHECKPOINT] = "full" if recompute.full else "none"
    known = {part.pattern: part.num_layers for part in recompute.selective if part.pattern in PATTERNS}
    if unknown := [part.pattern for part in recompute.selective if part.pattern not in PATTERNS]:
        builder.refuse("recompute.selective", f"{', '.join(unknown)}: known are {', '.join(PATTERNS)}")
    if "feed_forward" in known and has_experts(builder.workload.model):
        builder.refuse("recompute.selective", "feed_forward: experts have another name")
        del known["feed_forward"]
    if is_partial or known:
        modules = {name: layer_ids(counts, layout, number) for name, counts in known.items()}
        full = layer_ids(recompute.full, layout, number) if recompute.full else []
        builder.settings |= {ACTIVATION_CHECKPOINT: SELECTED, FULL: full, MODULES: modules}


def _read_recompute(found: Found) -> dict[str, Any]:
    policy, held = found.get(ACTIVATION_CHECKPOINT), found.held
    if policy == "none":
        return {"recompute.full": (), "recompute.selective": ()}
    if policy == "full" and held is not None:
        return {"recompute.full": all_of(held), "recompute.selective": ()}
    if policy == SELECTED and held is not None:
        schedule = found.fields.get("layout.schedule", "1f1b")
        parts = {name: first_layers_of(layers, held, schedule) for name, layers in found[MODULES].items()}
        return {
            "recompute.full": first_layers_of(found[FULL], held, schedule),
            "recompute.selective": tuple(
                SelectiveRecompute(pattern=name, num_layers=counts) for name, counts in parts.items() if counts
            ),
        }
    if policy != UNKNOWN:
        found.unread("recompute", f"activation-checkpoint:{policy}")
    return {}


_NO_CLIPPING = 1e30
"""Gradient norm that is never reached: torchtitan always clips."""


def _read_clip_norm(norm: Any) -> float:
    return 0.0 if norm >= _NO_CLIPPING else float(norm)


ROWS: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.seq_length", "workload.model.resnet", "workload.model.linear"),
        (LENGTH, "model_spec.max_seq_len", "loss.global_vocab_size"),
        _write_kind,
        _read_kind,
        overlay="read",
    ),
    option(f"{LLAMA}.hidden_size", "model_spec.dim"),
    option(f"{LLAMA}.num_layers", NUM_LAYERS),
    option(f"{LLAMA}.num_heads", "model_spec.n_heads"),
    option(f"{LLAMA}.num_kv_heads", "model_spec.n_kv_heads"),
    option(f"{LLAMA}.ffn_hidden_size", "model_spec.hidden_dim"),
    option(f"{LLAMA}.vocab_size", VOCAB),
    option(f"{LLAMA}.rope_theta", "model_spec.rope_theta"),
    option(f"{LLAMA}.norm_eps", "model_spec.norm_eps"),
    torchtitan_experts.ROW,
    torchtitan_experts.PARALLEL,
    NO_LATENT,
    row(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (DTYPE, COMPUTE, "training.mixed_precision_reduce", FLOAT8),
        _write_precision,
        _read_precision,
    ),
    unable("precision.white", "precision.black", message="no autocast, so no operator lists"),
    NO_FP32_MODULES,
    NO_FLOAT8_GATHER,
    option(f"{OPTIMIZER}.clip_norm", "training.max_norm", to=lambda norm: norm or _NO_CLIPPING, of=_read_clip_norm),
    fixed("training.disable_cuda_graphs", True),
    row(("kernels.compile", "kernels.backend"), (COMPILE, COMPONENTS, COMPILER), _write_compile, _read_compile),
    lacking(
        "kernels.compile_mode",
        "blocks compile in the default mode; training.disable_cuda_graphs: False enables CUDA graphs",
    ),
    lacking("kernels.attention", "attention is FlexAttention"),
    lacking("kernels.matmul_precision", "fp32 matrix products stay fp32"),
    lacking("kernels.cudnn_tuning_range", "cuDNN is not tuned; Llama has no convolutions"),
    lacking("kernels.memory_format", "no memory format; Llama has no convolutions"),
    OWN_FUSED,
    *VARYING_LENGTHS,
    *memory_savers(
        loss_chunks=option("kernels.loss_chunks", "loss.num_chunks"),
        optimizer="training.enable_cpu_offload moves weights and gradients too, and gathers weights from the host",
    ),
    fixed("dataloader.dataset", "c4"),
    row(
        tuple(f"loader.{name}" for name in _LOADER),
        tuple(f"dataloader.{name}" for name in _LOADER),
        _write_loader,
        _read_loader,
    ),
    lacking("loader.full_batch", "every rank reads only its own rows"),
    left_to_script("loader.tuning", "the loader is not tuned automatically: set the values from the report"),
    option(f"{OPTIMIZER}.lr", "optimizer.lr"),
    betas("optimizer.betas", tuple),
    option(f"{OPTIMIZER}.eps", "optimizer.eps"),
    option(f"{OPTIMIZER}.weight_decay", "optimizer.weight_decay"),
    fixed("lr_scheduler.warmup_steps", 0),
    fixed("lr_scheduler.decay_ratio", 0.0),
    row("workload.seed", SEED, _write_seed, lambda found: {"workload.seed": _whole(found, "workload", SEED)}),
    own_data("packed C4 documents, with attention within each; set your dataset and tokenizer"),
    custom((), (), lambda _: None, _note_unread, overlay="read"),
    custom(
        ("layout.gradient_reduction",),
        (),
        _write_reduction,
        lambda found: {"layout.gradient_reduction": _reduction(found[PP], found[SHARDS])},
    ),
    _degree("layout.tp", TP),
    row(
        "layout.sequence_parallel",
        SEQUENCE,
        _write_sequence_parallel,
        lambda found: {"layout.sequence_parallel": _truth(found, SEQUENCE)},
        matters=lambda candidate: candidate.layout.tp > 1,
    ),
    custom(("layout.tp_engine",), (BACKEND,), _write_engine, _read_engine),
    lacking(
        "layout.num_copies",
        "micro-batches are not split; compile.enable_async_tensor_parallel overlaps in another way",
        in_overlays=True,
    ),
    _degree("layout.cp", CP, cp_method="all_gather"),
    unable(
        "layout.cp_method",
        "layout.ulysses_degree",
        message="keys and values are gathered: neither Ulysses nor ring is supported",
    ),
    fixed("parallelism.context_parallel_load_balancer", "headtail"),
    row(
        ("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (PP, SCHEDULE, PARTS),
        _write_pipeline,
        _read_pipeline,
    ),
    row(
        tuple(
            f"layout.{name}" for name in ("dp_replicate", "dp_shard", "zero_stage", "replicate_with", "shard_embedding")
        ),
        (REPLICAS, SHARDS, RESHARD),
        _write_data_parallel,
        _read_data_parallel,
    ),
    row(("micro_batch_size", "workload.global_batch_size"), (LOCAL, GLOBAL, MICRO), _write_batch, _read_batch),
    row(
        ("recompute.full", "recompute.selective"),
        (ACTIVATION_CHECKPOINT, FULL, MODULES),
        _write_recompute,
        _read_recompute,
    ),
    unable("recompute.communication", message="gathered sequence shards are kept, or recomputed with the whole layer"),
)


# Exports.


def _command(builder: SettingsBuilder) -> str:
    world_size, module = builder.candidate.layout.world_size, FILE.removesuffix(".py")
    return f"torchrun --nproc-per-node {world_size} -m torchtitan.train --module {module} --config {FUNCTION}"


def _render(builder: SettingsBuilder) -> Mapping[str, str]:
    return {FILE: module_text(builder.settings, comments(builder.notes), _command(builder))}


RECIPE = Recipe(
    name="torchtitan",
    title="torchtitan",
    settings=ROWS,
    render=_render,
    load=lambda files: module_settings(files[FILE]),
    command=_command,
)


# Commands.

CONFIG = "titan_config"
"""Name of the configuration function's file among a run's files."""
BASE = "titan_base"
"""Name of the file with the functions that it is based on."""
_MODULE, _FUNCTION = Argument(name="--module"), Argument(name="--config")
_OLD = either_dash("--job.config_file", aliases=("--job.config-file",))
_OFF: dict[str, Any] = {
    "checkpoint.enable": False,
    "validator.enable": False,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "metrics.disable_color_printing": True,
    "profiler.enable_profiling": False,
    "profiler.enable_memory_snapshot": False,
    "debug.enable_structured_logging": True,
}
"""Settings of trials."""
_FLAGS = {name for name, value in {**DEFAULTS, **_OFF}.items() if isinstance(value, bool)}
_LLAMA3 = {
    "1B": (2048, 16, 32, 8, 8192),
    "3B": (3072, 28, 24, 8, 8192),
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
"""Hidden size, layers, heads, key-value heads and feed-forward width of ``torchtitan.models.llama3``."""


def _argument(name: str) -> Argument:
    """The spelling of a setting as an argument; a truth value has a separate name for false."""
    if name not in _FLAGS:
        return either_dash(f"--{name}", "list" if name == PARTS else "value")
    section, _, key = name.rpartition(".")
    return either_dash(f"--{name}", "flag", negative=(f"--{section}.no_{key}",))


class TitanArguments:
    """Settings of an edit by name: arguments, which override those of the configuration function, and its defaults."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        function = arguments.read_text(edit.argv, _FUNCTION)
        text = edit.files.get(CONFIG)
        base = edit.files.get(BASE, "")
        self.config = settings_of(text, function, base) if text is not None and function else None
        """The settings of the configuration function; None if it could not be read."""

    @property
    def _at(self) -> int:
        """Position of tyro's subcommand, which later options belong to."""
        found = (index for index, word in enumerate(self._edit.argv) if _is_policy(word))
        return next(found, len(self._edit.argv))

    @property
    def options(self) -> Words:
        return self._edit.argv[: self._at]

    def get(self, name: str, /, default: Any = None) -> Any:
        """The effective value; :data:`UNKNOWN` if the function computes it, or could not be read."""
        if name == ACTIVATION_CHECKPOINT and self._at < len(self._edit.argv):
            return self._edit.argv[self._at].partition(":")[2]
        given = arguments.read(self.options, _argument(name)) if name not in (ACTIVATION_CHECKPOINT, MODEL) else None
        if given is not None:
            return given
        if self.config is None:
            return UNKNOWN
        value = self.config.get(name, UNKNOWN if ELSEWHERE in self.config else DEFAULTS.get(name))
        return default if value is None else value

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name == ACTIVATION_CHECKPOINT:
                self._put_policy(value)
                continue
            given: ArgumentValue = value if isinstance(value, bool) else str(value)
            if name == PARTS:
                given = tuple(",".join(part) for part in value)
            head = arguments.write(self.options, _argument(name), given)
            self._edit.argv = (*head, *self._edit.argv[self._at :])

    def drop(self, *names: str) -> None:
        kept = arguments.remove(self.options, *map(_argument, names))
        self._edit.argv = (*kept, *self._edit.argv[self._at :])

    def _put_policy(self, policy: str) -> None:
        """Set the policy of activation checkpointing, and remove options of another policy."""
        if self._at == len(self._edit.argv) or self.get(ACTIVATION_CHECKPOINT) != policy:
            self._edit.argv = (*self.options, f"activation-checkpoint:{policy}")


def _is_policy(word: str) -> bool:
    return word.replace("_", "-").startswith("activation-checkpoint:")


def recognises(run: Run) -> bool:
    words = run.argv
    is_script = any(word.endswith("torchtitan/train.py") for word in words)
    return "torchtitan.train" in words or is_script or is_specified(words, _OLD)


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The file of the configuration function, if it can be found."""
    module = arguments.read_text(argv, _MODULE)
    python = argv[0] if argv else "python"
    path = find(module, cwd, python) if module and "{" not in module else None
    base = base_of(path, cwd, python) if path else None
    return {name: found for name, found in ((CONFIG, path), (BASE, base)) if found}


def _model(edit: Edit, found: Found) -> LlamaModel | None:
    """The decoder, if the command uses one of torchtitan's own."""
    given = TitanArguments(edit)
    if is_specified(edit.argv, _OLD):
        found.refuse(
            "workload", "--job.config_file: only torchtitan 0.3 is supported; earlier releases use other names"
        )
    elif given.config is None:
        found.warn("workload", "the configuration function was not found or not recognized: only arguments are read")
    flavor = given.get(MODEL)
    is_llama = any(word.rpartition("=")[2] in ("llama3", "torchtitan.models.llama3") for word in edit.argv)
    if not (is_specified(edit.argv, _MODULE) and is_llama and flavor in _LLAMA3):
        return None
    hidden, layers, heads, groups, width = _LLAMA3[flavor]
    found.num_layers = layers
    return LlamaModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        ffn_hidden_size=width,
        vocab_size=128256,
        rope_theta=500000.0,
    )


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Note what torchtitan itself would reject."""
    layout, shape, length = request.candidate.layout, request.reading.shape, request.reading.seq_length
    given = TitanArguments(edit)
    is_piped = any(
        request.changes(f"layout.{name}", getattr(layout, name))
        for name in ("pp", "schedule", "num_virtual_stages", "stage_layers")
    )
    if layout.pp > 1 and is_piped and request.reading.num_layers is None:
        edit.refuse("layout.pp", "stages cannot be named for a model with an unknown number of layers")
    if layout.pp > 1 and given.get("training.disable_cuda_graphs") is not True:
        given.put({"training.disable_cuda_graphs": True})
        edit.warn(
            "layout.pp", "CUDA graphs, on by default in torchtitan, are off: it does not support them with pipelines"
        )
    divisor = (layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1)
    if length and length % divisor:
        edit.refuse("layout.tp" if layout.tp > 1 else "layout.cp", f"{length} tokens are not a multiple of {divisor}")
    if problem := torchtitan_experts.parallel_problem(layout):
        edit.refuse("layout.ep", problem)
    if layout.pp > 1 and request.num_microbatches < layout.pp:
        edit.warn("layout.pp", f"{request.num_microbatches} micro-batches are fewer than stages")
    if shape is not None and (shape.num_heads % layout.tp or shape.num_kv_heads % layout.tp):
        edit.refuse("layout.tp", f"{shape.num_heads} heads, {shape.num_kv_heads} groups: not multiples of {layout.tp}")


TABLE = FrameworkTable(
    rows=ROWS,
    command=TitanArguments,
    defaults={},
    model=_model,
    check=_check,
    open=functools.partial(Edit.of_run, copies_files=False),
)


# Trials.


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """The trial without checkpoints, validation, trackers and profiles; ``training.steps`` ends it, and
    ``lr_scheduler.total_steps`` keeps the schedule of the command's number of steps."""
    edit = Edit.of_overlay(made)
    given = TitanArguments(edit)
    steps = arguments.read_text(given.options, either_dash("--training.steps"))
    total = arguments.read_text(given.options, either_dash("--lr_scheduler.total_steps"))
    if steps and total in (None, "None"):
        given.put({"lr_scheduler.total_steps": steps})
    given.put({**_OFF, "training.steps": last_step, "dump_folder": "{out}/titan"})
    return edit.overlay()


def expected(request: OverlayRequest) -> Expected:
    candidate, layout = request.candidate, request.candidate.layout
    policy = request.reading.values.get("recompute.full", UNKNOWN)
    spread = layout.tp * layout.pp * (layout.dp_shard if layout.zero_stage >= 2 else 1)
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size,
        num_microbatches=None if layout.pp > 1 else request.num_microbatches,
        dtype=candidate.precision.dtype if "precision.dtype" in request.reading.values else None,
        recomputes=bool(candidate.recompute.full) if policy != UNKNOWN or candidate.recompute.full else None,
        parameter_shards=spread if spread > 1 else None,
    )


TRAINING = Training(
    name="torchtitan",
    title="torchtitan",
    package="torchtitan",
    releases=">=0.3,<0.4",
    log=LogFormat(name="torchtitan", files=("{out}/titan/structured_logs/training.global_rank_*.jsonl",)),
    recognises=recognises,
    find_files=find_files,
    read=TABLE.read,
    overlay=TABLE.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
