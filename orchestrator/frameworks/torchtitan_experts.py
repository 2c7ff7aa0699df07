"""Mixtures of experts as arguments of the model in a torchtitan export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.frameworks.spelling import Found, SettingsBuilder, custom, row
from orchestrator.frameworks.torchtitan_config import NUM_EXPERTS, UNKNOWN
from trials.spec import Layout, LlamaModel

_PATH = "workload.model.llama.experts"
PARALLEL_SIZE = "parallelism.expert_parallel_degree"
_BIAS = "model_spec.load_balance_coeff"
_NAMES = {
    "num_experts": NUM_EXPERTS,
    "top_k": "model_spec.top_k",
    "ffn_hidden_size": "model_spec.expert_dim",
    "shared_ffn_hidden_size": "model_spec.shared_dim",
    "num_dense_layers": "model_spec.n_dense_layers",
    "scores": "model_spec.score_func",
    "normalizes": "model_spec.route_norm",
}


def _write(builder: SettingsBuilder) -> None:
    model = builder.workload.model
    experts = model.experts if isinstance(model, LlamaModel) else None
    if experts is None:
        return
    builder.settings |= {theirs: getattr(experts, ours) for ours, theirs in _NAMES.items()}
    builder.settings[_BIAS] = experts.balance_rate or None
    for field in ("aux_loss", "z_loss"):
        if getattr(experts, field):
            builder.refuse(f"{_PATH}.{field}", "experts are balanced by a bias only; use balance_rate")
    if experts.capacity is not None:
        builder.refuse(f"{_PATH}.capacity", "no token is dropped")
    if experts.routing == "balanced":
        builder.warn(f"{_PATH}.routing", "exported as learned; balanced routing is for measurements")
    if builder.candidate.precision.dtype == "float32":
        builder.warn("precision.dtype", "experts always multiply in bfloat16")


def _read(found: Found) -> Mapping[str, Any]:
    if NUM_EXPERTS not in found:
        return {}
    values = {ours: found[theirs] for ours, theirs in _NAMES.items()}
    values |= {"balance_rate": found[_BIAS] or 0.0, "aux_loss": 0.0, "z_loss": 0.0, "capacity": None}
    return {f"{_PATH}.{name}": value for name, value in {**values, "routing": "learned"}.items()}


ROW = custom((_PATH,), (*_NAMES.values(), _BIAS), _write, _read)


def parallel_problem(layout: Layout) -> str | None:
    """Why torchtitan would reject the layout's split of experts; None if it would not."""
    if layout.dp_shard * layout.cp * layout.tp % layout.ep:
        return f"ep {layout.ep} does not divide dp_shard x cp x tp: experts are not split over replicas"
    return None


def _write_parallel(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if not builder.is_export or layout.ep > 1:
        builder.settings[PARALLEL_SIZE] = layout.ep
    if builder.is_export and (problem := parallel_problem(layout)):
        builder.refuse("layout.ep", problem)


def _read_parallel(found: Found) -> Mapping[str, Any]:
    is_unknown = found.get(PARALLEL_SIZE) == UNKNOWN
    return {"layout.ep": None if is_unknown else found.whole("layout.ep", PARALLEL_SIZE, 1)}


PARALLEL = row("layout.ep", PARALLEL_SIZE, _write_parallel, _read_parallel)
