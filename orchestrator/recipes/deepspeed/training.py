"""Programs with ``deepspeed.initialize`` and a training loop of their own: DeepSpeed's JSON is what they are told.

Names and defaults are those of DeepSpeed 0.19 (``runtime/config.py``, ``zero/config.py``). Loader, recompute and
kernels are the script's own there, and so is every loss: DeepSpeed prints none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.recipes.arguments import Argument, Words, read_text, write
from orchestrator.recipes.gaps import TORCH_SCALER
from orchestrator.recipes.hugging_face.engine import ShardingEngine
from orchestrator.recipes.hugging_face.overlay import TrainerLaying, expected_of, finished, scale_of_deepspeed
from orchestrator.recipes.hugging_face.reading import loss_scale_of_deepspeed, opened
from orchestrator.recipes.hugging_face.trial import ENVIRONMENT, edit_of
from orchestrator.recipes.launchers import imports, program_of, script_text, without_launcher
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft, without_pipeline
from orchestrator.recipes.training import Overlay, OverlayRequest, Reading, Run, Training
from trials.script.command import LogFormat

CONFIG = "deepspeed"
"""Placeholder of the JSON that the arguments point to."""
_POINTERS = tuple(
    Argument(name=name) for name in ("--deepspeed_config", "--deepspeed-config", "--ds_config", "--deepspeed")
)
MICRO, NUMBER, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_STAGE, _TP = "zero_optimization.stage", "tensor_parallel.autotp_size"
_HALVES = {"bf16": "bfloat16", "fp16": "float16"}
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "autotuning")


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
    """Placeholder of DeepSpeed's JSON: the one that an argument of DeepSpeed gives, else the only file there is."""
    words = program_of(edit.argv).arguments
    given = [read_text(words, pointer) or "" for pointer in _POINTERS]
    named = [word.strip("{}") for word in given if word.strip("{}") in edit.files]
    if named:
        return named[0]
    placed = [name for name in edit.files if any(f"{{{name}}}" in word for word in edit.argv)]
    return (
        placed[0] if (len(placed) == 1 and edit.file_name(placed[0]).endswith(".json")) or placed == [CONFIG] else None
    )


# ---- reading ----


def _read(run: Run) -> Reading:
    edit, world = opened(run)
    return _read_edit(edit, world)


def _read_edit(edit: Edit, world: int | None = None) -> Reading:
    found, name = ReadingDraft(), _name(edit)
    if name is None:
        message = "no JSON of DeepSpeed: give it by --deepspeed_config FILE, or name it under files and write its name"
        found.warn("workload", message)
        return Reading(values={}, notes=tuple(found.notes))
    config = EditedFile(edit, name)
    _read_layout(config, found)
    _read_precision(config, found)
    number, total = _read_batch(config, found, world)
    return Reading(
        values=found.values,
        num_microbatches=number,
        global_batch_size=total,
        world_size=world,
        notes=tuple(found.notes),
    )


def _read_layout(config: EditedFile, found: ReadingDraft) -> None:
    stage = found.whole("layout.zero_stage", _STAGE, config.get(_STAGE, 0), 0)
    tp = found.whole("layout.tp", _TP, config.get(_TP, 1), 1) or 1
    cp = found.whole("layout.cp", "sequence_parallel_size", config.get("sequence_parallel_size", 1), 1) or 1
    found.say({**without_pipeline(), "layout.tp": tp, "layout.cp": cp, "layout.zero_stage": stage})


def _read_batch(config: EditedFile, found: ReadingDraft, world: int | None) -> tuple[int | None, int | None]:
    """Micro-batches of a step, and samples; DeepSpeed works out the one of three that is not given."""
    micro, number, total = (_size(config, name, found) for name in (MICRO, NUMBER, TOTAL))
    dp = (world or 0) // (found.values.get("layout.tp", 1) * found.values.get("layout.cp", 1))
    if dp and total and micro and number is None:
        number = total // (micro * dp)
    elif dp and total and micro is None:
        number = number or 1
        micro = total // (number * dp)
    elif number is None and total is None:
        number = 1
    found.say({"micro_batch_size": micro})
    return number, total or (micro * number * dp if micro and number and dp else None)


def _size(config: EditedFile, name: str, found: ReadingDraft) -> int | None:
    given = config.get(name)
    if given == "auto":
        found.unread("micro_batch_size", f"{name} auto, which only the Trainer of transformers fills in")
        return None
    return found.whole("micro_batch_size", name, given)


