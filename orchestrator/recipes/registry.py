"""Formats by name, and exports of a configuration to one or all of them."""

from __future__ import annotations

import importlib
import typing

from orchestrator.errors import ConfigError
from orchestrator.recipes.base import Export, Recipe, audited
from trials.spec import Candidate, Workload

FORMATS = {
    "megatron": "orchestrator.recipes.megatron.recipe",
    "torchtitan": "orchestrator.recipes.torchtitan.recipe",
    "deepspeed": "orchestrator.recipes.deepspeed.recipe",
    "mindformers": "orchestrator.recipes.mindformers.recipe",
    "paddlenlp": "orchestrator.recipes.paddlenlp.recipe",
    "accelerate": "orchestrator.recipes.accelerate.recipe",
    "torchrun": "orchestrator.recipes.torchrun.recipe",
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
