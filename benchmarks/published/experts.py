"""Reads what a published row says of its mixture of experts, and fills in what it leaves out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, float | None]

DENSE = ("", "false", "no")
_NUM_EXPERTS = re.compile(r"(?:experts?(?:_num)?|num_experts)\s*=\s*(\d+)|(\d+)\s*(?:routed|experts?)", re.IGNORECASE)
_TOP_K = re.compile(r"top[-_ ]?k?\s*=?\s*(\d+)", re.IGNORECASE)
_SHARED = re.compile(r"(\d+)\s*shared", re.IGNORECASE)
_WIDTH = re.compile(r"(?:moe|expert)[_ ]ffn\D{0,3}(\d+)", re.IGNORECASE)
_DENSE_LAYERS = re.compile(r"(\d+)\s*dense layers?", re.IGNORECASE)
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)\s?[bB](?![a-z])")
_LATENT = re.compile(r"\bMLA\b|latent attention", re.IGNORECASE)
LATENT_HEAD_DIM = 128.0
"""Values of each head with multi-head latent attention (DeepSeek-AI, arXiv 2405.04434)."""
FAR_OFF = 2.5
"""Factor between the stated number of parameters and that of the stated widths beyond which the width is taken to be
that of the dense layers."""


class NotModelledError(ValueError):
    """The cost model cannot say anything about this row; the message is the reason."""


def is_mixture(f: Mapping[str, str]) -> bool:
    """Whether the row's model has experts."""
    return f["moe"].lower() not in DENSE


def expert_fields(f: Mapping[str, str], n: Numbers, model: Mapping[str, Any]) -> dict[str, float]:
    """Fields of ``CostInputs`` on experts; none for a dense model. ``model``: its other fields, as if it were dense.

    Raises:
        NotModelledError: the row does not say how many experts there are, or how wide layers are.
    """
    text = f["moe"]
    if not is_mixture(f):
        return {}
    found = _NUM_EXPERTS.search(text)
    if found is None:
        raise NotModelledError(f"mixture of experts ({text}): the number of experts is not stated")
    if not (n["layers"] and n["hidden"]):
        raise NotModelledError(f"mixture of experts ({text}): layers or hidden size are not stated")
    num_experts = float(found[1] or found[2])
    top_k = float(match[1]) if (match := _TOP_K.search(text)) else 2.0
    dense_layers = float(match[1]) if (match := _DENSE_LAYERS.search(text)) else 0.0
    share = 1 - min(dense_layers, n["layers"] - 1) / n["layers"]
    width = float(match[1]) if (match := _WIDTH.search(text)) else _width(f, n, model, share * num_experts)
    num_shared = float(match[1]) if (match := _SHARED.search(text)) else 0.0
    ep = max(1.0, n["ep"] or 1.0)
    if num_experts % ep:
        raise NotModelledError(f"{num_experts:g} experts do not split into ep {ep:g}")
    return {
        "expert_share": share,
        "num_experts": num_experts,
        "experts_per_token": min(top_k, num_experts),
        "expert_ffn": width,
        "shared_ffn": num_shared * width,
        "ep": ep,
    }


def mixture_shape(f: Mapping[str, str], n: Numbers, model: Mapping[str, Any]) -> dict[str, float]:
    """What a mixture's other fields are, where a dense model's rules lead astray: gated or not by the number of
    parameters with all experts; heads of a size that fused attention has; keys and values of latent attention come of
    one narrow projection."""
    heads, head_dim = model["num_heads"], model["head_dim"]
    if head_dim % 16:
        head_dim = 2.0 ** math.ceil(math.log2(head_dim))
    latent = {"head_dim": LATENT_HEAD_DIM, "num_kv_heads": 1.0} if _LATENT.search(f["moe"]) else {}
    return {"num_heads": heads, "head_dim": head_dim, "gated": _gated(f, n, model), "tied": 0.0, **latent}


def _gated(f: Mapping[str, str], n: Numbers, model: Mapping[str, Any]) -> float:
    total, count = total_params(f) or n["n_params"], _NUM_EXPERTS.search(f["moe"])
    if total is None or count is None:
        return 1.0
    width = float(match[1]) if (match := _WIDTH.search(f["moe"])) else model["ffn"]
    matrix = model["num_layers"] * model["hidden"] * width * float(count[1] or count[2])
    near = {g: abs(math.log((2 + g) * matrix / total)) for g in (0.0, 1.0)}
    return min(near, key=lambda g: near[g]) if min(near.values()) < math.log(FAR_OFF) else 1.0


def total_params(f: Mapping[str, str]) -> float | None:
    """Number of parameters in the model's name, experts included: ``8x7B``, ``DeepSeek-V2-236B``."""
    if "layers)" in f["model"]:  # a part of the model of that name
        return None
    sizes = [float(count or 1) * float(size) * 1e9 for count, size in _SIZE_IN_NAME.findall(f["model"])]
    return max(sizes, default=None)


def _width(f: Mapping[str, str], n: Numbers, model: Mapping[str, Any], per_layer: float) -> float:
    """Width of an expert: as stated, unless that many of them come to another number of parameters by far."""
    stated = float(n["ffn"] or 4 * model["hidden"])
    total = total_params(f) or n["n_params"]
    of_width = model["num_layers"] * (2 + model["gated"]) * model["hidden"] * per_layer
    if total is None or total / FAR_OFF <= of_width * stated <= total * FAR_OFF:
        return stated
    return float(max(64.0, 64.0 * round(total / of_width / 64)))
