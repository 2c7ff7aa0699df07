"""The text of a torchtitan configuration module, and its settings read back from it.

Since torchtitan 0.3 a configuration is a Python function that returns a ``Trainer.Config``; the command line names the
module and the function. The values stand there as literals, so that reading them back needs no torchtitan.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.errors import ConfigError

FILE, FUNCTION = "tune_cluster_recipe.py", "train"
ACTIVATION_CHECKPOINT = "activation_checkpoint"
_FULL = "FullAC.Config"
_CONSTRUCTORS = {
    "model_spec": "llama",
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "compile": "CompileConfig",
    "optimizer": "default_adamw",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "dataloader": "HuggingFaceTextDataLoader.Config",
    "loss": "cross_entropy",
    "debug": "DebugConfig",
}
"""Constructor of each part of a ``Trainer.Config``."""

_HEAD = '''\
"""Made by tune-cluster for torchtitan 0.3: {command}"""
'''

_BODY = '''
from dataclasses import replace
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.trainer import Trainer


def llama(*, dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size, max_seq_len, rope_theta, norm_eps):
    """A Llama of this shape, trained as torchtitan trains its own."""
    weight = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
    residual = {"weight": partial(nn.init.trunc_normal_, std=0.02 / (2 * n_layers) ** 0.5)}

    def norm():
        return RMSNorm.Config(normalized_shape=dim, eps=norm_eps, param_init={"weight": nn.init.ones_})

    def layer():
        rope = ComplexRoPE.Config(dim=dim // n_heads, max_seq_len=max_seq_len, theta=rope_theta, scaling="none")
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                wqkv_param_init=weight,
                wo_param_init=residual,
                inner_attention=get_attention_config("flex"),
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=weight, w2w3_param_init=residual
            ),
        )

    model = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=weight),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=weight),
        layers=[layer() for _ in range(n_layers)],
    )
    return replace(model_registry("debugmodel"), flavor="tune-cluster", model=model)


def cross_entropy(*, num_chunks, global_vocab_size):
    """The loss of all logits, or of a part of the positions at a time."""
    loss = CrossEntropyLoss.Config(global_vocab_size=global_vocab_size)
    return loss if num_chunks == 1 else ChunkedLossWrapper.Config(num_chunks=num_chunks, loss_fn=loss)


'''


def write(settings: Mapping[str, Any], comments: Iterable[str], command: str) -> str:
    """The module's text."""
    parts = [
        f"        {part}={_call(constructor, _of_part(settings, part))},\n"
        for part, constructor in _CONSTRUCTORS.items()
        if _of_part(settings, part)
    ]
    policy = f"{_FULL}()" if settings[ACTIVATION_CHECKPOINT] == "full" else "None"
    parts.append(f"        {ACTIVATION_CHECKPOINT}={policy},\n")
    head = _HEAD.format(command=command) + "".join(f"\n{line}" for line in comments)
    body = f"def {FUNCTION}() -> Trainer.Config:\n    return Trainer.Config(\n{''.join(parts)}    )\n"
    return f"{head}\n{_BODY}{body}".replace("\n\n\nfrom dataclasses", "\n\nfrom dataclasses")


def read(text: str) -> dict[str, Any]:
    """The settings of a module that :func:`write` made, whatever values were changed in it since.

    Raises:
        ConfigError: it is not of that form.
    """
    try:
        config = _config(ast.parse(text))
        found: dict[str, Any] = {}
        for keyword in config.keywords:
            found |= _read_part(str(keyword.arg), keyword.value)
    except (SyntaxError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{FILE} cannot be read: {error}", remedy="Export it again.") from None
    return found


def _call(constructor: str, values: Mapping[str, Any]) -> str:
    lines = "".join(f"            {name}={value!r},\n" for name, value in values.items())
    return f"{constructor}(\n{lines}        )"


def _of_part(settings: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(part + ".")}


def _config(module: ast.Module) -> ast.Call:
    """The expression that the configuration function returns."""
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION)
    returned = function.body[-1]
    if not isinstance(returned, ast.Return) or not isinstance(returned.value, ast.Call):
        raise TypeError(f"{FUNCTION}() does not return Trainer.Config(...)")
    return returned.value


def _read_part(part: str, value: ast.expr) -> dict[str, Any]:
    if part == ACTIVATION_CHECKPOINT:
        return {part: "full" if ast.unparse(value) == f"{_FULL}()" else "none"}
    if not isinstance(value, ast.Call):
        raise TypeError(f"{part} is no call")
    return {f"{part}.{keyword.arg}": ast.literal_eval(keyword.value) for keyword in value.keywords}