def _read_precision(config: EditedFile, found: ReadingDraft) -> None:
    found.say({"precision.white": (), "precision.black": ()})
    if config.get("torch_autocast.enabled") is True:
        dtype = str(config.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
        found.say({"precision.level": "O1", "precision.dtype": dtype})
        found.say(TORCH_SCALER if dtype == "float16" else {})
        return
    short = next((name for name in _HALVES if config.get(f"{name}.enabled") is True), None)
    found.say({"precision.level": "O2" if short else "O0", "precision.dtype": _HALVES.get(short or "", "float32")})
    if short == "fp16":
        found.say(loss_scale_of_deepspeed(config))


# ---- overlay ----


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    """The JSON with the candidate laid over it; what a script does itself is refused unless it has placeholders."""
    edit, _ = opened(run)
    laying = TrainerLaying(edit, ShardingEngine(edit, None), request)
    if (name := _name(edit)) is None:
        return finished(laying, _read_edit(edit))
    config = EditedFile(edit, name)
    config.put(dict(_batch(config, request)))
    layout = request.candidate.layout
    for degree, message in _UNABLE.items():
        if getattr(layout, degree) != request.reading.values.get(f"layout.{degree}", 1):
            edit.refuse(f"layout.{degree}", message)
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        edit.refuse("layout.dp_shard", "ZeRO shards over all data-parallel ranks, not over some of them")
    if laying.changes("layout.zero_stage"):
        config.put({_STAGE: layout.zero_stage})
    if laying.changes("precision.level", "precision.dtype"):
        _write_precision(config, laying)
    for choice in request.candidate.own:
        argument = Argument(name=f"--{choice.name}")
        program = program_of(edit.argv)
        edit.argv = (*program.head, *write(program.arguments, argument, str(choice.value)))
    return finished(laying, _read_edit(edit))


_UNABLE = {
    "pp": "a pipeline is code: PipelineModule(layers, num_stages=...)",
    "cp": "splitting sequences is up to the script: UlyssesSPAttentionHF",
    "tp": "splitting matrices is up to the script, too: deepspeed.tp_model_init",
}


def _batch(config: EditedFile, request: OverlayRequest) -> Iterator[tuple[str, int]]:
    """Sizes that are not what was asked for; those that the JSON leaves out are only added where they must be."""
    sizes = {
        MICRO: request.candidate.micro_batch_size,
        NUMBER: request.num_microbatches,
        TOTAL: request.global_batch_size,
    }
    is_told = "micro_batch_size" in request.told
    given = {name: config.get(name) for name in sizes}
    for name, size in sizes.items():
        is_needed = given[name] is not None or (name == MICRO and "micro_batch_size" in request.named)
        is_needed = is_needed or (name == NUMBER and size != 1 and given[TOTAL] is None)
        if given[name] != size and is_needed and not is_told:
            yield name, size


def _write_precision(config: EditedFile, laying: TrainerLaying) -> None:
    precision = laying.candidate.precision
    short = next((name for name, dtype in _HALVES.items() if dtype == precision.dtype), None)
    changes: dict[str, Any] = {}
    for name in _HALVES:
        is_on = precision.level == "O2" and name == short
        if bool(config.get(f"{name}.enabled", default=False)) != is_on:
            changes[f"{name}.enabled"] = is_on
    if precision.level == "O1":
        changes |= {"torch_autocast.enabled": True, "torch_autocast.dtype": precision.dtype}
        changes |= {"torch_autocast.lower_precision_safe_modules": []}
    elif config.get("torch_autocast.enabled"):
        changes["torch_autocast.enabled"] = False
    if precision.loss_scale is not None and precision.level == "O2":
        changes |= scale_of_deepspeed(precision.loss_scale)
    elif precision.loss_scale is not None:
        laying.edit.warn("precision.loss_scale", "torch's GradScaler is taken as it is")
    config.put(changes)


# ---- trial ----


def _trial_mode(overlay: Overlay, last_step: int) -> Overlay:  # noqa: ARG001 - the rank ends it
    """A line per step, monitors and tuners off; saves are the script's own."""
    edit = edit_of(overlay)
    if (name := _name(edit)) is not None:
        config = EditedFile(edit, name)
        off = {f"{part}.enabled": False for part in _MONITORS if config.get(f"{part}.enabled")}
        config.put({"steps_per_print": 1, "log_level": "info", **off})
    edit.env |= {name: value for name, value in ENVIRONMENT.items() if name not in edit.env}
    return edit.overlay()


TRAINING = Training(
    name="deepspeed",
    title="DeepSpeed",
    package="deepspeed",
    releases=">=0.14,<1",
    takes_launchers=True,
    takes_own_names=True,
    log=LogFormat(name="deepspeed"),
    recognises=_recognises,
    find_files=_find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=_trial_mode,
    expected=expected_of,
)
