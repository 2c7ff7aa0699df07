"""The truth of time: planted coefficients, errors of structure, and every candidate's own error.

The terms are the cost model's, with coefficients of a drawn machine; errors of structure then bend them beyond what
the product describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.cost.inputs import Array, Coefficients, CostInputs, Prior
from cluster.cost.step_time import step_seconds
from cluster.cost.work import work_of

Terms = dict[str, Array]
"""Seconds of a step by name, arrays of shape (n,)."""

MAX_DEVIATIONS = 2.0
MAX_FACTOR = 4.0
"""Most that a planted coefficient differs from the prior's mean."""


def planted(prior: Prior, rng: np.random.Generator, share: float) -> Coefficients:
    """Coefficients of a machine: drawn from ``share`` of the spread that published families have, but no wild ones."""
    deviations = np.clip(rng.standard_normal(len(prior.mean)), -MAX_DEVIATIONS, MAX_DEVIATIONS)
    moved = share * np.linalg.cholesky(prior.covariance) @ deviations
    return Coefficients(prior.group, prior.mean + np.clip(moved, -np.log(MAX_FACTOR), np.log(MAX_FACTOR)))


def step_times(
    x: CostInputs,
    coefficients: Coefficients,
    errors: Sequence[str],
    memory_share: Array,
    rng: np.random.Generator,
) -> Array:
    """Seconds per step, shape (n,), before the candidates' own errors.

    Args:
        errors: names of ``ERRORS`` and ``CONTRARY``.
        memory_share: peak / limit of every candidate.
    """
    terms = {name: values.copy() for name, values in step_seconds(x, work_of(x), coefficients).items()}
    for name in errors:
        terms = {**ERRORS, **CONTRARY}[name](x, terms, rng)
    step_s = np.sum(list(terms.values()), axis=0)
    if "thrashing" in errors:
        # The caching allocator frees and asks again when the device is nearly full.
        step_s = step_s * (1 + 1.2 * np.clip(memory_share - 0.9, 0.0, 0.1))
    return np.asarray(step_s)


