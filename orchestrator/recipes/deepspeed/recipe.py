"""DeepSpeed: its JSON configuration, and the model as transformers describes it.

Names and defaults are those of DeepSpeed 0.19 (``deepspeed/runtime/config.py``, ``precision_config.py``,
``zero/config.py``, ``tensor_parallel/config.py``). Pipelines, recompute, compilation and data loading are calls in the
training script there, not configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.recipes.base import Draft, Recipe, Setting, fixed, option, settings_of, tree
from orchestrator.recipes.deepspeed import layout, precision
from orchestrator.recipes.deepspeed.layout import FILE
from orchestrator.recipes.gaps import (
    KERNELS_OF_SCRIPT,
    REDUCES_EACH,
    betas,
    left_to_script,
    memory_savers,
    own_data,
    own_seed,
)
from orchestrator.recipes.hugging_face import model_file

_OPTIMIZER = "workload.optimizer"
_PARAMS = f"{FILE}:optimizer.params"
_BETAS = f"{_PARAMS}.betas"


_RUN: tuple[Setting, ...] = (
    left_to_script("loader", "the DataLoader is your script's"),
    left_to_script("kernels.compile", "your script compiles each block or the whole model: engine.compile(...)"),
    left_to_script("kernels.backend", "your script names it: engine.compile(backend=...)"),
    left_to_script("kernels.compile_mode", "your script names it: engine.compile(compile_kwargs={'mode': ...})"),
    *KERNELS_OF_SCRIPT,
    *memory_savers(
        activations="activation_checkpointing.cpu_checkpointing moves only what is kept by layers that your script "
        "recomputes with DeepSpeed's own function",
        optimizer=layout.OFFLOAD_OPTIMIZER,
    ),
    REDUCES_EACH,
    left_to_script("kernels.matmul_precision", "your script calls torch.set_float32_matmul_precision(...)"),
    fixed(f"{FILE}:optimizer.type", "AdamW"),
    option(f"{_OPTIMIZER}.lr", f"{_PARAMS}.lr"),
    betas(_BETAS),
    option(f"{_OPTIMIZER}.eps", f"{_PARAMS}.eps"),
    option(f"{_OPTIMIZER}.weight_decay", f"{_PARAMS}.weight_decay"),
    fixed(f"{_PARAMS}.torch_adam", True),
    fixed(f"{_PARAMS}.adam_w_mode", True),
    fixed(f"{FILE}:gradient_clipping", 0.0),
    fixed(f"{FILE}:dataloader_drop_last", True),
    own_data("your script reads the data"),
    own_seed(),
)


def _render(draft: Draft) -> dict[str, str]:
    return {FILE: json.dumps(tree(draft.settings, FILE), indent=2) + "\n", **model_file.render(draft)}


def _load(files: Mapping[str, str]) -> dict[str, Any]:
    return {**settings_of(FILE, json.loads(files[FILE])), **model_file.load(files)}


def _command(draft: Draft) -> str:
    world_size = draft.candidate.layout.world_size
    return f"deepspeed --num_gpus {world_size} train.py --deepspeed --deepspeed_config {FILE}"


RECIPE = Recipe(
    name="deepspeed",
    title="DeepSpeed",
    settings=(*layout.SETTINGS, *precision.SETTINGS, *_RUN, *model_file.SETTINGS),
    render=_render,
    load=_load,
    command=_command,
)
