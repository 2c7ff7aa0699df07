"""A candidate laid over a program on the Trainer of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.recipes.base import Note
from orchestrator.recipes.fields import is_at_or_below
from orchestrator.recipes.hugging_face.engine import MIXED_PRECISION, ShardingEngine
from orchestrator.recipes.hugging_face.reading import attention, opened, read_edit
from orchestrator.recipes.hugging_face.settings import Dialect, TrainerArguments
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.lay import contradictions, values_of
from orchestrator.recipes.training import Overlay, OverlayRequest, Reading, Run
from trials.script.command import Expected
from trials.spec import LossScale

_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


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


def overlay_trainer(run: Run, request: OverlayRequest, dialect: Dialect) -> Overlay:
    """The Trainer's arguments with the candidate laid over them; files they point to are changed in copies."""
    edit, _ = opened(run)
    arguments = TrainerArguments(edit, dialect)
    laying = TrainerLaying(edit, ShardingEngine(edit, arguments), request)
    _write_batch(laying, arguments)
    write_layout(laying, arguments.dialect.presets)
    _write_precision(laying, arguments)
    _write_recompute(laying, arguments)
    _write_loader(laying, arguments)
    _write_kernels(laying, arguments)
    _write_seed(laying, arguments)
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
        _refuse(
            laying, "layout.zero_stage", f"asked for {laying.candidate.layout.zero_stage}, the command says {stage}"
        )
    wrong = [note for note in contradictions(request, said) if not _touches(note.knob, known)]
    edit.notes += wrong
    return edit.overlay()


def _touches(path: str, knobs: Iterable[str]) -> bool:
    return any(is_at_or_below(path, knob) or is_at_or_below(knob, path) for knob in knobs)


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


# ---- batch, layout ----


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


def write_layout(laying: TrainerLaying, presets: bool = False) -> None:
    """Data parallelism by the engine that the command has; by DeepSpeed where it has none and is to shard."""
    layout, engine = laying.candidate.layout, laying.engine
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        _refuse(laying, "layout.dp_shard", "the ranks shard among all of them, or none: no replicas beside dp_shard")
    for name in ("pp", "cp", "tp"):
        if getattr(layout, name) != laying.request.reading.values.get(f"layout.{name}", 1):
            _refuse(laying, f"layout.{name}", _UNABLE[name])
    if engine.kind == "fsdp" and (laying.request.device == "cpu" or engine.is_on_cpu):
        _refuse(laying, "layout.zero_stage", "FSDP on the CPU trains with DDP, without a word: use DeepSpeed")
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
        _refuse(laying, "layout.zero_stage", "FSDP has no stage 1: DeepSpeed has")
    else:
        engine.put_fsdp("reshard_after_forward", stage == 3)


def _refuse(laying: TrainerLaying, knob: str, message: str) -> None:
    laying.edit.notes.append(Note(knob=knob, message=message, severity="error"))


def _warn(laying: TrainerLaying, knob: str, message: str) -> None:
    laying.edit.notes.append(Note(knob=knob, message=message, severity="warning"))


# ---- precision ----


