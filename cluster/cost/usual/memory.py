"""The peak memory of a program of which nothing is known, relative to its baseline's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.cost.inputs import Array
from cluster.cost.usual.effects import NUM_DRAWS, Draw
from cluster.cost.usual.knobs import KnobColumns


@dataclass(frozen=True, slots=True)
class MemoryEffect:
    """A quantity of a program's memory, normally distributed, and where that comes from."""

    name: str
    mean: float
    std: float
    source: str


MEMORY_EFFECTS = (
    MemoryEffect(
        "activations",
        0.4,
        1.2,
        "Logit of the activations' share of the baseline's peak: 60 %, from a quarter to nearly all; the others are "
        "weights, gradients, optimiser states and the process.",
    ),
    MemoryEffect(
        "kept",
        1.4,
        0.7,
        "Logit of the activations' share that recompute in full saves: some 80 % (Chen et al., arXiv 1604.06174).",
    ),
    MemoryEffect(
        "low_precision",
        -0.45,
        0.2,
        "Activations under autocast: half the bytes, but for norms, losses and copies of weights.",
    ),
    MemoryEffect(
        "low_weights",
        -0.05,
        0.15,
        "16-bit weights with fp32 masters: gradients shrink, masters are added (16 bytes a parameter as in fp32).",
    ),
    MemoryEffect(
        "sharded",
        0.8,
        0.7,
        "Logit of the states' share that ZeRO splits: optimiser states are 8 of 16 bytes (arXiv 1910.02054).",
    ),
    MemoryEffect("offloaded", 0.4, 0.7, "Logit of the share that leaves the device by offloading."),
    MemoryEffect("compiled", -0.08, 0.12, "Fused operators keep less (PyTorch 2.0, min-cut partitioner)."),
    MemoryEffect("split", -0.1, 0.3, "How far tensor and pipeline parallelism stay behind an even split, as a log."),
)


def usual_memory() -> Draw:
    """Memory effects at their means."""
    return {effect.name: np.asarray(effect.mean) for effect in MEMORY_EFFECTS}


def drawn_memory() -> Draw:
    """Memory effects of ``NUM_DRAWS`` programs, the same at every call."""
    normal = np.random.default_rng(1).standard_normal((NUM_DRAWS // 2, len(MEMORY_EFFECTS)))
    both = np.concatenate([normal, -normal])
    exact = both @ np.linalg.inv(np.linalg.cholesky(both.T @ both / NUM_DRAWS)).T
    return {e.name: (e.mean + e.std * exact[:, i])[:, None] for i, e in enumerate(MEMORY_EFFECTS)}


def relative_peak(k: KnobColumns, baseline: KnobColumns, usual: Draw) -> Array:
    """Log of the peak relative to that of ``baseline``, a single row; shape (n,) or (draws, n)."""
    return np.log(_peak(k, baseline, usual)) - np.log(_peak(baseline, baseline, usual))


def _peak(k: KnobColumns, baseline: KnobColumns, usual: Draw) -> Array:
    share = _logistic(usual["activations"])
    first = float(baseline.micro_batch_size[0])
    low = usual["low_precision"] * k.low_precision + usual["compiled"] * k.compiled
    saved = 1 - k.repeated_share * _logistic(usual["kept"])
    offloaded = _logistic(usual["offloaded"])
    split = np.where(k.tp * k.pp > 1, np.exp(-usual["split"]), 1.0) / (k.tp * k.pp)
    activations = k.micro_batch_size / first * np.exp(low) * saved * (1 - offloaded * k.offload_activations) / k.cp
    sharded = _logistic(usual["sharded"])
    states = (1 - sharded + sharded / k.num_shards) * np.exp(usual["low_weights"] * k.low_weights)
    states = states * (1 - offloaded * k.offload_optimizer)
    return np.asarray((share * activations + (1 - share) * states) * split)


def _logistic(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
