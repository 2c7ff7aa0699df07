"""MindFormers: ``run_mindformer.py --config FILE.yaml``, started by ``msrun``; a Llama in graph mode.

Exports are the YAML. Names, defaults and rules are those of the sources of 1.3 to 2.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from orchestrator.frameworks import arguments, mindformers_experts
from orchestrator.frameworks.arguments import Argument, Words, either_dash, read_text
from orchestrator.frameworks.edit import Edit, EditedFile, FrameworkTable, Overlay, OverlayRequest, Run, Training
from orchestrator.frameworks.gaps import (
    NO_FLOAT8_GATHER,
    NO_FP32_MODULES,
    NO_LATENT,
    OWN_KERNELS,
    VARYING_LENGTHS,
    all_of,
    betas,
    memory_savers,
    num_microbatches,
    own_collectives,
    refuse_fp8,
    sharded_from,
    weight_decay_but_norms,
    without_pipeline,
)
from orchestrator.frameworks.mindformers_context import CP, DEGREE_ROW, METHOD, METHOD_ROW, METHODS
from orchestrator.frameworks.spelling import (
    Found,
    Recipe,
    Setting,
    Settings,
    SettingsBuilder,
    comments,
    custom,
    lacking,
    number,
    option,
    row,
    settings_of,
    switch,
    tree,
)
from orchestrator.space.file_types import layers_of
from trials.script.command import Expected, LogFormat
from trials.spec import Counts, LlamaModel, LossScale, SelectiveRecompute, gather_pattern

SCRIPT, FILE = "run_mindformer.py", "mindformers.yaml"
MODEL, LLAMA = "model.model_config", "workload.model.llama"
DP, PP = "parallel_config.data_parallel", "parallel_config.pipeline_stage"
TP = "parallel_config.model_parallel"
SEQUENCE, EMBEDDING = "parallel_config.use_seq_parallel", "parallel_config.vocab_emb_dp"
NUM_LAYERS = f"{MODEL}.num_layers"
COPIES, TOKEN_COPIES = "micro_batch_interleave_num", f"{MODEL}.fine_grain_interleave"
BATCH, ACCUMULATED = "runner_config.batch_size", "runner_config.gradient_accumulation_steps"
MICRO_BATCHES = "parallel_config.micro_batch_num"
_OPTIMIZER = "parallel.parallel_optimizer_config"
SHARDS, LEVEL = "parallel.enable_parallel_optimizer", f"{_OPTIMIZER}.optimizer_level"
SHARD_SIZE, SHARDS_SUMS = f"{_OPTIMIZER}.optimizer_weight_shard_size", f"{_OPTIMIZER}.gradient_accumulation_shard"
INTERLEAVE, SCHEDULER = "parallel.pipeline_config.pipeline_interleave", "parallel.pipeline_config.pipeline_scheduler"
CHUNKS, OFFSET = f"{MODEL}.pp_interleave_num", f"{MODEL}.offset"
SCHEDULERS = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "1f1b", "zbv": "zero_bubble_v"}
FULL, SELECT = "recompute_config.recompute", "recompute_config.select_recompute"
COMMUNICATION = "recompute_config.select_comm_recompute"
COMPUTE, RESIDUAL, WEIGHTS = f"{MODEL}.compute_dtype", f"{MODEL}.residual_dtype", f"{MODEL}.param_init_type"
PARTS = tuple(f"{MODEL}.{part}" for part in ("layernorm_compute_type", "softmax_compute_type", "rotary_dtype"))
SCALE = "runner_wrapper.scale_sense"
WORKERS, PREFETCH = "train_dataset.num_parallel_workers", "train_dataset.prefetch_size"
FULL_BATCH, STRATEGY = "parallel.full_batch", "parallel.dataset_strategy"
FLASH = f"{MODEL}.use_flash_attention"
DEFAULTS = {
    **dict.fromkeys((DP, TP, PP, CP, CHUNKS, COPIES, TOKEN_COPIES, BATCH, ACCUMULATED, MICRO_BATCHES, "seed"), 1),
    **dict.fromkeys((FULL, SELECT, COMMUNICATION), False),
    METHOD: METHODS["all_gather"],
    SCHEDULER: "1f1b",
    LEVEL: "level1",
    SHARD_SIZE: -1,
    COMPUTE: "float16",
    SCALE: 1.0,
    FULL_BATCH: True,
}
DIMENSIONS = {
    "num_layers": ("num_layers", "num_hidden_layers"),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size", "ffn_hidden_size"),
    "num_heads": ("num_heads", "num_attention_heads"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "vocab_size": ("vocab_size",),
    "rope_theta": ("theta", "rope_theta"),
    "norm_eps": ("rms_norm_eps", "layernorm_epsilon"),
    "seq_length": ("seq_length",),
}
"""Keys of the model's section, in releases before 1.6 and since; exports use the former."""


# The model and the data.

