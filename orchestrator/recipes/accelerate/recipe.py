"""Accelerate and the Trainer of transformers: the launcher's YAML, and ``TrainingArguments`` as JSON.

Names and defaults are those of Accelerate 1.15 (``commands/launch.py``, ``parallelism_config.py``,
``utils/dataclasses.py``) and transformers 5.23 (``training_args.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from orchestrator.recipes.accelerate import layout, run
from orchestrator.recipes.accelerate.layout import ARGUMENTS, FILE
from orchestrator.recipes.base import Draft, Recipe, comments, settings_of, tree
from orchestrator.recipes.hugging_face import model_file


def _render(draft: Draft) -> dict[str, str]:
    head = "".join(f"{line}\n" for line in comments(draft.notes))
    return {
        FILE: head + yaml.safe_dump(tree(draft.settings, FILE), sort_keys=False),
        ARGUMENTS: json.dumps(tree(draft.settings, ARGUMENTS), indent=2) + "\n",
        **model_file.render(draft),
    }


def _load(files: Mapping[str, str]) -> dict[str, Any]:
    launcher, arguments = yaml.safe_load(files[FILE]), json.loads(files[ARGUMENTS])
    return {**settings_of(FILE, launcher), **settings_of(ARGUMENTS, arguments), **model_file.load(files)}


RECIPE = Recipe(
    name="accelerate",
    title="Accelerate",
    settings=(*layout.SETTINGS, *run.SETTINGS, *model_file.SETTINGS),
    render=_render,
    load=_load,
    command=lambda _: f"accelerate launch --config_file {FILE} train.py {ARGUMENTS}",
)
