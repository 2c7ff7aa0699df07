"""Mixtures of experts as arguments of Megatron-LM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.frameworks.spelling import Found, SettingsBuilder, custom, row
from trials.spec import Experts, Layout, LlamaModel

_PATH = "workload.model.llama.experts"
NUM, WIDTH, TOP_K = "--num-experts", "--moe-ffn-hidden-size", "--moe-router-topk"
SHARED, LAYERS = "--moe-shared-expert-intermediate-size", "--moe-layer-freq"
SCORES, BEFORE = "--moe-router-score-function", "--moe-router-pre-softmax"
BIAS, RATE = "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"
BALANCING, AUX, Z = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff"
CAPACITY, PADS, POLICY = "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy"
PARALLEL_SIZE, TENSOR_SIZE = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_FIXED = {"--moe-grouped-gemm": True, "--moe-token-dispatcher-type": "alltoall", "--moe-router-dtype": "fp32"}
FLAGS = (BEFORE, BIAS, PADS, "--moe-grouped-gemm")
"""Arguments without a value."""
_FIRST_DENSE = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")


def _write(builder: SettingsBuilder) -> None:
    model = builder.workload.model
    experts = model.experts if isinstance(model, LlamaModel) else None
    if experts is None or not isinstance(model, LlamaModel):
        return
    is_softmax = experts.scores == "softmax"
    settings: dict[str, Any] = {
        **_FIXED,
        NUM: experts.num_experts,
        TOP_K: experts.top_k,
        WIDTH: experts.ffn_hidden_size,
        SCORES: experts.scores,
        BALANCING: "seq_aux_loss" if experts.aux_loss else "none",
    }
    if experts.shared_ffn_hidden_size:
        settings[SHARED] = experts.shared_ffn_hidden_size
    if experts.num_dense_layers:
        settings[LAYERS] = f"([0]*{experts.num_dense_layers}+[1]*{model.num_layers - experts.num_dense_layers})"
    if is_softmax and not experts.normalizes:
        settings[BEFORE] = True
    if experts.balance_rate and not is_softmax:
        settings |= {BIAS: True, RATE: experts.balance_rate}
    if experts.aux_loss:
        settings[AUX] = experts.aux_loss
    if experts.z_loss:
        settings[Z] = experts.z_loss
    if experts.capacity is not None:
        settings |= {CAPACITY: experts.capacity, PADS: True, POLICY: "position"}
    builder.settings |= settings
    _note(builder, experts)


def _note(builder: SettingsBuilder, experts: Experts) -> None:
    """Note what Megatron-LM rejects or does differently."""
    is_softmax = experts.scores == "softmax"
    if is_softmax and experts.normalizes and experts.top_k == 1:
        builder.refuse(f"{_PATH}.normalizes", f"with one expert per token, {BEFORE} is required")
    if not is_softmax and not experts.normalizes:
        builder.refuse(f"{_PATH}.normalizes", "sigmoid weights are always scaled to sum to 1")
    if is_softmax and experts.balance_rate:
        builder.refuse(f"{_PATH}.balance_rate", f"{BIAS} requires sigmoid scores; balance by aux_loss")
    if experts.capacity is not None:
        builder.warn(f"{_PATH}.capacity", "slots are counted per micro-batch instead of per sequence")
    if experts.routing == "balanced":
        builder.warn(f"{_PATH}.routing", "exported as learned; balanced routing is for measurements")


def read_experts(found: Found) -> dict[str, Any] | None:
    """Return the fields of :class:`trials.spec.Experts`; None for a dense model.

    Raises:
        ValueError: an argument has a value that no field describes.
    """
    if int(found.get(NUM) or 0) == 0:
        return None
    scores, rate = str(found.get(SCORES, "softmax")), float(found.get(RATE, 1e-3))
    if scores not in ("softmax", "sigmoid"):
        raise ValueError(f"{SCORES} {scores}")
    has_aux = "aux_loss" in str(found.get(BALANCING, "aux_loss"))
    return {
        "num_experts": int(found[NUM]),
        "top_k": int(found.get(TOP_K, 2)),
        "ffn_hidden_size": int(found.get(WIDTH) or found["--ffn-hidden-size"]),
        "shared_ffn_hidden_size": int(found.get(SHARED) or 0),
        "num_dense_layers": _num_dense(str(found.get(LAYERS, 1)), int(found["--num-layers"])),
        "scores": scores,
        "normalizes": scores == "sigmoid" or not found.is_on(BEFORE),
        "balance_rate": rate if found.is_on(BIAS) else 0.0,
        "aux_loss": float(found.get(AUX, 0.0)) if has_aux else 0.0,
        "z_loss": float(found.get(Z, 0.0)),
        "capacity": float(found[CAPACITY]) if found.get(CAPACITY) else None,
        "routing": "learned",
    }


def _num_dense(frequency: str, num_layers: int) -> int:
    """Number of first layers without experts."""
    text = frequency.replace(" ", "")
    if text == "1":
        return 0
    if (match := _FIRST_DENSE.fullmatch(text)) is not None and int(match[1]) + int(match[2]) == num_layers:
        return int(match[1])
    layers = text.strip("()[]").split(",")
    number = layers.count("0")
    if len(layers) == num_layers and layers == ["0"] * number + ["1"] * (num_layers - number):
        return number
    raise ValueError(f"{LAYERS} {frequency}")


def _read(found: Found) -> Mapping[str, Any]:
    return {f"{_PATH}.{name}": value for name, value in (read_experts(found) or {}).items()}


ROW = custom(
    (_PATH,),
    (*_FIXED, NUM, TOP_K, WIDTH, SHARED, LAYERS, SCORES, BEFORE, BIAS, RATE, BALANCING, AUX, Z, CAPACITY, PADS, POLICY),
    _write,
    _read,
)


def _write_parallel(builder: SettingsBuilder) -> None:
    """Write the degree. Experts are whole, but by default Megatron-LM splits each over the tensor-parallel ranks."""
    layout = builder.candidate.layout
    if not builder.is_export or layout.ep > 1:
        builder.settings[PARALLEL_SIZE] = layout.ep
    if layout.ep > 1 and layout.tp > 1:
        builder.settings[TENSOR_SIZE] = 1
    if builder.is_export and (problem := parallel_problem(layout)):
        builder.refuse("layout.ep", problem)


def parallel_problem(layout: Layout) -> str | None:
    """Why Megatron-LM would reject the layout's split of experts; None if it would not."""
    is_split = layout.ep > 1 and layout.tp > 1 and not layout.sequence_parallel
    return "experts with tensor parallelism require --sequence-parallel" if is_split else None


def _read_parallel(found: Found) -> dict[str, Any]:
    ep, tp = found.whole("layout.ep", PARALLEL_SIZE, 1), found.whole("layout.tp", "--tensor-model-parallel-size", 1)
    if 1 not in (ep, tp) and str(found.get(TENSOR_SIZE)) != "1":
        found.unread("layout.ep", f"experts split by tensor parallelism as well; {TENSOR_SIZE} 1 keeps them whole")
        return {"layout.ep": ep if found.is_export else None}
    return {"layout.ep": ep}


PARALLEL = row("layout.ep", (PARALLEL_SIZE, TENSOR_SIZE), _write_parallel, _read_parallel)
