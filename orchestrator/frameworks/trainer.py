"""The Trainer of transformers: how its arguments spell a candidate, read and written, and what a trial needs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.frameworks.decoder_config import decoder_in
from orchestrator.frameworks.documents import ABSENT
from orchestrator.frameworks.edit import (
    Edit,
    EditedFile,
    Overlay,
    OverlayRequest,
    Reading,
    Run,
    contradictions,
    touch,
    values_of,
)
from orchestrator.frameworks.gaps import TORCH_SCALER, without_pipeline
from orchestrator.frameworks.launchers import count, program_of, without_launcher
from orchestrator.frameworks.spelling import Found, is_at_or_below
from orchestrator.frameworks.trainer_arguments import (
    MIXED_PRECISION,
    Dialect,
    FileSection,
    ShardingEngine,
    TrainerArguments,
    environment,
    world_size,
)
from trials.script.command import OUT, Expected
from trials.spec import LlamaModel, LossScale, Precision

_MODEL_FOLDERS = ("config_name", "model_name_or_path", "model", "model_id_or_path")
"""Arguments that name a model, or a folder with its ``config.json``."""
_LENGTHS = ("block_size", "max_seq_length", "cutoff_len", "max_length", "model_max_length")
_DYNAMO_BACKEND, _DYNAMO_MODE = "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"
_REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
MODES = ("default", "reduce-overhead", "max-autotune")
"""Modes of torch.compile that are knobs of ours."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def opened(run: Run) -> tuple[Edit, int | None]:
    """The command without its launcher, whose variables it has instead; and how many ranks that would start."""
    edit = Edit.of_run(run)
    launched = without_launcher(edit.argv)
    edit.argv = launched.argv
    world = launched.world_size
    if launched.launcher == "accelerate":
        edit.env |= environment(launched.options, edit)
        world = world_size(launched, edit)
    return edit, world or count(run.env.get("WORLD_SIZE"))


class TrainerLaying:
    """One candidate on its way into one command."""

    def __init__(self, edit: Edit, engine: ShardingEngine, request: OverlayRequest) -> None:
        self.edit = edit
        self.engine = engine
        self.request = request
        self.candidate = request.candidate
        self._asked = values_of(request.candidate)

    def changes(self, *paths: str) -> bool:
        """Whether any field at or below these paths has to be written."""
        below = [path for path in self._asked if any(is_at_or_below(path, part) for part in paths)]
        return any(self.request.changes(path, self._asked[path]) for path in below)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRow:
    """Fields that belong together, as the Trainer's arguments and the engine's settings spell them."""

    read: Callable[[TrainerArguments, ShardingEngine, Found], None]
    write: Callable[[TrainerLaying, TrainerArguments], None]


# Batch


def _read_batch(arguments: TrainerArguments, engine: ShardingEngine, found: Found) -> None:  # noqa: ARG001
    found.say({"micro_batch_size": arguments.get("per_device_train_batch_size", found, "micro_batch_size")})
    if arguments.is_on("auto_find_batch_size"):
        found.warn("micro_batch_size", "auto_find_batch_size may train on a smaller batch than the one asked for")


