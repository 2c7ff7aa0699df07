"""Samples of varying size: drawing their lengths, and arranging them in micro-batches. Standard library only.

The samples of a step depend only on its number and the seed. Layouts and ways of batching only arrange them, so all
train on the same tokens in the same step.
"""

from __future__ import annotations

import bisect
import functools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trials.reports import LengthReport
from trials.spec import Candidate, Layout, Loader, Workload

IGNORED = -100
"""Target of padding, as in ``torch.nn.functional.cross_entropy``."""
NUM_BUCKETS = 8
"""Number of sizes per dimension that buckets pad to."""

Size = tuple[int, ...]
"""Size of a sample: its tokens, or the shape of an image."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of one rank."""

    size: Size
    """Size of every row, padding included."""
    rows: tuple[tuple[int, ...], ...]
    """Numbers of the samples in every row; several if rows are packed, none if a row is only padding."""

    @property
    def num_positions(self) -> int:
        return len(self.rows) * math.prod(self.size)


Arrangement = tuple[tuple[MicroBatch, ...], ...]
"""Micro-batches of every data-parallel rank, equally many."""


def draw_lengths(workload: Workload, step: int) -> list[int]:
    """Return the tokens of every sample of a step.

    One sample is drawn from each of equally likely ranges of lengths (systematic sampling), so that the tokens of a
    step hardly vary.
    """
    drawing, drawn = _drawn(workload, step)
    drawing.shuffle(drawn)
    return drawn


def num_tokens(workload: Workload, step: int) -> int:
    """Return the tokens of all samples of a step."""
    return sum(_drawn(workload, step)[1])


def _drawn(workload: Workload, step: int) -> tuple[random.Random, list[int]]:
    """Return the lengths of a step, ascending, and the generator that shuffles them."""
    lengths, number = workload.lengths, workload.global_batch_size
    drawing = random.Random(workload.seed * 1_000_003 + step)
    first = drawing.random()
    return drawing, [lengths[int((i + first) / number * len(lengths))] for i in range(number)]


def arrange(sizes: Sequence[Size], candidate: Candidate, largest: Size) -> Arrangement:
    """Arrange the samples of a global batch; ``largest`` bounds their sizes."""
    batching, layout, rows_each = candidate.loader.batching, candidate.layout, candidate.micro_batch_size
    if batching == "packing":
        return _packed([size[0] for size in sizes], largest, candidate)
    numbers = list(range(len(sizes)))
    steps = (1,) * len(largest)
    if batching == "buckets":
        steps = tuple(-(-side // NUM_BUCKETS) for side in largest)
        padded = [_rounded(size, steps, largest) for size in sizes]
        numbers.sort(key=lambda number: (math.prod(padded[number]), padded[number]))
        # Neighbours go to different ranks, back and forth, so that all have micro-batches of about the same size at the
        # same time.
        groups = [numbers[first : first + layout.dp] for first in range(0, len(numbers), layout.dp)]
        groups[1::2] = [group[::-1] for group in groups[1::2]]
        numbers = [group[rank] for rank in range(layout.dp) for group in groups]
    if layout.sequence_parallel:
        steps = tuple(-(-step // layout.tp) * layout.tp for step in steps)
    per_rank = len(sizes) // layout.dp

    def micro_batch(first: int) -> MicroBatch:
        chosen = numbers[first : first + rows_each]
        longest = tuple(max(sides) for sides in zip(*(sizes[number] for number in chosen), strict=True))
        # Stages of a pipeline exchange tensors of one shape.
        size = largest if layout.pp > 1 else _rounded(longest, steps, largest)
        return MicroBatch(size, tuple((number,) for number in chosen))

    return tuple(
        tuple(micro_batch(first) for first in range(rank * per_rank, (rank + 1) * per_rank, rows_each))
        for rank in range(layout.dp)
    )


def _rounded(size: Size, steps: Size, largest: Size) -> Size:
    return tuple(min(-(-n // step) * step, most) for n, step, most in zip(size, steps, largest, strict=True))


def _packed(lengths: Sequence[int], largest: Size, candidate: Candidate) -> Arrangement:
    """Pack into rows by best-fit decreasing; rows without samples make the ranks' micro-batches equally many."""
    dp, rows_each = candidate.layout.dp, candidate.micro_batch_size
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free positions of every row and its index, ascending
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect.bisect_left(free, (lengths[number], -1))
        if place == len(free):
            free.append((largest[0], len(rows)))
            rows.append([])
        left, row = free.pop(place)
        rows[row].append(number)
        bisect.insort(free, (left - lengths[number], row))
    rows += [[] for _ in range(-len(rows) % (dp * rows_each))]
    return tuple(
        tuple(
            MicroBatch(largest, tuple(map(tuple, own[first : first + rows_each])))
            for first in range(0, len(own), rows_each)
        )
        for own in (rows[rank::dp] for rank in range(dp))
    )


def length_report(steps: Iterable[tuple[Sequence[Size], Arrangement]], candidate: Candidate) -> LengthReport:
    """Count the samples and arrangements of the measured steps."""
    num_steps = num_real = num_positions = 0
    imbalances: list[float] = []
    shapes: set[tuple[int, Size]] = set()
    for sizes, arrangement in steps:
        num_steps += 1
        num_real += sum(map(math.prod, sizes))
        ranks = [sum(one.num_positions for one in own) for own in arrangement]
        num_positions += sum(ranks)
        imbalances.append(max(ranks) * len(ranks) / sum(ranks) - 1)
        shapes |= {(len(one.rows), one.size) for own in arrangement for one in own}
    return LengthReport(
        batching=candidate.loader.batching,
        padding=1 - num_real / num_positions,
        imbalance=sum(imbalances) / num_steps,
        num_shapes=len(shapes),
    )


def expected_positions(workload: Workload, candidate: Candidate) -> float:
    """Return the positions that a step computes, padding included, relative to samples that are all of full length."""
    if not workload.lengths:
        return 1.0
    layout = Layout(dp_replicate=candidate.layout.dp, pp=candidate.layout.pp)
    loader = Loader(batching=candidate.loader.batching)
    return _expected_positions(
        workload, Candidate(layout=layout, loader=loader, micro_batch_size=candidate.micro_batch_size)
    )


@functools.lru_cache(maxsize=1024)
def _expected_positions(workload: Workload, candidate: Candidate) -> float:
    """Arrange a few steps; ``candidate`` has only what matters."""
    num_positions = 0
    for step in range(_EXPECTED_STEPS):
        sizes = [(length,) for length in draw_lengths(workload, step)]
        arrangement = arrange(sizes, candidate, (workload.seq_length,))
        num_positions += sum(one.num_positions for own in arrangement for one in own)
    return num_positions / (_EXPECTED_STEPS * workload.global_batch_size * workload.seq_length)


_EXPECTED_STEPS = 4
