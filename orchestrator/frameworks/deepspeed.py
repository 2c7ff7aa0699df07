"""DeepSpeed: exports of its JSON, with the model as a transformers configuration; and programs with
``deepspeed.initialize`` and a training loop of their own, which that JSON configures.

Names and defaults are those of DeepSpeed 0.19 (``runtime/config.py``, ``precision_config.py``, ``zero/config.py``,
``tensor_parallel/config.py``). Pipelines, recompute, compilation, data loading and the output of losses are part of the
training script, not of the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.frameworks.arguments import Argument, Words, read_text, write
from orchestrator.frameworks.decoder_config import MODEL_SETTINGS, model_files, model_settings
from orchestrator.frameworks.edit import (
    Edit,
    EditedFile,
    FrameworkTable,
    Overlay,
    OverlayRequest,
    Reading,
    Run,
    Training,
    contradictions,
)
from orchestrator.frameworks.gaps import (
    DYNAMIC_SHAPES,
    KERNELS_OF_SCRIPT,
    NO_FLOAT8_GATHER,
    NO_FP32_MODULES,
    NO_FUSED,
    REDUCES_EACH,
    TORCH_SCALER,
    WHOLE_BETWEEN,
    betas,
    left_to_script,
    memory_savers,
    no_pipeline,
    num_microbatches,
    own_data,
    own_seed,
    refuse_fp8,
    sharded_from,
    takes_torch_scaler,
    unable,
    without_pipeline,
)
from orchestrator.frameworks.launchers import imports, program_of, script_text, without_launcher
from orchestrator.frameworks.spelling import (
    Found,
    Note,
    Recipe,
    Setting,
    Settings,
    SettingsBuilder,
    custom,
    fixed,
    lacking,
    option,
    row,
    settings_of,
    tree,
)
from orchestrator.frameworks.transformers import (
    SHORT,
    edit_of,
    expected_of,
    opened,
    scale_in_deepspeed,
    scale_of_deepspeed,
    trackers_off,
)
from trials.layout_rules import holds_plain
from trials.script.command import LogFormat
from trials.spec import LlamaModel, LossScale

FILE = "deepspeed.json"
_BATCH = f"{FILE}:train_batch_size"
_MICRO = f"{FILE}:train_micro_batch_size_per_gpu"
_ACCUMULATION = f"{FILE}:gradient_accumulation_steps"
_ZERO_STAGE = f"{FILE}:zero_optimization.stage"
_AUTOTP, _PRESET = f"{FILE}:tensor_parallel.autotp_size", f"{FILE}:tensor_parallel.preset_model"
_SEQUENCE, _DATA = f"{FILE}:sequence_parallel_size", f"{FILE}:data_parallel_size"
_OFFLOAD_DEVICE = f"{FILE}:zero_optimization.offload_optimizer.device"
_OFFLOAD_PINNED = f"{FILE}:zero_optimization.offload_optimizer.pin_memory"
_CHECKPOINTS = f"{FILE}:activation_checkpointing.number_checkpoints"
_PARTITION = f"{FILE}:activation_checkpointing.partition_activations"
_AUTOCAST, _AUTOCAST_DTYPE = f"{FILE}:torch_autocast.enabled", f"{FILE}:torch_autocast.dtype"
_SAFE = f"{FILE}:torch_autocast.lower_precision_safe_modules"
"""Modules whose weights and gradients are communicated in 16 bits under autocast; by default the matrix products."""
_BF16, _BF16_OVERFLOW = f"{FILE}:bf16.enabled", f"{FILE}:bf16.check_grad_overflow"
_FP16 = f"{FILE}:fp16.enabled"
_SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
_COMMUNICATION, _ACCUMULATED = f"{FILE}:communication_data_type", f"{FILE}:data_types.grad_accum_dtype"
_OPTIMIZER = "workload.optimizer"
_PARAMS = f"{FILE}:optimizer.params"
_BETAS = f"{_PARAMS}.betas"


# Batch and layout


def _write_batch(builder: SettingsBuilder) -> None:
    total = builder.workload.global_batch_size
    sizes = {_BATCH: total, _MICRO: builder.candidate.micro_batch_size, _ACCUMULATION: num_microbatches(builder)}
    builder.settings |= {
        name: size for name, size in sizes.items() if builder.is_export or _is_needed(builder, name, size)
    }


def _is_needed(builder: SettingsBuilder, name: str, size: int) -> bool:
    """Whether a command has to set a size: DeepSpeed derives a missing one of the three."""
    if builder.current(name) is not None:
        return True
    if name == _MICRO:
        return builder.changed("micro_batch_size")
    return name == _ACCUMULATION and size != 1 and builder.current(_BATCH) is None


def _read_batch(found: Found) -> dict[str, Any]:
    if found.is_export:
        return {"micro_batch_size": found[_MICRO], "workload.global_batch_size": found[_BATCH]}
    micro, number, total = (_size(found, name) for name in (_MICRO, _ACCUMULATION, _BATCH))
    dp = (found.get(WORLD_SIZE) or 0) // (
        (found.whole("layout.tp", _AUTOTP) or 1) * (found.whole("layout.cp", _SEQUENCE) or 1)
    )
    if dp and total and micro and number is None:
        number = total // (micro * dp)
    elif dp and total and micro is None:
        number = number or 1
        micro = total // (number * dp)
    elif number is None and total is None:
        number = 1
    found.num_microbatches = number
    total = total or (micro * number * dp if micro and number and dp else None)
    return {"micro_batch_size": micro, "workload.global_batch_size": total}


def _size(found: Found, name: str) -> int | None:
    if found.get(name) == "auto":
        key = name.removeprefix(f"{FILE}:")
        found.unread("micro_batch_size", f"{key}: auto, which only the Trainer of transformers resolves")
        return None
    return found.whole("micro_batch_size", name)


def _write_layout(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    builder.settings[_ZERO_STAGE] = layout.zero_stage
    if builder.is_export and layout.dp_replicate > 1 and layout.dp_shard > 1:
        message = f"ZeRO shards over all {layout.dp} data-parallel ranks, not only {layout.dp_shard}"
        builder.warn("layout.dp_shard", message)
        builder.warn("layout.dp_replicate", message)
    if builder.is_export and layout.zero_stage == 0 and layout.dp > 1 and layout.replicate_with != "ddp":
        builder.warn("layout.replicate_with", "DeepSpeed replicates by itself, like DDP")


def _read_layout(found: Found) -> dict[str, Any]:
    stage = found.whole("layout.zero_stage", _ZERO_STAGE, 0)
    if not found.is_export:
        return {"layout.zero_stage": stage}
    dp = found[_BATCH] // (found[_MICRO] * found[_ACCUMULATION])
    return {
        "layout.zero_stage": stage,
        "layout.dp_replicate": 1 if stage else dp,
        "layout.dp_shard": dp if stage else 1,
    }


def _write_tensor_parallel(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.tp == 1:
        return
    builder.settings[_AUTOTP] = layout.tp
    if isinstance(builder.workload.model, LlamaModel):
        builder.settings[_PRESET] = "llama"
    if layout.tp_engine != "local":
        builder.warn("layout.tp_engine", "AutoTP uses plain tensors with explicit collectives, not DTensor")


def _read_tensor_parallel(found: Found) -> dict[str, Any]:
    tp = found.whole("layout.tp", _AUTOTP, 1)
    return {"layout.tp": tp, **({"layout.tp_engine": "local" if tp != 1 else "dtensor"} if found.is_export else {})}


def _write_sequence(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.cp == 1:
        return
    builder.settings |= {_SEQUENCE: layout.cp, _DATA: layout.dp}
    if layout.tp > 1:
        builder.refuse("layout.cp", "Ulysses and AutoTP cannot be combined")
    if layout.cp_method != "ulysses":
        for knob in ("layout.cp_method", *(["layout.ulysses_degree"] if layout.ulysses_degree > 1 else [])):
            builder.refuse(knob, "DeepSpeed supports only Ulysses for splitting sequences")
    builder.warn(
        "layout.cp",
        "your script must use Ulysses attention in the model (UlyssesSPAttentionHF or DistributedAttention)",
    )
    if layout.zero_stage == 0 and layout.replicate_with != "ddp":
        builder.warn("layout.replicate_with", "DeepSpeed replicates by itself, like DDP")


def _read_sequence(found: Found) -> dict[str, Any]:
    cp = found.whole("layout.cp", _SEQUENCE, 1)
    return {
        "layout.cp": cp,
        "layout.ulysses_degree": 1,
        **({"layout.cp_method": "ulysses" if cp != 1 else "all_gather"} if found.is_export else {}),
    }


# Recompute, host memory (exports alone)


def _write_recompute(builder: SettingsBuilder) -> None:
    num_layers = sum(map(sum, builder.candidate.recompute.full))
    builder.settings |= {_CHECKPOINTS: num_layers or None, _PARTITION: False}
    if num_layers == builder.workload.num_layers:
        builder.warn("recompute.full", "your script must enable it: model.gradient_checkpointing_enable()")
    elif num_layers:
        call = "deepspeed.checkpointing.checkpoint"
        builder.warn("recompute.full", f"your model must run its first {num_layers} layers through {call}")


def _read_recompute(settings: Settings) -> dict[str, Any]:
    num_layers = settings.get(_CHECKPOINTS)
    return {"recompute.full": ((num_layers,),) if num_layers else ()}


def _write_offload(builder: SettingsBuilder) -> None:
    if not builder.candidate.offload.optimizer:
        return
    if builder.candidate.layout.zero_stage == 0:
        builder.refuse("offload.optimizer", "DeepSpeed offloads states that ZeRO shards: stages 1 to 3")
        return
    builder.settings |= {_OFFLOAD_DEVICE: "cpu", _OFFLOAD_PINNED: True}
    builder.warn("offload.optimizer", "torch's AdamW updates on the host; without torch_adam, DeepSpeed's AdamW does")


_OFFLOAD_OPTIMIZER = custom(
    ("offload.optimizer",),
    (_OFFLOAD_DEVICE, _OFFLOAD_PINNED),
    _write_offload,
    lambda settings: {"offload.optimizer": settings.get(_OFFLOAD_DEVICE, "none") == "cpu"},
)

# Number formats


_FP8 = "8-bit matmuls require code: torchao.float8.convert_to_float8_training(layer) before deepspeed.initialize"


def _write_precision(builder: SettingsBuilder) -> None:
    precision, layout = builder.candidate.precision, builder.candidate.layout
    is_half = precision.base == "O2"
    builder.settings |= {
        _AUTOCAST: precision.base == "O1",
        _BF16: is_half and precision.dtype == "bfloat16",
        _FP16: is_half and precision.dtype == "float16",
    }
    refuse_fp8(builder, _FP8)
    if builder.settings[_AUTOCAST]:
        _write_autocast(builder, precision.dtype)
    if builder.is_export and is_half:
        reduced = SHORT[precision.dtype] if holds_plain(layout) or layout.world_size == 1 else "fp32"
        builder.settings |= {_COMMUNICATION: reduced, _ACCUMULATED: reduced}
    if builder.is_export and builder.settings[_BF16]:
        builder.settings[_BF16_OVERFLOW] = False
    if precision.loss_scale is not None:
        _write_loss_scale(builder, precision.loss_scale)


def _write_autocast(builder: SettingsBuilder, dtype: str) -> None:
    """Write autocast. As in the runner, nothing is communicated in 16 bits; but DeepSpeed scales losses only for what
    is."""
    builder.settings[_AUTOCAST_DTYPE] = dtype
    if dtype == "bfloat16" or not builder.is_export:
        builder.settings[_SAFE] = []
    else:
        builder.refuse(
            "precision.level", "gradients of matrix products are reduced in float16; the measurement used fp32"
        )


def _write_loss_scale(builder: SettingsBuilder, scale: LossScale) -> None:
    if not builder.settings[_FP16]:
        if not takes_torch_scaler(builder):
            builder.warn("precision.loss_scale", "with autocast, DeepSpeed uses torch's GradScaler with its defaults")
        return
    configured = {f"{FILE}:{key}": value for key, value in scale_in_deepspeed(scale).items()}
    builder.settings |= configured
    if builder.is_export:
        builder.settings[f"{FILE}:fp16.consecutive_hysteresis"] = True
    power = configured[f"{FILE}:fp16.initial_scale_power"]
    if scale.dynamic and scale.initial != 2.0**power:
        builder.warn("precision.loss_scale.initial", f"DeepSpeed starts from a power of two: 2^{power}")
    for factor in ("growth_factor", "backoff_factor"):
        path = f"precision.loss_scale.{factor}"
        if builder.values[path] != TORCH_SCALER[path]:
            builder.refuse(path, f"DeepSpeed always doubles and halves; the configuration has {builder.values[path]}")


def _read_precision(found: Found) -> dict[str, Any]:
    lists = {"precision.white": (), "precision.black": ()}
    if found.get(_AUTOCAST) is True:
        dtype = str(found.get(_AUTOCAST_DTYPE, "bfloat16")).removeprefix("torch.")
        scale = TORCH_SCALER if dtype == "float16" else {}
        return {"precision.level": "O1", "precision.dtype": dtype, **lists, **scale}
    dtype = "bfloat16" if found.get(_BF16) is True else "float16" if found.get(_FP16) is True else "float32"
    scale = scale_of_deepspeed(lambda key, default: found.get(f"{FILE}:{key}", default)) if dtype == "float16" else {}
    return {"precision.level": "O0" if dtype == "float32" else "O2", "precision.dtype": dtype, **lists, **scale}


_ALWAYS = without_pipeline()
ROWS: tuple[Setting, ...] = (
    custom(_ALWAYS, (), lambda _: None, lambda _: _ALWAYS, "read"),
    row(
        ("micro_batch_size", "workload.global_batch_size"),
        (_BATCH, _MICRO, _ACCUMULATION),
        _write_batch,
        _read_batch,
    ),
    row("layout.zero_stage", _ZERO_STAGE, _write_layout, _read_layout),
    custom(("layout.dp_replicate", "layout.dp_shard", "layout.replicate_with"), (_ZERO_STAGE,), lambda _: None),
    custom(
        ("layout.tp", "layout.tp_engine"), (_AUTOTP, _PRESET), _write_tensor_parallel, _read_tensor_parallel, "read"
    ),
    custom(
        ("layout.cp", "layout.cp_method", "layout.ulysses_degree"),
        (_SEQUENCE, _DATA),
        _write_sequence,
        _read_sequence,
        "read",
    ),
    no_pipeline("a pipeline requires code: PipelineModule(layers, num_stages=...), with ZeRO stage 0 or 1"),
    unable("layout.sequence_parallel", message=WHOLE_BETWEEN),
    sharded_from(
        3,
        refused="only stage 3 shards embedding and head",
        warned="stage 3 shards embedding and head like everything else",
    ),
    lacking("layout.num_copies", "Domino is a different training loop, not a configuration"),
    custom(("recompute.full",), (_CHECKPOINTS, _PARTITION), _write_recompute, _read_recompute),
    unable("recompute.selective", "recompute.communication", message="DeepSpeed recomputes full layers only"),
    row(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (
            _AUTOCAST,
            _AUTOCAST_DTYPE,
            _SAFE,
            _BF16,
            _BF16_OVERFLOW,
            _FP16,
            *(f"{FILE}:fp16.{name}" for name in _SCALE),
            _COMMUNICATION,
            _ACCUMULATED,
        ),
        _write_precision,
        _read_precision,
    ),
    unable("precision.white", "precision.black", message="autocast's lists of operators cannot be changed"),
    NO_FP32_MODULES,
    NO_FLOAT8_GATHER,
    left_to_script("loader", "the DataLoader is created by your script"),
    left_to_script("kernels.compile", "your script must compile each block or the full model: engine.compile(...)"),
    left_to_script("kernels.backend", "your script must set it: engine.compile(backend=...)"),
    left_to_script("kernels.compile_mode", "your script must set it: engine.compile(compile_kwargs={'mode': ...})"),
    *KERNELS_OF_SCRIPT,
    NO_FUSED,
    DYNAMIC_SHAPES,
    *memory_savers(
        activations="activation_checkpointing.cpu_checkpointing moves only activations of layers that your "
        "script recomputes with DeepSpeed's checkpoint function",
        optimizer=_OFFLOAD_OPTIMIZER,
    ),
    REDUCES_EACH,
    left_to_script("kernels.matmul_precision", "your script must call torch.set_float32_matmul_precision(...)"),
    fixed(f"{FILE}:optimizer.type", "AdamW"),
    option(f"{_OPTIMIZER}.lr", f"{_PARAMS}.lr"),
    betas(_BETAS),
    option(f"{_OPTIMIZER}.eps", f"{_PARAMS}.eps"),
    option(f"{_OPTIMIZER}.weight_decay", f"{_PARAMS}.weight_decay"),
    fixed(f"{_PARAMS}.torch_adam", True),
    fixed(f"{_PARAMS}.adam_w_mode", True),
    option(f"{_OPTIMIZER}.clip_norm", f"{FILE}:gradient_clipping", of=float),
    fixed(f"{FILE}:dataloader_drop_last", True),
    own_data("the data are read by your script"),
    own_seed(),
    *MODEL_SETTINGS,
)


# The export


def _render(builder: SettingsBuilder) -> dict[str, str]:
    return {FILE: json.dumps(tree(builder.settings, FILE), indent=2) + "\n", **model_files(builder)}


def _load(files: Mapping[str, str]) -> dict[str, Any]:
    return {**settings_of(FILE, json.loads(files[FILE])), **model_settings(files)}


def _command(builder: SettingsBuilder) -> str:
    world_size = builder.candidate.layout.world_size
    return f"deepspeed --num_gpus {world_size} train.py --deepspeed --deepspeed_config {FILE}"


RECIPE = Recipe(
    name="deepspeed",
    title="DeepSpeed",
    settings=ROWS,
    render=_render,
    load=_load,
    command=_command,
)


# Programs on DeepSpeed

CONFIG = "deepspeed"
"""Placeholder of the JSON that the arguments refer to."""
_POINTERS = tuple(
    Argument(name=name) for name in ("--deepspeed_config", "--deepspeed-config", "--ds_config", "--deepspeed")
)
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "autotuning")
WORLD_SIZE = "WORLD_SIZE"
"""A setting outside the JSON: the number of ranks that the command starts, if known."""


def _recognises(run: Run) -> bool:
    text = script_text(run.argv, run.cwd)
    launched = without_launcher(run.argv)
    if text:
        return "deepspeed" in imports(text) and "deepspeed.initialize" in text
    return launched.launcher == "deepspeed" or any("deepspeed_config" in word for word in launched.argv)


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    words = program_of(without_launcher(argv).argv).arguments
    paths = (read_text(words, pointer) for pointer in _POINTERS)
    found = [Path(cwd, path) for path in paths if path and path.endswith(".json")]
    return {CONFIG: str(found[0])} if found and found[0].is_file() else {}


def _name(edit: Edit) -> str | None:
    """Placeholder of DeepSpeed's JSON: the file given by an argument of DeepSpeed, else the only file."""
    words = program_of(edit.argv).arguments
    given = [read_text(words, pointer) or "" for pointer in _POINTERS]
    named = [word.strip("{}") for word in given if word.strip("{}") in edit.files]
    if named:
        return named[0]
    placed = [name for name in edit.files if any(f"{{{name}}}" in word for word in edit.argv)]
    return (
        placed[0] if (len(placed) == 1 and edit.file_name(placed[0]).endswith(".json")) or placed == [CONFIG] else None
    )


