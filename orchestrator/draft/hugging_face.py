"""From the ``config.json`` of a Hugging Face model to the model that trials train, and what is lost on the way.

Trials train Llama-style decoders (RMSNorm, rotary embeddings, SwiGLU, grouped queries, an untied output layer) and
ResNets. Decoders that differ in details have the same matrix products, and with them the same best configuration: they
are approximated, and the difference is said. Others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.draft.model import DraftedModel
from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How a type of decoder relates to a Llama."""

    is_gated: bool = True
    """Whether its feed-forward has three matrices; otherwise two."""
    is_tied: bool = False
    """Whether input embedding and output layer are one, where the configuration does not say."""
    differences: tuple[str, ...] = ()


_LAYER_NORM = "RMSNorm for LayerNorm"
_BIASES = "no biases"
_GELU = "SiLU for GELU"
_POSITIONS = "rotary for other position embeddings"

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "ministral": _Family(),
    "phi3": _Family(),
    "granite": _Family(),
    "smollm3": _Family(),
    "olmo": _Family(differences=("RMSNorm for a norm without weights",)),
    "olmo2": _Family(differences=("no norms of queries and keys",)),
    "qwen2": _Family(differences=("no biases of queries, keys and values",)),
    "qwen3": _Family(differences=("no norms of queries and keys",)),
    "stablelm": _Family(differences=(_LAYER_NORM,)),
    "gemma": _Family(is_tied=True, differences=(_GELU,)),
    "gemma2": _Family(is_tied=True, differences=(_GELU, "two norms fewer per block")),
    "gemma3_text": _Family(is_tied=True, differences=(_GELU, "four norms fewer per block")),
    "gpt_neox": _Family(is_gated=False, differences=(_LAYER_NORM, _BIASES, "blocks in sequence, not parallel")),
    "gpt2": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES, _POSITIONS)),
    "gptj": _Family(is_gated=False, differences=(_LAYER_NORM, _BIASES, "blocks in sequence, not parallel")),
    "opt": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES, _POSITIONS)),
    "bloom": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES, _POSITIONS)),
    "falcon": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM,)),
    "phi": _Family(is_gated=False, differences=(_LAYER_NORM, _BIASES, "blocks in sequence, not parallel")),
    "starcoder2": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES)),
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_seq_length": ("max_position_embeddings", "n_positions"),
}
"""What the sizes are called in configurations, by what they are called here."""
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
    if isinstance(text := config.get("text_config"), dict) and text.get("model_type") in _FAMILIES:
        return _decoder(text, file, ("its text model only",))
    kind = config["model_type"]
    if kind == "resnet":
        return _resnet(config, file)
    if kind not in _FAMILIES or config.get("is_encoder_decoder"):
        raise _no_counterpart(kind, config, file)
    return _decoder(config, file, ())


def _no_counterpart(kind: str, config: Mapping[str, Any], file: Path) -> ConfigError:
    experts = any("expert" in key for key in config)
    what = "a mixture of experts" if experts else f"a model of type {kind[:40]!r}"
    return ConfigError(
        f"{what} is not among the models that trials train",
        file=file,
        key="model_type",
        remedy=f"There are {', '.join(_FAMILIES)} and resnet; --parameters 13B takes a Llama of that size instead.",
    )


def _decoder(config: Mapping[str, Any], file: Path, known: tuple[str, ...]) -> DraftedModel:
    kind = config["model_type"]
    family, sizes = _FAMILIES[kind], _sizes(config, file)
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    if hidden % heads or hidden // heads % 2 or heads % sizes["num_kv_heads"]:
        raise ConfigError(
            f"{heads} heads and {sizes['num_kv_heads']} key-value heads do not divide width {hidden}", file=file
        )
    keys: dict[str, Any] = {"kind": "llama", **{key: sizes[key] for key in _NAMES if key != "max_seq_length"}}
    if not family.is_gated:
        keys["ffn_hidden_size"] = _rounded(2 * sizes["ffn_hidden_size"] / 3)
    keys["vocab_size"] = max(256, keys["vocab_size"])
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    if isinstance(theta, int | float) and theta != 10000:
        keys["rope_theta"] = float(theta)
    name = _sweep_name(config, file, kind)
    return DraftedModel(
        name=name if name != kind else f"{kind}-{_weights(keys)}",
        keys=keys,
        source=f"{file.name} ({kind})",
        max_seq_length=sizes["max_seq_length"],
        differences=(*known, *family.differences, *_differences(config, family, sizes)),
    )


def _weights(keys: Mapping[str, Any]) -> str:
    """How many weights the model has, as names of models tell it: 13b, 350m."""
    count = DraftedModel(name="", keys=keys, source="").num_parameters or 0
    return f"{count / 1e9:.2g}b" if count >= 1e9 else f"{max(1, round(count / 1e6))}m"


def _sizes(config: Mapping[str, Any], file: Path) -> dict[str, int]:
    """The sizes by our names. Key-value heads and the feed-forward may be left out, or null."""
    found = {key: next((config[name] for name in names if config.get(name)), None) for key, names in _NAMES.items()}
    found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
    if config["model_type"] == "falcon" and config.get("multi_query") and not config.get("new_decoder_architecture"):
        found["num_kv_heads"] = 1
    found["ffn_hidden_size"] = found["ffn_hidden_size"] or (found["hidden_size"] or 0) * 4
    found["max_seq_length"] = found["max_seq_length"] or 2048
    for key, value in found.items():
        if not isinstance(value, int) or value < 1:
            name = _NAMES[key][0]
            shown = "missing" if value is None else f"{str(value)[:40]!r} is no size"
            raise ConfigError(shown, file=file, key=name, remedy="Name the config.json of a whole model.")
    return {key: int(value) for key, value in found.items() if value is not None}


def _differences(config: Mapping[str, Any], family: _Family, sizes: Mapping[str, int]) -> Iterator[str]:
    """In what this very model differs from the one that is trained, besides what all of its family do."""
    if not family.is_gated:
        yield "SwiGLU of as many weights for two matrices"
    if config.get("tie_word_embeddings", family.is_tied):
        yield "an output layer of its own"
    head, ours = config.get("head_dim"), sizes["hidden_size"] // sizes["num_heads"]
    if head and head != ours:
        yield f"heads of {ours} for {head}"
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        yield f"full attention for windows of {window}"


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


def _rounded(size: float) -> int:
    """The nearest multiple of 128, which tensor parallelism divides and matrix units like."""
    return max(128, round(size / 128) * 128)


def _sweep_name(config: Mapping[str, Any], file: Path, kind: str) -> str:
    """The model's own name where the configuration tells it, else that of its folder or type."""
    given = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    folder = file.parent.name if file.name == "config.json" else ""
    return given or folder or kind
