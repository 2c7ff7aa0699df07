"""The ``config.json`` of Hugging Face models: read as Llamas of the same matrix products, and written for
frameworks that train the workload's Llama.

Decoders that differ in details have the same matrix products, and with them the same best configuration: they are
approximated, and the differences are listed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.frameworks.gaps import NO_EXPERT_PARALLEL, NO_LATENT
from orchestrator.frameworks.mixtral import mixtral
from orchestrator.frameworks.spelling import Setting, Settings, SettingsBuilder, custom, option, settings_of, tree
from trials.files import read_regular
from trials.spec import Experts, LatentAttention, LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The difference between a type of decoder and a Llama."""

    is_gated: bool = True
    """Whether its feed-forward part has three matrices instead of two."""
    is_tied: bool = False
    """Whether input embedding and output layer are tied, if the configuration does not set it."""
    differences: tuple[str, ...] = ()
    experts: Mapping[str, tuple[str, ...]] | None = None
    """Keys of :class:`trials.spec.Experts`, by what the configuration calls them; None: a dense model."""
    is_latent: bool = False
    """Whether it has multi-head latent attention."""


_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
}
_LAYER_NORM = "RMSNorm instead of LayerNorm"
_BIASES = "no biases"
_GELU = "SiLU instead of GELU"
_POSITIONS = "rotary instead of other position embeddings"

FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "ministral": _Family(),
    "phi3": _Family(),
    "granite": _Family(),
    "smollm3": _Family(),
    "olmo": _Family(differences=("RMSNorm instead of a norm without weights",)),
    "olmo2": _Family(differences=("no norms on queries and keys",)),
    "qwen2": _Family(differences=("no biases on queries, keys and values",)),
    "qwen3": _Family(differences=("no norms on queries and keys",)),
    "mixtral": _Family(experts=_EXPERTS),
    "qwen2_moe": _Family(
        experts={**_EXPERTS, "shared_ffn_hidden_size": ("shared_expert_intermediate_size",)},
        differences=("no biases on queries, keys and values", "no gate of the shared expert"),
    ),
    "qwen3_moe": _Family(experts=_EXPERTS, differences=("no norms on queries and keys",)),
    "deepseek": _Family(experts=_EXPERTS),
    "deepseek_v2": _Family(experts=_EXPERTS, is_latent=True),
    "deepseek_v3": _Family(experts=_EXPERTS, is_latent=True),
    "dots1": _Family(experts=_EXPERTS, differences=("no norms on queries and keys",)),
    "olmoe": _Family(experts=_EXPERTS, differences=("no norms on queries and keys",)),
    "stablelm": _Family(differences=(_LAYER_NORM,)),
    "gemma": _Family(is_tied=True, differences=(_GELU,)),
    "gemma2": _Family(is_tied=True, differences=(_GELU, "two norms fewer per block")),
    "gemma3_text": _Family(is_tied=True, differences=(_GELU, "four norms fewer per block")),
    "gpt_neox": _Family(is_gated=False, differences=(_LAYER_NORM, _BIASES, "sequential instead of parallel blocks")),
    "gpt2": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES, _POSITIONS)),
    "gptj": _Family(is_gated=False, differences=(_LAYER_NORM, _BIASES, "sequential instead of parallel blocks")),
    "opt": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES, _POSITIONS)),
    "bloom": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES, _POSITIONS)),
    "falcon": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM,)),
    "phi": _Family(is_gated=False, differences=(_LAYER_NORM, _BIASES, "sequential instead of parallel blocks")),
    "starcoder2": _Family(is_gated=False, is_tied=True, differences=(_LAYER_NORM, _BIASES)),
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_seq_length": ("max_position_embeddings", "n_positions"),
}
"""Maps our names of sizes to their names in configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Properties of a decoder in a configuration."""

    keys: Mapping[str, Any]
    """Fields of a :class:`trials.spec.LlamaModel` by name."""
    max_seq_length: int
    """The longest sequence it is made for."""
    differences: tuple[str, ...]
    """The differences of the Llama from it."""

    @property
    def shape(self) -> LlamaModel:
        experts, latent = self.keys.get("experts"), self.keys.get("latent")
        parts = {
            "experts": None if experts is None else Experts(**experts),
            "latent": None if latent is None else LatentAttention(**latent),
        }
        return LlamaModel(**{**self.keys, **parts})


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a configuration that describes a decoder: all of it for a text model; None for other models."""
    if isinstance(text := config.get("text_config"), dict) and text.get("model_type") in FAMILIES:
        return text
    return config if config.get("model_type") in FAMILIES and not config.get("is_encoder_decoder") else None


def decoder_of(config: Mapping[str, Any], file: Path) -> Decoder:
    """The decoder of a configuration; unknown types, those not in :data:`FAMILIES`, are treated as Llamas.

    Raises:
        ConfigError: sizes are missing or inconsistent.
    """
    family, sizes = FAMILIES.get(config.get("model_type", ""), _Family()), _sizes(config, file)
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    if family.is_latent:
        sizes["num_kv_heads"] = heads
    elif hidden % heads or hidden // heads % 2 or heads % sizes["num_kv_heads"]:
        raise ConfigError(
            f"unsupported sizes: hidden size {hidden}, {heads} heads, {sizes['num_kv_heads']} key-value heads",
            file=file,
            remedy="The hidden size must be a multiple of twice the number of heads, and that a multiple of the "
            "number of key-value heads.",
        )
    keys: dict[str, Any] = {key: sizes[key] for key in _NAMES if key != "max_seq_length"}
    if not family.is_gated:
        keys["ffn_hidden_size"] = _rounded(2 * sizes["ffn_hidden_size"] / 3)
    keys["vocab_size"] = max(256, keys["vocab_size"])
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    if isinstance(theta, int | float) and theta != 10000:
        keys["rope_theta"] = float(theta)
    if family.experts is not None:
        keys["experts"] = _experts(config, family.experts, file)
    if family.is_latent:
        keys["latent"] = {name: _size(config, name, file) for name in _LATENT if name != "q_lora_rank"}
        keys["latent"] |= {"q_lora_rank": _size(config, "q_lora_rank", file)} if config.get("q_lora_rank") else {}
    differences = (*family.differences, *_differences(config, family, sizes))
    return Decoder(keys=keys, max_seq_length=sizes["max_seq_length"], differences=differences)


def decoder_in(folder_or_file: Path) -> Decoder | None:
    """The decoder of a model's folder or ``config.json`` on this machine; None if there is none of a known type."""
    file = folder_or_file / "config.json" if folder_or_file.is_dir() else folder_or_file
    try:
        config = json.loads(read_regular(file))
        text = text_config(config) if isinstance(config, dict) else None
        return None if text is None else decoder_of(text, file)
    except (OSError, ValueError):
        return None


