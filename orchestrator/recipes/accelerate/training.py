"""Programs with an ``Accelerator`` and a training loop of their own.

The engine and the number format are told by the variables that ``accelerate launch`` sets, accumulation by
``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``; batch size and workers by the script's own arguments, if their names are
common ones. Names are those of Accelerate 1.15.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.recipes.accelerate.program import ScriptWords
from orchestrator.recipes.arguments import Words
from orchestrator.recipes.hugging_face.accelerate_launch import find_launch_files
from orchestrator.recipes.hugging_face.engine import ACCUMULATION, MIXED_PRECISION, ShardingEngine
from orchestrator.recipes.hugging_face.overlay import (
    TrainerLaying,
    expected_of,
    finished,
    write_batch_of_deepspeed,
    write_layout,
    write_precision_of_engine,
)
from orchestrator.recipes.hugging_face.reading import opened, read_layout, read_precision
from orchestrator.recipes.hugging_face.trial import ENVIRONMENT, edit_of
from orchestrator.recipes.launchers import imports, script_text, without_launcher
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.findings import ReadingDraft
from orchestrator.recipes.training import Overlay, OverlayRequest, Reading, Run, Training
from trials.script.command import LogFormat

_SHORT = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def _recognises(run: Run) -> bool:
    text = script_text(run.argv, run.cwd)
    if "accelerate" in imports(text):
        return "Accelerator(" in text
    return without_launcher(run.argv).launcher == "accelerate"


# ---- reading ----


def _read(run: Run) -> Reading:
    edit, world = opened(run)
    return _read_edit(edit, ScriptWords(edit, script_text(run.argv, run.cwd)), world)


def _read_edit(edit: Edit, words: ScriptWords, world: int | None = None) -> Reading:
    found, engine = ReadingDraft(notes=list(edit.notes)), ShardingEngine(edit, None)
    read_layout(engine, found)
    short = words.text("precision") or engine.variable(MIXED_PRECISION)
    if short is not None or not words.decides_precision:
        read_precision(engine, found, short or "no")
    found.say({"micro_batch_size": words.whole("batch", found), "loader.num_workers": words.whole("workers", found)})
    if engine.kind == "fsdp":
        is_on = str(engine.fsdp("activation_checkpointing")).lower() == "true"
        found.say({"recompute.full": ((1,),) if is_on else ()})
    number = words.whole("accumulation", found)
    told = engine.variable(ACCUMULATION)
    if told is not None and told.isdigit():
        number = int(told)
    micro = found.values.get("micro_batch_size")
    return Reading(
        values=found.values,
        num_microbatches=number,
        global_batch_size=world * micro * number if world and micro and number else None,
        seed=words.whole("seed", found),
        world_size=world,
        notes=tuple(found.notes),
    )


# ---- overlay ----


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    """Variables for what Accelerate is told, and the script's arguments for the rest."""
    edit, _ = opened(run)
    words = ScriptWords(edit, script_text(run.argv, run.cwd))
    laying = TrainerLaying(edit, ShardingEngine(edit, None), request)
    words.write(laying)
    _write_accumulation(laying, words)
    write_batch_of_deepspeed(laying.engine, request)
    write_layout(laying)
    if laying.changes("precision.level", "precision.dtype"):
        short = _SHORT[request.candidate.precision.dtype]
        if words.text("precision") is not None:
            words.put("precision", short)
        elif words.decides_precision:
            edit.refuse("precision", "the script itself says Accelerator(mixed_precision=...)")
        else:
            edit.env[MIXED_PRECISION] = short
        write_precision_of_engine(laying)
    if laying.changes("recompute.full"):
        if laying.engine.kind == "fsdp":
            laying.engine.put_fsdp("activation_checkpointing", bool(request.candidate.recompute.full))
        else:
            edit.refuse("recompute.full", "outside of FSDP the script itself has to recompute its layers")
    return finished(laying, _read_edit(edit, words))


def _write_accumulation(laying: TrainerLaying, words: ScriptWords) -> None:
    """Accumulation by the script's argument, or by the variable that wins over what the script tells Accelerate."""
    number = laying.request.num_microbatches
    if number == laying.request.reading.num_microbatches:
        return
    if words.has("accumulation"):
        words.put("accumulation", number)
        if laying.engine.variable(ACCUMULATION) is not None:
            laying.edit.env[ACCUMULATION] = str(number)
    elif words.accumulates:
        laying.edit.env[ACCUMULATION] = str(number)
    elif number != 1 and "{accumulation}" not in " ".join(laying.edit.argv):
        message = (
            f"the script never accumulates, and {number} micro-batches were asked for: accelerator.accumulate(model)"
        )
        laying.edit.refuse("micro_batch_size", message)


def _trial_mode(overlay: Overlay, last_step: int) -> Overlay:  # noqa: ARG001 - the rank ends it
    """Trackers off; saves and evaluation are the script's own, but what it is told to write goes to the trial's
    folder."""
    edit = edit_of(overlay)
    ScriptWords(edit, "").quiet()
    edit.env |= {name: value for name, value in ENVIRONMENT.items() if name not in edit.env}
    return edit.overlay()


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    return {name: str(Path(path)) for name, path in find_launch_files(argv, cwd).items()}


TRAINING = Training(
    name="accelerate",
    title="Accelerate",
    package="accelerate",
    releases=">=1.0,<2",
    takes_launchers=True,
    takes_own_names=True,
    log=LogFormat(name="accelerate"),
    recognises=_recognises,
    find_files=_find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=_trial_mode,
    expected=expected_of,
)
