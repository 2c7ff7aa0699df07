"""The model of a draft: from one of this project's model files, or a common shape of a given size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.workload import MODEL_SECTIONS
from orchestrator.config.yaml_source import read_yaml, unreadable
from orchestrator.errors import ConfigError
from orchestrator.frameworks.decoder_config import FAMILIES, decoder_of, text_config
from trials.files import read_regular
from trials.sizes import num_parameters
from trials.spec import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedModel:
    """What is trained, as the draft writes it."""

    name: str
    """Start of the sweep's name."""
    keys: Mapping[str, Any]
    """The section ``workload.model``."""
    source: str
    """Its source, in words."""
    max_seq_length: int | None = None
    """The longest sequence it is made for; None if unknown."""
    differences: tuple[str, ...] = ()
    """How the trained model differs from the requested one."""

    @property
    def shape(self) -> Model:
        """The model, checked.

        Raises:
            pydantic.ValidationError: incompatible sizes.
        """
        section: Any = MODEL_SECTIONS[self.keys["kind"]].model_validate(dict(self.keys))
        model: Model = section.to_model()
        return model

    @property
    def num_parameters(self) -> int | None:
        """Weights of a decoder, its untied output layer included; None for other models."""
        return num_parameters(self.shape) if self.keys["kind"] == "llama" else None


_SHAPES = (
    # hidden_size, num_layers, num_heads, num_kv_heads, ffn_hidden_size, vocab_size
    (768, 12, 12, 12, 2048, 32000),
    (2048, 16, 32, 8, 8192, 128256),
    (3072, 28, 24, 8, 8192, 128256),
    (4096, 32, 32, 32, 11008, 32000),
    (4096, 32, 32, 8, 14336, 128256),
    (5120, 40, 40, 40, 13824, 32000),
    (8192, 48, 64, 8, 22016, 32000),
    (8192, 80, 64, 8, 28672, 128256),
    (16384, 126, 128, 8, 53248, 128256),
)
"""Shapes of published Llamas, from 0.1 to 405 billion parameters."""
_KEYS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size")
_UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def model_of_size(text: str) -> DraftedModel:
    """The published Llama whose number of parameters is nearest to a text like ``13B`` or ``350M``.

    Raises:
        ConfigError: not a number of parameters.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MBT])", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(
            f"{text[:40]!r} is not a number of parameters",
            key="--parameters",
            remedy="Use a value such as 350M or 13B.",
        )
    wanted = float(match[1]) * _UNITS[match[2].upper()]
    models = [
        DraftedModel(
            name=f"llama-{match[1]}{match[2].lower()}",
            keys={"kind": "llama", **dict(zip(_KEYS, shape, strict=True))},
            source=f"the published Llama nearest to {text.strip()}",
        )
        for shape in _SHAPES
    ]
    return min(models, key=lambda model: abs((model.num_parameters or 0) / wanted - 1))


def model_of_file(path: Path) -> DraftedModel:
    """The model of a file: a Hugging Face ``config.json``, a folder with one, or a model file like configs/models.

    Raises:
        ConfigError: it cannot be read, or is a model that cannot be trained here.
    """

    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        return _own_model(file)
    try:
        config = json.loads(read_regular(file))
    except json.JSONDecodeError as error:
        raise ConfigError(f"invalid JSON: {error.msg}", file=file, line=error.lineno, remedy="Fix the file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None
    return model_of_config(config, file)


def _own_model(file: Path) -> DraftedModel:
    source = read_yaml(file)
    if not isinstance(source.data, dict) or source.data.get("kind") not in MODEL_SECTIONS:
        known = ", ".join(map(repr, MODEL_SECTIONS))
        raise source.error(("kind",), f"expected one of {known}", "Use a Hugging Face config.json, or a model file.")
    return DraftedModel(name=file.stem, keys=source.data, source=file.name)


# From the ``config.json`` of a Hugging Face model to the model that trials train, and what is lost. Trials train
# Llama-style decoders (RMSNorm, rotary embeddings, SwiGLU, grouped queries, an untied output layer) and ResNets.
# Decoders that differ in details have the same matrix products, and with them the same best configuration: they are
# approximated, and the differences are reported. Others are refused.


_RESNETS = {(2, 2, 2, 2): 18, (3, 4, 6, 3): 50}


def model_of_config(config: Any, file: Path) -> DraftedModel:
    """The model to be trained for this configuration.

    Raises:
        ConfigError: not a configuration, or an unsupported model.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            "required key is missing",
            file=file,
            key="model_type",
            remedy="Use the config.json of a Hugging Face model.",
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
    if config.get("kv_lora_rank"):
        what = "multi-head latent attention (kv_lora_rank)"
    return ConfigError(
        f"{what} is not supported by the built-in runner",
        file=file,
        key="model_type",
        remedy=f"Supported: {', '.join(FAMILIES)} and resnet. For a Llama model of a given size, pass --parameters "
        "13B.",
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
    """The number of weights as in model names: 13b, 350m."""
    count = DraftedModel(name="", keys=keys, source="").num_parameters or 0
    return f"{count / 1e9:.2g}b" if count >= 1e9 else f"{max(1, round(count / 1e6))}m"


def _resnet(config: Mapping[str, Any], file: Path) -> DraftedModel:
    depths = tuple(config.get("depths") or (3, 4, 6, 3))
    if depths not in _RESNETS:
        raise ConfigError(
            f"a ResNet with depths {depths} is not supported by the built-in runner",
            file=file,
            key="depths",
            remedy="Supported: ResNet-18 and ResNet-50.",
        )
    depth = _RESNETS[depths]
    keys = {"kind": "resnet", "depth": depth, "width": config.get("embedding_size") or 64}
    if isinstance(labels := config.get("id2label"), dict) and len(labels) > 2:
        keys["num_classes"] = len(labels)
    return DraftedModel(name=f"resnet-{depth}", keys=keys, source=f"{file.name} (resnet)")


def _sweep_name(config: Mapping[str, Any], file: Path, kind: str) -> str:
    """The name in the configuration, else that of its folder or type."""
    given = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    folder = file.parent.name if file.name == "config.json" else ""
    return given or folder or kind
