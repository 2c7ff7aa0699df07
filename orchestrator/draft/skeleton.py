"""A sweep file to be filled in, for people who name a framework and have no command at hand."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from orchestrator.draft.machine import DraftedMachine
from orchestrator.draft.sweep_text import sweep_text, value_text, words_text
from orchestrator.recipes.trainings import training

_BATCH: Mapping[str, Any] = {"micro_batch_size": [1, 2, 4, 8]}
_USUAL: Mapping[str, Any] = {**_BATCH, "recompute": ["none", "full"]}
_PLACED = "--batch-size {micro_batch_size} --accumulation {accumulation}"
TYPICAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "megatron": ("python pretrain_gpt.py --your-arguments", {"tp": [1, 2, 4, 8], "pp": [1, 2, 4], **_USUAL}),
    "torchtitan": ("-m torchtitan.train --module llama3 --config llama3_8b", {"tp": [1, 2], **_USUAL}),
    "deepspeed": ("python train.py --deepspeed_config ds_config.json", {"zero_stage": [1, 2, 3], **_BATCH}),
    "transformers": ("python train.py --output_dir out --per_device_train_batch_size 1", _USUAL),
    "accelerate": (f"python train.py {_PLACED}", _BATCH),
    "lightning": ("python main.py fit --config config.yaml", _BATCH),
    "llamafactory": ("python -m llamafactory.launcher train.yaml", _USUAL),
    "ms-swift": ("swift sft --your-arguments", _USUAL),
    "mindformers": ("msrun --worker_num 8 run_mindformer.py --config config.yaml", {"tp": [1, 2, 4, 8], **_USUAL}),
    "paddlenlp": ("python -m paddle.distributed.launch run_pretrain.py config.json", {"tp": [1, 2, 4, 8], **_USUAL}),
    "custom": (f"python train.py {_PLACED}", _BATCH),
}
"""A usual command by recipe, and the knobs that matter for most of its programs."""


def skeleton(recipe: str, machine: DraftedMachine, *, max_trials: int | None = None) -> str:
    """The text of a sweep file in which the command and what it trains are still to be put in.

    Raises:
        ConfigError: there is no such recipe.
    """
    known = training(recipe)
    command, space = TYPICAL[recipe]
    lines = [
        f"# {known.title}, on {machine.label}. Put your command into `run`, then: tune-cluster check FILE",
        "# Shorter: tune-cluster init -- COMMAND reads all of this from the command.",
        f"name: {recipe}",
        "",
        "workload: # your own training; every key is in docs/your-own-training.md",
        f"  recipe: {recipe}",
        f"  run: {words_text(shlex.split(command))}",
    ]
    is_placed = _PLACED in command
    if is_placed:
        lines.append("  global_batch_size: 64 # samples of an optimiser step over all devices, as it is today")
    lines += [f"cluster: {machine.section}", ""]
    devices = machine.topology.num_devices
    lines.append(
        f"baseline: {{dp_replicate: {devices}, micro_batch_size: 1}} # what is used today"
        if is_placed
        else "baseline: from_run # the command as it stands, always the first trial"
    )
    lines.append("space: # what may be changed; what is not named stays as it is. Knobs: docs/knobs.md")
    lines += [f"  {key}: {value_text(value)}" for key, value in space.items()]
    lines += ["deadlines: {starting_s: 600}", f"budget: {{max_trials: {max_trials or 12}}}"]
    return sweep_text(lines)