class DeepSpeedFile:
    """DeepSpeed's JSON of a command by names of settings, and the number of ranks that the command starts."""

    def __init__(self, edit: Edit) -> None:
        self._file = EditedFile(edit, _name(edit) or "")
        self._world = edit.world_size

    def get(self, name: str, default: Any = None) -> Any:
        if name == WORLD_SIZE:
            return self._world
        found = self._file.get(name.removeprefix(f"{FILE}:"))
        return default if found is None else found

    def put(self, values: Mapping[str, Any]) -> None:
        self._file.put({name.removeprefix(f"{FILE}:"): value for name, value in values.items()})

    def drop(self, *names: str) -> None:
        self._file.drop(*(name.removeprefix(f"{FILE}:") for name in names))


def _check(edit: Edit, request: OverlayRequest) -> None:
    """Refuse what the script does itself, unless it has placeholders."""
    _write_custom(edit, request)
    layout = request.candidate.layout
    for degree, message in _UNABLE.items():
        if getattr(layout, degree) != request.reading.values.get(f"layout.{degree}", 1):
            edit.refuse(f"layout.{degree}", message)
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        edit.refuse("layout.dp_shard", "ZeRO shards over all data-parallel ranks, not over a part of them")


_UNABLE = {
    "pp": "a pipeline requires code: PipelineModule(layers, num_stages=...)",
    "cp": "the script must split sequences: UlyssesSPAttentionHF",
    "tp": "the script must split matrices: deepspeed.tp_model_init",
}
TABLE = FrameworkTable(
    rows=ROWS,
    command=DeepSpeedFile,
    defaults={_AUTOCAST: False, _BF16: False, _FP16: False},
    model=lambda edit, found: None,  # noqa: ARG005
    check=_check,
    open=opened,
)
_NO_JSON = "no DeepSpeed JSON: pass --deepspeed_config FILE, or add it to `files` and use its placeholder"