def decoder_of_config(text: str, file: Path) -> Decoder:
    """The decoder in the text of a ``config.json``, of any type, for the cost model.

    Raises:
        ConfigError: not JSON, not a decoder, or inconsistent sizes.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"invalid JSON: {error}", file=file) from None
    if not isinstance(config, dict):
        raise ConfigError("expected a mapping", file=file)
    inner = config.get("text_config")
    return decoder_of(inner if isinstance(inner, dict) else config, file)


def _sizes(config: Mapping[str, Any], file: Path) -> dict[str, int]:
    """The sizes by our names. Key-value heads and the feed-forward size may be absent or null."""
    found = {key: next((config[name] for name in names if config.get(name)), None) for key, names in _NAMES.items()}
    found["num_kv_heads"] = found["num_kv_heads"] or found["num_heads"]
    if (
        config.get("model_type") == "falcon"
        and config.get("multi_query")
        and not config.get("new_decoder_architecture")
    ):
        found["num_kv_heads"] = 1
    found["ffn_hidden_size"] = found["ffn_hidden_size"] or (found["hidden_size"] or 0) * 4
    found["max_seq_length"] = found["max_seq_length"] or 2048
    for key, value in found.items():
        if not isinstance(value, int) or value < 1:
            name = _NAMES[key][0]
            shown = "missing" if value is None else f"{str(value)[:40]!r} is not a valid size"
            raise ConfigError(shown, file=file, key=name, remedy="Use the config.json of a complete model.")
    return {key: int(value) for key, value in found.items() if value is not None}


_LATENT = tuple(field.name for field in fields(LatentAttention))


def _size(config: Mapping[str, Any], name: str, file: Path) -> int:
    value = config.get(name)
    if isinstance(value, int) and value >= 1:
        return value
    shown = "missing" if value is None else f"{str(value)[:40]!r} is not a valid size"
    raise ConfigError(shown, file=file, key=name, remedy="Use the config.json of a complete model.")


def _experts(config: Mapping[str, Any], known: Mapping[str, tuple[str, ...]], file: Path) -> dict[str, Any]:
    """The mixture of experts of a configuration whose every layer has one.

    Raises:
        ConfigError: missing sizes, or layers of both kinds in turn.
    """
    found: dict[str, Any] = {}
    for key, names in known.items():
        found[key] = _size(config, next((name for name in names if name in config), names[-1]), file)
    for name, plain in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("moe_layer_freq", 1)):
        if config.get(name, plain) not in (plain, None):
            raise ConfigError(
                "only models with experts in every layer are supported",
                file=file,
                key=name,
                remedy="Describe the model in a file like configs/models/moe-tiny.yaml, with experts.num_dense_layers.",
            )
    if number := config.get("first_k_dense_replace"):
        found["num_dense_layers"] = number
    if number := config.get("n_shared_experts"):
        found["shared_ffn_hidden_size"] = number * found["ffn_hidden_size"]
    if config.get("scoring_func") == "sigmoid" or config.get("model_type") in ("dots1", "deepseek_v3"):
        found["scores"] = "sigmoid"
    if config.get("norm_topk_prob", True) is False:
        found["normalizes"] = False
    if config.get("output_router_logits"):
        found |= {"aux_loss": float(config.get("router_aux_loss_coef", 0.001)), "balance_rate": 0.0}
    return found


def _differences(config: Mapping[str, Any], family: _Family, sizes: Mapping[str, int]) -> Iterator[str]:
    """Differences of this model from the trained one, in addition to those of its family."""
    if not family.is_gated:
        yield "SwiGLU with the same number of weights instead of two matrices"
    if config.get("tie_word_embeddings", family.is_tied):
        yield "a separate output layer"
    if family.experts is not None and config.get("output_router_logits"):
        yield "an auxiliary loss per sequence and layer instead of one for all"
    if family.experts is not None and config.get("routed_scaling_factor", 1.0) not in (None, 1, 1.0):
        yield f"weights of experts not multiplied by {config['routed_scaling_factor']}"
    if family.experts is not None and (groups := config.get("n_group")) not in (None, 1):
        yield f"experts chosen from all groups instead of {config.get('topk_group')} of {groups}"
    if config.get("num_nextn_predict_layers"):
        yield "no prediction of further tokens"
    if family.is_latent and (config.get("rope_scaling") or config.get("rope_parameters", {}).get("factor")):
        yield "rotary positions without scaling"
    if family.is_latent:
        return
    head, ours = config.get("head_dim"), sizes["hidden_size"] // sizes["num_heads"]
    if head and head != ours:
        yield f"heads of size {ours} instead of {head}"
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        yield f"full attention instead of windows of {window}"


def _rounded(size: float) -> int:
    """The nearest multiple of 128, which tensor parallelism can divide and which suits matrix units."""
    return max(128, round(size / 128) * 128)


MODEL_FILE = "model.json"
_LLAMA = "workload.model.llama"
_NUM_LAYERS = f"{MODEL_FILE}:num_hidden_layers"
_KIND = f"{MODEL_FILE}:model_type"
_FIXED = {
    _KIND: "llama",
    f"{MODEL_FILE}:architectures": ["LlamaForCausalLM"],
    f"{MODEL_FILE}:hidden_act": "silu",
    f"{MODEL_FILE}:initializer_range": 0.02,
    f"{MODEL_FILE}:rope_parameters.rope_type": "default",
    f"{MODEL_FILE}:tie_word_embeddings": False,
    f"{MODEL_FILE}:attention_bias": False,
    f"{MODEL_FILE}:mlp_bias": False,
    f"{MODEL_FILE}:use_cache": False,
}


def layer_class(model: LlamaModel) -> str:
    """Name of the class of the decoder's layers in transformers."""
    return "LlamaDecoderLayer" if model.experts is None else "MixtralDecoderLayer"