def _waves(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Tiles of 128 x 256 come in whole waves over the processors of a device (NVIDIA, Deep Learning Performance Guide,
    "Wave Quantization")."""
    processors = float(rng.choice([80, 108, 132, 148]))
    rows = np.ceil(x.micro_batch_size * x.seq_length / x.cp / 128)
    waves = rows * np.ceil((x.ffn + x.hidden) / 2 / x.tp / 256) / processors
    factor = np.ceil(waves) / waves
    # Operators differ in width, and only some of them end in a short wave.
    factor = 1 + 0.5 * (np.minimum(factor, 2.0) - 1)
    for name in ("forward", "backward", "recompute"):
        terms[name] = terms[name] * factor
    return terms


def _crowded_network(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Reductions meet others' on the way: worse with every doubling of the nodes that take part."""
    nodes = np.maximum(1.0, x.dp * x.cp * x.tp / x.domain_size)
    factor = 1 + float(rng.uniform(0.15, 0.5)) * np.log2(nodes)
    terms["gradient_reduction"] = terms["gradient_reduction"] * factor
    terms["sharding"] = terms["sharding"] * (1 + 0.5 * (factor - 1))
    return terms


def _stragglers(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Stages wait for the slowest: bubbles and transfers cost more the longer the pipeline."""
    factor = 1 + float(rng.uniform(0.05, 0.15)) * np.log2(x.pp)
    for name in ("bubble", "stage_transfers"):
        terms[name] = terms[name] * factor
    terms["overhead"] = terms["overhead"] + 0.01 * float(rng.uniform(0, 1)) * np.log2(x.pp) * terms["forward"]
    return terms


def _sharding_turns(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Every gathered layer takes turns on a ring over all its ranks."""
    turn_s = float(rng.uniform(3e-6, 2e-5))
    gathers = np.where(x.zero_stage == 3, 3 * x.stage_layers.max(axis=1) * x.num_microbatches, 0.0)
    terms["sharding"] = terms["sharding"] + gathers * turn_s * np.sqrt(x.num_shards)
    return terms


def _slow_wide_tp(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Links are shared: wide tensor parallelism reaches less of them."""
    factor = 1 + float(rng.uniform(0.05, 0.25)) * np.log2(x.tp)
    terms["tensor_parallel"] = terms["tensor_parallel"] * factor
    return terms


def _dear_recompute(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Repeated passes do not overlap with what the first ones overlapped with, or kernels are tuned for them."""
    del x
    terms["recompute"] = terms["recompute"] * float(rng.uniform(0.75, 1.35))
    return terms


def _batch_appetite(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Kernels that need larger or smaller micro-batches than specified."""
    factor = x.micro_batch_size ** float(rng.uniform(-0.06, 0.04))
    for name in ("forward", "backward", "recompute"):
        terms[name] = terms[name] * factor
    return terms


def _late_interleaving(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Chunks cost the host a little each."""
    terms["overhead"] = terms["overhead"] + float(rng.uniform(1e-4, 1e-3)) * np.where(
        x.num_virtual_stages > 1, x.num_microbatches * x.num_virtual_stages, 0.0
    )
    return terms


def _near_limit(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """What is nearly full is slow; done on the whole step."""
    del x, rng
    return terms


ERRORS: Mapping[str, Callable[[CostInputs, Terms, np.random.Generator], Terms]] = {
    "waves": _waves,
    "crowded-network": _crowded_network,
    "stragglers": _stragglers,
    "sharding-turns": _sharding_turns,
    "slow-wide-tp": _slow_wide_tp,
    "dear-recompute": _dear_recompute,
    "batch-appetite": _batch_appetite,
    "late-interleaving": _late_interleaving,
    "thrashing": _near_limit,
}
"""Errors of structure by name."""
MAX_ERRORS = 4
"""Most that one machine has."""


PASSES = ("forward", "backward", "recompute")


def _slow_kernel(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """One degree of tensor parallelism or size of micro-batches gets a kernel that was never tuned."""
    values = x.tp if rng.random() < 0.5 else x.micro_batch_size
    slow = values == rng.choice(np.unique(values))
    return _slower(terms, np.where(slow, float(rng.uniform(1.25, 2.0)), 1.0))


def _free_recompute(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Keeping activations costs more than computing them again: the program moves them about in memory."""
    kept = 1 - x.stage_full.sum(axis=1) / x.num_layers
    slower = _slower(terms, 1 + float(rng.uniform(0.1, 0.4)) * np.clip(kept, 0.0, 1.0))
    return {**slower, "recompute": 0.3 * slower["recompute"]}


def _hurtful_overlap(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Collectives of sharded states take the processors that kernels need meanwhile."""
    return _slower(terms, np.where(x.zero_stage > x.zero_stage.min(), float(rng.uniform(1.15, 1.5)), 1.0))


def _slow_link(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """The groups of one kind of parallelism cross nodes on a slow link."""
    if rng.random() < 0.5:
        crosses = x.dp * x.cp * x.tp > x.domain_size
        slowed: tuple[str, ...] = ("gradient_reduction", "sharding")
    else:
        crosses, slowed = (x.pp > 1) & (x.world_size > x.domain_size), ("stage_transfers", "bubble")
    factor = np.where(crosses, float(rng.uniform(3.0, 8.0)), 1.0)
    return {**terms, **{name: terms[name] * factor for name in slowed}}


def _slower(terms: Terms, factor: Array) -> Terms:
    return {**terms, **{name: terms[name] * factor for name in PASSES}}


CONTRARY: Mapping[str, Callable[[CostInputs, Terms, np.random.Generator], Terms]] = {
    "slow-kernel": _slow_kernel,
    "free-recompute": _free_recompute,
    "hurtful-overlap": _hurtful_overlap,
    "slow-link": _slow_link,
}
"""Errors that no description of the product covers and that make another candidate the best. Only for reports."""


def own_errors(x: CostInputs, rng: np.random.Generator) -> Array:
    """Log errors that candidates have on their own, shape (n,): of values of knobs, of pairs of them, of each one.

    Kernels and libraries have shapes that they like; a candidate shares most of that with those that are like it.
    """
    columns = {
        "tp": x.tp,
        "micro_batch_size": x.micro_batch_size,
        "pp": x.pp,
        "zero_stage": x.zero_stage,
        "recompute": x.stage_full.sum(axis=1) + 0.5 * x.selective_share,
    }
    spread = float(rng.uniform(0.02, 0.05))
    error = rng.normal(0.0, 0.01, len(x))
    for values in columns.values():
        error = error + _effects(values, spread, rng)
    pairs = (("tp", "micro_batch_size"), ("zero_stage", "recompute"), ("micro_batch_size", "recompute"))
    for one, other in pairs:
        joint = columns[one] * 1009 + columns[other]
        error = error + _effects(joint, 0.6 * spread, rng)
    return np.asarray(error)


def _effects(values: Array, spread: float, rng: np.random.Generator) -> Array:
    distinct, place = np.unique(values, return_inverse=True)
    return np.asarray(rng.normal(0.0, spread, len(distinct))[place])