def _read(run: Run) -> Reading:
    if _name(opened(run)) is None:
        return Reading(values={}, notes=(Note(knob="workload", message=_NO_JSON, severity="warning"),))
    return TABLE.read(run)


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    edit = opened(run)
    if _name(edit) is not None:
        return TABLE.overlay(run, request)
    _write_custom(edit, request)
    edit.notes += contradictions(request, Reading(values={}))
    return edit.overlay()


def _write_custom(edit: Edit, request: OverlayRequest) -> None:
    for choice in request.candidate.own:
        program = program_of(edit.argv)
        words = write(program.arguments, Argument(name=f"--{choice.name}"), str(choice.value))
        edit.argv = (*program.head, *words)


def _trial_mode(overlay: Overlay, last_step: int) -> Overlay:  # noqa: ARG001 - the rank ends it
    """Print a line per step, with monitors and tuners off; the script controls saves."""
    edit = edit_of(overlay)
    if (name := _name(edit)) is not None:
        config = EditedFile(edit, name)
        off = {f"{part}.enabled": False for part in _MONITORS if config.get(f"{part}.enabled")}
        config.put({"steps_per_print": 1, "log_level": "info", **off})
    return trackers_off(edit)


TRAINING = Training(
    name="deepspeed",
    title="DeepSpeed",
    package="deepspeed",
    releases=">=0.14,<1",
    takes_launchers=True,
    takes_custom_names=True,
    log=LogFormat(name="deepspeed"),
    recognises=_recognises,
    find_files=_find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=_trial_mode,
    expected=expected_of,
)