def _write_kind(builder: SettingsBuilder) -> None:
    if isinstance(builder.workload.model, LlamaModel):
        builder.settings |= {**_FIXED, f"{MODEL_FILE}:max_position_embeddings": builder.workload.seq_length}
    else:
        builder.warn(
            "workload.model",
            f"{MODEL_FILE} describes a Llama; build this {builder.workload.model.kind} model in your script",
        )


def _read_kind(settings: Settings) -> dict[str, Any]:
    if _KIND not in settings:
        return {"workload.seq_length": 1}
    return {"workload.model.kind": "llama", "workload.seq_length": settings[f"{MODEL_FILE}:max_position_embeddings"]}


MODEL_SETTINGS: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.seq_length", "workload.model.resnet", "workload.model.linear"),
        (*_FIXED, f"{MODEL_FILE}:max_position_embeddings"),
        _write_kind,
        _read_kind,
    ),
    option(f"{_LLAMA}.hidden_size", f"{MODEL_FILE}:hidden_size"),
    option(f"{_LLAMA}.num_layers", _NUM_LAYERS),
    option(f"{_LLAMA}.num_heads", f"{MODEL_FILE}:num_attention_heads"),
    option(f"{_LLAMA}.num_kv_heads", f"{MODEL_FILE}:num_key_value_heads"),
    option(f"{_LLAMA}.ffn_hidden_size", f"{MODEL_FILE}:intermediate_size"),
    option(f"{_LLAMA}.vocab_size", f"{MODEL_FILE}:vocab_size"),
    option(f"{_LLAMA}.rope_theta", f"{MODEL_FILE}:rope_parameters.rope_theta"),
    option(f"{_LLAMA}.norm_eps", f"{MODEL_FILE}:rms_norm_eps"),
    mixtral(f"{MODEL_FILE}:", "transformers", not_in_mixtral=("attention_bias", "mlp_bias")),
    NO_LATENT,
    NO_EXPERT_PARALLEL,
)


def num_layers(settings: Settings) -> int | None:
    """Number of layers; None for models that the file does not describe."""
    return settings.get(_NUM_LAYERS)


def model_files(builder: SettingsBuilder) -> dict[str, str]:
    content = tree(builder.settings, MODEL_FILE)
    return {MODEL_FILE: json.dumps(content, indent=2) + "\n"} if content else {}


def model_settings(files: Mapping[str, str]) -> dict[str, Any]:
    return settings_of(MODEL_FILE, json.loads(files.get(MODEL_FILE, "{}")))
