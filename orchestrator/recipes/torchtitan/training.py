"""torchtitan as people run it: ``python -m torchtitan.train --module M --config F --section.key value``.

Names, defaults and rules are those of release 0.3.0. Before it, configurations were TOML; after it, batches are counted
in tokens under other names.
"""

from __future__ import annotations

from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import either_dash
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.torchtitan.config_text import UNKNOWN
from orchestrator.recipes.torchtitan.given import OLD, TitanArguments, find_files
from orchestrator.recipes.torchtitan.reader import read
from orchestrator.recipes.torchtitan.writer import LAYING
from orchestrator.recipes.training import Overlay, OverlayRequest, Run, Training
from trials.script.command import Expected, LogFormat

_MODULE = "torchtitan.train"
_SCRIPTS = ("torchtitan/train.py",)
_DUMP = either_dash("--dump_folder")
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


def recognises(run: Run) -> bool:
    words = run.argv
    return _MODULE in words or any(word.endswith(_SCRIPTS) for word in words) or arguments.is_given(words, OLD)


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """Without checkpoints, validation, trackers, profiles; ``training.steps`` ends it, and ``lr_scheduler.total_steps``
    keeps the schedule that the user's own number of steps made."""
    edit = Edit.of_overlay(made)
    given = TitanArguments(edit)
    steps = arguments.read_text(given.options, either_dash("--training.steps"))
    total = arguments.read_text(given.options, either_dash("--lr_scheduler.total_steps"))
    if steps and total in (None, "None"):
        given.put("lr_scheduler.total_steps", steps)
    for name, value in {**_OFF, "training.steps": last_step}.items():
        given.put(name, value)
    given.put("dump_folder", "{out}/titan")
    return edit.overlay()


def expected(request: OverlayRequest) -> Expected:
    candidate, layout = request.candidate, request.candidate.layout
    dtype = candidate.precision.dtype if "precision.dtype" in request.reading.values else None
    policy = request.reading.values.get("recompute.full", UNKNOWN)
    spread = layout.tp * layout.pp * (layout.dp_shard if layout.zero_stage >= 2 else 1)
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size,
        num_microbatches=None if layout.pp > 1 else request.num_microbatches,
        dtype=dtype,
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
    read=read,
    overlay=LAYING.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
