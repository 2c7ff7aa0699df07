"""From the ``config.json`` of a Hugging Face model to the model that trials train, and what is lost on the way.

Trials train Llama-style decoders (RMSNorm, rotary embeddings, SwiGLU, grouped queries, an untied output layer) and
ResNets. Decoders that differ in details have the same matrix products, and with them the same best configuration: they
are approximated, and the difference is said. Others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.draft.model import DraftedModel
from orchestrator.errors import ConfigError
from orchestrator.recipes.hugging_face.config_file import FAMILIES, decoder_of, text_config

_RESNETS = {(2, 2, 2, 2): 18, (3, 4, 6, 3): 50}


def model_of_config(config: Any, file: Path) -> DraftedModel:
    """The model to be trained for this configuration.

    Raises:
        ConfigError: it is no configuration, or a model that has no counterpart here.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            "no 'model_type'", file=file, key="model_type", remedy="Name the config.json of a Hugging Face model."
        )
    kind = config["model_type"]
    if (text := text_config(config)) is not None:
        return _decoder(text, file, () if text is config else ("its text model only",))
    if kind == "resnet":
        return _resnet(config, file)
    raise _no_counterpart(kind, config, file)


def _no_counterpart(kind: str, config: Mapping[str, Any], file: Path) -> ConfigError:
    experts = any("expert" in key for key in config)
    what = "a mixture of experts" if experts else f"a model of type {kind[:40]!r}"
    return ConfigError(
        f"{what} is not among the models that trials train",
        file=file,
        key="model_type",
        remedy=f"There are {', '.join(FAMILIES)} and resnet; --parameters 13B takes a Llama of that size instead.",
    )


def _decoder(config: Mapping[str, Any], file: Path, known: tuple[str, ...]) -> DraftedModel:
    kind, decoder = config["model_type"], decoder_of(config, file)
    keys = {"kind": "llama", **decoder.keys}
    name = _sweep_name(config, file, kind)
    return DraftedModel(
        name=name if name != kind else f"{kind}-{_weights(keys)}",
        keys=keys,
        source=f"{file.name} ({kind})",
        max_seq_length=decoder.max_seq_length,
        differences=(*known, *decoder.differences),
    )


def _weights(keys: Mapping[str, Any]) -> str:
    """How many weights the model has, as names of models tell it: 13b, 350m."""
    count = DraftedModel(name="", keys=keys, source="").num_parameters or 0
    return f"{count / 1e9:.2g}b" if count >= 1e9 else f"{max(1, round(count / 1e6))}m"


def _resnet(config: Mapping[str, Any], file: Path) -> DraftedModel:
    depths = tuple(config.get("depths") or (3, 4, 6, 3))
    if depths not in _RESNETS:
        raise ConfigError(
            f"a ResNet of depths {depths} is not among the models that trials train",
            file=file,
            key="depths",
            remedy="There are ResNet-18 and ResNet-50.",
        )
    depth = _RESNETS[depths]
    keys = {"kind": "resnet", "depth": depth, "width": config.get("embedding_size") or 64}
    if isinstance(labels := config.get("id2label"), dict) and len(labels) > 2:
        keys["num_classes"] = len(labels)
    return DraftedModel(name=f"resnet-{depth}", keys=keys, source=f"{file.name} (resnet)")


def _sweep_name(config: Mapping[str, Any], file: Path, kind: str) -> str:
    """The model's own name where the configuration tells it, else that of its folder or type."""
    given = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    folder = file.parent.name if file.name == "config.json" else ""
    return given or folder or kind