_WHOLE = ("recompute_config.select_recompute", "recompute_config.select_comm_recompute", "runner_wrapper.scale_sense")
"""Settings whose values are mappings."""
_FRAME = {
    "use_legacy": True,
    "run_mode": "train",
    "use_parallel": True,
    "trainer.type": "CausalLanguageModelingTrainer",
    "trainer.model_name": "llama",
    "context.mode": 0,
    "parallel.parallel_mode": 1,
    "parallel.gradients_mean": True,
    "runner_wrapper.type": "MFTrainOneStepCell",
    "optimizer.type": "AdamW",
    "lr_schedule.type": "ConstantWarmUpLR",
    "lr_schedule.warmup_ratio": 0.0,
    "lr_schedule.total_steps": -1,
    "train_dataset.data_loader.type": "MindDataset",
    "train_dataset.data_loader.dataset_dir": "path/to/your.mindrecord",
    "train_dataset.data_loader.shuffle": True,
    "train_dataset.input_columns": ["input_ids"],
    "train_dataset.drop_remainder": True,
    "train_dataset_task.type": "CausalLanguageModelDataset",
}
"""Settings for training as in the runner: semi-automatic parallel graph mode, constant learning rate."""
_ARCHITECTURE = {
    "model.arch.type": "LlamaForCausalLM",
    f"{MODEL}.type": "LlamaConfig",
    f"{MODEL}.init_method_std": 0.02,
    f"{MODEL}.tie_word_embeddings": False,
}


def _write_kind(builder: SettingsBuilder) -> None:
    builder.settings |= _FRAME
    if isinstance(builder.workload.model, LlamaModel):
        builder.settings |= _ARCHITECTURE
    else:
        builder.refuse("workload.model", f"this recipe is for Llama, not models of kind {builder.workload.model.kind}")


def _read_kind(found: Found) -> dict[str, Any]:
    found.num_layers = found.get(NUM_LAYERS)
    return {"workload.model.kind": "llama"} if "model.arch.type" in found else {}


def _write_data(builder: SettingsBuilder) -> None:
    builder.warn("workload.data", "convert your tokens to MindRecord (seq_length + 1 per sample) and set dataset_dir")


# The layout and the batch.


def _write_data_parallel(builder: SettingsBuilder) -> None:
    layout, before = builder.candidate.layout, builder.current(DP) or 1
    builder.settings[DP] = layout.dp
    if builder.is_export or (builder.changed("layout.zero_stage") and layout.dp > 1):
        builder.settings[SHARDS] = layout.zero_stage > 0
        if layout.zero_stage:
            builder.settings[LEVEL] = f"level{layout.zero_stage}"
    if layout.zero_stage and (builder.is_export or builder.current(SHARD_SIZE) is not None or layout.dp_replicate > 1):
        builder.settings[SHARD_SIZE] = layout.dp_shard * layout.cp
    if layout.zero_stage >= 2 and builder.is_export:
        builder.settings[SHARDS_SUMS] = layout.gradient_reduction == "each"
    rows = builder.current(STRATEGY)
    if layout.dp != before and isinstance(rows, list):
        builder.settings[STRATEGY] = [_split(one, before, layout.dp) for one in rows]


def _split(one: Any, before: int, now: int) -> Any:
    """How one input of the data set is split: along the batch, over the data-parallel ranks."""
    return [now, *one[1:]] if isinstance(one, list) and one and one[0] == before else one


