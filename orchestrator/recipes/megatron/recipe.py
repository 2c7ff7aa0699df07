"""Megatron-LM: a shell script with the arguments of ``pretrain_gpt.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.recipes import shell
from orchestrator.recipes.base import Draft, Recipe, Setting, Settings, custom, option
from orchestrator.recipes.gaps import weight_decay_but_norms
from orchestrator.recipes.megatron import layout as megatron_layout
from orchestrator.recipes.megatron import recompute, run
from trials.spec import LlamaModel

FILE = "megatron.sh"
_LLAMA = "workload.model.llama"
_GROUPS = "--num-query-groups"
_ARCHITECTURE = {
    "--group-query-attention": True,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--init-method-std": 0.02,
    "--tokenizer-type": "NullTokenizer",
}
"""Arguments that make Megatron-LM's decoder a Llama with the runner's initial weights."""
_TRAINING = {
    "--optimizer": "adam",
    "--lr-decay-style": "constant",
    "--clip-grad": 0.0,
    "--split": "1,0,0",
    "--eval-iters": 0,
}
"""Arguments for the runner's constant learning rate, without clipping or evaluation."""
_START = """torchrun --nnodes "$NUM_NODES" --nproc-per-node "$PROCESSES_PER_NODE" \\
  --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \\
  pretrain_gpt.py "${ARGS[@]}" \\
  --train-iters "${TRAIN_ITERS:?number of optimiser steps}" \\
  --data-path "${DATA_PATH:?prefix of a data set made by tools/preprocess_data.py}" "$@\""""


def _write_kind(draft: Draft) -> None:
    draft.settings |= _TRAINING
    if isinstance(draft.workload.model, LlamaModel):
        draft.settings |= _ARCHITECTURE
        draft.settings["--max-position-embeddings"] = draft.workload.seq_length
    else:
        draft.refuse(
            "workload.model", f"pretrain_gpt.py trains decoders, not models of kind {draft.workload.model.kind}"
        )


def _read_kind(settings: Settings) -> dict[str, Any]:
    return {"workload.model.kind": "llama"} if "--swiglu" in settings else {}


def _write_vocab(draft: Draft) -> None:
    """Write the padded size, which counts: versions differ on whether the tokenizer adds an id to the other one."""
    if isinstance(draft.workload.model, LlamaModel):
        size = draft.workload.model.vocab_size
        draft.settings |= {"--vocab-size": size - 1, "--padded-vocab-size": size}


def _read_vocab(settings: Settings) -> dict[str, Any]:
    name = "--padded-vocab-size"
    return {f"{_LLAMA}.vocab_size": int(settings[name])} if name in settings else {}


def _write_rope(draft: Draft) -> None:
    if isinstance(draft.workload.model, LlamaModel):
        base = draft.workload.model.rope_theta
        draft.settings["--rotary-base"] = int(base)
        if base != int(base):
            draft.refuse(f"{_LLAMA}.rope_theta", "--rotary-base takes whole numbers")


def _read_rope(settings: Settings) -> dict[str, Any]:
    return {f"{_LLAMA}.rope_theta": float(settings["--rotary-base"])} if "--rotary-base" in settings else {}


def _write_data(draft: Draft) -> None:
    draft.warn("workload.data", "convert your tokens with tools/preprocess_data.py and name the result in DATA_PATH")


_WORKLOAD: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.model.resnet", "workload.model.linear"),
        (*_ARCHITECTURE, *_TRAINING, "--max-position-embeddings"),
        _write_kind,
        _read_kind,
    ),
    option(f"{_LLAMA}.num_layers", "--num-layers", of=int),
    option(f"{_LLAMA}.hidden_size", "--hidden-size", of=int),
    option(f"{_LLAMA}.ffn_hidden_size", "--ffn-hidden-size", of=int),
    option(f"{_LLAMA}.num_heads", "--num-attention-heads", of=int),
    option(f"{_LLAMA}.num_kv_heads", _GROUPS, of=int),
    option(f"{_LLAMA}.norm_eps", "--norm-epsilon", of=float),
    custom((f"{_LLAMA}.rope_theta",), ("--rotary-base",), _write_rope, _read_rope),
    custom((f"{_LLAMA}.vocab_size",), ("--vocab-size", "--padded-vocab-size"), _write_vocab, _read_vocab),
    option("workload.seq_length", "--seq-length", of=int),
    option("workload.global_batch_size", "--global-batch-size", of=int),
    option("micro_batch_size", "--micro-batch-size", of=int),
    option("workload.optimizer.lr", "--lr", of=float),
    option("workload.optimizer.beta1", "--adam-beta1", of=float),
    option("workload.optimizer.beta2", "--adam-beta2", of=float),
    option("workload.optimizer.eps", "--adam-eps", of=float),
    weight_decay_but_norms("--weight-decay"),
    option("workload.seed", "--seed", of=int),
    custom(("workload.data",), (), _write_data),
)


def _exports(draft: Draft) -> dict[str, str]:
    """Environment. One hardware queue keeps collectives ahead of what they overlap; Megatron-FSDP needs several."""
    layout = draft.candidate.layout
    needs_one = layout.zero_stage < 2 and layout.tp * layout.cp > 1
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if needs_one else {}


def _render(draft: Draft) -> dict[str, str]:
    return {FILE: shell.script(draft, exports=_exports(draft), start=_START)}


def _load(files: Mapping[str, str]) -> Settings:
    return shell.load(files[FILE])


RECIPE = Recipe(
    name="megatron",
    title="Megatron-LM",
    settings=(*_WORKLOAD, *megatron_layout.SETTINGS, *recompute.SETTINGS, *run.SETTINGS),
    render=_render,
    load=_load,
    command=lambda _: f"TRAIN_ITERS=100 DATA_PATH=data/text_document bash {FILE}",
)
