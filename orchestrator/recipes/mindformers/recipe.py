"""MindFormers: the YAML of a Llama trained in graph mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from orchestrator.recipes.base import Draft, Recipe, Setting, Settings, comments, custom, option, settings_of, tree
from orchestrator.recipes.gaps import betas, weight_decay_but_norms
from orchestrator.recipes.mindformers import layout, recompute, run
from orchestrator.recipes.mindformers.layout import NUM_LAYERS
from trials.spec import LlamaModel

FILE = "mindformers.yaml"
_LLAMA, _MODEL = "workload.model.llama", "model.model_config"
_BETAS = "optimizer.betas"
_WHOLE = ("recompute_config.select_recompute", "recompute_config.select_comm_recompute", "runner_wrapper.scale_sense")
"""Settings whose values are mappings."""
_FRAME = {
    "use_legacy": True,
    "run_mode": "train",
    "use_parallel": True,
    "trainer.type": "CausalLanguageModelingTrainer",
    "trainer.model_name": "llama",
    "context.mode": 0,
    "parallel.parallel_mode": 1,
    "parallel.gradients_mean": True,
    "runner_wrapper.type": "MFTrainOneStepCell",
    "runner_wrapper.use_clip_grad": False,
    "optimizer.type": "AdamW",
    "lr_schedule.type": "ConstantWarmUpLR",
    "lr_schedule.warmup_ratio": 0.0,
    "lr_schedule.total_steps": -1,
    "train_dataset.data_loader.type": "MindDataset",
    "train_dataset.data_loader.dataset_dir": "path/to/your.mindrecord",
    "train_dataset.data_loader.shuffle": True,
    "train_dataset.input_columns": ["input_ids"],
    "train_dataset.drop_remainder": True,
    "train_dataset_task.type": "CausalLanguageModelDataset",
}
"""Settings for the runner's way to train: semi-automatic parallel graph mode, constant learning rate, no clipping."""
_ARCHITECTURE = {
    "model.arch.type": "LlamaForCausalLM",
    f"{_MODEL}.type": "LlamaConfig",
    f"{_MODEL}.init_method_std": 0.02,
    f"{_MODEL}.tie_word_embeddings": False,
}


def _write_kind(draft: Draft) -> None:
    draft.settings |= _FRAME
    if isinstance(draft.workload.model, LlamaModel):
        draft.settings |= _ARCHITECTURE
    else:
        draft.refuse("workload.model", f"this recipe is for Llama, not models of kind {draft.workload.model.kind}")


def _read_kind(settings: Settings) -> dict[str, Any]:
    return {"workload.model.kind": "llama"} if "model.arch.type" in settings else {}


def _write_data(draft: Draft) -> None:
    draft.warn("workload.data", "convert your tokens to MindRecord (seq_length + 1 per sample) and set dataset_dir")


_WORKLOAD: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.model.resnet", "workload.model.linear"),
        (*_FRAME, *_ARCHITECTURE),
        _write_kind,
        _read_kind,
    ),
    option(f"{_LLAMA}.num_layers", NUM_LAYERS),
    option(f"{_LLAMA}.hidden_size", f"{_MODEL}.hidden_size"),
    option(f"{_LLAMA}.ffn_hidden_size", f"{_MODEL}.intermediate_size"),
    option(f"{_LLAMA}.num_heads", f"{_MODEL}.num_heads"),
    option(f"{_LLAMA}.num_kv_heads", f"{_MODEL}.n_kv_heads"),
    option(f"{_LLAMA}.vocab_size", f"{_MODEL}.vocab_size"),
    option(f"{_LLAMA}.rope_theta", f"{_MODEL}.theta"),
    option(f"{_LLAMA}.norm_eps", f"{_MODEL}.rms_norm_eps"),
    option("workload.seq_length", f"{_MODEL}.seq_length"),
    option("workload.optimizer.lr", "lr_schedule.learning_rate"),
    betas(_BETAS),
    option("workload.optimizer.eps", "optimizer.eps"),
    weight_decay_but_norms("optimizer.weight_decay"),
    option("workload.seed", "seed"),
    custom(("workload.data",), (), _write_data),
)


def _render(draft: Draft) -> dict[str, str]:
    content = tree({f"{FILE}:{name}": value for name, value in draft.settings.items()}, FILE)
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    return {FILE: "\n".join([*comments(draft.notes), text])}


def _load(files: Mapping[str, str]) -> Settings:
    content = yaml.safe_load(files[FILE])
    found: dict[str, Any] = {}
    for name in _WHOLE:
        section, _, key = name.partition(".")
        found[name] = content[section].pop(key)
    return found | {name.partition(":")[2]: value for name, value in settings_of(FILE, content).items()}


def _command(draft: Draft) -> str:
    size = draft.candidate.layout.world_size
    return f'bash scripts/msrun_launcher.sh "run_mindformer.py --config {FILE} --use_parallel True" {size}'


RECIPE = Recipe(
    name="mindformers",
    title="MindFormers",
    settings=(*_WORKLOAD, *layout.SETTINGS, *recompute.SETTINGS, *run.SETTINGS),
    render=_render,
    load=_load,
    command=_command,
)
