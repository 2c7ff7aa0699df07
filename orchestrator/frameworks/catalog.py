"""Frameworks by name: exports of a configuration, and the framework that a command is written for."""

from __future__ import annotations

import importlib
import typing
from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.frameworks.spelling import Export, Recipe, audited
from trials.spec import Candidate, Workload

if typing.TYPE_CHECKING:
    from orchestrator.frameworks.edit import Run, Training  # would load numpy, and shells complete names from here


@dataclass(frozen=True, slots=True)
class Framework:
    """A module of this package by name, imported when needed."""

    name: str
    exports: bool = True
    """Whether configurations can be exported to it: its module has a ``RECIPE``."""
    programs: bool = True
    """Whether its programs can be tuned: its module has a ``TRAINING``."""

    def load(self, part: str) -> object:
        return getattr(importlib.import_module(f"{__package__}.{self.name.replace('-', '_')}"), part)


FRAMEWORKS = (
    Framework("megatron"),
    Framework("torchtitan"),
    Framework("mindformers"),
    Framework("paddlenlp"),
    Framework("llamafactory", exports=False),
    Framework("ms-swift", exports=False),
    Framework("lightning", exports=False),
    Framework("transformers", exports=False),
    Framework("accelerate"),
    Framework("deepspeed"),
    Framework("custom", exports=False),
    Framework("torchrun", programs=False),
)
"""Specific ones come before general ones: a LLaMA-Factory program is also a transformers program, and every program is
a ``custom`` one."""


def formats() -> list[str]:
    """Names of the frameworks that configurations can be exported to."""
    return [framework.name for framework in FRAMEWORKS if framework.exports]


def trainings() -> list[str]:
    """Names of the frameworks whose programs can be tuned, in the order of detection."""
    return [framework.name for framework in FRAMEWORKS if framework.programs]


def recipe(format: str) -> Recipe:  # noqa: A002 - the word users type
    """The recipe of a format.

    Raises:
        ConfigError: unknown format.
    """
    found = next((one for one in FRAMEWORKS if one.name == format and one.exports), None)
    if found is None:
        raise ConfigError(f"unknown format {format!r}", remedy=f"Choose from: {', '.join(formats())}.")
    return typing.cast(Recipe, found.load("RECIPE"))


def export(format: str, candidate: Candidate, workload: Workload, *, allow_lossy: bool = False) -> Export:  # noqa: A002
    """Files and command of one format.

    Raises:
        ConfigError: the framework would train something else, and ``allow_lossy`` is not set; with every reason.
    """
    made = audited(recipe(format), candidate, workload)
    refused = [note for note in made.notes if note.severity == "error"]
    if refused and not allow_lossy:
        reasons = "".join(f"\n  {note.knob}: {note.message}" for note in refused)
        raise ConfigError(
            f"{recipe(format).title} cannot express some settings of this configuration:{reasons}",
            remedy="\nTo export the configuration anyway, use --allow-lossy, and fix the listed settings manually.",
        )
    return made


def export_all(candidate: Candidate, workload: Workload) -> dict[str, Export | ConfigError]:
    """The export by format, or the reason why it is impossible."""
    found: dict[str, Export | ConfigError] = {}
    for name in formats():
        try:
            found[name] = export(name, candidate, workload)
        except ConfigError as error:
            found[name] = error
    return found


def training(name: str) -> Training:
    """The support for a framework's programs.

    Raises:
        ConfigError: unknown framework.
    """
    found = next((one for one in FRAMEWORKS if one.name == name and one.programs), None)
    if found is None:
        raise ConfigError(f"unknown recipe {name!r}", key="recipe", remedy=f"Choose from: {', '.join(trainings())}.")
    return typing.cast("Training", found.load("TRAINING"))


def recognise(run: Run) -> Training | None:
    """The first framework whose programs a command resembles; None if there is none."""
    for name in trainings():
        if name != "custom" and (found := training(name)).recognises(run):
            return found
    return None
