"""The shares of a decoder layer that selective recompute drops and repeats, from the kept outputs and the work of its
operators."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from trials.spec import Counts, LlamaModel, Recompute

FLOPS_PER_BYTE = 160.0
"""Matmul FLOPs that current accelerators do, as efficiencies go, while they read or write a byte."""
MAX_DROPPED = 0.95
"""Largest share of a layer's kept bytes that can be dropped: its input always stays."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator, per token: output elements that the backward pass keeps, FLOPs, elements read and written."""

    kept: float
    flops: float = 0.0
    traffic: float = 0.0

    @property
    def work(self) -> float:
        """FLOPs, with those that could be done while its elements of two bytes are read and written."""
        return self.flops + 2 * self.traffic * FLOPS_PER_BYTE


def operators_of(model: LlamaModel, seq_length: int) -> dict[str, Operator]:
    """Operators of :class:`trials.models.llama.Block` by their paths; fused attention skips the masked half."""
    h, f = model.hidden_size, model.ffn_hidden_size
    kv = h // model.num_heads * model.num_kv_heads
    return {
        "attention_norm.rms_norm": Operator(h, 0, 2 * h),
        "attention.wqkv.linear": Operator(0, 2 * h * (h + 2 * kv)),
        "attention.addcmul": Operator(h + kv, 0, 3 * (h + kv)),
        "attention.contiguous": Operator(kv, 0, 2 * kv),
        "attention.scaled_dot_product_attention": Operator(h, 4 * seq_length * h * 0.5),
        "attention.wo.linear": Operator(0, 2 * h * h),
        "add": Operator(h, 0, 3 * h),
        "feed_forward_norm.rms_norm": Operator(h, 0, 2 * h),
        "feed_forward.w13.linear": Operator(2 * f, 4 * h * f),
        "feed_forward.silu": Operator(f, 0, 2 * f),
        "feed_forward.mul": Operator(f, 0, 3 * f),
        "feed_forward.w2.linear": Operator(0, 2 * h * f),
    }


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches the operator's whole path or that of a module around it, as
    :class:`trials.recompute.tally.PatternTally` does."""
    parts = path.split(".")
    return any(re.fullmatch(pattern, ".".join(parts[:i])) for i in range(1, len(parts) + 1))


@functools.lru_cache(maxsize=4096)
def selective_shares(
    recompute: Recompute, model: LlamaModel, seq_length: int, plain: Counts
) -> tuple[list[float], list[float]]:
    """Share of kept bytes dropped and of work repeated, each per pipeline rank: the mean over its layers that are not
    recomputed in full.

    Args:
        plain: numbers of those layers, ``[chunk][stage]``.
    """
    num_stages = len(plain[0])
    if not recompute.selective:
        return [0.0] * num_stages, [0.0] * num_stages
    operators = operators_of(model, seq_length)
    # The layer's input is kept as well.
    all_kept = model.hidden_size + sum(operator.kept for operator in operators.values())
    all_work = sum(operator.work for operator in operators.values())
    dropped, repeated = [0.0] * num_stages, [0.0] * num_stages
    for path, operator in operators.items():
        counts = _layers(path, recompute, plain)
        for stage, count in enumerate(counts):
            layers = max(1, sum(row[stage] for row in plain))
            dropped[stage] += count / layers * operator.kept / all_kept
            repeated[stage] += count / layers * operator.work / all_work
    return [min(MAX_DROPPED, share) for share in dropped], repeated


def _layers(path: str, recompute: Recompute, plain: Counts) -> list[int]:
    """Layers of each stage in which a pattern chooses the operator, beyond those recomputed in full."""
    chosen = [part.num_layers for part in recompute.selective if matches(part.pattern, path)]
    layers = [0] * len(plain[0])
    for chunk, row in enumerate(plain):
        for stage in range(len(row)):
            layers[stage] += max((_beyond(counts, recompute.full, chunk, stage) for counts in chosen), default=0)
    return layers


def _beyond(counts: Counts, full: Counts, chunk: int, stage: int) -> int:
    return max(0, counts[chunk][stage] - (full[chunk][stage] if full else 0))
