"""Programs on the Trainer of transformers, that of trl included: ``TrainingArguments`` by HfArgumentParser.

Names and defaults are those of transformers 5.23 (``training_args.py``, ``hf_argparser.py``); 4.46 and later have the
same for all that is written here.
"""

from __future__ import annotations

from orchestrator.recipes.arguments import Words
from orchestrator.recipes.hugging_face.accelerate_launch import find_launch_files
from orchestrator.recipes.hugging_face.overlay import expected_of, overlay_trainer
from orchestrator.recipes.hugging_face.reading import read_trainer
from orchestrator.recipes.hugging_face.settings import Dialect, find_files
from orchestrator.recipes.hugging_face.trial import trial_of_trainer
from orchestrator.recipes.launchers import imports, program_of, script_text, without_launcher
from orchestrator.recipes.training import Overlay, OverlayRequest, Reading, Run, Training
from trials.script.command import LogFormat

_DIALECT = Dialect()
_SIGNS = ("Trainer(", "TrainingArguments", "SFTConfig", "HfArgumentParser")


def _recognises(run: Run) -> bool:
    """Whether the script has a Trainer, or is given arguments that only a Trainer has."""
    text = script_text(run.argv, run.cwd)
    if imports(text) & {"transformers", "trl"} and any(sign in text for sign in _SIGNS):
        return True
    words = program_of(without_launcher(run.argv).argv).arguments
    return not text and any(word.replace("-", "_").startswith("__per_device_train_batch_size") for word in words)


def _find_files(argv: Words, cwd: str) -> dict[str, str]:
    return {**find_files(without_launcher(argv).argv, cwd), **find_launch_files(argv, cwd)}


def _read(run: Run) -> Reading:
    return read_trainer(run, _DIALECT)


def _overlay(run: Run, request: OverlayRequest) -> Overlay:
    return overlay_trainer(run, request, _DIALECT)


def _trial_mode(overlay: Overlay, last_step: int) -> Overlay:
    return trial_of_trainer(overlay, last_step, _DIALECT)


TRAINING = Training(
    name="transformers",
    title="the Trainer of transformers",
    package="transformers",
    releases=">=4.46,<6",
    takes_launchers=True,
    takes_own_names=True,
    log=LogFormat(name="transformers"),
    recognises=_recognises,
    find_files=_find_files,
    read=_read,
    overlay=_overlay,
    trial_mode=_trial_mode,
    expected=expected_of,
)
