"""Operators of a profile that take much time and reach little of what the device can do."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.hardware.topology import CatalogueError, Topology, find_accelerator
from cluster.probing import Profile
from trials.reports import OperatorTime, RankProfile
from trials.sizes import matmul_format
from trials.spec import Candidate

MUCH_TIME = 0.05
"""Minimum share of all operators' time."""
FAR = 0.3
"""Share of the roofline below which an operator is far from it: well-fed kernels reach half and more."""
MAX_OPERATORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What a device can do at most."""

    flops_per_s: float
    bytes_per_s: float
    source: str
    """``probe`` or ``catalogue``."""


def roof_of(candidate: Candidate, profile: Profile | None, topology: Topology | None) -> Roof | None:
    """Return the roof for the candidate's number format, as probed or else from the catalogue; None if unknown."""
    name = matmul_format(candidate)
    nodes = profile.measured if profile is not None else ()
    rates = [node.matmul_flops_per_s[name].per_s for node in nodes if name in node.matmul_flops_per_s]
    copies = [node.copy_bytes_per_s["device"].per_s for node in nodes if "device" in node.copy_bytes_per_s]
    if rates and copies:
        return Roof(flops_per_s=min(rates), bytes_per_s=min(copies), source="probe")
    devices = {node.device_name for node in topology.nodes if node.device_kind != "cpu"} if topology is not None else ()
    for device in sorted(devices):
        try:
            found = find_accelerator(device)
        except CatalogueError:
            continue
        if (peak := found.peak(name)) is not None:
            return Roof(flops_per_s=peak, bytes_per_s=found.memory_bytes_per_s, source="catalogue")
    return None


def far_operators(rank: RankProfile, candidate: Candidate, roof: Roof) -> list[str]:
    """Describe the operators that are far from the roof and take much time, the longest first, with what would help."""
    on_device = any(operator.device_s for operator in rank.operators)
    lines = []
    for operator in rank.operators:
        seconds = operator.device_s if on_device else operator.cpu_s
        reached = _least_s(operator, roof) / seconds if seconds and operator.num_bytes else 1.0
        if operator.share >= MUCH_TIME and reached < FAR:
            lines.append(
                f"{operator.name} takes {operator.share:.0%} of operator time and reaches {reached:.0%} of the "
                f"roofline ({roof.source}): {_remedy(operator, candidate, roof)}"
            )
    return lines[:MAX_OPERATORS]


def _least_s(operator: OperatorTime, roof: Roof) -> float:
    return max(operator.num_flops / roof.flops_per_s, operator.num_bytes / roof.bytes_per_s)


def _remedy(operator: OperatorTime, candidate: Candidate, roof: Roof) -> str:
    name = operator.name.removeprefix("aten::")
    is_compiled = candidate.kernels.compile != "off"
    if name.startswith("_scaled_dot_product_"):
        return "try other kernels (attention)"
    if name in ("bmm", "baddbmm", "_softmax", "_softmax_backward_data"):
        return "attention computed in parts; a fused kernel (scaled_dot_product_attention) keeps no scores"
    if name.startswith("_log_softmax"):
        return "a loss in chunks (loss_chunks) keeps no logits"
    if operator.num_flops / roof.flops_per_s > operator.num_bytes / roof.bytes_per_s:
        return "its matrices are small or oddly shaped; a larger micro_batch_size or a smaller tp makes them larger"
    if name in ("copy_", "clone"):
        return "strided copies or casts; O2 casts less, memory_format avoids transposes"
    return "its tensors are small; a larger micro_batch_size helps" if is_compiled else "compile fuses it with others"
