"""Pipeline schedules: the time of all micro-batches from that of one per stage, and the micro-batches in flight.

The closed form is exact for equal stages: ``m`` micro-batches on ``p`` ranks with ``v`` chunks take
``(m + (p - 1) / v)`` stage times. Where ranks hold different numbers of layers the schedule is simulated.
"""

from __future__ import annotations

import functools

import numpy as np

from cluster.cost.inputs import SCHEDULES, Array, CostInputs
from trials.spec import Schedule

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a stage's time (without recompute, which lengthens the backward pass)."""
ZBV = 3
"""Code of the zero-bubble schedule in ``SCHEDULES``."""

Operation = tuple[int, int, int, int]
"""Rank, 0 for forward or 1 for backward, chunk, micro-batch."""


def pipeline_seconds(x: CostInputs, stage_total_s: Array) -> Array:
    """Time from the first forward to the last backward pass, shape (n,), from stage times (n, stages)."""
    seconds = closed_form_seconds(x, stage_total_s)
    used = np.arange(x.stage_layers.shape[1])[None, :] < x.pp[:, None]
    most = np.max(x.stage_layers, axis=1)
    least = np.min(np.where(used, x.stage_layers, np.inf), axis=1)
    uneven = (most - least > 1) & (x.pp > 1) & (x.schedule != ZBV)
    if uneven.any():
        seconds[uneven] = simulated_seconds(x.take(uneven), stage_total_s[uneven])
    return seconds


def closed_form_seconds(x: CostInputs, stage_total_s: Array) -> Array:
    """The slowest stage ``m`` times, and every other stage once (a ``v``-th of it with ``v`` chunks).

    Zero bubble (Qi et al., arXiv 2401.10241) fills the waiting with weight gradients; a third of the bubble stays.
    """
    slowest = np.max(stage_total_s, axis=1)
    others = np.sum(stage_total_s, axis=1) - slowest
    bubble = others / x.num_virtual_stages * np.where(x.schedule == ZBV, 1 / 3, 1.0)
    return np.asarray(x.num_microbatches * slowest + bubble)


def simulated_seconds(x: CostInputs, stage_total_s: Array) -> Array:
    """Event simulation of each candidate's schedule; candidates with equal schedules run together.

    Only the first micro-batches, twice the stages, are simulated; in the steady state each further one adds the slowest
    stage's time (within 2 % of the whole simulation).
    """
    seconds = np.zeros(len(x))
    limit = np.minimum(x.num_microbatches, 2 * x.pp)
    keys = np.stack([x.schedule, x.pp, x.num_virtual_stages, limit], axis=1).astype(np.int64)
    kinds, members = np.unique(keys, axis=0, return_inverse=True)
    for i, (schedule, pp, chunks, num) in enumerate(kinds):
        rows = np.flatnonzero(members.reshape(-1) == i)
        stage = stage_total_s[rows][:, :pp] / chunks
        span = _simulate(_operations(int(schedule), int(pp), int(chunks), int(num)), stage, int(pp), int(chunks))
        more = x.num_microbatches[rows] - num
        seconds[rows] = span + more * np.max(stage_total_s[rows], axis=1)
    return seconds


def _simulate(operations: tuple[Operation, ...], chunk_s: Array, pp: int, chunks: int) -> Array:
    """Finish time of the last operation. ``chunk_s``: seconds of one chunk on each rank, shape (n, pp)."""
    free = [np.zeros(len(chunk_s)) for _ in range(pp)]
    spans = [[share * chunk_s[:, rank] for rank in range(pp)] for share in (FORWARD_SHARE, 1 - FORWARD_SHARE)]
    done: dict[tuple[int, int, int], Array] = {}
    last = chunks * pp - 1
    for rank, kind, chunk, microbatch in operations:
        stage = chunk * pp + rank
        start = free[rank]
        before = _dependency(kind, stage, last, microbatch)
        if before is not None:
            start = np.maximum(start, done[before])
        end = start + spans[kind][rank]
        free[rank] = done[(kind, stage, microbatch)] = end
    return np.asarray(np.max(free, axis=0))


def _dependency(kind: int, stage: int, last: int, microbatch: int) -> tuple[int, int, int] | None:
    """The operation that must be done before: forward that of the previous stage, backward that of the next one, on the
    last stage its own forward."""
    if kind == 0:
        return (0, stage - 1, microbatch) if stage else None
    return (1, stage + 1, microbatch) if stage < last else (0, stage, microbatch)


@functools.lru_cache(maxsize=256)
def _operations(schedule: int, pp: int, chunks: int, num_microbatches: int) -> tuple[Operation, ...]:
    """All operations in an order in which each comes after what it waits for."""
    queues = [_rank_order(schedule, pp, chunks, num_microbatches, rank) for rank in range(pp)]
    position = [0] * pp
    done: set[tuple[int, int, int]] = set()
    ordered: list[Operation] = []
    last = chunks * pp - 1
    while len(ordered) < sum(map(len, queues)):
        before_round = len(ordered)
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                kind, chunk, microbatch = queue[position[rank]]
                stage = chunk * pp + rank
                before = _dependency(kind, stage, last, microbatch)
                if before is not None and before not in done:
                    break
                done.add((kind, stage, microbatch))
                ordered.append((rank, kind, chunk, microbatch))
                position[rank] += 1
        assert len(ordered) > before_round, "the schedule waits for itself"
    return tuple(ordered)


def _rank_order(schedule: int, pp: int, chunks: int, num: int, rank: int) -> list[tuple[int, int, int]]:
    """(kind, chunk, micro-batch) in the order in which ``rank`` runs them.

    1F1B: Narayanan et al., arXiv 2104.04473; with chunks, groups of ``pp`` micro-batches go through one chunk at a
    time. GPipe: all forwards, then all backwards.
    """
    total = num * chunks
    slots = [_slot(i, pp, chunks, num) for i in range(total)]
    forward = [(0, chunk, microbatch) for chunk, microbatch in slots]
    backward = [(1, chunks - 1 - chunk, microbatch) for chunk, microbatch in slots]
    if schedule == 0:
        warmup = total
    elif chunks > 1:
        warmup = min(total, 2 * (pp - rank - 1) + (chunks - 1) * pp)
    else:
        warmup = min(total, pp - rank - 1)
    order = forward[:warmup]
    for i in range(total - warmup):
        order += [forward[warmup + i], backward[i]]
    return order + backward[total - warmup :]


def _slot(i: int, pp: int, chunks: int, num: int) -> tuple[int, int]:
    """Chunk and micro-batch of the ``i``-th forward pass: groups of ``pp`` micro-batches, the last may be smaller."""
    group, rest = divmod(i, pp * chunks)
    size = min(pp, num - group * pp)
    return rest // size, group * pp + rest % size


Peaks = tuple[tuple[int, ...], ...]
"""The worst moments of one pipeline rank: micro-batches in flight per chunk at each of them. No entry is below another
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
