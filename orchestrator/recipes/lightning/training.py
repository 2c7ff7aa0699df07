"""Lightning as people run it: ``main.py fit --config FILE --trainer.key value``, and other scripts, whose
arguments only placeholders can fill.

Names and defaults are those of 2.6.6. The reporting hook is a callback, which measures and stops either kind.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from orchestrator.recipes.lightning.given import NOTHING, LightningArguments, find_files, is_cli, recognises
from orchestrator.recipes.lightning.layout import LAYING, read
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.training import Overlay, OverlayRequest, Training
from trials.script.command import Expected, LogFormat

_OFF: dict[str, Any] = {
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.limit_val_batches": 0,
    "trainer.num_sanity_val_steps": 0,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.log_every_n_steps": 1,
    "trainer.profiler": None,
    "trainer.max_time": None,
    "trainer.max_epochs": -1,
    "trainer.default_root_dir": "{out}",
}
_ROOT = "PL_TRAINER_DEFAULT_ROOT_DIR"
"""Lightning's own variable for where its Trainer puts logs and checkpoints, unless the program says where."""
_NEED_WHAT_IS_OFF = ("Checkpoint", "LearningRateMonitor", "DeviceStatsMonitor", "EarlyStopping", "ModelSummary")
"""Callbacks that Lightning refuses, or that wait in vain, without logger, checkpoints and validation."""


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """Without logger, checkpoints, validation; ``max_steps`` ends it. A program that is no LightningCLI's stays as it
    is, but for where it leaves its files: its callbacks may need a logger, or checkpoints. The hook ends it, and the
    schedule of its learning rate is that of the whole run."""
    edit = Edit.of_overlay(made)
    if not is_cli(edit.argv):
        return replace(made, env={**made.env, _ROOT: "{out}"})
    given = LightningArguments(edit)
    callbacks = given.get("trainer.callbacks")
    if isinstance(callbacks, list):
        kept = [one for one in callbacks if not _needs_what_is_off(one)]
        if kept != callbacks:
            given.put("trainer.callbacks", json.dumps(kept))
    given.drop("ckpt_path")
    if given.get("ckpt_path") not in (NOTHING, None):
        given.put("ckpt_path", None)
    for name, value in {**_OFF, "trainer.max_steps": last_step}.items():
        given.put(name, value)
    return edit.overlay()


def _needs_what_is_off(callback: Any) -> bool:
    name = str(callback.get("class_path", "")) if isinstance(callback, dict) else str(callback)
    return name.rpartition(".")[2].endswith(_NEED_WHAT_IS_OFF)


def expected(request: OverlayRequest) -> Expected:
    """What can be seen from inside; a rank's samples only where the command says its batch."""
    candidate, layout = request.candidate, request.candidate.layout
    says = request.reading.values
    return Expected(
        world_size=request.world_size,
        micro_batch_size=candidate.micro_batch_size if "micro_batch_size" in says else None,
        num_microbatches=request.num_microbatches,
        dtype=candidate.precision.dtype if "precision.dtype" in says else None,
        parameter_shards=layout.dp_shard if layout.zero_stage == 3 and layout.dp_shard > 1 else None,
    )


TRAINING = Training(
    name="lightning",
    title="Lightning",
    package="pytorch-lightning",
    releases=">=2.2,<3",
    log=LogFormat(name="lightning"),
    recognises=recognises,
    find_files=find_files,
    read=read,
    overlay=LAYING.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
