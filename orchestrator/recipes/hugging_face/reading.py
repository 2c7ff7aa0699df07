"""What a program on the Trainer of transformers is told, in our words."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.recipes.documents import ABSENT
from orchestrator.recipes.gaps import TORCH_SCALER
from orchestrator.recipes.hugging_face.accelerate_launch import environment, world_size
from orchestrator.recipes.hugging_face.config_file import decoder_in
from orchestrator.recipes.hugging_face.engine import MIXED_PRECISION, ShardingEngine
from orchestrator.recipes.hugging_face.settings import Dialect, FileSection, TrainerArguments
from orchestrator.recipes.launchers import program_of, without_launcher
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft, without_pipeline
from orchestrator.recipes.training import Reading, Run
from trials.spec import LlamaModel

_MODEL_FOLDERS = ("config_name", "model_name_or_path", "model", "model_id_or_path")
"""Arguments that name a model, or a folder with its ``config.json``."""
_LENGTHS = ("block_size", "max_seq_length", "cutoff_len", "max_length", "model_max_length")
_DYNAMO_BACKEND, _DYNAMO_MODE = "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"
_REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
MODES = ("default", "reduce-overhead", "max-autotune")
"""Modes of torch.compile that are knobs of ours."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def opened(run: Run) -> tuple[Edit, int | None]:
    """The command without its launcher, whose variables it has instead; and how many ranks that would start."""
    edit = Edit.of_run(run)
    launched = without_launcher(edit.argv)
    edit.argv = launched.argv
    world = launched.world_size
    if launched.launcher == "accelerate":
        edit.env |= environment(launched.options, edit)
        world = world_size(launched, edit)
    return edit, world or _whole(run.env.get("WORLD_SIZE"))


def read_trainer(run: Run, dialect: Dialect) -> Reading:
    """The Trainer's arguments in our words, its defaults included."""
    edit, world = opened(run)
    return read_edit(edit, dialect, Path(run.cwd), world)


