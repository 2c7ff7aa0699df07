"""Programs on the Trainer of transformers as a trial runs them: nothing saved, evaluated, pushed or tracked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.recipes.base import Note
from orchestrator.recipes.documents import ABSENT
from orchestrator.recipes.hugging_face.settings import Dialect, TrainerArguments
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.training import Overlay
from trials.script.command import OUT

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
        edit.notes.append(Note(knob="workload", message=message, severity="warning"))
    edit.env |= {name: value for name, value in ENVIRONMENT.items() if name not in edit.env}
    return edit.overlay()
