"""The Trainer of transformers, including that of trl: arguments for a candidate, read and written, and the settings of
a trial. LLaMA-Factory and ms-swift use the same rows in their own dialects.

Names and defaults are those of transformers 5.23 (``training_args.py``, ``hf_argparser.py``); versions since 4.46 agree
in everything written here.
"""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.frameworks.arguments import Words
from orchestrator.frameworks.decoder_config import decoder_in
from orchestrator.frameworks.documents import ABSENT
from orchestrator.frameworks.edit import Edit, FrameworkTable, Overlay, OverlayRequest, Run, Training
from orchestrator.frameworks.gaps import TORCH_SCALER, num_microbatches, refuse_fp8, without_pipeline
from orchestrator.frameworks.launchers import count, imports, program_of, script_text, without_launcher
from orchestrator.frameworks.spelling import Found, Setting, SettingsBuilder, custom, number, row, switch
from orchestrator.frameworks.trainer_arguments import (
    ACCUMULATION,
    CONFIGURATION,
    ENGINE,
    MIXED_PRECISION,
    RANKS,
    STAGE,
    Dialect,
    FileSection,
    ShardingEngine,
    TrainerArguments,
    environment,
    find_files,
    find_launch_files,
    truth,
    world_size,
)
from trials.script.command import OUT, Expected, LogFormat
from trials.spec import LlamaModel, LossScale, Precision

_MODEL_FOLDERS = ("config_name", "model_name_or_path", "model", "model_id_or_path")
"""Arguments that name a model, or a folder with its ``config.json``."""
_LENGTHS = ("block_size", "max_seq_length", "cutoff_len", "max_length", "model_max_length")
_BATCH, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_STEPS = f"env:{ACCUMULATION}"
_SIZES = ("micro_batch_size", "workload.global_batch_size")
_WORKERS, _AHEAD, _KEPT = "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"
_DYNAMO_BACKEND, _DYNAMO_MODE = "env:ACCELERATE_DYNAMO_BACKEND", "env:ACCELERATE_DYNAMO_MODE"
_REGIONAL = "env:ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
_PRECISION = f"env:{MIXED_PRECISION}"
_FSDP_RECOMPUTE = "fsdp:activation_checkpointing"
MODES = ("default", "reduce-overhead", "max-autotune")
"""Modes of torch.compile that are built-in knobs."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
DEFAULTS: Mapping[str, Any] = {
    _BATCH: 8,
    _ACCUMULATION: 1,
    "bf16": False,
    "fp16": False,
    "torch_compile": False,
    _WORKERS: 0,
    "dataloader_pin_memory": True,
    _KEPT: False,
    "gradient_checkpointing": False,
    "max_steps": -1,
    "seed": 42,
}
"""Defaults of ``TrainingArguments`` in transformers 4.40 to 5.23."""


def opened(run: Run) -> Edit:
    """The command with the launcher's variables instead of the launcher."""
    edit = Edit.of_run(run)
    launched = without_launcher(edit.argv)
    edit.argv = launched.argv
    world = launched.world_size
    if launched.launcher == "accelerate":
        edit.env |= environment(launched.options, edit)
        world = world_size(launched, edit)
    edit.world_size = world or count(run.env.get("WORLD_SIZE"))
    return edit


def _is_on(found: Found, knob: str, name: str) -> bool | None:
    """A truth value; None if missing, or if it is not one, which is noted."""
    given = found.get(name)
    is_on = truth(given)
    if is_on is None and given is not None and "{" not in str(given):
        found.unread(knob, f"{name} {given}")
    return is_on


# Batch


def _write_batch(builder: SettingsBuilder) -> None:
    if builder.changed("micro_batch_size"):
        builder.settings[_BATCH] = builder.candidate.micro_batch_size
    builder.settings[_ACCUMULATION] = steps = num_microbatches(builder)
    if str(builder.current(_STEPS)).isdigit():  # under DeepSpeed, the Trainer compares it with its argument
        builder.settings[_STEPS] = str(steps)


