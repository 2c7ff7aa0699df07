"""A first sweep file as text: commented, of at most thirty lines, complete, and checked before it is handed out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.sweep import load_sweep
from orchestrator.draft.choices import Choices, choose, drafted_workload
from orchestrator.draft.machine import DraftedMachine
from orchestrator.draft.model import DraftedModel
from orchestrator.draft.sweep_text import comment, safe_name, sweep_text, value_text
from orchestrator.errors import ConfigError
from orchestrator.search.prediction.prediction import Prediction
from orchestrator.units import num_bytes
from trials.files import write_atomically

_PATIENCE = {"starting_s": (600.0, 0), "warmup_s": (300.0, 40), "measuring_s": (600.0, 200), "stall_s": (300.0, 30)}
"""A trial's deadlines: seconds at least, and for how many steps at the pace that is expected of the baseline. The loss
gate trains twenty steps in float32, which may take ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDraft:
    """A sweep file that nobody has written yet, and what there is to say about it."""

    name: str
    text: str
    hardware: str
    choices: Choices
    simulated: bool
    differences: tuple[str, ...]
    """In what the model that is trained differs from the one that was asked for."""
    max_trials: int

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``init --json``, without the file."""
        workload, expected = self.choices.workload, self.choices.prediction
        return {
            "name": self.name,
            "hardware": self.hardware,
            "simulated": self.simulated,
            "differences": list(self.differences),
            "seq_length": workload.seq_length,
            "global_batch_size": workload.global_batch_size,
            "baseline": dict(self.choices.baseline),
            "space": dict(self.choices.space),
            "max_trials": self.max_trials,
            "expected": expected.to_json() if expected is not None else None,
        }


def make_draft(
    model: DraftedModel,
    machine: DraftedMachine,
    *,
    name: str | None = None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    max_trials: int | None = None,
) -> SweepDraft:
    """The sweep file for a model on a machine.

    Raises:
        ConfigError: the model does not fit there, or sizes do not go together.
    """
    choices = choose(model, machine, drafted_workload(model, machine, seq_length, global_batch_size))
    trials = max_trials or (25 if machine.is_gpu else 12)
    name = name or safe_name(model.name)
    return SweepDraft(
        name=name,
        text=sweep_text(list(_lines(name, model, machine, choices, trials))),
        hardware=machine.label,
        choices=choices,
        simulated=machine.is_simulated,
        differences=model.differences,
        max_trials=trials,
    )


def require_room(file: Path, *, force: bool) -> None:
    """
    Raises:
        ConfigError: the file is there already and not to be overwritten, or its folder is not there.
    """
    if file.exists() and not force:
        raise ConfigError("there is such a file already", file=file, remedy="Give another --output, or --force.")
    if not file.absolute().parent.is_dir():
        raise ConfigError("its folder is not there", file=file, remedy="Make it first, or give another --output.")


def write_draft(text: str, file: Path, *, force: bool) -> None:
    """Write the sweep file, once it is known to be a legal one.

    Raises:
        ConfigError: there is such a file already, or the text is none that ``plan`` accepts.
    """
    require_room(file, force=force)
    trial = file.with_name(f".{file.name}.draft")
    try:
        write_atomically(trial, [text.encode()])
        load_sweep(trial)
        trial.replace(file)
    except ConfigError as error:
        raise ConfigError(error.message, key=error.key, remedy=error.remedy or "") from None
    finally:
        trial.unlink(missing_ok=True)


def _lines(name: str, model: DraftedModel, machine: DraftedMachine, choices: Choices, max_trials: int) -> Iterator[str]:
    workload, size = choices.workload, model.num_parameters
    yield from comment(f"{name}: {model.source}{f', {_count(size)} weights' if size else ''}, on {machine.label}.")
    if model.differences:
        yield from comment(f"An approximation, trained with: {'; '.join(model.differences)}.")
    for remark in machine.remarks:
        yield from comment(remark)
    yield from (f"name: {name}", "", "workload: # what is trained, the same in every trial")
    yield f"  model: {value_text(model.keys)}"
    if model.keys["kind"] == "llama":
        yield "  data: {kind: text, path: null} # stands in for yours: {kind: token_file, path: FILE, dtype: uint16}"
        yield f"  seq_length: {workload.seq_length}"
    batch = workload.global_batch_size
    tokens = f": {_count(batch * workload.seq_length)} tokens" if workload.seq_length > 1 else ""
    yield f"  global_batch_size: {batch} # samples per optimiser step{tokens}"
    yield from (f"cluster: {machine.section}", "")
    yield "# Put here what you run today: it is always the first trial, and what the winner is compared with."
    if choices.prediction is not None:
        yield f"# This one is expected to take {expected_words(choices.prediction)}."
    yield f"baseline: {value_text(choices.baseline)}"
    yield from ("", "space: # what may be changed; every knob is in docs/knobs.md")
    yield from (f"  {key}: {value_text(value)}" for key, value in choices.space.items())
    if limits := _deadlines(choices):
        yield f"deadlines: {value_text(limits)} # large models take their time"
    yield f"budget: {value_text({'max_trials': max_trials})}"


def expected_words(found: Prediction) -> str:
    """Time and memory that are expected of a baseline, in words."""
    memory = f"{num_bytes(found.peak_bytes)} of {num_bytes(found.limit_bytes)} of memory"
    return f"{found.step_s:.3g} s a step and {memory}"


def _deadlines(choices: Choices) -> dict[str, int]:
    """Limits for trials that need more than the usual ones; empty where those will do."""
    found = choices.prediction
    if found is None or found.step_s < 2.0:
        return {}
    limits = {key: max(least, steps * found.step_s) for key, (least, steps) in _PATIENCE.items()}
    return {key: math.ceil(limit_s / 100) * 100 for key, limit_s in limits.items()}


def _count(number: int) -> str:
    """A large number in words."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
