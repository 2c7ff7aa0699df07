"""How many micro-batches' activations a pipeline rank holds at its worst moments, by schedule. Pure arithmetic.

Twice: ``in_flight_peaks`` chunk by chunk for one layout, ``in_flight`` in total for many candidates at once.
"""

from __future__ import annotations

import numpy as np

from cluster.cost.inputs import SCHEDULES, Array, CostInputs
from trials.spec import Schedule

Peaks = tuple[tuple[int, ...], ...]
"""Worst moments of one pipeline rank: at each of them, micro-batches in flight per chunk. No entry is below another
in every chunk, so whatever the chunks' activations weigh, the largest moment is among them."""


def in_flight_peaks(
    schedule: Schedule, *, pp: int, num_virtual_stages: int, num_microbatches: int
) -> tuple[Peaks, ...]:
    """The worst moments of every pipeline rank.

    ``gpipe`` holds every micro-batch; ``1f1b`` rank s holds ``min(m, pp - s)`` (Narayanan et al., arXiv 2104.04473);
    ``interleaved`` is followed step by step, warm-up ``(v - 1) pp + 2 (pp - s - 1)`` forwards as in the same paper;
    ``zbv`` keeps ``2 pp`` chunks in all: ``2 pp - 1 - s`` of the first and ``s + 1`` of the second (arXiv 2401.10241).
    """
    v, m = num_virtual_stages, num_microbatches
    if schedule == "gpipe":
        return ((((m,) * v),),) * pp
    if schedule == "zbv":
        return tuple(((min(m, 2 * pp - 1 - stage), min(m, stage + 1)),) for stage in range(pp))
    if schedule == "1f1b" and v == 1:
        return tuple(((min(m, pp - stage),),) for stage in range(pp))
    return tuple(_interleaved(stage, pp=pp, v=v, m=m) for stage in range(pp))


def _interleaved(stage: int, *, pp: int, v: int, m: int) -> Peaks:
    """Follow one rank: warm-up forwards, then one forward and one backward in turn; chunks in rounds of micro-batches.

    ``m`` need not be divisible by ``pp``: a round then takes ``m // max(1, m // pp)`` micro-batches.
    """
    per_round = m // max(1, m // pp)
    num_warmup = min(m * v, (v - 1) * per_round + 2 * (pp - stage - 1))
    held = [0] * v
    moments = set()
    for forward in range(m * v):
        held[forward // per_round % v] += 1
        moments.add(tuple(held))
        backward = forward - num_warmup
        if backward >= 0:
            held[v - 1 - backward // per_round % v] -= 1
    return tuple(sorted(_maximal(moments)))


def _maximal(vectors: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [a for a in vectors if not any(a != b and _covers(b, a) for b in vectors)]


def _covers(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(x >= y for x, y in zip(large, small, strict=True))


def in_flight(x: CostInputs) -> Array:
    """Micro-batches that a pipeline rank holds at its worst moment, shape (n, stages); a chunk counts 1 / v.

    The largest sum of ``in_flight_peaks`` over chunks, for interleaving in closed form, which holds where m is a
    multiple of pp: ``min(m v, 2 (p - s - 1) + (v - 1) p + 1) / v``.
    """
    stage = np.arange(x.stage_layers.shape[1])[None, :]
    m, p, v = x.num_microbatches[:, None], x.pp[:, None], x.num_virtual_stages[:, None]
    plain = np.minimum(m, p - stage)
    chunked = np.minimum(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
    zbv = (np.minimum(m, 2 * p - 1 - stage) + np.minimum(m, stage + 1)) / 2
    code = x.schedule[:, None]
    held = np.select(
        [code == SCHEDULES.index("gpipe"), code == SCHEDULES.index("zbv"), v > 1], [m, zbv, chunked], default=plain
    )
    return np.asarray(np.maximum(held, 0.0))
