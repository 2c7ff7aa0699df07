"""PaddleNLP as people run it: ``paddle.distributed.launch run_pretrain.py FILE.json``, or with arguments.

Names, defaults and rules are those of the sources of 2.8.1 and 3.0.0b4. PaddleFormers, which followed, has other names.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import either_dash
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.paddlenlp.given import SCRIPTS, PaddleArguments, find_files, is_launched, script_at
from orchestrator.recipes.paddlenlp.reader import read
from orchestrator.recipes.paddlenlp.writer import LAYING
from orchestrator.recipes.training import Overlay, OverlayRequest, Run, Training
from trials.script.command import Expected, LogFormat

LOG_DIR = either_dash("--log_dir")
_OFF: dict[str, Any] = {
    "do_eval": False,
    "do_predict": False,
    "evaluation_strategy": "no",
    "save_strategy": "no",
    "logging_steps": 1,
    "logging_strategy": "steps",
    "report_to": "none",
    "disable_tqdm": True,
    "output_dir": "{out}/output",
}
_GONE = ("resume_from_checkpoint", "logging_dir", "push_to_hub", "load_best_model_at_end", "profiler_options")


def recognises(run: Run) -> bool:
    return is_launched(run.argv) or any(PurePath(word).name in SCRIPTS for word in run.argv)


def trial_mode(made: Overlay, last_step: int) -> Overlay:
    """Without evaluation, checkpoints, trackers; ``max_steps`` ends it, and ``decay_steps`` and ``warmup_steps`` keep
    the schedule of the learning rate that the user's own ``max_steps`` made. Logs go to the attempt's folder;
    ``test_ci_no_save_model`` is how ``run_pretrain.py`` is told not to save at its end."""
    edit = Edit.of_overlay(made)
    given = PaddleArguments(edit)
    total = given.get("max_steps")
    steps = int(total) if str(total).isdigit() else None
    if steps and given.get("decay_steps") is None:
        given.put({"decay_steps": steps})
    ratio = float(given.get("warmup_ratio") or 0)
    if steps and ratio and not int(given.get("warmup_steps") or 0):
        given.put({"warmup_steps": int(ratio * steps), "warmup_ratio": 0.0})
    given.put({**_OFF, "max_steps": last_step})
    given.drop(*_GONE)
    edit.env["test_ci_no_save_model"] = "1"
    at = script_at(edit.argv)
    if at is not None and is_launched(edit.argv):
        edit.argv = (*_launcher(edit.argv[:at]), *edit.argv[at:])
    return edit.overlay()


def _launcher(head: arguments.Words) -> arguments.Words:
    """The launcher's own words, which stand before the script."""
    return arguments.write(head, LOG_DIR, "{out}/log")


def expected(request: OverlayRequest) -> Expected:
    """Paddle is no torch: no hook looks inside, only the number of processes can be told."""
    return Expected(world_size=request.world_size)


TRAINING = Training(
    name="paddlenlp",
    title="PaddleNLP",
    package="paddlenlp",
    releases=">=2.8,<3.1",
    launcher="own",
    log=LogFormat(name="paddlenlp", files=("{out}/log/workerlog.*",)),
    recognises=recognises,
    find_files=find_files,
    read=read,
    overlay=LAYING.overlay,
    trial_mode=trial_mode,
    expected=expected,
)