def _read_batch(found: Found) -> dict[str, Any]:
    if truth(found.get("auto_find_batch_size")):
        found.warn("micro_batch_size", "auto_find_batch_size may train with a smaller batch than configured")
    found.num_microbatches = found.whole("micro_batch_size", _ACCUMULATION)
    return {"micro_batch_size": found.whole("micro_batch_size", _BATCH)}


def _read_total(found: Found) -> dict[str, Any]:
    ranks, micro, steps = found.get(RANKS), found.fields.get("micro_batch_size"), found.num_microbatches
    if not (ranks and micro and steps):
        return {}
    return {"workload.global_batch_size": ranks // found.fields.get("layout.tp", 1) * micro * steps}


TOTAL = custom((), (), lambda _: None, _read_total, overlay="read")
"""Samples of an optimiser step on the ranks that the command starts."""


def write_batch_of_deepspeed(engine: ShardingEngine, request: OverlayRequest) -> None:
    """The batch sizes that are numbers in DeepSpeed's configuration."""
    sizes = {
        "train_micro_batch_size_per_gpu": request.candidate.micro_batch_size,
        "gradient_accumulation_steps": request.num_microbatches,
        "train_batch_size": request.global_batch_size,
    }
    for name, size in sizes.items():
        given = engine.get(f"deepspeed:{name}")
        if isinstance(given, int | float) and given != size:
            engine.put_config({name: size})


# Layout


def _write_stage(builder: SettingsBuilder) -> None:
    stage = builder.candidate.layout.zero_stage
    if builder.current(ENGINE) == "fsdp" and stage == 1:
        builder.refuse("layout.zero_stage", "FSDP has no stage 1, but DeepSpeed has")
    else:
        builder.settings[STAGE] = stage


def _read_layout(found: Found) -> dict[str, Any]:
    """Degrees, except that of data parallelism, which the program does not take."""
    fixed = {"layout.cp": 1, "layout.sequence_parallel": False, "layout.shard_embedding": False, "layout.num_copies": 1}
    configured = {**without_pipeline(), **fixed, "layout.tp": _tensor_parallel(found)}
    stage = found.get(STAGE)
    if stage is None:
        found.unread("layout.zero_stage", f"the configuration of {found.get(ENGINE)}")
        return configured
    return {**configured, "layout.zero_stage": stage, "layout.replicate_with": "ddp"}


def _tensor_parallel(found: Found) -> int | None:
    """The degree; 1 unless DeepSpeed or ``accelerate launch`` sets it."""
    for name in ("CP_SIZE", "SP_SIZE", "DP_REPLICATE_SIZE"):
        if (found.get(f"env:PARALLELISM_CONFIG_{name}") or "1") not in ("1", "-1"):
            found.unread("layout", f"parallelism_config: {name.lower()}")
    given = found.get("deepspeed:tensor_parallel.autotp_size", found.get("env:PARALLELISM_CONFIG_TP_SIZE") or 1)
    return found.number("layout.tp", "tensor parallelism", given, 1)


LAYOUT = row("layout.zero_stage", STAGE, _write_stage, _read_layout)
"""Data parallelism with the command's engine; with DeepSpeed if it has none and shards."""
_UNABLE = {
    "pp": "the Trainer does not support pipelines",
    "cp": "the script must split sequences: ParallelismConfig(cp_size=...)",
    "tp": "the script must split matrices by loading the model with from_pretrained(..., tp_plan='auto')",
}


def check_engine(engine: ShardingEngine, request: OverlayRequest) -> None:
    """Note what the engine does not support, and write the batch into DeepSpeed's configuration."""
    layout, edit = request.candidate.layout, engine.edit
    write_batch_of_deepspeed(engine, request)
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        edit.refuse("layout.dp_shard", "sharding uses all ranks or none: no replicas with dp_shard")
    for name, message in _UNABLE.items():
        if getattr(layout, name) != request.reading.values.get(f"layout.{name}", 1):
            edit.refuse(f"layout.{name}", message)
    if engine.kind == "fsdp" and (request.device == "cpu" or engine.is_on_cpu):
        edit.refuse("layout.zero_stage", "FSDP on CPUs silently trains with DDP: use DeepSpeed")
    if request.changes("layout.zero_stage", layout.zero_stage) and engine.stage != layout.zero_stage:
        edit.refuse("layout.zero_stage", f"expected {layout.zero_stage}, but the command sets {engine.stage}")


# Precision


def _read_precision(found: Found) -> dict[str, Any]:
    lists: dict[str, Any] = {"precision.white": (), "precision.black": ()}
    given = {name: _is_on(found, "precision.dtype", name) for name in ("fp16", "bf16")}
    if set(given.values()) == {None}:
        found.warn("precision", "neither bf16 nor fp16 is set: the number format is that of the model")
        return lists
    variable = (
        None if "deepspeed" in found else found.get(_PRECISION)
    )  # its configuration is derived from the arguments
    short = next((name for name, is_on in given.items() if is_on), variable)
    return lists | read_precision(found, short or "no")


def read_precision(found: Found, short: str) -> dict[str, Any]:
    """Number format and level: autocast under DDP, 16-bit weights with fp32 masters under DeepSpeed or FSDP."""
    config = found.get(CONFIGURATION)
    level = "O1" if found.get(ENGINE) == "ddp" else "O2"
    if config is not None and config.get("torch_autocast.enabled") is True:
        dtype = str(config.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
        short, level = SHORT.get(dtype, dtype), "O1"
    elif config is not None:
        short = _deepspeed_dtype(config, short)
    if short not in _DTYPES:
        found.unread("precision.dtype", f"mixed precision {short}")
        return {}
    configured = {"precision.level": "O0" if short == "no" else level, "precision.dtype": _DTYPES[short]}
    if short != "fp16":
        return configured
    return configured | (scale_of_deepspeed(config.get) if config is not None and level == "O2" else TORCH_SCALER)


def _deepspeed_dtype(config: FileSection, requested: str) -> str:
    """DeepSpeed's number format: its own setting, or that of the arguments if it is ``auto`` or missing."""
    for name in ("bf16", "fp16"):
        configured = config.get(f"{name}.enabled")
        if configured is True or (configured in ("auto", None) and requested == name):
            return name
    return "no"


def _write_precision(builder: SettingsBuilder) -> None:
    """Autocast by the Trainer's flags under DDP; by DeepSpeed's configuration under DeepSpeed."""
    precision = builder.candidate.precision
    short = SHORT.get(precision.dtype)
    is_autocast = precision.base == "O1" and builder.current(CONFIGURATION) is not None
    for name in ("bf16", "fp16"):
        is_on = name == short and not is_autocast
        if truth(builder.current(name)) is not is_on:
            builder.settings[name] = is_on
    if builder.current(_PRECISION) is not None:
        builder.settings[_PRECISION] = "no" if is_autocast else short or "no"
    write_precision_of_engine(builder)


def write_precision_of_engine(builder: SettingsBuilder) -> None:
    """Number formats in DeepSpeed's configuration, and limits of the other engines."""
    precision, kind, config = builder.candidate.precision, builder.current(ENGINE), builder.current(CONFIGURATION)
    refuse_fp8(builder)
    if kind == "ddp" and precision.base == "O2":
        builder.refuse("precision.level", "DDP supports autocast (O1), but not 16-bit weights with fp32 master weights")
    elif kind == "fsdp" and precision.base == "O1":
        builder.refuse("precision.level", "FSDP computes in 16 bits (O2), without autocast")
    elif kind == "deepspeed" and precision.base == "O1" and config is None:
        builder.refuse("precision.level", "autocast requires a DeepSpeed configuration file")
    if precision.loss_scale is not None and not (kind == "deepspeed" and precision.base == "O2"):
        builder.warn(_SCALE, "torch's GradScaler is used with its defaults")
    if config is not None:
        changes = _precision_in_deepspeed(config, precision)
        builder.settings |= {f"deepspeed:{key}": value for key, value in changes.items()}


_SCALE = "precision.loss_scale"
APPROXIMATED = frozenset({_SCALE})
"""Fields for which a warning is enough."""


def _precision_in_deepspeed(config: FileSection, precision: Precision) -> dict[str, Any]:
    """The changes to DeepSpeed's configuration for a number format; settings left to the arguments stay so."""
    changes: dict[str, Any] = {}
    short = SHORT.get(precision.dtype) if precision.base == "O2" else None
    for name in ("bf16", "fp16"):
        configured = config.get(f"{name}.enabled")
        if configured not in (None, "auto", name == short) or (configured is None and name == short):
            changes[f"{name}.enabled"] = name == short
    if precision.base == "O1":
        changes |= {"torch_autocast.enabled": True, "torch_autocast.dtype": precision.dtype}
        changes["torch_autocast.lower_precision_safe_modules"] = []
    elif config.get("torch_autocast.enabled"):
        changes["torch_autocast.enabled"] = False
    if precision.loss_scale is not None and short == "fp16":
        changes |= scale_in_deepspeed(precision.loss_scale)
    return changes


def scale_of_deepspeed(get: Callable[[str, Any], Any]) -> dict[str, Any]:
    """DeepSpeed's loss scale, with its defaults; it doubles and halves, as in torch."""
    static = get("fp16.loss_scale", 0)
    return TORCH_SCALER | {
        "precision.loss_scale.initial": float(static or 2.0 ** get("fp16.initial_scale_power", 16)),
        "precision.loss_scale.growth_interval": get("fp16.loss_scale_window", 1000),
        "precision.loss_scale.backoff_interval": get("fp16.hysteresis", 2),
        "precision.loss_scale.dynamic": not static,
    }


def scale_in_deepspeed(scale: LossScale) -> dict[str, Any]:
    """The loss scale as DeepSpeed's settings, which double and halve it."""
    return {
        "fp16.loss_scale": 0 if scale.dynamic else scale.initial,
        "fp16.initial_scale_power": max(0, round(math.log2(scale.initial))),
        "fp16.loss_scale_window": scale.growth_interval,
        "fp16.hysteresis": scale.backoff_interval,
    }


# Recompute


def _recompute(name: str) -> Setting:
    """All layers or none, by an argument that enables recompute, or by one named ``disable_...``."""
    is_off = name.startswith("disable_")
    other = "activation_checkpointing"

    def read(found: Found) -> dict[str, Any]:
        on = [_is_on(found, "recompute.full", name) is (not is_off)]
        if not is_off:
            on.append(truth(found.get(other)) is True)
        return {
            "recompute.selective": (),
            "recompute.communication": (),
            **full_recompute(found, any(on) or fsdp_recomputes(found)),
        }

    def write(builder: SettingsBuilder) -> None:
        is_on = bool(builder.candidate.recompute.full)
        if is_on and sum(map(sum, builder.candidate.recompute.full)) != builder.workload.num_layers:
            builder.refuse("recompute.full", "only all layers or none are supported")
        spelled = other if not is_off and builder.current(other) is not None else name
        builder.settings[spelled] = is_on is not is_off
        is_fsdp = builder.current(ENGINE) == "fsdp"
        has_kwargs = any(builder.current(f"{stem}_checkpointing_kwargs") for stem in ("gradient", "activation"))
        if is_on and spelled == "gradient_checkpointing" and not has_kwargs and not is_fsdp:
            builder.settings["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        if is_fsdp and builder.current(_FSDP_RECOMPUTE) is not None:
            builder.settings[_FSDP_RECOMPUTE] = is_on

    return row("recompute.full", (name, other, "gradient_checkpointing_kwargs", _FSDP_RECOMPUTE), write, read)


def fsdp_recomputes(found: Found) -> bool:
    return found.get(ENGINE) == "fsdp" and str(found.get(_FSDP_RECOMPUTE)).lower() in ("true", "1")


def full_recompute(found: Found, is_on: bool) -> dict[str, Any]:
    """All layers or none; one if the model's number of layers is unknown."""
    return {"recompute.full": ((found.num_layers or 1,),) if is_on else ()}


# Loader


def _read_ahead(found: Found) -> dict[str, Any]:
    workers, ahead = found.fields.get("loader.num_workers"), found.whole("loader.prefetch_factor", _AHEAD)
    return {} if workers is None else {"loader.prefetch_factor": (ahead or 2) if workers else 0}


def _write_ahead(builder: SettingsBuilder) -> None:
    if builder.candidate.loader.num_workers:
        builder.settings[_AHEAD] = builder.candidate.loader.prefetch_factor


def _read_pinned(found: Found) -> dict[str, Any]:
    pinned = _is_on(found, "loader.pin_memory", "dataloader_pin_memory")
    return {"loader.pin_memory": pinned and truth(found.get("use_cpu")) is not True, "loader.full_batch": False}


def _read_kept(found: Found) -> dict[str, Any]:
    kept = _is_on(found, "loader.persistent_workers", _KEPT)
    return {"loader.persistent_workers": bool(found.fields.get("loader.num_workers")) and kept}


# Kernels


def _read_compile(found: Found) -> dict[str, Any]:
    backend, mode = found.get("torch_compile_backend"), found.get("torch_compile_mode")
    is_on, what = truth(found.get("torch_compile")) is True or bool(backend or mode), "model"
    dynamo = str(found.get(_DYNAMO_BACKEND) or "no").lower()
    if not is_on and dynamo != "no":
        is_on, backend, mode = True, dynamo, found.get(_DYNAMO_MODE)
        what = "block" if truth(found.get(_REGIONAL)) is True else "model"
    configured = {"kernels.compile": what if is_on else "off", "kernels.backend": backend or "inductor"}
    if (mode or "default") in MODES:
        configured["kernels.compile_mode"] = mode or "default"
    else:
        found.unread("kernels.compile_mode", f"torch_compile_mode {mode}")
    tf32 = _is_on(found, "kernels.matmul_precision", "tf32")
    if tf32 is not None or not is_on:  # the Trainer may enable it itself when it compiles
        configured["kernels.matmul_precision"] = "high" if tf32 else "highest"
    return configured


def _write_compile(builder: SettingsBuilder) -> None:
    kernels = builder.candidate.kernels
    if any(map(builder.changed, _COMPILE)):
        if kernels.compile == "block":
            builder.refuse("kernels.compile", "the Trainer compiles the full model")
        builder.drop("torch_compile_backend", "torch_compile_mode")
        builder.settings["torch_compile"] = is_on = kernels.compile != "off"
        if is_on and (kernels.backend, kernels.compile_mode) != ("inductor", "default"):
            builder.settings["torch_compile_backend"] = kernels.backend
            builder.settings["torch_compile_mode"] = kernels.compile_mode
    if builder.changed("kernels.matmul_precision"):
        if kernels.matmul_precision == "medium":
            builder.refuse("kernels.matmul_precision", "the Trainer supports TF32 (high) or none (highest)")
        builder.settings["tf32"] = kernels.matmul_precision != "highest"


_COMPILE = ("kernels.compile", "kernels.backend", "kernels.compile_mode")
ATTENTION: Mapping[str, str] = {"auto": "sdpa", "flash": "flash_attention_2", "math": "eager"}
"""Implementations of transformers by our names."""


def _attention(dialect: Dialect) -> Setting:
    name, known = dialect.attention or ("attn_implementation", ATTENTION)

    def read(found: Found) -> dict[str, Any]:
        theirs = found.get(name)
        ours = next((ours for ours, value in known.items() if value == theirs), None)
        if theirs is not None and ours is None:
            found.unread("kernels.attention", f"{name} {theirs}")
        return {"kernels.attention": ours}

    def write(builder: SettingsBuilder) -> None:
        wanted = builder.candidate.kernels.attention
        if wanted not in known:
            builder.refuse("kernels.attention", f"{name} does not support {wanted}: supported are {', '.join(known)}")
        elif dialect.attention is None and builder.current(name) not in known.values():
            builder.refuse("kernels.attention", f"the command has no --{name}: add it if your script supports it")
        else:
            builder.settings[name] = known[wanted]

    return row("kernels.attention", name, write, read)


def rows(dialect: Dialect) -> tuple[Setting, ...]:
    """In the order of writing: number formats depend on the engine."""
    return (
        row(_SIZES, (_BATCH, _ACCUMULATION, _STEPS), _write_batch, _read_batch),
        LAYOUT,
        row(("precision.level", "precision.dtype"), ("bf16", "fp16", _PRECISION), _write_precision, _read_precision),
        _recompute(dialect.recompute),
        number("loader.num_workers", _WORKERS),
        row("loader.prefetch_factor", _AHEAD, _write_ahead, _read_ahead),
        replace(switch("loader.persistent_workers", _KEPT), read=_read_kept),
        replace(switch("loader.pin_memory", "dataloader_pin_memory"), read=_read_pinned),
        row((*_COMPILE, "kernels.matmul_precision"), ("torch_compile", "tf32"), _write_compile, _read_compile),
        _attention(dialect),
        number("workload.seed", "seed"),
        TOTAL,
    )


# Commands


def _shape(edit: Edit, found: Found) -> LlamaModel | None:
    """The decoder of the model's folder, if that is on this machine and of a known type."""
    _note_unread(edit, found)
    folders = (found.get(name) for name in _MODEL_FOLDERS)
    shapes = (_shape_in(Path(edit.cwd, folder)) for folder in folders if isinstance(folder, str) and folder)
    shape = next((shape for shape in shapes if shape is not None), None)
    found.num_layers = shape.num_layers if shape else None
    lengths = (found.whole("workload.seq_length", name) for name in _LENGTHS)
    found.add({"workload.seq_length": next((size for size in lengths if size and size > 0), None)})
    return shape


@functools.lru_cache(maxsize=32)
def _shape_in(path: Path) -> LlamaModel | None:
    """The decoder in a folder, read once, since every candidate of a plan needs it."""
    decoder = decoder_in(path)
    return None if decoder is None else decoder.shape


def _note_unread(edit: Edit, found: Found) -> None:
    arguments = typing.cast(TrainerArguments, found.command)
    script = program_of(edit.argv).script
    if script is not None and Path(edit.cwd, script).with_suffix(".args").is_file():
        sibling = Path(script).with_suffix(".args").name
        found.unread("workload", f"{sibling}, which transformers reads from the directory of the script")
    if any(word.startswith("@") for word in arguments.words):
        found.unread("workload", "a file of arguments (@...)")
    for name in ("deepspeed", "fsdp_config"):
        given = arguments.current(name)
        is_path = isinstance(given, str) and given and "{" not in given and not arguments.dialect.presets
        if is_path and arguments.section(name) is None:
            found.unread("layout.zero_stage", f"{name} {given}: the file does not exist")


def _check(edit: Edit, request: OverlayRequest, arguments_of: Callable[[Edit], TrainerArguments]) -> None:
    """Write settings that depend on others, and custom knobs; note what the Trainer does not support."""
    arguments, loader = arguments_of(edit), request.candidate.loader
    if not loader.num_workers:  # torch rejects both without workers
        arguments.drop(_AHEAD)
        if arguments.is_on(_KEPT):
            arguments.put({_KEPT: False})
    if loader.tuning is not None:
        edit.refuse("loader.tuning", "the loader of a custom program is not tuned automatically: set num_workers")
    for choice in request.candidate.own:
        if choice.value is None:
            arguments.drop(choice.name)
        else:
            arguments.put({choice.name: choice.value})
    check_engine(arguments.engine, request)


def table(dialect: Dialect) -> FrameworkTable:
    """The Trainer's rows in the spelling of a framework on it."""
    arguments_of = partial(TrainerArguments, dialect=dialect)
    return FrameworkTable(
        rows=rows(dialect),
        command=arguments_of,
        defaults={**DEFAULTS, **dialect.defaults},
        model=_shape,
        check=partial(_check, arguments_of=arguments_of),
        open=opened,
        approximated=APPROXIMATED,
    )


def expected_of(request: OverlayRequest) -> Expected:
    """The values to observe in the Trainer's ranks."""
    candidate, layout = request.candidate, request.candidate.layout
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size,
        num_microbatches=request.num_microbatches,
        dtype=candidate.precision.dtype,
        recomputes=bool(candidate.recompute.full),
        parameter_shards=layout.dp_shard * layout.tp if layout.zero_stage == 3 else layout.tp,
    )


# A trial: nothing saved, evaluated, pushed or tracked


TRIAL: Mapping[str, Any] = {
    "output_dir": OUT,
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "push_to_hub": False,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "disable_tqdm": True,
}
"""Arguments of every trial. The filter for NaN would make the log of a diverged run look like that of a normal one."""


_OFF_IF_SPECIFIED = ("do_eval", "do_predict", "eval_on_start", "plot_loss", "auto_find_batch_size")


ENVIRONMENT: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that turn trackers off, for programs that start one themselves."""


def edit_of(overlay: Overlay) -> Edit:
    """The overlay ready for changes; the formats of its files are detected from their text."""
    edit = Edit.of_overlay(overlay)
    edit.names = {name: _file_name(name, text) for name, text in overlay.files.items()}
    return edit


def _file_name(name: str, text: str) -> str:
    return f"{name}.json" if text.lstrip().startswith("{") else f"{name}.yaml"


def trackers_off(edit: Edit) -> Overlay:
    """The overlay, with trackers that programs start themselves turned off."""
    edit.env |= {name: value for name, value in ENVIRONMENT.items() if name not in edit.env}
    return edit.overlay()


def trial_of_trainer(
    overlay: Overlay, last_step: int, dialect: Dialect, more: Mapping[str, Any] | None = None
) -> Overlay:
    """The program in trial mode.

    The hook's callback or the end of its rank stops it, without changing the learning-rate schedule; only a
    ``max_steps`` of its own that comes too early is raised.
    """
    edit = edit_of(overlay)
    arguments = TrainerArguments(edit, dialect)
    old_name = arguments.current("evaluation_strategy") is not ABSENT
    for name, value in {**TRIAL, **(more or {})}.items():
        arguments.put({"evaluation_strategy" if old_name and name == "eval_strategy" else name: value})
    arguments.put({name: False for name in _OFF_IF_SPECIFIED if arguments.current(name) is not ABSENT})
    arguments.drop("resume_from_checkpoint")
    if arguments.current("logging_dir") is not ABSENT:
        arguments.put({"logging_dir": OUT})
    limit = str(arguments.get("max_steps"))
    if limit.isdigit() and 0 < int(limit) < last_step:
        arguments.put({"max_steps": last_step})
        message = f"max_steps {limit} is less than the {last_step} steps of a trial, which changes the schedule"
        edit.warn("workload", message)
    return trackers_off(edit)


# transformers itself

_DIALECT = Dialect()
TABLE = table(_DIALECT)
_PARSERS = ("HfArgumentParser", "TrlParser")
_FIXED_FILE = re.compile(r"parse_json_file\(\s*(?:json_file\s*=\s*)?[\"']")


def _recognises(run: Run) -> bool:
    """Whether the script parses a Trainer's arguments, or is given arguments that only a Trainer has. A script that
    sets them in code, or in a file that it names itself, takes none."""
    text = script_text(run.argv, run.cwd)
    if imports(text) & {"transformers", "trl"} and any(parser in text for parser in _PARSERS):
        return _FIXED_FILE.search(text) is None
    words = program_of(without_launcher(run.argv).argv).arguments
    return not text and any(word.replace("-", "_").startswith("__per_device_train_batch_size") for word in words)


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    return {**find_files(without_launcher(argv).argv, cwd), **find_launch_files(argv, cwd)}


TRAINING = Training(
    name="transformers",
    title="the Trainer of transformers",
    package="transformers",
    releases=">=4.46,<6",
    takes_launchers=True,
    takes_custom_names=True,
    log=LogFormat(name="transformers"),
    recognises=_recognises,
    find_files=_find_files,
    read=TABLE.read,
    overlay=TABLE.overlay,
    trial_mode=partial(trial_of_trainer, dialect=_DIALECT),
    expected=expected_of,
)