def _write_batch(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    """Batch sizes, in DeepSpeed's configuration too where that does not leave them to the arguments."""
    request, engine = laying.request, laying.engine
    micro, number = laying.candidate.micro_batch_size, request.num_microbatches
    if laying.changes("micro_batch_size"):
        arguments.put("per_device_train_batch_size", micro)
    if request.reading.num_microbatches != number:
        arguments.put("gradient_accumulation_steps", number)
    write_batch_of_deepspeed(engine, request)


def write_batch_of_deepspeed(engine: ShardingEngine, request: OverlayRequest) -> None:
    """The batch in DeepSpeed's configuration, as far as that gives numbers."""
    sizes = {
        "train_micro_batch_size_per_gpu": request.candidate.micro_batch_size,
        "gradient_accumulation_steps": request.num_microbatches,
        "train_batch_size": request.global_batch_size,
    }
    config = engine.config if engine.kind == "deepspeed" else None
    said = {name: config.get(name) for name in sizes} if config is not None else {}
    wrong = {name: sizes[name] for name, size in said.items() if isinstance(size, int | float) and size != sizes[name]}
    if wrong:
        engine.put_config(wrong)


# Layout


def read_layout(engine: ShardingEngine, found: Found) -> None:
    """Degrees; how many ranks data parallelism has is nothing that the program is told."""
    found.say({**without_pipeline(), "layout.cp": 1, "layout.sequence_parallel": False})
    found.say({"layout.shard_embedding": False, "layout.num_copies": 1})
    found.say({"layout.tp": _tensor_parallel(engine, found)})
    stage = engine.stage
    if stage is None:
        found.unread("layout.zero_stage", f"the configuration of {engine.kind}")
        return
    found.say({"layout.zero_stage": stage, "layout.replicate_with": "ddp"})


def _tensor_parallel(engine: ShardingEngine, found: Found) -> int | None:
    """The degree; 1 unless DeepSpeed or ``accelerate launch`` is told of one."""
    for name in ("CP_SIZE", "SP_SIZE", "DP_REPLICATE_SIZE"):
        if (engine.variable(f"PARALLELISM_CONFIG_{name}") or "1") not in ("1", "-1"):
            found.unread("layout", f"parallelism_config: {name.lower()}")
    given: Any = engine.variable("PARALLELISM_CONFIG_TP_SIZE") or 1
    if engine.kind == "deepspeed" and engine.config is not None:
        given = engine.config.get("tensor_parallel.autotp_size", given)
    return found.number("layout.tp", "tensor parallelism", given, 1)


def write_layout(laying: TrainerLaying, presets: bool = False) -> None:
    """Data parallelism by the engine that the command has; by DeepSpeed where it has none and is to shard."""
    layout, engine = laying.candidate.layout, laying.engine
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        laying.edit.refuse("layout.dp_shard", "the ranks shard among all of them, or none: no replicas beside dp_shard")
    for name in ("pp", "cp", "tp"):
        if getattr(layout, name) != laying.request.reading.values.get(f"layout.{name}", 1):
            laying.edit.refuse(f"layout.{name}", _UNABLE[name])
    if engine.kind == "fsdp" and (laying.request.device == "cpu" or engine.is_on_cpu):
        laying.edit.refuse("layout.zero_stage", "FSDP on the CPU trains with DDP, without a word: use DeepSpeed")
    if not laying.changes("layout.zero_stage"):
        return
    if engine.kind == "fsdp":
        _write_fsdp(laying)
    elif engine.kind == "deepspeed" and presets and engine.preset is not None:
        engine.put_preset(layout.zero_stage)
    elif engine.kind == "deepspeed" or layout.zero_stage:
        engine.put_config({"zero_optimization.stage": layout.zero_stage})


_UNABLE = {
    "pp": "the Trainer has no pipelines",
    "cp": "splitting sequences is up to the script: ParallelismConfig(cp_size=...)",
    "tp": "splitting matrices is up to the script, which loads the model so: from_pretrained(..., tp_plan='auto')",
}


def _write_fsdp(laying: TrainerLaying) -> None:
    stage, engine = laying.candidate.layout.zero_stage, laying.engine
    if stage == 0:
        engine.leave()
    elif stage == 1:
        laying.edit.refuse("layout.zero_stage", "FSDP has no stage 1: DeepSpeed has")
    else:
        engine.put_fsdp("reshard_after_forward", stage == 3)


# Precision


def _read_precision(arguments: TrainerArguments, engine: ShardingEngine, found: Found) -> None:
    found.say({"precision.white": (), "precision.black": ()})
    given = {name: arguments.get(name, found, "precision.dtype") for name in ("fp16", "bf16")}
    if set(given.values()) == {None}:
        found.warn("precision", "neither bf16 nor fp16 is said: the number format is the model's own")
        return
    short = next((name for name, is_on in given.items() if is_on), None)
    short = short or engine.variable(MIXED_PRECISION) or "no"
    read_precision(engine, found, short)


def read_precision(engine: ShardingEngine, found: Found, short: str) -> None:
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
        found.say(scale_of_deepspeed(config.get))
    elif short == "fp16":
        found.say(TORCH_SCALER)


def _deepspeed_dtype(config: FileSection, asked: str) -> str:
    """What DeepSpeed computes in: its own word, or the arguments' where it says ``auto`` or nothing."""
    for name in ("bf16", "fp16"):
        said = config.get(f"{name}.enabled")
        if said is True or (said in ("auto", None) and asked == name):
            return name
    return "no"


def _write_precision(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    """Autocast by the Trainer's flags under DDP; by DeepSpeed's configuration under DeepSpeed."""
    precision, engine = laying.candidate.precision, laying.engine
    if not _changes_precision(laying):
        return
    short = SHORT.get(precision.dtype)
    is_autocast = precision.level == "O1" and engine.kind == "deepspeed" and engine.config is not None
    for name in ("bf16", "fp16"):
        is_on = name == short and not is_autocast
        if arguments.get(name) is not is_on:
            arguments.put(name, is_on)
    if engine.variable(MIXED_PRECISION) is not None:
        laying.edit.env[MIXED_PRECISION] = "no" if is_autocast else short or "no"
    write_precision_of_engine(laying)


def _changes_precision(laying: TrainerLaying) -> bool:
    """Whether another engine, or another word, gives another precision than the one asked for."""
    values = laying.request.reading.values
    is_other_engine = values.get("layout.zero_stage") != laying.candidate.layout.zero_stage
    return laying.changes("precision.level", "precision.dtype") or is_other_engine


def write_precision_of_engine(laying: TrainerLaying) -> None:
    """What DeepSpeed's configuration says of number formats, and what the others cannot do."""
    precision, engine = laying.candidate.precision, laying.engine
    if engine.kind == "ddp" and precision.level == "O2":
        laying.edit.refuse("precision.level", "DDP has autocast (O1), but no 16-bit weights with fp32 masters")
    elif engine.kind == "fsdp" and precision.level == "O1":
        laying.edit.refuse("precision.level", "FSDP itself computes in 16 bits (O2), without autocast")
    elif engine.kind == "deepspeed" and precision.level == "O1" and engine.config is None:
        laying.edit.refuse("precision.level", "autocast needs a configuration file of DeepSpeed, and there is none")
    if precision.loss_scale is not None and not (engine.kind == "deepspeed" and precision.level == "O2"):
        laying.edit.warn("precision.loss_scale", "torch's GradScaler is taken as it is")
    config = engine.config if engine.kind == "deepspeed" else None
    if config is not None and (changes := precision_in_deepspeed(config, precision)):
        engine.put_config(changes)


def precision_in_deepspeed(config: FileSection | EditedFile, precision: Precision) -> dict[str, Any]:
    """What has to change in DeepSpeed's configuration for a number format; what is left to the arguments stays so."""
    changes: dict[str, Any] = {}
    short = SHORT.get(precision.dtype) if precision.level == "O2" else None
    for name in ("bf16", "fp16"):
        said = config.get(f"{name}.enabled")
        if said not in (None, "auto", name == short) or (said is None and name == short):
            changes[f"{name}.enabled"] = name == short
    if precision.level == "O1":
        changes |= {"torch_autocast.enabled": True, "torch_autocast.dtype": precision.dtype}
        changes["torch_autocast.lower_precision_safe_modules"] = []
    elif config.get("torch_autocast.enabled"):
        changes["torch_autocast.enabled"] = False
    if precision.loss_scale is not None and short == "fp16":
        changes |= scale_in_deepspeed(precision.loss_scale)
    return changes


def scale_of_deepspeed(get: Callable[[str, Any], Any]) -> dict[str, Any]:
    """DeepSpeed's loss scale, with its defaults; it doubles and halves, like torch."""
    static = get("fp16.loss_scale", 0)
    return TORCH_SCALER | {
        "precision.loss_scale.initial": float(static or 2.0 ** get("fp16.initial_scale_power", 16)),
        "precision.loss_scale.growth_interval": get("fp16.loss_scale_window", 1000),
        "precision.loss_scale.backoff_interval": get("fp16.hysteresis", 2),
        "precision.loss_scale.dynamic": not static,
    }


def scale_in_deepspeed(scale: LossScale) -> dict[str, Any]:
    """The loss scale in DeepSpeed's words, which doubles and halves it."""
    return {
        "fp16.loss_scale": 0 if scale.dynamic else scale.initial,
        "fp16.initial_scale_power": max(0, round(math.log2(scale.initial))),
        "fp16.loss_scale_window": scale.growth_interval,
        "fp16.hysteresis": scale.backoff_interval,
    }


# Recompute


def _read_recompute(arguments: TrainerArguments, engine: ShardingEngine, found: Found) -> None:
    found.say({"recompute.selective": (), "recompute.communication": ()})
    name = arguments.dialect.recompute
    is_off = name.startswith("disable_")
    on = [arguments.get(name, found, "recompute.full") is (not is_off)]
    if not is_off:
        on.append(arguments.is_on("activation_checkpointing"))
    if engine.kind == "fsdp":
        on.append(str(engine.fsdp("activation_checkpointing")).lower() in ("true", "1"))
    found.say({"recompute.full": ((1,),) if any(on) else ()})


def _write_recompute(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    if not laying.changes("recompute.full"):
        return
    is_on, name = bool(laying.candidate.recompute.full), arguments.dialect.recompute
    if is_on and not is_whole(laying):
        laying.edit.refuse("recompute.full", "it is all layers or none")
    if name == "gradient_checkpointing" and arguments.get("activation_checkpointing") is not None:
        name = "activation_checkpointing"
    arguments.put(name, is_on != name.startswith("disable_"))
    has_kwargs = any(arguments.get(f"{stem}_checkpointing_kwargs") for stem in ("gradient", "activation"))
    if is_on and name == "gradient_checkpointing" and not has_kwargs and laying.engine.kind != "fsdp":
        arguments.put("gradient_checkpointing_kwargs", {"use_reentrant": False})
    if laying.engine.kind == "fsdp" and laying.engine.fsdp("activation_checkpointing") is not None:
        laying.engine.put_fsdp("activation_checkpointing", is_on)


def is_whole(laying: TrainerLaying) -> bool:
    """Whether every layer is recomputed, as far as their number is known."""
    number = laying.request.reading.num_layers
    return number is None or sum(map(sum, laying.candidate.recompute.full)) == number


# Loader


def _read_loader(arguments: TrainerArguments, engine: ShardingEngine, found: Found) -> None:  # noqa: ARG001
    workers = arguments.get("dataloader_num_workers", found, "loader.num_workers")
    ahead = arguments.get("dataloader_prefetch_factor", found, "loader.prefetch_factor")
    found.say({"loader.num_workers": workers, "loader.full_batch": False})
    if workers is not None:
        found.say({"loader.prefetch_factor": (ahead or 2) if workers else 0})
    pinned = arguments.get("dataloader_pin_memory", found, "loader.pin_memory")
    found.say({"loader.pin_memory": pinned and not arguments.is_on("use_cpu")})
    kept = arguments.get("dataloader_persistent_workers", found, "loader.persistent_workers")
    found.say({"loader.persistent_workers": bool(workers) and kept})


def _write_loader(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    loader = laying.candidate.loader
    if loader.tuning is not None:
        laying.edit.refuse("loader.tuning", "nothing tunes the loader of a program of your own: name num_workers")
    if laying.changes("loader.num_workers"):
        arguments.put("dataloader_num_workers", loader.num_workers)
    given = arguments.get("dataloader_prefetch_factor")
    if not loader.num_workers and given is not None:
        arguments.drop("dataloader_prefetch_factor")  # torch refuses it without workers
    elif loader.num_workers and (given or 2) != loader.prefetch_factor:
        arguments.put("dataloader_prefetch_factor", loader.prefetch_factor)
    kept = arguments.is_on("dataloader_persistent_workers")
    if kept != loader.persistent_workers and (laying.changes("loader") or not loader.num_workers):
        arguments.put("dataloader_persistent_workers", loader.persistent_workers)
    if laying.changes("loader.pin_memory"):
        arguments.put("dataloader_pin_memory", loader.pin_memory)


# Kernels


def _read_kernels(arguments: TrainerArguments, engine: ShardingEngine, found: Found) -> None:
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


def _write_kernels(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    kernels = laying.candidate.kernels
    if laying.changes("kernels.compile", "kernels.backend", "kernels.compile_mode"):
        if kernels.compile == "block":
            laying.edit.refuse("kernels.compile", "the Trainer compiles the whole model")
        is_on = kernels.compile != "off"
        arguments.drop("torch_compile_backend", "torch_compile_mode")
        arguments.put("torch_compile", is_on)
        if is_on and (kernels.backend, kernels.compile_mode) != ("inductor", "default"):
            arguments.put("torch_compile_backend", kernels.backend)
            arguments.put("torch_compile_mode", kernels.compile_mode)
    if laying.changes("kernels.matmul_precision"):
        if kernels.matmul_precision == "medium":
            laying.edit.refuse("kernels.matmul_precision", "the Trainer has TF32 (high) or not (highest)")
        arguments.put("tf32", kernels.matmul_precision != "highest")
    if laying.changes("kernels.attention"):
        _write_attention(laying, arguments)


def _write_attention(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    name, known = attention(arguments)
    asked = laying.candidate.kernels.attention
    if asked not in known:
        laying.edit.refuse("kernels.attention", f"{name} has no {asked}: it has {', '.join(known)}")
    elif arguments.dialect.attention is None and "kernels.attention" not in laying.request.reading.values:
        laying.edit.refuse("kernels.attention", f"the command has no --{name}: write it there if your script has it")
    else:
        arguments.put(name, known[asked])


ROWS = (
    TrainerRow(read=_read_batch, write=_write_batch),
    TrainerRow(
        read=lambda _, engine, found: read_layout(engine, found),
        write=lambda laying, arguments: write_layout(laying, arguments.dialect.presets),
    ),
    TrainerRow(read=_read_precision, write=_write_precision),
    TrainerRow(read=_read_recompute, write=_write_recompute),
    TrainerRow(read=_read_loader, write=_write_loader),
    TrainerRow(read=_read_kernels, write=_write_kernels),
)
"""In the order in which they are written: number formats depend on the engine."""


# A command read


def read_trainer(run: Run, dialect: Dialect) -> Reading:
    """The Trainer's arguments in our words, its defaults included."""
    edit, world = opened(run)
    return read_edit(edit, dialect, Path(run.cwd), world)


def read_edit(edit: Edit, dialect: Dialect, cwd: Path, world: int | None = None) -> Reading:
    """What a command in the making says by now, on ``world`` ranks where that is known."""
    found, arguments = Found({}, is_export=False), TrainerArguments(edit, dialect)
    found.notes += edit.notes
    engine, shape = ShardingEngine(edit, arguments), _shape(cwd, arguments)
    for row in ROWS:
        row.read(arguments, engine, found)
    if shape is not None and found.fields["recompute.full"]:
        found.say({"recompute.full": ((shape.num_layers,),)})
    number = arguments.get("gradient_accumulation_steps", found, "micro_batch_size")
    _read_rest(cwd, arguments, found)
    micro, tp = found.fields.get("micro_batch_size"), found.fields.get("layout.tp", 1)
    return Reading(
        values=found.fields,
        shape=shape,
        num_layers=shape.num_layers if shape else None,
        seq_length=next((size for size in map(arguments.get, _LENGTHS) if isinstance(size, int) and size > 0), None),
        global_batch_size=world // tp * micro * number if world and micro and number else None,
        num_microbatches=number,
        seed=arguments.get("seed", found, "workload.seed"),
        world_size=world,
        notes=tuple(found.notes),
    )


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


def _read_rest(cwd: Path, arguments: TrainerArguments, found: Found) -> None:
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


# A candidate laid over a command


def overlay_trainer(run: Run, request: OverlayRequest, dialect: Dialect) -> Overlay:
    """The Trainer's arguments with the candidate laid over them; files they point to are changed in copies."""
    edit, _ = opened(run)
    arguments = TrainerArguments(edit, dialect)
    laying = TrainerLaying(edit, ShardingEngine(edit, arguments), request)
    for row in ROWS:
        row.write(laying, arguments)
    if request.seed is not None and request.seed != request.reading.seed:
        arguments.put("seed", request.seed)
    for choice in request.candidate.own:
        arguments.drop(choice.name) if choice.value is None else arguments.put(choice.name, choice.value)
    return finished(laying, read_edit(edit, dialect, Path(run.cwd)))


def finished(laying: TrainerLaying, said: Reading) -> Overlay:
    """The overlay, with an error for every field that it says otherwise, or cannot say, and that no note speaks of."""
    edit, request = laying.edit, laying.request
    policy = laying.candidate.recompute.full
    if said.num_layers is None and said.values.get("recompute.full") and policy:
        values = {**said.values, "recompute.full": policy}  # all of them, however many there are
        said = dataclasses.replace(said, values=values)
    known = [note.knob for note in edit.notes]
    stage = said.values.get("layout.zero_stage")
    if laying.changes("layout.zero_stage") and stage != laying.candidate.layout.zero_stage:
        message = f"asked for {laying.candidate.layout.zero_stage}, the command says {stage}"
        edit.refuse("layout.zero_stage", message)
    edit.notes += [note for note in contradictions(request, said) if not any(touch(note.knob, k) for k in known)]
    return edit.overlay()


def expected_of(request: OverlayRequest) -> Expected:
    """What the Trainer's ranks are seen to do."""
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
"""Arguments of every trial. With the filter for NaN the log of a run that diverged looks like that of one that did
not."""


_OFF_WHERE_GIVEN = ("do_eval", "do_predict", "eval_on_start", "plot_loss", "auto_find_batch_size")


ENVIRONMENT: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Trackers off, for programs that start one themselves."""


def edit_of(overlay: Overlay) -> Edit:
    """The overlay ready to be changed; its files' formats are seen from their text."""
    edit = Edit.of_overlay(overlay)
    edit.names = {name: _file_name(name, text) for name, text in overlay.files.items()}
    return edit


def _file_name(name: str, text: str) -> str:
    return f"{name}.json" if text.lstrip().startswith("{") else f"{name}.yaml"


def trackers_off(edit: Edit) -> Overlay:
    """The overlay, with trackers that programs start themselves off."""
    edit.env |= {name: value for name, value in ENVIRONMENT.items() if name not in edit.env}
    return edit.overlay()


def trial_of_trainer(
    overlay: Overlay, last_step: int, dialect: Dialect, more: Mapping[str, Any] | None = None
) -> Overlay:
    """The program in trial mode.

    It ends by the hook's callback or with its rank, which leave the schedule of the learning rate; only a ``max_steps``
    of its own that comes too early is moved.
    """
    edit = edit_of(overlay)
    arguments = TrainerArguments(edit, dialect)
    old_name = arguments.given("evaluation_strategy") is not ABSENT
    for name, value in {**TRIAL, **(more or {})}.items():
        arguments.put("evaluation_strategy" if old_name and name == "eval_strategy" else name, value)
    for name in _OFF_WHERE_GIVEN:
        if arguments.given(name) is not ABSENT:
            arguments.put(name, False)
    arguments.drop("resume_from_checkpoint")
    if arguments.given("logging_dir") is not ABSENT:
        arguments.put("logging_dir", OUT)
    limit = arguments.get("max_steps")
    if isinstance(limit, int) and 0 < limit < last_step:
        arguments.put("max_steps", last_step)
        message = f"max_steps {limit} is less than the {last_step} steps of a trial, which moves the schedule"
        edit.warn("workload", message)
    return trackers_off(edit)
