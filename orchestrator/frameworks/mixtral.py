"""Mixtures of experts as the ``config.json`` of a Mixtral, which transformers and PaddleNLP train."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from orchestrator.frameworks.spelling import Setting, Settings, SettingsBuilder, custom
from trials.spec import Experts, LlamaModel

_LLAMA = "workload.model.llama"
_PATH = f"{_LLAMA}.experts"
_NAMES = {"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "ffn_hidden_size": "intermediate_size"}


def _lacking() -> dict[str, Any]:
    """The fields of :class:`trials.spec.Experts` that a Mixtral has no setting for, and their values."""
    fixed = Experts(num_experts=1, top_k=1, ffn_hidden_size=1, balance_rate=0.0)
    return {field.name: getattr(fixed, field.name) for field in fields(fixed) if field.name not in _NAMES}


def mixtral(prefix: str, package: str, *, not_in_mixtral: Collection[str] = ()) -> Setting:
    """The setting that turns the Llama of a file into a Mixtral, and refuses what that lacks.

    Names in the file begin with ``prefix``; ``not_in_mixtral`` are those that only a Llama has.
    """
    names = {ours: f"{prefix}{theirs}" for ours, theirs in _NAMES.items()}
    kind, reports, aux = (f"{prefix}{name}" for name in ("model_type", "output_router_logits", "router_aux_loss_coef"))

    def write(builder: SettingsBuilder) -> None:
        model = builder.workload.model
        experts = model.experts if isinstance(model, LlamaModel) else None
        if experts is None or not isinstance(model, LlamaModel):
            return
        for name in not_in_mixtral:
            builder.settings.pop(f"{prefix}{name}", None)
        builder.settings |= {kind: "mixtral", f"{prefix}architectures": ["MixtralForCausalLM"]}
        builder.settings |= {name: getattr(experts, ours) for ours, name in names.items()}
        for name, only in _lacking().items():
            value = getattr(experts, name)
            if name == "routing" and value != only:
                builder.warn(f"{_PATH}.{name}", "exported as learned; balanced routing is for measurements")
            elif name == "aux_loss" and value:
                builder.settings |= {reports: True, aux: value}
                builder.warn(f"{_PATH}.{name}", "one loss over all layers instead of one per sequence and layer")
            elif value != only:
                builder.refuse(f"{_PATH}.{name}", f"exported as {package}'s Mixtral, which always has {only}")
        if model.ffn_hidden_size != experts.ffn_hidden_size:
            builder.warn(f"{_LLAMA}.ffn_hidden_size", "no layer has a dense feed-forward")

    def read(settings: Settings) -> dict[str, Any]:
        if settings.get(kind) != "mixtral":
            return {}
        found = {**_lacking(), **{ours: settings[name] for ours, name in names.items()}}
        if settings.get(reports):
            found["aux_loss"] = settings[aux]
        return {f"{_PATH}.{name}": value for name, value in found.items()}

    return custom((_PATH,), (*names.values(), reports, aux), write, read)