def read_edit(edit: Edit, dialect: Dialect, cwd: Path, world: int | None = None) -> Reading:
    """What a command in the making says by now, on ``world`` ranks where that is known."""
    found, arguments = ReadingDraft(notes=list(edit.notes)), TrainerArguments(edit, dialect)
    engine = ShardingEngine(edit, arguments)
    read_layout(engine, found)
    number = _read_batch(arguments, found)
    shape = _shape(cwd, arguments)
    _read_recompute(arguments, engine, found, shape.num_layers if shape else 1)
    _read_precision(arguments, engine, found)
    _read_loader(arguments, found)
    _read_kernels(arguments, engine, found)
    _read_rest(cwd, arguments, found)
    micro, tp = found.values.get("micro_batch_size"), found.values.get("layout.tp", 1)
    return Reading(
        values=found.values,
        shape=shape,
        num_layers=shape.num_layers if shape else None,
        seq_length=next((size for size in map(arguments.get, _LENGTHS) if isinstance(size, int) and size > 0), None),
        global_batch_size=world // tp * micro * number if world and micro and number else None,
        num_microbatches=number,
        seed=arguments.get("seed", found, "workload.seed"),
        world_size=world,
        notes=tuple(found.notes),
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _shape(cwd: Path, arguments: TrainerArguments) -> LlamaModel | None:
    """The decoder of the model's folder, if that is on this machine and of a known type."""
    for name in _MODEL_FOLDERS:
        given = arguments.get(name)
        if isinstance(given, str) and given and (shape := _shape_in(cwd / given)) is not None:
            return shape
    return None


@functools.lru_cache(maxsize=32)
def _shape_in(path: Path) -> LlamaModel | None:
    """The decoder in a folder, which is read once: every candidate of a plan asks for it."""
    decoder = decoder_in(path)
    return None if decoder is None else decoder.shape


# ---- layout, batch ----


def read_layout(engine: ShardingEngine, found: ReadingDraft) -> None:
    """Degrees; how many ranks data parallelism has is nothing that the program is told."""
    found.say({**without_pipeline(), "layout.cp": 1, "layout.sequence_parallel": False})
    found.say({"layout.shard_embedding": False, "layout.num_copies": 1})
    found.say({"layout.tp": _tensor_parallel(engine, found)})
    stage = engine.stage
    if stage is None:
        found.unread("layout.zero_stage", f"the configuration of {engine.kind}")
        return
    found.say({"layout.zero_stage": stage, "layout.replicate_with": "ddp"})


def _tensor_parallel(engine: ShardingEngine, found: ReadingDraft) -> int | None:
    """The degree; 1 unless DeepSpeed or ``accelerate launch`` is told of one."""
    for name in ("CP_SIZE", "SP_SIZE", "DP_REPLICATE_SIZE"):
        if (engine.variable(f"PARALLELISM_CONFIG_{name}") or "1") not in ("1", "-1"):
            found.unread("layout", f"parallelism_config: {name.lower()}")
    given: Any = engine.variable("PARALLELISM_CONFIG_TP_SIZE") or 1
    if engine.kind == "deepspeed" and engine.config is not None:
        given = engine.config.get("tensor_parallel.autotp_size", given)
    return found.whole("layout.tp", "tensor parallelism", given, 1)


def _read_batch(arguments: TrainerArguments, found: ReadingDraft) -> int | None:
    found.say({"micro_batch_size": arguments.get("per_device_train_batch_size", found, "micro_batch_size")})
    if arguments.is_on("auto_find_batch_size"):
        found.warn("micro_batch_size", "auto_find_batch_size may train on a smaller batch than the one asked for")
    number: int | None = arguments.get("gradient_accumulation_steps", found, "micro_batch_size")
    return number


# ---- recompute ----


def _read_recompute(arguments: TrainerArguments, engine: ShardingEngine, found: ReadingDraft, num_layers: int) -> None:
    found.say({"recompute.selective": (), "recompute.communication": ()})
    name = arguments.dialect.recompute
    is_off = name.startswith("disable_")
    on = [arguments.get(name, found, "recompute.full") is (not is_off)]
    if not is_off:
        on.append(arguments.is_on("activation_checkpointing"))
    if engine.kind == "fsdp":
        on.append(str(engine.fsdp("activation_checkpointing")).lower() in ("true", "1"))
    found.say({"recompute.full": ((num_layers,),) if any(on) else ()})


# ---- precision ----


def _read_precision(arguments: TrainerArguments, engine: ShardingEngine, found: ReadingDraft) -> None:
    found.say({"precision.white": (), "precision.black": ()})
    given = {name: arguments.get(name, found, "precision.dtype") for name in ("fp16", "bf16")}
    if set(given.values()) == {None}:
        found.warn("precision", "neither bf16 nor fp16 is said: the number format is the model's own")
        return
    short = next((name for name, is_on in given.items() if is_on), None)
    short = short or engine.variable(MIXED_PRECISION) or "no"
    read_precision(engine, found, short)


def read_precision(engine: ShardingEngine, found: ReadingDraft, short: str) -> None:
    """Number format and level: autocast under DDP, 16-bit weights with fp32 masters under DeepSpeed or FSDP."""
    config = engine.config if engine.kind == "deepspeed" else None
    level = "O1" if engine.kind == "ddp" else "O2"
    if config is not None:
        if config.get("torch_autocast.enabled") is True:
            dtype = str(config.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
            short, level = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype), "O1"
        else:
            short = _deepspeed_dtype(config, short)
    if short not in _DTYPES:
        found.unread("precision.dtype", f"mixed precision {short}")
        return
    found.say({"precision.level": "O0" if short == "no" else level, "precision.dtype": _DTYPES[short]})
    if short == "fp16" and config is not None and level == "O2":
        found.say(loss_scale_of_deepspeed(config))
    elif short == "fp16":
        found.say(TORCH_SCALER)


def _deepspeed_dtype(config: FileSection, asked: str) -> str:
    """What DeepSpeed computes in: its own word, or the arguments' where it says ``auto`` or nothing."""
    for name in ("bf16", "fp16"):
        said = config.get(f"{name}.enabled")
        if said is True or (said in ("auto", None) and asked == name):
            return name
    return "no"


def loss_scale_of_deepspeed(config: FileSection | EditedFile) -> dict[str, Any]:
    """DeepSpeed's loss scale, with its defaults; it doubles and halves, like torch."""
    static = config.get("fp16.loss_scale", 0)
    return TORCH_SCALER | {
        "precision.loss_scale.initial": float(static or 2.0 ** config.get("fp16.initial_scale_power", 16)),
        "precision.loss_scale.growth_interval": config.get("fp16.loss_scale_window", 1000),
        "precision.loss_scale.backoff_interval": config.get("fp16.hysteresis", 2),
        "precision.loss_scale.dynamic": not static,
    }


# ---- loader, kernels ----


def _read_loader(arguments: TrainerArguments, found: ReadingDraft) -> None:
    workers = arguments.get("dataloader_num_workers", found, "loader.num_workers")
    ahead = arguments.get("dataloader_prefetch_factor", found, "loader.prefetch_factor")
    found.say({"loader.num_workers": workers, "loader.full_batch": False})
    if workers is not None:
        found.say({"loader.prefetch_factor": (ahead or 2) if workers else 0})
    pinned = arguments.get("dataloader_pin_memory", found, "loader.pin_memory")
    found.say({"loader.pin_memory": pinned and not arguments.is_on("use_cpu")})
    kept = arguments.get("dataloader_persistent_workers", found, "loader.persistent_workers")
    found.say({"loader.persistent_workers": bool(workers) and kept})


def _read_kernels(arguments: TrainerArguments, engine: ShardingEngine, found: ReadingDraft) -> None:
    backend, mode = arguments.get("torch_compile_backend"), arguments.get("torch_compile_mode")
    is_on, what = arguments.is_on("torch_compile") or bool(backend or mode), "model"
    if not is_on and (engine.variable(_DYNAMO_BACKEND) or "no").lower() != "no":
        is_on, backend, mode = True, str(engine.variable(_DYNAMO_BACKEND)).lower(), engine.variable(_DYNAMO_MODE)
        what = "block" if engine.is_set(_REGIONAL) else "model"
    found.say({"kernels.compile": what if is_on else "off", "kernels.backend": backend or "inductor"})
    if (mode or "default") in MODES:
        found.say({"kernels.compile_mode": mode or "default"})
    else:
        found.unread("kernels.compile_mode", f"torch_compile_mode {mode}")
    tf32 = arguments.get("tf32", found, "kernels.matmul_precision")
    if tf32 is not None:
        found.say({"kernels.matmul_precision": "high" if tf32 else "highest"})
    elif not is_on:
        found.say({"kernels.matmul_precision": "highest"})
    name, known = attention(arguments)
    theirs = arguments.given(name)
    if theirs is not ABSENT:
        ours = next((ours for ours, value in known.items() if value == theirs), None)
        if ours is None:
            found.unread("kernels.attention", f"{name} {theirs}")
        found.say({"kernels.attention": ours})


ATTENTION: Mapping[str, str] = {"auto": "sdpa", "flash": "flash_attention_2", "math": "eager"}
"""Implementations of transformers by our names."""


def attention(arguments: TrainerArguments) -> tuple[str, Mapping[str, str]]:
    """Name of the argument that chooses the attention, and its values by our names."""
    return arguments.dialect.attention or ("attn_implementation", ATTENTION)


def _read_rest(cwd: Path, arguments: TrainerArguments, found: ReadingDraft) -> None:
    script = program_of(arguments.edit.argv).script
    if script is not None and (cwd / script).with_suffix(".args").is_file():
        found.unread(
            "workload", f"{Path(script).with_suffix('.args').name}, which transformers reads beside the script"
        )
    if any(word.startswith("@") for word in arguments.words):
        found.unread("workload", "a file of arguments (@...)")
    for name in ("deepspeed", "fsdp_config"):
        given = arguments.given(name)
        is_path = isinstance(given, str) and given and "{" not in given and not arguments.dialect.presets
        if is_path and arguments.section(name) is None:
            found.unread("layout.zero_stage", f"{name} {given}: there is no such file")