def _write_precision(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    """Autocast by the Trainer's flags under DDP; by DeepSpeed's configuration under DeepSpeed."""
    precision, engine = laying.candidate.precision, laying.engine
    if not _changes_precision(laying):
        return
    short = _SHORT.get(precision.dtype)
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
        _refuse(laying, "precision.level", "DDP has autocast (O1), but no 16-bit weights with fp32 masters")
    elif engine.kind == "fsdp" and precision.level == "O1":
        _refuse(laying, "precision.level", "FSDP itself computes in 16 bits (O2), without autocast")
    elif engine.kind == "deepspeed" and precision.level == "O1" and engine.config is None:
        _refuse(laying, "precision.level", "autocast needs a configuration file of DeepSpeed, and there is none")
    if precision.loss_scale is not None and not (engine.kind == "deepspeed" and precision.level == "O2"):
        _warn(laying, "precision.loss_scale", "torch's GradScaler is taken as it is")
    if engine.kind == "deepspeed":
        _write_deepspeed_precision(laying)


def _write_deepspeed_precision(laying: TrainerLaying) -> None:
    precision, engine = laying.candidate.precision, laying.engine
    config = engine.config
    if config is None:
        return
    changes: dict[str, Any] = {}
    short = _SHORT.get(precision.dtype) if precision.level == "O2" else None
    for name in ("bf16", "fp16"):
        said = config.get(f"{name}.enabled")
        if said not in (None, "auto", name == short) or (said is None and name == short):
            changes[f"{name}.enabled"] = name == short
    has_autocast = config.get("torch_autocast.enabled")
    if precision.level == "O1":
        changes |= {"torch_autocast.enabled": True, "torch_autocast.dtype": precision.dtype}
        changes["torch_autocast.lower_precision_safe_modules"] = []
    elif has_autocast:
        changes["torch_autocast.enabled"] = False
    if precision.loss_scale is not None and short == "fp16":
        changes |= scale_of_deepspeed(precision.loss_scale)
    if changes:
        engine.put_config(changes)


def scale_of_deepspeed(scale: LossScale) -> dict[str, Any]:
    """The loss scale in DeepSpeed's words, which doubles and halves it."""
    return {
        "fp16.loss_scale": 0 if scale.dynamic else scale.initial,
        "fp16.initial_scale_power": max(0, int(scale.initial).bit_length() - 1),
        "fp16.loss_scale_window": scale.growth_interval,
        "fp16.hysteresis": scale.backoff_interval,
    }


# ---- recompute, loader, kernels ----


def _write_recompute(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    if not laying.changes("recompute.full"):
        return
    is_on, name = bool(laying.candidate.recompute.full), arguments.dialect.recompute
    if is_on and not is_whole(laying):
        _refuse(laying, "recompute.full", "it is all layers or none")
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


def _write_loader(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    loader = laying.candidate.loader
    if loader.tuning is not None:
        _refuse(laying, "loader.tuning", "nothing tunes the loader of a program of your own: name num_workers")
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


def _write_kernels(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    kernels = laying.candidate.kernels
    if laying.changes("kernels.compile", "kernels.backend", "kernels.compile_mode"):
        if kernels.compile == "block":
            _refuse(laying, "kernels.compile", "the Trainer compiles the whole model")
        is_on = kernels.compile != "off"
        arguments.drop("torch_compile_backend", "torch_compile_mode")
        arguments.put("torch_compile", is_on)
        if is_on and (kernels.backend, kernels.compile_mode) != ("inductor", "default"):
            arguments.put("torch_compile_backend", kernels.backend)
            arguments.put("torch_compile_mode", kernels.compile_mode)
    if laying.changes("kernels.matmul_precision"):
        if kernels.matmul_precision == "medium":
            _refuse(laying, "kernels.matmul_precision", "the Trainer has TF32 (high) or not (highest)")
        arguments.put("tf32", kernels.matmul_precision != "highest")
    if laying.changes("kernels.attention"):
        _write_attention(laying, arguments)


def _write_attention(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    name, known = attention(arguments)
    asked = laying.candidate.kernels.attention
    if asked not in known:
        _refuse(laying, "kernels.attention", f"{name} has no {asked}: it has {', '.join(known)}")
    elif arguments.dialect.attention is None and "kernels.attention" not in laying.request.reading.values:
        _refuse(laying, "kernels.attention", f"the command has no --{name}: write it there if your script has it")
    else:
        arguments.put(name, known[asked])


def _write_seed(laying: TrainerLaying, arguments: TrainerArguments) -> None:
    seed = laying.request.seed
    if seed is not None and seed != laying.request.reading.seed:
        arguments.put("seed", seed)
