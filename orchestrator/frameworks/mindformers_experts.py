"""Mixtures of experts as ``moe_config`` of MindFormers' Llama, whose layers all have experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.frameworks.spelling import Found, SettingsBuilder, custom, row
from trials.spec import Experts, Layout, LlamaModel

_LLAMA = "workload.model.llama"
_PATH = f"{_LLAMA}.experts"
NUM, TOP_K, SHARED = (f"moe_config.{name}" for name in ("expert_num", "num_experts_chosen", "shared_expert_num"))
SIGMOID, NORMALIZES = "moe_config.use_gating_sigmoid", "moe_config.norm_topk_prob"
GROUPED, CAPACITY = "moe_config.use_gmm", "moe_config.capacity_factor"
_FIXED = {"moe_config.routing_policy": "TopkRouterV2", "moe_config.router_dense_type": "float32"}
WIDTH = "model.model_config.intermediate_size"
PARALLEL_SIZE = "parallel_config.expert_parallel"


def _write(builder: SettingsBuilder) -> None:
    model = builder.workload.model
    experts = model.experts if isinstance(model, LlamaModel) else None
    if experts is None or not isinstance(model, LlamaModel):
        return
    width, is_dropless = experts.ffn_hidden_size, experts.capacity is None
    builder.settings |= {
        **_FIXED,
        WIDTH: width,
        NUM: experts.num_experts,
        TOP_K: experts.top_k,
        SHARED: experts.shared_ffn_hidden_size // width,
        SIGMOID: experts.scores == "sigmoid",
        NORMALIZES: experts.normalizes,
        GROUPED: is_dropless,
    }
    if not is_dropless:
        builder.settings[CAPACITY] = experts.capacity
        builder.warn(f"{_PATH}.capacity", "slots are counted per micro-batch instead of per sequence")
    _note(builder, model, experts)


def _note(builder: SettingsBuilder, model: LlamaModel, experts: Experts) -> None:
    """Note what MindFormers' Llama lacks or does differently."""
    width, layout = experts.ffn_hidden_size, builder.candidate.layout
    if experts.shared_ffn_hidden_size % width:
        builder.refuse(f"{_PATH}.shared_ffn_hidden_size", f"shared experts are as wide as the others, {width}")
    if experts.num_dense_layers:
        builder.refuse(f"{_PATH}.num_dense_layers", "all layers have experts")
    elif model.ffn_hidden_size != width:
        builder.warn(f"{_LLAMA}.ffn_hidden_size", "no layer has a dense feed-forward")
    for field in ("aux_loss", "z_loss"):
        if getattr(experts, field):
            builder.refuse(f"{_PATH}.{field}", "LlamaForCausalLM does not add losses of its routers")
    if experts.balance_rate:
        builder.refuse(f"{_PATH}.balance_rate", "the bias requires TopkBiasBalanceCallback and shared experts")
    if experts.normalizes and experts.top_k == 1:
        builder.refuse(f"{_PATH}.normalizes", "the weight of a single expert is never scaled to 1")
    if experts.routing == "balanced":
        builder.warn(f"{_PATH}.routing", "exported as learned; balanced routing is for measurements")
    if experts.capacity is None and layout.cp > 1:
        builder.refuse("layout.cp", "experts without a capacity are not split by context parallelism")


def read_experts(get: Callable[..., Any], width: int) -> Experts:
    """The experts in ``moe_config``, where ``get`` looks up dotted keys; ``width`` is that of the feed-forward."""
    return Experts(
        num_experts=int(get(NUM)),
        top_k=int(get(TOP_K) or 1),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=int(get(SHARED) or 0) * width,
        scores="sigmoid" if get(SIGMOID) else "softmax",
        normalizes=get(NORMALIZES) is not False,
        balance_rate=0.0,
        capacity=None if get(GROUPED) else float(get(CAPACITY) or 1.1),
    )


def _read(found: Found) -> Mapping[str, Any]:
    if NUM not in found:
        return {}
    experts = dataclasses.asdict(read_experts(found.get, found[WIDTH]))
    return {f"{_PATH}.{name}": value for name, value in experts.items()}


ROW = custom((_PATH,), (*_FIXED, WIDTH, NUM, TOP_K, SHARED, SIGMOID, NORMALIZES, GROUPED, CAPACITY), _write, _read)


def parallel_problem(layout: Layout) -> str | None:
    """Why the layout's split of experts is impossible for MindFormers' Llama; None if it is possible."""
    return f"{layout.ep} does not divide data_parallel {layout.dp}" if layout.dp % layout.ep else None


def _write_parallel(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if not builder.is_export or layout.ep > 1:
        builder.settings[PARALLEL_SIZE] = layout.ep
    if builder.is_export and (problem := parallel_problem(layout)):
        builder.refuse("layout.ep", problem)


PARALLEL = row(
    "layout.ep", PARALLEL_SIZE, _write_parallel, lambda found: {"layout.ep": found.whole("layout.ep", PARALLEL_SIZE, 1)}
)
