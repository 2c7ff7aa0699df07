"""Decoders of the transformers package, built from a configuration without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trials.failure import InfeasibleSpec
from trials.models.own import Built
from trials.own_code.functions import described
from trials.spec import LlamaModel

MISSING = (
    "models of kind huggingface need the transformers package where trials run, and where the sweep is submitted;"
    " pip install 'transformers>=5'"
)


def build_hugging_face(config: str) -> Built:
    """Build the decoder of this ``config.json`` with transformers' own initial values, without dropout.

    Raises:
        InfeasibleSpec: transformers is not installed, or knows no such decoder.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InfeasibleSpec(f"{MISSING} ({described(error)})") from error
    try:
        content = json.loads(config)
        made = AutoConfig.for_model(content.pop("model_type"), **content)
        drop_nothing(made)
        module = AutoModelForCausalLM.from_config(made, dtype=torch.float32, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (KeyError, TypeError, ValueError, ImportError, OSError) as error:
        raise InfeasibleSpec(f"transformers builds no decoder of this config.json: {described(error)}") from error
    before, after = _ends(module)
    return Built(
        module=module,
        layers=_layers_path(module, made),
        before=before,
        after=after,
        tensor_parallel=tuple(_plan(module)),
        call=_logits,
    )


def drop_nothing(config: Any) -> None:
    """Set every probability of dropout to 0, in place: the built-in models train without, and layouts compare so."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "layerdrop"))):
                setattr(part, name, 0.0)


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = module(input_ids=x, use_cache=False).logits
    return logits


@torch.no_grad()
def head_of(built: Built, tokens: Tensor) -> str | None:
    """Path of the module whose outputs for all ``tokens`` are the decoder's logits, where it is linear without a bias;
    None where there is none, or where the decoder does more with its outputs: caps or scales them, or changes their
    type."""
    head: nn.Module = built.module.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or dict(head.named_parameters()).keys() != {"weight"}:
        return None
    made: list[Tensor] = []

    def narrowed(_module: nn.Module, _args: Any, outputs: Tensor) -> Tensor:
        made.append(outputs.bfloat16())
        return made[-1]

    with head.register_forward_hook(narrowed):
        logits = built.call(built.module, tokens)
    if len(made) != 1 or logits is not made[0] or logits.shape != (*tokens.shape, head.out_features):
        return None
    paths: dict[nn.Module, str] = {one: name for name, one in built.module.named_modules()}
    return paths[head]


def _layers_path(module: nn.Module, config: Any) -> str:
    """Where the decoder keeps its layers: the first list of as many modules as it has layers."""
    number = config.get_text_config().num_hidden_layers
    for name, one in module.named_modules():
        if isinstance(one, nn.ModuleList) and len(one) == number:
            return str(name)
    raise InfeasibleSpec(f"this {config.model_type} has no list of {number} layers; use workload kind python")


def _ends(module: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Modules before and after the layers, by transformers' own plan for pipelines; None where it has none."""
    plan = list(getattr(module, "_pp_plan", None) or {})
    layers = [name for name in plan if name.rpartition(".")[2] in ("layers", "h", "blocks")]
    if not layers:
        return None, None
    # The output layer comes first in the plan, because it is the outer model's.
    inner = [name for name in plan if "." in name]
    at = inner.index(layers[0])
    outer = [name for name in plan if "." not in name]
    return tuple(inner[:at]), (*inner[at + 1 :], *outer)


def _plan(module: Any) -> Iterator[tuple[str, str]]:
    """Transformers' own plan for tensor parallelism, without what splits weights that two modules share."""
    ends = [end for end in (module.get_input_embeddings(), module.get_output_embeddings()) if end is not None]
    is_tied = len({id(end.weight) for end in ends}) < len(ends)
    names = dict(module.named_modules())
    for pattern, style in (getattr(module, "tp_plan", None) or {}).items():
        if not (is_tied and names.get(pattern) in ends):
            yield pattern, style


def shape_of(built: Built, config: str, vocab_size: int) -> LlamaModel | None:
    """The built-in decoder with as many weights per layer and the same attention; None for what is unlike one.

    Its feed-forward is as wide as the weights of a layer tell, whatever number of matrices they are in.
    """
    if "expert" in config:
        return None  # of a mixture's weights only a part works on each token
    text = built.module.config.get_text_config()  # type: ignore[operator, union-attr]
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    layers = list(built.module.get_submodule(built.layers).children())
    number = sum(parameter.numel() for parameter in layers[0].parameters())
    others = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads
    ffn = max(1, round((number - others) / (3 * hidden)))
    if hidden % heads or heads % kv_heads or number <= others:
        return None
    return LlamaModel(
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=int(getattr(text, "intermediate_size", 0)) if _is_gated(layers[0]) else ffn,
        vocab_size=vocab_size,
    )


def _is_gated(layer: nn.Module) -> bool:
    """Whether the feed-forward has a gate, as those of Llamas do."""
    return any("gate_proj" in name for name, _ in layer.named_modules())