def _read_data_parallel(found: Found) -> dict[str, Any]:
    dp, cp = found.whole("layout.dp", DP), found.whole("layout.cp", CP)
    if dp is None or cp is None:
        return {}
    stage = int(str(found[LEVEL]).removeprefix("level")) if found.is_on(SHARDS) else 0
    size = found.whole("layout.dp_shard", SHARD_SIZE) or -1
    shards = 1 if stage == 0 else dp if size <= 0 else max(1, size // cp)
    if dp % shards:
        found.unread("layout.dp_shard", f"{SHARD_SIZE}: {size} with {dp} data-parallel ranks")
        return {}
    values = {"layout.dp_replicate": dp // shards, "layout.dp_shard": shards, "layout.zero_stage": stage}
    if not found.is_export:
        return values
    return {**values, "layout.gradient_reduction": "each" if stage < 2 or found[SHARDS_SUMS] else "last"}


def _write_embedding(builder: SettingsBuilder) -> None:
    """With tensor parallelism, always write that the embedding is split over the vocabulary, as in the runner."""
    builder.settings[EMBEDDING] = builder.candidate.layout.tp == 1


def _write_pipeline(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    chunks, number_of_batches = layout.num_virtual_stages, num_microbatches(builder)
    if layout.pp > 1:
        share = builder.workload.num_layers // (layout.pp * chunks)
        rows = [[count - share for count in each] for each in layout.stage_layers]
        offset = rows[0] if len(rows) == 1 else rows
    if not builder.is_export:
        builder.settings[PP] = layout.pp
        if layout.pp == 1:
            builder.drop(CHUNKS, OFFSET, INTERLEAVE, SCHEDULER)
            return
        builder.settings[OFFSET] = offset if any(map(any, rows)) else 0
        if chunks > 1 or builder.current(CHUNKS) is not None:
            builder.settings |= {CHUNKS: chunks, INTERLEAVE: chunks > 1}
        builder.settings[SCHEDULER] = SCHEDULERS[layout.schedule]
    elif layout.pp > 1:
        builder.settings |= {INTERLEAVE: chunks > 1, SCHEDULER: SCHEDULERS[layout.schedule]}
        builder.settings |= {CHUNKS: chunks, OFFSET: offset}
        if _has_gap(layout.stage_layers):
            builder.refuse("layout.stage_layers", _GAP)
        if number_of_batches < layout.pp:
            builder.refuse("layout.pp", f"MindFormers requires at least one micro-batch per stage: {number_of_batches}")


_GAP = "only the first and the last stage may be without layers"


def _has_gap(stage_layers: Counts) -> bool:
    return 0 in [count for each in stage_layers for count in each][1:-1]


def _read_pipeline(found: Found) -> dict[str, Any]:
    pp, layers = found.whole("layout.pp", PP), found.num_layers
    if pp == 1:
        found.held = ((layers or 1,),)
        return without_pipeline()
    chunks, theirs = found.whole("layout.num_virtual_stages", CHUNKS), found.get(SCHEDULER)
    values: dict[str, Any] = {"layout.pp": pp, "layout.num_virtual_stages": chunks}
    ours = {"zero_bubble_v": "zbv", "gpipe": "gpipe", "1f1b": "interleaved" if chunks and chunks > 1 else "1f1b"}
    values["layout.schedule"] = ours.get(str(theirs))
    if theirs not in ours:
        found.unread("layout.schedule", f"{SCHEDULER}: {theirs}")
    if not (pp and chunks and layers):
        return values
    found.held = _held(found.get(OFFSET, 0), layers, pp, chunks)
    if found.held is None:
        found.unread("layout.stage_layers", f"{OFFSET}: {found.get(OFFSET)} for {layers} layers, pp {pp}")
    return {**values, "layout.stage_layers": found.held}


def _held(offset: Any, layers: int, pp: int, chunks: int) -> Counts | None:
    """Layers of every chunk and stage: the even share plus ``offset``."""
    share = layers // (pp * chunks)
    rows = [[0] * pp] * chunks if offset in (0, None, []) else offset
    rows = rows if isinstance(rows, list) and isinstance(rows[0], list) else [rows]
    if any(not isinstance(row, list) or len(row) != pp for row in rows):
        return None
    held = tuple(tuple(share + number for number in row) for row in rows)
    return held if sum(map(sum, held)) == layers and len(held) == chunks else None


def _write_micro_batch(builder: SettingsBuilder) -> None:
    """``micro_batch_interleave_num`` splits samples, ``fine_grain_interleave`` the positions of the projections."""
    candidate, copies = builder.candidate, builder.candidate.layout.num_copies
    by_sample, by_token = (1, copies) if candidate.splits_positions else (copies, 1)
    if builder.changed("layout.num_copies") or copies > 1:
        builder.settings[COPIES] = by_sample
    if by_token > 1 or builder.current(TOKEN_COPIES) not in (None, 1):
        builder.settings[TOKEN_COPIES] = by_token
    builder.settings[BATCH] = candidate.micro_batch_size // by_sample


def _read_micro_batch(found: Found) -> dict[str, Any]:
    copies, size = found.whole("layout.num_copies", COPIES), found.whole("micro_batch_size", BATCH)
    by_token = found.whole("layout.num_copies", TOKEN_COPIES)
    if not (size and copies and by_token):
        return {}
    if by_token > 1 and found.fields.get("layout.tp", 1) > 1:
        if by_token > 2 or copies > 1 or size % 2 == 0:
            split = f"{TOKEN_COPIES} {by_token} with {COPIES} {copies} and batch_size {size}"
            found.unread(
                "layout.num_copies", f"{split} has no equal: positions are split in 2, and only of an odd batch"
            )
            return {"micro_batch_size": size * copies}
        return {"layout.num_copies": by_token, "micro_batch_size": size}
    return {"layout.num_copies": copies, "micro_batch_size": size * copies}


def _write_batch(builder: SettingsBuilder) -> None:
    builder.settings[MICRO_BATCHES if builder.candidate.layout.pp > 1 else ACCUMULATED] = num_microbatches(builder)


def _read_batch(found: Found) -> dict[str, Any]:
    size, key = (
        found.fields.get("micro_batch_size"),
        MICRO_BATCHES if found.fields.get("layout.pp", 1) > 1 else ACCUMULATED,
    )
    batches = found.whole("micro_batch_size", key)
    if not (size and batches):
        return {}
    found.num_microbatches = batches
    replicas, shards = (found.fields.get(f"layout.{name}") for name in ("dp_replicate", "dp_shard"))
    return {"workload.global_batch_size": size * batches * replicas * shards} if replicas and shards else {}


# Recompute.

GATHERS = r".*\.norm"
"""Operators before which MindFormers gathers sequence shards."""
GATHERS_IN = {gather_pattern("attention"): r"attention_norm\.norm", gather_pattern("feed_forward"): r"ffn_norm\.norm"}
"""The same by sub-layer, for the runner's patterns."""
PATTERNS = {
    "attention": "attention",
    "attention_norm": "attention_norm",
    r"attention_norm\.rms_norm": r"attention_norm\.norm",
    r"attention\.scaled_dot_product_attention": r"attention\.flash_attention",
    "feed_forward": "feed_forward",
    r"feed_forward\.mul": r"feed_forward\.mul",
    r"feed_forward\.silu": r"feed_forward\.w1\.activation\.silu",
    "feed_forward_norm": "ffn_norm",
    r"feed_forward_norm\.rms_norm": r"ffn_norm\.norm",
}
"""Operators and modules of the runner's layers, with their names in MindFormers' Llama."""


def _write_recompute(builder: SettingsBuilder) -> None:
    recompute = builder.candidate.recompute
    builder.settings |= {FULL: _rows(recompute.full), SELECT: False, COMMUNICATION: False}
    parts = {part.pattern: _rows(part.num_layers) for part in recompute.selective}
    configured = {PATTERNS[pattern]: rows for pattern, rows in parts.items() if pattern in PATTERNS}
    gathers = {GATHERS_IN[pattern]: rows for pattern, rows in parts.items() if pattern in GATHERS_IN}
    unknown = [pattern for pattern in parts if pattern not in PATTERNS | GATHERS_IN]
    if configured:
        builder.settings[SELECT] = configured
    if unknown:
        builder.refuse("recompute.selective", f"{', '.join(unknown)}: known are {', '.join(PATTERNS)}")
    if recompute.communication:
        gathers[GATHERS] = _rows(recompute.communication)
    if gathers:
        builder.settings[COMMUNICATION] = gathers
    if not builder.is_export and recompute.full == layers_of(builder.candidate.layout, builder.workload.num_layers):
        builder.settings[FULL] = True  # in its usual spelling


def _rows(counts: Counts) -> Any:
    return [list(row) for row in counts] if counts else False


def _read_recompute(found: Found) -> dict[str, Any]:
    held = found.held
    if held is None:
        found.unread("recompute", "layers of unknown stages")
        return {}
    values: dict[str, Any] = {"recompute.full": _counts(found[FULL], held, found)}
    if values["recompute.full"] is None:
        found.unread("recompute.full", f"{FULL}: {found[FULL]}")
    select, known = _patterns(found[SELECT], held, found), {theirs: ours for ours, theirs in PATTERNS.items()}
    gathers, gathers_in = _patterns(found[COMMUNICATION], held, found), {v: k for k, v in GATHERS_IN.items()}
    if select is not None and set(select) <= set(known):
        parts = [(known[name], counts) for name, counts in select.items()]
        parts += [(gathers_in[name], counts) for name, counts in (gathers or {}).items() if name in gathers_in]
        values["recompute.selective"] = tuple(SelectiveRecompute(pattern=p, num_layers=n) for p, n in sorted(parts))
    for name in set(select or ()) - set(known):
        found.unread("recompute.selective", f"{SELECT}: {name}")
    if gathers is not None and set(gathers) <= {GATHERS, *gathers_in}:
        values["recompute.communication"] = gathers.get(GATHERS, ())
    elif gathers is not None:
        found.unread("recompute.communication", f"{COMMUNICATION}: {', '.join(gathers)}")
    return values


def _counts(configured: Any, held: Counts, found: Found) -> Counts | None:
    """Layers per chunk and stage from true, false, numbers per stage, or lists of them per chunk; a command may have
    numbers that exceed the layers."""
    if isinstance(configured, bool):
        return all_of(held) if configured else ()
    if not isinstance(configured, list) or not configured:
        return None
    rows = configured if isinstance(configured[0], list) else [configured]
    shape = [len(row) for row in held]
    if [len(row) if isinstance(row, list) else -1 for row in rows] != shape:
        return None
    if found.is_export:
        return tuple(map(tuple, rows))
    counts = tuple(
        tuple(min(most if count is True else int(count), most) for count, most in zip(each, stages, strict=True))
        for each, stages in zip(rows, held, strict=True)
    )
    return counts if any(map(any, counts)) else ()


def _patterns(configured: Any, held: Counts, found: Found) -> dict[str, Counts] | None:
    """Numbers of layers by pattern; for a plain list of patterns, all layers."""
    if configured in (False, None, {}, []):
        return {}
    pairs = dict.fromkeys(configured, True) if isinstance(configured, list) else configured
    if not isinstance(pairs, dict):
        found.unread("recompute.selective", f"recompute: {configured}")
        return None
    made = {str(name): _counts(value, held, found) for name, value in pairs.items()}
    if any(counts is None for counts in made.values()):
        found.unread("recompute.selective", f"recompute: {configured}")
        return None
    return {name: counts for name, counts in made.items() if counts}


# Number formats, data loading, kernels.

_BY_MODULE = "number formats are set by kind of module, not by lists of operators"
_DTYPES = {"float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32"}


def _write_precision(builder: SettingsBuilder) -> None:
    """Write number formats: weights and masters stay fp32; O1 also keeps norms, softmax and residuals in fp32."""
    precision = builder.candidate.precision
    refuse_fp8(builder)
    parts = precision.dtype if precision.base == "O2" else "float32"
    builder.settings[COMPUTE] = precision.dtype
    if builder.is_export:
        builder.settings[WEIGHTS] = "float32"
    builder.settings[RESIDUAL] = parts
    if builder.is_export:
        builder.settings |= dict.fromkeys(PARTS, parts)
    builder.settings[SCALE] = 1.0
    if precision.level == "O1" and builder.is_export:
        builder.warn("precision.level", _BY_MODULE)
    if precision.loss_scale is not None:
        _write_loss_scale(builder, precision.loss_scale)


def _write_loss_scale(builder: SettingsBuilder, scale: LossScale) -> None:
    if not scale.dynamic:
        builder.settings[SCALE] = scale.initial
        return
    builder.settings |= {
        SCALE: {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": scale.initial,
            "scale_factor": int(scale.growth_factor),
            "scale_window": scale.growth_interval,
        }
    }
    if not builder.is_export:
        return
    if scale.growth_factor != int(scale.growth_factor):
        builder.refuse("precision.loss_scale.growth_factor", "integers only")
    if scale.backoff_factor * scale.growth_factor != 1.0:
        builder.refuse("precision.loss_scale.backoff_factor", "always the inverse of growth_factor")
    if scale.backoff_interval != 1:
        builder.warn("precision.loss_scale.backoff_interval", "the scale shrinks after every overflow")


def _read_precision(found: Found) -> dict[str, Any]:
    dtype = _DTYPES.get(str(found[COMPUTE]))
    if dtype is None:
        found.unread("precision.dtype", f"{COMPUTE}: {found[COMPUTE]}")
        return {}
    residual = _DTYPES.get(str(found.get(RESIDUAL, dtype)))
    level = "O0" if dtype == "float32" else "O2" if residual == dtype else "O1"
    values: dict[str, Any] = {"precision.dtype": dtype, "precision.level": level}
    if dtype == "float16":
        try:
            scale = dataclasses.asdict(_loss_scale(found[SCALE]))
        except (KeyError, TypeError, ValueError):
            found.unread("precision.loss_scale", f"{SCALE}: {found[SCALE]}")
        else:
            values |= {f"precision.loss_scale.{name}": value for name, value in scale.items()}
    return values


def _loss_scale(theirs: Any) -> LossScale:
    if not isinstance(theirs, dict):
        return LossScale(dynamic=False, initial=float(theirs))
    return LossScale(
        initial=float(theirs["loss_scale_value"]),
        growth_factor=float(theirs["scale_factor"]),
        backoff_factor=1.0 / theirs["scale_factor"],
        growth_interval=theirs["scale_window"],
        backoff_interval=1,
    )


def _write_loader(builder: SettingsBuilder) -> None:
    loader, settings = builder.candidate.loader, builder.settings
    if not builder.is_export:
        if builder.changed("loader.num_workers"):
            settings[WORKERS] = loader.num_workers
        if loader.num_workers and builder.changed("loader.prefetch_factor"):
            settings[PREFETCH] = loader.prefetch_factor
        if not loader.num_workers:
            builder.refuse("loader.num_workers", "MindSpore always reads in separate processes")
    elif loader.tuning is None:
        settings |= {WORKERS: max(1, loader.num_workers), PREFETCH: max(1, loader.prefetch_factor)}
        if loader.num_workers == 0:
            builder.warn("loader.num_workers", "MindSpore always reads in separate processes")
            builder.warn("loader.prefetch_factor", "MindSpore always prefetches")


def _read_loader(found: Found) -> dict[str, Any]:
    workers = found.whole("loader.num_workers", WORKERS)
    values: dict[str, Any] = {"loader.num_workers": workers}
    if workers:
        values["loader.prefetch_factor"] = found.whole("loader.prefetch_factor", PREFETCH)
    if workers and not found.is_export:
        values["loader.persistent_workers"] = True
    return {path: value for path, value in values.items() if value is not None}


def _write_full_batch(builder: SettingsBuilder) -> None:
    full = builder.candidate.loader.full_batch
    builder.settings |= {FULL_BATCH: full, STRATEGY: "full_batch" if full else [[builder.settings[DP], 1]]}


def _write_attention(builder: SettingsBuilder) -> None:
    wanted = builder.candidate.kernels.attention
    flash = wanted != "math" or (builder.is_export and builder.candidate.layout.cp > 1)
    builder.settings[FLASH] = flash
    if builder.is_export and wanted != ("flash" if flash else "math"):
        builder.warn("kernels.attention", "flash attention; context parallelism supports no other kernel")
    elif wanted not in ("flash", "math"):
        builder.refuse("kernels.attention", "flash and math only")


def _read_attention(found: Found) -> dict[str, Any]:
    return {"kernels.attention": "flash" if found.is_on(FLASH) else "math"} if FLASH in found else {}


_CLIPS, _CLIP_NORM = "runner_wrapper.use_clip_grad", "runner_wrapper.max_grad_norm"


def _write_clip_norm(builder: SettingsBuilder) -> None:
    norm = builder.workload.optimizer.clip_norm
    builder.settings[_CLIPS] = norm > 0
    if norm:
        builder.settings[_CLIP_NORM] = norm


def _read_clip_norm(found: Found) -> dict[str, Any]:
    return {"workload.optimizer.clip_norm": float(found[_CLIP_NORM]) if found.is_on(_CLIPS) else 0.0}


ROWS: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.model.resnet", "workload.model.linear"),
        (*_FRAME, *_ARCHITECTURE),
        _write_kind,
        _read_kind,
    ),
    *(option(f"{LLAMA}.{ours}", f"{MODEL}.{names[0]}") for ours, names in DIMENSIONS.items() if ours != "seq_length"),
    option("workload.seq_length", f"{MODEL}.seq_length"),
    option("workload.optimizer.lr", "lr_schedule.learning_rate"),
    betas("optimizer.betas"),
    option("workload.optimizer.eps", "optimizer.eps"),
    custom(("workload.optimizer.clip_norm",), (_CLIPS, _CLIP_NORM), _write_clip_norm, _read_clip_norm),
    weight_decay_but_norms("optimizer.weight_decay"),
    number("workload.seed", "seed"),
    custom(("workload.data",), (), _write_data),
    number("layout.tp", TP),
    option("layout.pp", PP),
    DEGREE_ROW,
    row(
        ("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage", "layout.gradient_reduction"),
        (DP, SHARDS, LEVEL, SHARD_SIZE, SHARDS_SUMS),
        _write_data_parallel,
        _read_data_parallel,
    ),
    mindformers_experts.ROW,
    mindformers_experts.PARALLEL,
    NO_LATENT,
    lacking("layout.replicate_with", "MindSpore replicates with its own fused all-reduce, like ddp"),
    sharded_from(
        1,
        refused="embedding and head are sharded by the parallel optimiser only",
        warned="the parallel optimiser shards embedding and head like other weights",
    ),
    switch("layout.sequence_parallel", SEQUENCE, matters=lambda candidate: candidate.layout.tp > 1),
    own_collectives("the MindSpore compiler places the collectives", lambda found: int(found[TP])),
    custom((), (EMBEDDING,), _write_embedding),
    METHOD_ROW,
    row(
        ("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (PP, INTERLEAVE, SCHEDULER, CHUNKS, OFFSET),
        _write_pipeline,
        _read_pipeline,
    ),
    row(
        ("layout.num_copies", "micro_batch_size"), (COPIES, TOKEN_COPIES, BATCH), _write_micro_batch, _read_micro_batch
    ),
    row("workload.global_batch_size", (MICRO_BATCHES, ACCUMULATED), _write_batch, _read_batch),
    row(
        ("recompute.full", "recompute.selective", "recompute.communication"),
        (FULL, SELECT, COMMUNICATION),
        _write_recompute,
        _read_recompute,
    ),
    row(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (COMPUTE, WEIGHTS, RESIDUAL, *PARTS, SCALE),
        _write_precision,
        _read_precision,
    ),
    lacking("precision.white", _BY_MODULE, severity="error", in_overlays=True),
    lacking("precision.black", _BY_MODULE, severity="error", in_overlays=True),
    NO_FP32_MODULES,
    NO_FLOAT8_GATHER,
    row(("loader.num_workers", "loader.prefetch_factor"), (WORKERS, PREFETCH), _write_loader, _read_loader),
    lacking("loader.persistent_workers", "the data pipeline is kept between epochs", means=True),
    lacking(
        "loader.tuning", f"the loader is not tuned automatically; set {WORKERS} and {PREFETCH} to the values found"
    ),
    custom(
        ("loader.full_batch",),
        (FULL_BATCH, STRATEGY),
        _write_full_batch,
        lambda found: {"loader.full_batch": found.is_on(FULL_BATCH)},
        overlay="read",
    ),
    lacking("loader.pin_memory", "MindSpore manages the host memory of its data pipeline"),
    row("kernels.attention", FLASH, _write_attention, _read_attention),
    lacking("kernels.compile", "MindSpore always compiles the full model", means="model"),
    lacking("kernels.backend", "MindSpore has its own compiler"),
    lacking("kernels.compile_mode", "MindSpore has its own compiler; its levels are context.jit_config.jit_level"),
    lacking("kernels.matmul_precision", "the precision of fp32 multiplications is the default of the device"),
    *OWN_KERNELS,
    *VARYING_LENGTHS,
    *memory_savers(),
)


# Exports.


def _render(builder: SettingsBuilder) -> dict[str, str]:
    content = tree({f"{FILE}:{name}": value for name, value in builder.settings.items()}, FILE)
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    return {FILE: "\n".join([*comments(builder.notes), text])}


def _load(files: Mapping[str, str]) -> Settings:
    content = yaml.safe_load(files[FILE])
    found: dict[str, Any] = {}
    for name in _WHOLE:
        section, _, key = name.partition(".")
        found[name] = content[section].pop(key)
    return found | {name.partition(":")[2]: value for name, value in settings_of(FILE, content).items()}


def _command(builder: SettingsBuilder) -> str:
    size = builder.candidate.layout.world_size
    return f'bash scripts/msrun_launcher.sh "run_mindformer.py --config {FILE} --use_parallel True" {size}'


RECIPE = Recipe(
    name="mindformers",
    title="MindFormers",
    settings=ROWS,
    render=_render,
    load=_load,
    command=_command,
    defaults=DEFAULTS,
)


# Commands.

_CONFIG, _BATCH_SIZE = Argument(name="--config"), either_dash("--batch_size")
_TASK = "train_dataset_task.dataset_config."
"""Place where an alias often repeats the section of the data set."""
_WORKER_NUM, _LOCAL_WORKER_NUM = either_dash("--worker_num"), either_dash("--local_worker_num")


def _document(edit: Edit) -> EditedFile:
    """The YAML of a command being edited; an empty one if there is none."""
    name = _file_name(edit.argv)
    if name is None or name not in edit.files:
        return EditedFile(edit, "")
    edit.names[name] = f"{name}.yaml"
    return EditedFile(edit, name)


def _file_name(argv: Words) -> str | None:
    """Placeholder of the YAML among the arguments."""
    word = read_text(argv, _CONFIG)
    return word[1:-1] if word and word.startswith("{") and word.endswith("}") else None


class MindFormersSettings:
    """Settings by dotted key, from the YAML; the batch size may be an argument."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._config = _document(edit)

    def get(self, name: str, /, default: Any = None) -> Any:
        given = read_text(self._edit.argv, _BATCH_SIZE) if name == BATCH else None
        return given or self._config.get(name, default)

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name == BATCH and arguments.is_specified(self._edit.argv, _BATCH_SIZE):
                self._edit.argv = arguments.write(self._edit.argv, _BATCH_SIZE, str(value))
                continue
            self._config.put({name: value})
            again = name.replace("train_dataset.", _TASK)
            if again != name and self._config.has(again):
                self._config.put({again: value})

    def drop(self, *names: str) -> None:
        self._config.drop(*names)


def _name_of(config: EditedFile, key: str) -> str:
    """Dotted key of a dimension by the file's name of it."""
    found = [name for name in DIMENSIONS[key] if config.get(f"{MODEL}.{name}") is not None]
    return f"{MODEL}.{(found or DIMENSIONS[key])[0]}"


def _model(edit: Edit, found: Found) -> LlamaModel | None:
    """The decoder, if the model's section has all its dimensions."""
    config = _document(edit)
    if not config.exists:
        found.refuse("workload", f"no YAML found: write {SCRIPT} --config FILE as separate arguments")
        return None
    found.num_layers = found.whole("workload", _name_of(config, "num_layers"))
    found.add({"workload.seq_length": found.whole("workload", _name_of(config, "seq_length"))})
    keys = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
    numbers = {key: found.whole("workload.model", _name_of(config, key)) for key in keys}
    missing = [key for key, number in numbers.items() if number is None]
    heads, size = numbers["num_heads"], config.get(f"{MODEL}.head_dim")
    if missing or heads is None:
        found.warn("workload.model", f"missing from {MODEL}: {', '.join(missing)}; without it there are no predictions")
        return None
    experts = None
    if int(config.get("moe_config.expert_num") or 1) > 1:
        experts = mindformers_experts.read_experts(config.get, numbers["ffn_hidden_size"] or 0)
        if config.get(f"{MODEL}.type") != "LlamaConfig":
            found.warn("workload.model", f"moe_config of a {config.get(f'{MODEL}.type')}: no predictions")
            return None
    if size is not None and size * heads != numbers["hidden_size"]:
        found.warn("workload.model", f"head_dim {size}: attention is wider than the model; predictions ignore that")
    return LlamaModel(
        **{key: int(number or 0) for key, number in numbers.items()},
        latent=None,
        num_kv_heads=found.whole("workload.model", _name_of(config, "num_kv_heads")) or heads,
        rope_theta=float(config.get(_name_of(config, "rope_theta")) or 10000.0),
        norm_eps=float(config.get(_name_of(config, "norm_eps")) or 1e-6),
        experts=experts,
    )


def _check(edit: Edit, request: OverlayRequest) -> None:
    config = _document(edit)
    if config.exists:
        _check_dimensions(edit, config, request)
    _write_world_size(edit, request)


def _check_dimensions(edit: Edit, config: EditedFile, request: OverlayRequest) -> None:
    layout, shape = request.candidate.layout, request.reading.shape
    if layout.pp > 1 and request.num_microbatches < layout.pp:
        edit.refuse("layout.pp", f"{request.num_microbatches} micro-batches: at least one per stage is required")
    if _has_gap(layout.stage_layers):
        edit.refuse("layout.stage_layers", _GAP)
    if shape is None:
        return
    if problem := mindformers_experts.parallel_problem(layout):
        edit.refuse("layout.ep", problem)
    for what, count in (("heads", shape.num_heads), ("the width of the feed-forward part", shape.ffn_hidden_size)):
        if count % layout.tp:
            edit.refuse("layout.tp", f"{what} {count} is not a multiple of model_parallel {layout.tp}")
    if shape.num_kv_heads % layout.tp and layout.tp % shape.num_kv_heads:
        edit.refuse("layout.tp", f"{_name_of(config, 'num_kv_heads')} {shape.num_kv_heads} over {layout.tp}")
    if shape.vocab_size % layout.tp and str(config.get(EMBEDDING, True)).lower() != "true":
        edit.refuse("layout.tp", f"vocab_size {shape.vocab_size} is not a multiple of model_parallel {layout.tp}")


def _write_world_size(edit: Edit, request: OverlayRequest) -> None:
    """Write msrun's number of workers, which on one node is also the number per node."""
    total = arguments.read_text(edit.argv, _WORKER_NUM)
    local = arguments.read_text(edit.argv, _LOCAL_WORKER_NUM)
    if total is None or "{" in total or total == str(request.world_size):
        return
    edit.argv = arguments.write(edit.argv, _WORKER_NUM, str(request.world_size))
    if local == total:
        edit.argv = arguments.write(edit.argv, _LOCAL_WORKER_NUM, str(request.world_size))


TABLE = FrameworkTable(rows=ROWS, command=MindFormersSettings, defaults=DEFAULTS, model=_model, check=_check)


# Trials.

_MSRUN = "mindspore.parallel.cluster.run"
"""The module behind ``msrun``."""
LOG_DIR, JOIN = either_dash("--log_dir"), Argument(name="--join")
_OVERRIDES = tuple(
    either_dash(name)
    for name in ("--load_checkpoint", "--resume_training", "--auto_trans_ckpt", "--do_eval", "--profile", "--run_mode")
)
"""Arguments of ``run_mindformer.py`` that would override the YAML."""
_OFF: dict[str, Any] = {
    "load_checkpoint": "",
    "resume_training": False,
    "auto_trans_ckpt": False,
    "only_save_strategy": False,
    "do_eval": False,
    "profile": False,
    "init_start_profile": False,
    "remote_save_url": None,
    "save_file": None,
}
_OUTPUT = {"output_dir": "{out}/output", "parallel.strategy_ckpt_config.save_file": "{out}/strategy.ckpt"}
_SILENT = ("tensorboard", "monitor_config")
_LOSS_MONITOR = "MFLossMonitor"


def recognises(run: Run) -> bool:
    return any(PurePath(word).name == SCRIPT or SCRIPT in word.split() for word in run.argv)


def find_files(argv: Words, cwd: str) -> Mapping[str, str]:
    """The YAML given by ``--config``."""
    word = arguments.read_text(argv, _CONFIG)
    if not word or "{" in word or not recognises(Run(argv=argv, cwd=cwd)):
        return {}
    return {"config": str(Path(cwd, word))}


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """The trial without checkpoints, evaluation, profiles and trackers; ``runner_config.stop_step`` ends it without
    changing the learning-rate schedule. msrun's logs go into the attempt's folder."""
    edit = Edit.of_overlay(made)
    config = _document(edit)
    for argument in _OVERRIDES:
        edit.argv = arguments.remove(edit.argv, argument)
    if any(PurePath(word).name == "msrun" or word == _MSRUN for word in edit.argv):
        edit.argv = _msrun(edit.argv)
    if not config.exists:
        return edit.overlay()
    changes = {key: value for key, value in _OFF.items() if config.has(key) and config.get(key) != value}
    changes |= {key: value for key, value in _OUTPUT.items() if key == "output_dir" or config.has(key)}
    changes |= {"runner_config.stop_step": last_step, "runner_config.sink_size": 1}
    config.put({**changes, "callbacks": _callbacks(config.get("callbacks"))})
    config.drop(*_SILENT)
    return edit.overlay()


def _msrun(argv: Words) -> Words:
    """The arguments with msrun's own, which come before the script."""
    at = next(index for index, word in enumerate(argv) if SCRIPT in word or word.endswith(".py"))
    head = arguments.write(argv[:at], LOG_DIR, "{out}/msrun_log")
    return (*arguments.write(head, JOIN, "True"), *argv[at:])


def _callbacks(configured: Any) -> list[Any]:
    """The user's callbacks without those that save or send data, plus one that prints every step."""
    kept = [one for one in configured or [] if isinstance(one, dict) and not _saves(str(one.get("type", "")))]
    monitors = [{**one, "per_print_times": 1} for one in kept if one.get("type") == _LOSS_MONITOR]
    others = [one for one in kept if one.get("type") != _LOSS_MONITOR]
    return [*(monitors or [{"type": _LOSS_MONITOR, "per_print_times": 1}]), *others]


def _saves(name: str) -> bool:
    return any(word in name for word in ("Checkpoint", "Obs", "Eval", "Profile", "Summary", "TrainingStateMonitor"))


TRAINING = Training(
    name="mindformers",
    title="MindFormers",
    package="mindformers",
    releases=">=1.3,<2.2",
    launcher="own",
    log=LogFormat(name="mindformers", files=("{out}/msrun_log/worker_*.log",)),
    recognises=recognises,
    find_files=find_files,
    read=TABLE.read,
    overlay=TABLE.overlay,
    trial_mode=trial_mode,
    expected=lambda request: Expected(world_size=request.world_size),
)
