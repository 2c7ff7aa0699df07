"""The step time of a program of which nothing is known, relative to its baseline; also what a data loader and kernels
usually change of a step that a cost model describes.

Arrays of n candidates have shape (n,), with many drawn programs (draws, n).
"""

from __future__ import annotations

import numpy as np

from cluster.cost.inputs import Array
from cluster.cost.usual.effects import Draw
from cluster.cost.usual.knobs import KnobColumns

SHARPNESS = 6.0
"""Exponent p of (a^p + b^p)^(1/p) in the place of max(a, b): where reading and computing take equally long, their
fluctuations show."""
GATHERS = 2.0
"""Times per micro-batch that ZeRO-3 gathers the weights, before forward and before backward passes, each half of what
an all-reduce sends (Rajbhandari et al., arXiv 1910.02054, section 7)."""


def kernel_effect(k: KnobColumns, usual: Draw) -> Array:
    """Log of the factor on computing by compilation, memory format, cuDNN's algorithms, attention and loss chunks."""
    last_low = k.channels_last * k.low_precision
    last_full = k.channels_last * (1 - k.low_precision)
    return np.asarray(
        usual["compiled"] * k.compiled
        + usual["whole_model"] * k.whole_model
        + usual["autotuned"] * k.autotuned
        + usual["channels_last_low"] * last_low
        + usual["channels_last_full"] * last_full
        + usual["cudnn_tuned"] * k.cudnn_tuned
        + usual["math_attention"] * k.math_attention
        + usual["loss_chunks"] * np.log2(np.maximum(k.loss_chunks, 1.0))
    )


def launch_effect(k: KnobColumns, usual: Draw) -> Array:
    """Log of the factor on launches."""
    return np.asarray(usual["compiled_launches"] * k.compiled + usual["graphs"] * k.graphs)


def longer(one: Array, other: Array) -> Array:
    """About the longer one of two that run beside each other."""
    largest = np.maximum(np.maximum(one, other), 1e-300)
    powers = (one / largest) ** SHARPNESS + (other / largest) ** SHARPNESS
    return np.asarray(largest * powers ** (1 / SHARPNESS))


def with_data(busy: Array, reading: Array, k: KnobColumns, usual: Draw) -> Array:
    """Step time of a rank that is ``busy`` so long and whose samples one process reads in ``reading``.

    Without workers the two follow each other; with them the longer one counts.
    """
    has_workers = k.num_workers > 0
    most = np.exp(usual["most_workers"])
    at_once = 1 / longer(1 / np.maximum(k.num_workers, 1.0), 1 / most)
    effective = at_once * np.exp(usual["worker_efficiency"])
    beside = busy * (1 + np.exp(usual["worker_cost"]) * k.num_workers) + np.exp(usual["contention"]) * reading
    evened = usual["prefetch"] * np.log2(np.maximum(k.prefetch_factor, 1.0) / 2) + usual["persistent"] * k.persistent
    total = np.where(has_workers, longer(beside, reading / effective) * np.exp(evened), busy + reading)
    return np.asarray(total * np.exp(usual["pinned"] * k.pinned))


def relative_step(k: KnobColumns, baseline: KnobColumns, usual: Draw) -> Array:
    """Log of the step time relative to that of ``baseline``, a single row."""
    return np.log(_step(k, baseline, usual)) - np.log(_step(baseline, baseline, usual))


def _step(k: KnobColumns, baseline: KnobColumns, usual: Draw) -> Array:
    """Seconds of a step, in units of the baseline's computing time of one sample."""
    share = k.tp * k.pp * k.cp
    first = float(baseline.micro_batch_size[0])
    samples = k.micro_batch_size * k.num_microbatches
    step = float(baseline.micro_batch_size[0] * baseline.num_microbatches[0])
    computing = _computing(k, first, usual) / share
    spread = (
        usual["tensor_parallel"] * np.log2(k.tp)
        + usual["pipelined"] * np.log2(k.pp)
        + usual["context_parallel"] * np.log2(k.cp)
    )
    bubble = (k.num_microbatches + k.pp - 1) / k.num_microbatches
    busy = computing * np.exp(spread) * bubble
    busy = busy + np.exp(usual["offload_activations"]) * k.offload_activations * computing
    host = np.exp(usual["offload_optimizer"]) * k.offload_optimizer
    busy = busy + step * (np.exp(usual["exchange"]) * bytes_sent(k) + np.exp(usual["update"]) / k.num_shards + host) / (
        k.tp * k.pp
    )
    reading = np.exp(usual["reading"]) * samples * np.where(k.full_batch > 0, k.dp, 1.0)
    return with_data(busy, reading, k, usual)


def _computing(k: KnobColumns, first: float, usual: Draw) -> Array:
    """Forward and backward passes of a step, with launches; ``first`` is the baseline's micro-batch."""
    slower = (
        usual["low_precision"] * k.low_precision
        + usual["low_weights"] * k.low_weights
        + usual["eight_bits"] * k.eight_bits
        + usual["fast_fp32"] * k.fast_fp32
        + usual["batch_slope"] * np.log2(k.micro_batch_size / first)
    )
    device = k.micro_batch_size * np.exp(kernel_effect(k, usual) + slower)
    launches = first * np.exp(usual["half_batch"] + launch_effect(k, usual))
    again = 1 + k.repeated_share * np.exp(usual["recompute"])
    return np.asarray(k.num_microbatches * (device + launches) * again)


def bytes_sent(k: KnobColumns) -> Array:
    """Bytes that a rank sends in a step, in units of two replicas that reduce their gradients once.

    Of an all-reduce one half scatters gradients, the other gathers them, or in its place new weights.
    """
    others = 2 * (k.dp - 1) / k.dp
    gathers = np.where(k.zero_stage == 3, k.num_microbatches * GATHERS, 1.0)
    return np.asarray(others * 0.5 * (k.reductions + gathers))
