"""PaddleNLP: arguments of ``llm/run_pretrain.py`` as JSON, the model's configuration, and a script that starts both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from orchestrator.recipes import shell
from orchestrator.recipes.base import Draft, Recipe, Setting, Settings, custom, option
from orchestrator.recipes.gaps import weight_decay_but_norms
from orchestrator.recipes.paddlenlp import layout, recompute, run
from orchestrator.recipes.paddlenlp.layout import NUM_LAYERS
from trials.spec import LlamaModel

FILE, MODEL_FILE, SCRIPT = "paddlenlp.json", "model/config.json", "paddlenlp.sh"
_MODEL = "model:"
"""Prefix of settings that go into the model's own file."""
_LLAMA = "workload.model.llama"
_FRAME = {
    "model_name_or_path": "model",
    "tokenizer_name_or_path": "path/to/your/tokenizer",
    "input_dir": "path/to/your/data",
    "output_dir": "output",
    "split": "1,0,0",
    "do_train": True,
    "max_steps": 100,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}
"""Arguments for the runner's constant learning rate, without clipping; paths are the user's to set."""
_ARCHITECTURE = {
    f"{_MODEL}architectures": ["LlamaForCausalLM"],
    f"{_MODEL}model_type": "llama",
    f"{_MODEL}hidden_act": "silu",
    f"{_MODEL}initializer_range": 0.02,
    f"{_MODEL}tie_word_embeddings": False,
}
_START = """python -u -m paddle.distributed.launch --nnodes "$NUM_NODES" --nproc_per_node "$PROCESSES_PER_NODE" \\
  --master "${MASTER:-}" run_pretrain.py paddlenlp.json "$@\""""


def _write_kind(draft: Draft) -> None:
    draft.settings |= _FRAME
    draft.settings["max_seq_length"] = draft.workload.seq_length
    if isinstance(draft.workload.model, LlamaModel):
        draft.settings |= _ARCHITECTURE
        draft.settings[f"{_MODEL}max_position_embeddings"] = draft.workload.seq_length
    else:
        draft.refuse(
            "workload.model", f"run_pretrain.py trains decoders, not models of kind {draft.workload.model.kind}"
        )


def _read_kind(settings: Settings) -> dict[str, Any]:
    kind = {"workload.model.kind": "llama"} if f"{_MODEL}model_type" in settings else {}
    return {**kind, "workload.seq_length": settings["max_seq_length"]}


def _write_data(draft: Draft) -> None:
    draft.warn("workload.data", "make a data set of .bin and .idx with PaddleNLP's tools and set input_dir")
    if isinstance(draft.workload.model, LlamaModel):
        draft.warn(f"{_LLAMA}.vocab_size", "run_pretrain.py rounds the tokenizer's size up to a multiple of 128")


_WORKLOAD: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.model.resnet", "workload.model.linear", "workload.seq_length"),
        (*_FRAME, *_ARCHITECTURE, "max_seq_length", f"{_MODEL}max_position_embeddings"),
        _write_kind,
        _read_kind,
    ),
    option(f"{_LLAMA}.num_layers", NUM_LAYERS),
    option(f"{_LLAMA}.hidden_size", f"{_MODEL}hidden_size"),
    option(f"{_LLAMA}.ffn_hidden_size", f"{_MODEL}intermediate_size"),
    option(f"{_LLAMA}.num_heads", f"{_MODEL}num_attention_heads"),
    option(f"{_LLAMA}.num_kv_heads", f"{_MODEL}num_key_value_heads"),
    option(f"{_LLAMA}.vocab_size", f"{_MODEL}vocab_size"),
    option(f"{_LLAMA}.rope_theta", f"{_MODEL}rope_theta"),
    option(f"{_LLAMA}.norm_eps", f"{_MODEL}rms_norm_eps"),
    option("workload.optimizer.lr", "learning_rate"),
    option("workload.optimizer.beta1", "adam_beta1"),
    option("workload.optimizer.beta2", "adam_beta2"),
    option("workload.optimizer.eps", "adam_epsilon"),
    weight_decay_but_norms("weight_decay"),
    option("workload.seed", "seed"),
    custom(("workload.data",), (), _write_data),
)


def _render(draft: Draft) -> dict[str, str]:
    model = {n.removeprefix(_MODEL): value for n, value in draft.settings.items() if n.startswith(_MODEL)}
    arguments = {
        name: value
        for name, value in draft.settings.items()
        if not name.startswith(_MODEL) and name != shell.WORLD_SIZE
    }
    script = dataclasses.replace(draft, settings={shell.WORLD_SIZE: draft.settings[shell.WORLD_SIZE]})
    return {
        FILE: json.dumps(arguments, indent=2) + "\n",
        MODEL_FILE: json.dumps(model, indent=2) + "\n",
        SCRIPT: shell.script(script, exports={}, start=_START),
    }


def _load(files: Mapping[str, str]) -> Settings:
    model = {f"{_MODEL}{name}": value for name, value in json.loads(files[MODEL_FILE]).items()}
    return {**json.loads(files[FILE]), **model, **shell.load(files[SCRIPT])}


RECIPE = Recipe(
    name="paddlenlp",
    title="PaddleNLP",
    settings=(*_WORKLOAD, *layout.SETTINGS, *recompute.SETTINGS, *run.SETTINGS),
    render=_render,
    load=_load,
    command=lambda _: f"bash {SCRIPT}",
)
