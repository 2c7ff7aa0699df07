"""MindFormers as people run it: ``msrun ... run_mindformer.py --config FILE``, whose YAML trials change in a copy.

Read from the sources of 2.1.0; keys of older releases are known where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import Argument, Words, either_dash
from orchestrator.recipes.mindformers.given import CONFIG, SCRIPT, document
from orchestrator.recipes.mindformers.reader import read
from orchestrator.recipes.mindformers.writer import LAYING
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.training import Overlay, OverlayRequest, Run, Training
from trials.script.command import Expected, LogFormat

_MSRUN = "mindspore.parallel.cluster.run"
"""The module that ``msrun`` is."""
LOG_DIR, JOIN = either_dash("--log_dir"), Argument(name="--join")
_OVERRIDES = tuple(
    either_dash(name)
    for name in ("--load_checkpoint", "--resume_training", "--auto_trans_ckpt", "--do_eval", "--profile", "--run_mode")
)
"""Arguments of ``run_mindformer.py`` that would speak louder than the YAML."""
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
    """The YAML behind ``--config``."""
    word = arguments.read_text(argv, CONFIG)
    if not word or "{" in word or not recognises(Run(argv=argv, cwd=cwd)):
        return {}
    return {"config": str(Path(cwd, word))}


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """Without checkpoints, evaluation, profiles, trackers; ``runner_config.stop_step`` ends it, which leaves the
    schedule of the learning rate. msrun's logs go to the attempt's folder."""
    edit = Edit.of_overlay(made)
    config = document(edit)
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
    """The arguments with msrun's own, which stand before the script."""
    at = next(index for index, word in enumerate(argv) if SCRIPT in word or word.endswith(".py"))
    head = arguments.write(argv[:at], LOG_DIR, "{out}/msrun_log")
    return (*arguments.write(head, JOIN, "True"), *argv[at:])


def _callbacks(said: Any) -> list[Any]:
    """The user's callbacks without those that save or send, with the one that prints every step."""
    kept = [one for one in said or [] if isinstance(one, dict) and not _saves(str(one.get("type", "")))]
    monitors = [{**one, "per_print_times": 1} for one in kept if one.get("type") == _LOSS_MONITOR]
    others = [one for one in kept if one.get("type") != _LOSS_MONITOR]
    return [*(monitors or [{"type": _LOSS_MONITOR, "per_print_times": 1}]), *others]


def _saves(name: str) -> bool:
    return any(word in name for word in ("Checkpoint", "Obs", "Eval", "Profile", "Summary", "TrainingStateMonitor"))


def expected(request: OverlayRequest) -> Expected:
    """MindSpore is no torch: no hook looks inside, only the number of processes can be told."""
    return Expected(world_size=request.world_size)


TRAINING = Training(
    name="mindformers",
    title="MindFormers",
    package="mindformers",
    releases=">=1.3,<2.2",
    launcher="own",
    log=LogFormat(name="mindformers", files=("{out}/msrun_log/worker_*.log",)),
    recognises=recognises,
    find_files=find_files,
    read=read,
    overlay=LAYING.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
