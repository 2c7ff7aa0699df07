"""Frameworks by name: exports of a configuration to one or all of them, and which of them a command is written for."""

from __future__ import annotations

import importlib
import typing

from orchestrator.errors import ConfigError
from orchestrator.frameworks.edit import Run, Training
from orchestrator.frameworks.spelling import Export, Recipe, audited
from trials.spec import Candidate, Workload

FORMATS = {
    "megatron": "orchestrator.frameworks.megatron",
    "torchtitan": "orchestrator.frameworks.torchtitan",
    "deepspeed": "orchestrator.frameworks.deepspeed",
    "mindformers": "orchestrator.frameworks.mindformers",
    "paddlenlp": "orchestrator.frameworks.paddlenlp",
    "accelerate": "orchestrator.frameworks.accelerate",
    "torchrun": "orchestrator.frameworks.torchrun",
}
"""Module of each format, imported when asked for; its recipe is called ``RECIPE``."""


def recipe(format: str) -> Recipe:  # noqa: A002 - the word users type
    """The recipe of a format.

    Raises:
        ConfigError: there is no such format.
    """
    if format not in FORMATS:
        raise ConfigError(f"no format called {format!r}", remedy=f"Formats: {', '.join(FORMATS)}")
    return typing.cast(Recipe, importlib.import_module(FORMATS[format]).RECIPE)


def export(format: str, candidate: Candidate, workload: Workload, *, allow_lossy: bool = False) -> Export:  # noqa: A002
    """Files and command of one format.

    Raises:
        ConfigError: the framework would train something else, with every reason, and ``allow_lossy`` is not set.
    """
    made = audited(recipe(format), candidate, workload)
    refused = [note for note in made.notes if note.severity == "error"]
    if refused and not allow_lossy:
        reasons = "".join(f"\n  {note.knob}: {note.message}" for note in refused)
        raise ConfigError(
            f"{recipe(format).title} cannot express this configuration:{reasons}",
            remedy="\nExport it anyway with --allow-lossy, and set right by hand what is listed here",
        )
    return made


def export_all(candidate: Candidate, workload: Workload) -> dict[str, Export | ConfigError]:
    """Export by format, or the reason why there is none."""
    found: dict[str, Export | ConfigError] = {}
    for name in FORMATS:
        try:
            found[name] = export(name, candidate, workload)
        except ConfigError as error:
            found[name] = error
    return found


TRAININGS = {
    "megatron": "orchestrator.frameworks.megatron",
    "torchtitan": "orchestrator.frameworks.torchtitan",
    "mindformers": "orchestrator.frameworks.mindformers",
    "paddlenlp": "orchestrator.frameworks.paddlenlp",
    "llamafactory": "orchestrator.frameworks.llamafactory",
    "ms-swift": "orchestrator.frameworks.ms_swift",
    "lightning": "orchestrator.frameworks.lightning",
    "transformers": "orchestrator.frameworks.transformers",
    "accelerate": "orchestrator.frameworks.accelerate",
    "deepspeed": "orchestrator.frameworks.deepspeed",
    "custom": "orchestrator.frameworks.custom",
}
"""Module of each, imported when asked for; what it knows is called ``TRAINING``. Specific ones stand before general
ones: a program of LLaMA-Factory is one of transformers, too, and any program is one of ``custom``."""


def training(name: str) -> Training:
    """What is known of a framework's programs.

    Raises:
        ConfigError: there is no such framework.
    """
    if name not in TRAININGS:
        raise ConfigError(f"no recipe called {name!r}", key="recipe", remedy=f"Recipes: {', '.join(TRAININGS)}")
    return typing.cast(Training, importlib.import_module(TRAININGS[name]).TRAINING)


def recognise(run: Run) -> Training | None:
    """The first framework that a command looks like one of; None where it looks like none of them."""
    for name in TRAININGS:
        if name != "custom" and (found := training(name)).recognises(run):
            return found
    return None
