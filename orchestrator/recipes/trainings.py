"""Training programs' frameworks by name, and which of them a command is written for."""

from __future__ import annotations

import importlib
import typing

from orchestrator.errors import ConfigError
from orchestrator.recipes.training import Run, Training

TRAININGS = {
    "megatron": "orchestrator.recipes.megatron.training",
    "torchtitan": "orchestrator.recipes.torchtitan.training",
    "mindformers": "orchestrator.recipes.mindformers.training",
    "paddlenlp": "orchestrator.recipes.paddlenlp.training",
    "llamafactory": "orchestrator.recipes.llamafactory.training",
    "ms-swift": "orchestrator.recipes.ms_swift.training",
    "lightning": "orchestrator.recipes.lightning.training",
    "transformers": "orchestrator.recipes.transformers.training",
    "accelerate": "orchestrator.recipes.accelerate.training",
    "deepspeed": "orchestrator.recipes.deepspeed.training",
    "custom": "orchestrator.recipes.custom.training",
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
