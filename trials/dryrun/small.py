"""Extrapolation from small trials with few layers, micro-batches and pipeline ranks. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from trials.dryrun.estimate import BUILD, PassKind, PassRun, Peak, RankRun, Traffic
from trials.sizes import Chunk, chunks_of_stage, count_at, num_virtual_stages_total, virtual_stage
from trials.spec import Counts, Layout, LinearModel, LlamaModel, Model, Recompute, ResNetModel, TrialSpec, UserModel

# Runs of equal layers: neighbouring layers of a chunk with the same recomputation.


LayerKind = tuple[bool, tuple[bool, ...], bool]
"""Whether a layer is recomputed in full; by which selective rules; whether its communication is recomputed."""

NUM_NAMED = 1
"""Layers at each end of a run that have separate places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """``length`` equal layers in a row, number ``index`` of their chunk."""

    chunk: int
    index: int
    kind: LayerKind
    length: int

    @property
    def place_names(self) -> list[str]:
        """Name each layer's place from the nearer end of the run; layers far from both ends are the middle.

        Peaks lie near an end, but not always at it: at the second layer, FSDP already has the weights of the next ones.
        """
        last = self.length - 1
        return [f"{self.index} {_position(i, last - i)}" for i in range(self.length)]


def _position(from_start: int, from_end: int) -> str:
    if min(from_start, from_end) >= NUM_NAMED:
        return "middle"
    return f"first+{from_start}" if from_start < NUM_NAMED else f"last-{from_end}"


def runs_of_chunk(recompute: Recompute, chunk: Chunk) -> list[LayerRun]:
    """Return the runs of a chunk, in model order."""
    kinds = [_kind(recompute, chunk, position) for position in range(len(chunk.layer_ids))]
    grouped = [(kind, len(list(members))) for kind, members in groupby(kinds)]
    return [
        LayerRun(chunk=chunk.chunk, index=index, kind=kind, length=length)
        for index, (kind, length) in enumerate(grouped)
    ]


def runs_of_stage(layout: Layout, recompute: Recompute, stage: int, num_layers: int) -> Iterator[LayerRun]:
    """Yield all runs of pipeline rank ``stage``."""
    for chunk in chunks_of_stage(layout, stage, num_layers):
        yield from runs_of_chunk(recompute, chunk)


def _kind(recompute: Recompute, chunk: Chunk, position: int) -> LayerKind:
    full = position < count_at(recompute.full, chunk.chunk, chunk.stage)
    if full:
        return (True, (), False)
    selective = tuple(position < count_at(rule.num_layers, chunk.chunk, chunk.stage) for rule in recompute.selective)
    return (False, selective, position < count_at(recompute.communication, chunk.chunk, chunk.stage))


# The run with all layers, computed from simulated runs with few.
#
# Every quantity is affine in the lengths of the runs of equal layers. At one place of the step
# (:mod:`trials.dryrun.simulate`), memory is a constant plus an amount per layer of each kind. The peak is the largest
# over all places, at the real number of layers.


Fit = Callable[[Callable[[RankRun], int]], int]
"""Maps the getter of a quantity in a small trial to its value in the large one."""
FitAll = Callable[[Callable[[RankRun], Mapping[str, int]]], dict[str, int]]


def lengthened(runs: Sequence[RankRun], lengths: Sequence[Sequence[int]], wanted: Sequence[int]) -> RankRun:
    """Extrapolate to layer runs of lengths ``wanted``, by group, from small runs with ``lengths``.

    The first small run is the base; each other one is longer in one group.
    """
    base, *longer = runs
    steps = [larger[i] - lengths[0][i] for i, larger in enumerate(lengths[1:])]
    extra = [large - small for large, small in zip(wanted, lengths[0], strict=True)]

    def fit(read: Callable[[RankRun], int]) -> int:
        start = read(base)
        growth = sum((read(run) - start) * more / step for run, step, more in zip(longer, steps, extra, strict=True))
        return round(start + growth)

    def fit_all(read: Callable[[RankRun], Mapping[str, int]]) -> dict[str, int]:
        names = dict.fromkeys(name for run in runs for name in read(run))
        return {name: fit(partial(_entry, read, name)) for name in names}

    places = [place for place in base.peaks if all(place in run.peaks for run in longer)]

    return RankRun(
        rank=base.rank,
        num_parameters=fit(lambda run: run.num_parameters),
        peaks={place: _peak_at(place, fit, fit_all) for place in places},
        host_bytes=fit(lambda run: run.host_bytes),
        flops=fit_all(lambda run: run.flops),
        collectives=_traffic(lambda run: run.collectives, fit_all),
        passes=tuple(_pass(i, one, fit, fit_all) for i, one in enumerate(base.passes)),
        is_upper_bound=any(run.is_upper_bound for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
    )


def _pass(number: int, base: PassRun, fit: Fit, fit_all: FitAll) -> PassRun:
    return PassRun(
        kind=base.kind,
        chunk=base.chunk,
        live=fit_all(lambda run: run.passes[number].live),
        host_bytes=fit(lambda run: run.passes[number].host_bytes),
        peak_host_bytes=fit(lambda run: run.passes[number].peak_host_bytes),
        flops=fit_all(lambda run: run.passes[number].flops),
        collectives=_traffic(lambda run: run.passes[number].collectives, fit_all),
    )


def _traffic(read: Callable[[RankRun], Mapping[str, Traffic]], fit_all: FitAll) -> dict[str, Traffic]:
    calls = fit_all(lambda run: {name: traffic.num_calls for name, traffic in read(run).items()})
    sizes = fit_all(lambda run: {name: traffic.num_bytes for name, traffic in read(run).items()})
    return {name: Traffic(num_calls=calls[name], num_bytes=sizes[name]) for name in calls}


def _peak_at(place: str, fit: Fit, fit_all: FitAll) -> Peak:
    by_category = fit_all(lambda run: run.peaks[place].by_category)
    return Peak(
        total_bytes=fit(lambda run: run.peaks[place].total_bytes),
        by_category={name: max(0, size) for name, size in by_category.items()},
    )


def _entry(read: Callable[[RankRun], Mapping[str, int]], name: str, run: RankRun) -> int:
    return read(run).get(name, 0)


# The order of a pipeline rank's passes, and what surrounds each of them.
#
# The orders are those of torch's schedules, whose names :func:`trials.training.loop.build_schedule` maps.


class Pass(NamedTuple):
    """One micro-batch in one of a rank's chunks, in one direction."""

    kind: PassKind
    chunk: int


class Surroundings(NamedTuple):
    """What the memory of a pass may depend on, in addition to its kind and chunk."""

    here: Pass
    is_first: bool
    """Whether it is the first of its kind in its chunk."""
    is_last: bool
    """Whether it is a backward pass and the last of its kind in its chunk."""
    before: PassKind | None
    after: PassKind | None
    last_here: PassKind | None
    """Kind of the rank's previous pass in this chunk."""


@functools.lru_cache(maxsize=4096)
def order_of_passes(layout: Layout, stage: int, num_microbatches: int) -> tuple[Pass, ...]:
    """Return all passes of one step on pipeline rank ``stage``."""
    pp, chunks = layout.pp, layout.num_virtual_stages
    if pp == 1:
        return (Pass("forward", 0), Pass("backward", 0)) * num_microbatches
    if layout.schedule == "zbv":
        return tuple(_zero_bubble(pp, stage, num_microbatches))
    if layout.schedule == "gpipe":
        forward = [Pass("forward", chunk) for chunk in range(chunks) for _ in range(num_microbatches)]
        backward = [Pass("backward", chunk) for chunk in reversed(range(chunks)) for _ in range(num_microbatches)]
        return (*forward, *backward)
    if layout.schedule == "interleaved":
        return tuple(_interleaved(pp, chunks, stage, num_microbatches))
    warmup = min(num_microbatches, pp - stage)
    turns = (Pass("backward", 0), Pass("forward", 0)) * (num_microbatches - warmup)
    return (Pass("forward", 0),) * warmup + turns + (Pass("backward", 0),) * warmup


def _interleaved(pp: int, chunks: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    """Yield the warm-up, then alternating forward and backward passes, each chunk for a round of micro-batches."""
    per_round = num_microbatches // max(1, num_microbatches // pp)
    total = num_microbatches * chunks
    warmup = min(total, (chunks - 1) * per_round + 2 * (pp - 1 - stage))
    for i in range(total + warmup):
        if i < total:
            yield Pass("forward", i // per_round % chunks)
        if i >= warmup:
            yield Pass("backward", chunks - 1 - (i - warmup) // per_round % chunks)


def _zero_bubble(pp: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    """Yield the V-shaped schedule, without passes of micro-batches beyond the last, which torch adds and drops."""
    seen: Counter[Pass] = Counter()
    for one in _full_zero_bubble(pp, stage, max(2 * pp - 1, num_microbatches)):
        seen[one] += 1
        if seen[one] <= num_microbatches:
            yield one


def _full_zero_bubble(pp: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    down, up = Pass("forward", 0), Pass("forward", 1)
    (input0, weights0), (input1, weights1) = ((Pass("input", i), Pass("weights", i)) for i in range(2))
    yield from [down] * (2 * (pp - stage) - 1)
    yield from [up, down] * stage
    yield from [up, input1, weights1] * (pp - stage)
    num_down = 2 * pp - 1 - stage
    more = num_microbatches - num_down
    yield from [down, input0, weights0, up, input1, weights1] * more
    for _ in range(num_microbatches - pp - more):
        yield from [input0, weights0, up, input1, weights1]
    rest = stage
    yield from [input0, input1] * rest
    yield from [input0, weights0] * (pp - stage)
    yield from [weights1] * rest + [weights0] * rest


def surroundings(order: Sequence[Pass]) -> list[Surroundings]:
    """Return the surroundings of every pass."""
    left = Counter(order)
    last_here: dict[int, PassKind] = {}
    seen: set[Pass] = set()
    found = []
    for i, one in enumerate(order):
        left[one] -= 1
        found.append(
            Surroundings(
                here=one,
                is_first=one not in seen,
                is_last=left[one] == 0 and one.kind != "forward",
                before=order[i - 1].kind if i else None,
                after=order[i + 1].kind if i + 1 < len(order) else None,
                last_here=last_here.get(one.chunk),
            )
        )
        seen.add(one)
        last_here[one.chunk] = one.kind
    return found


# A long schedule, replayed with the passes of a short one.
#
# A pass leaves and uses as much memory as any other of its kind in equal :class:`Surroundings`. So the memory at the
# start of a pass in the long schedule is a sum over previous passes, and the peak is the largest over all passes of
# that plus what the pass itself uses. Only the memory present from the start grows with the number of micro-batches:
# inputs and a pipeline rank's receive buffers.


class UnknownOrderError(Exception):
    """The schedule's order is not the known one; another release of torch may have changed it."""


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineRank:
    """A pipeline rank and its step."""

    layout: Layout
    stage: int
    num_microbatches: int

    @property
    def order(self) -> tuple[Pass, ...]:
        """Its passes."""
        return order_of_passes(self.layout, self.stage, self.num_microbatches)

    @property
    def surroundings(self) -> list[Surroundings]:
        """Surroundings of each of its passes."""
        return surroundings(self.order)


def equivalents(small: PipelineRank, large: PipelineRank) -> list[int] | None:
    """Map every pass of ``large`` to the index of a pass of ``small`` in equal surroundings; None if one has none."""
    near: dict[tuple[Surroundings, Pass | None, Pass | None], int] = {}
    known: dict[Surroundings, int] = {}
    for i, (around, before, after) in enumerate(_with_neighbours(small)):
        near.setdefault((around, before, after), i)
        known.setdefault(around, i)
    found = []
    for around, before, after in _with_neighbours(large):
        number = near.get((around, before, after), known.get(around))
        if number is None:
            return None
        found.append(number)
    return found


def _with_neighbours(rank: PipelineRank) -> Iterable[tuple[Surroundings, Pass | None, Pass | None]]:
    order = rank.order
    return zip(rank.surroundings, (None, *order[:-1]), (*order[1:], None), strict=True)


def replayed(run: RankRun, small: PipelineRank, large: PipelineRank) -> RankRun:
    """Replay the run of ``large`` from that of ``small``.

    Raises:
        UnknownOrderError: the run's passes are not those of ``small``.
    """
    if tuple(Pass(one.kind, one.chunk) for one in run.passes) != small.order:
        raise UnknownOrderError(f"schedule {small.layout.schedule}")
    numbers = equivalents(small, large)
    assert numbers is not None, "plans are made for those that have them"
    levels, at_start = _levels(run, numbers, _growth(run, small, large))
    highest: dict[int, dict[str, int]] = {}
    for number, level in zip(numbers, levels, strict=True):
        if number not in highest or sum(level.values()) > sum(highest[number].values()):
            highest[number] = level
    peaks = {}
    for place, peak in run.peaks.items():
        number = int(place.split("/", 2)[1])
        if place == BUILD:
            peaks[place] = peak
        elif number == 0:
            peaks[place] = _raised(peak, at_start)
        elif number - 1 in highest:
            peaks[place] = _raised(peak, _minus(highest[number - 1], run.passes[number - 1].live))
    passes = [run.passes[number] for number in numbers]
    return dataclasses.replace(
        run,
        peaks=peaks,
        host_bytes=_host_peak(run.passes, numbers),
        flops=_total(run.flops, [one.flops for one in run.passes], [one.flops for one in passes]),
        collectives=_traffic_replay(run, passes) | _sent(run, small, large),
    )


def _growth(run: RankRun, small: PipelineRank, large: PipelineRank) -> dict[str, int]:
    """Return the memory present from the start beyond that of ``small``."""
    more, done = large.num_microbatches - small.num_microbatches, small.num_microbatches
    received = run.collectives.get("recv", Traffic(num_calls=1, num_bytes=0))
    buffer_bytes = received.num_bytes // received.num_calls
    inputs = run.passes[0].live.get("input", 0)
    return {"activation": more * buffer_bytes * _num_buffers(small), "input": more * inputs // done}


def _num_buffers(rank: PipelineRank) -> int:
    """Count a micro-batch's receive buffers for each chunk's neighbours, even if on this rank. They count as
    activations until something is received into them."""
    chunks = range(rank.layout.num_virtual_stages)
    numbers = [virtual_stage(rank.layout, chunk, rank.stage) for chunk in chunks]
    last = num_virtual_stages_total(rank.layout) - 1
    return sum((number > 0) + (number < last) for number in numbers)


def _levels(
    run: RankRun, numbers: Sequence[int], growth: Mapping[str, int]
) -> tuple[list[dict[str, int]], Mapping[str, int]]:
    """Return the live memory at the start of each pass, and the additional memory present from the start."""
    changes = [_minus(after.live, one.live) for one, after in zip(run.passes, run.passes[1:], strict=False)]
    level = _plus(run.passes[0].live, growth)
    levels = [level]
    for number in numbers[:-1]:
        level = _plus(level, changes[number])
        levels.append(level)
    return levels, growth


def _host_peak(passes: Sequence[PassRun], numbers: Sequence[int]) -> int:
    level = peak = passes[0].host_bytes
    for number in numbers:
        one = passes[number]
        peak = max(peak, level + one.peak_host_bytes - one.host_bytes)
        if number + 1 < len(passes):
            level += passes[number + 1].host_bytes - one.host_bytes
    return peak


def _traffic_replay(run: RankRun, passes: Sequence[PassRun]) -> dict[str, Traffic]:
    def counted(read: str) -> dict[str, int]:
        def numbers(traffic: Mapping[str, Traffic]) -> dict[str, int]:
            return {name: getattr(one, read) for name, one in traffic.items()}

        small, large = ([numbers(one.collectives) for one in some] for some in (run.passes, passes))
        return _total(numbers(run.collectives), small, large)

    calls, sizes = counted("num_calls"), counted("num_bytes")
    return {name: Traffic(num_calls=calls[name], num_bytes=sizes[name]) for name in calls}


def _sent(run: RankRun, small: PipelineRank, large: PipelineRank) -> dict[str, Traffic]:
    """Scale sends and receives, which a schedule starts before their passes, by the number of micro-batches."""

    def scaled(number: int) -> int:
        return number * large.num_microbatches // small.num_microbatches

    known = {name: run.collectives[name] for name in ("send", "recv") if name in run.collectives}
    return {
        name: Traffic(num_calls=scaled(one.num_calls), num_bytes=scaled(one.num_bytes)) for name, one in known.items()
    }


def _total(
    total: Mapping[str, int], small: Iterable[Mapping[str, int]], large: Iterable[Mapping[str, int]]
) -> dict[str, int]:
    """Return the total with the counts of other passes."""
    change: Counter[str] = Counter()
    for one in large:
        change.update(one)
    for one in small:
        change.subtract(one)
    return {name: number + change[name] for name, number in total.items()}


def _raised(peak: Peak, by: Mapping[str, int]) -> Peak:
    raised = _plus(peak.by_category, by)
    return Peak(
        total_bytes=peak.total_bytes + sum(by.values()),
        by_category={name: size for name, size in raised.items() if size > 0},
    )


def _plus(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    total: defaultdict[str, int] = defaultdict(int, one)
    for name, size in other.items():
        total[name] += size
    return dict(total)


def _minus(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return _plus(one, {name: -size for name, size in other.items()})


# The shortest pipelines whose passes represent all those of a long one.


ACTIVE_CHUNKS = 3
"""Chunks with gathered weights at a time: those that torch's schedule runs next. With more chunks, which ones they are
depends on more than a pass's surroundings."""
MOST_RANKS = 6
"""Length of the longest pipeline that may replace a longer one."""


def shorter_ranks(layout: Layout, num_microbatches: int) -> tuple[PipelineRank, ...]:
    """For each pipeline rank, return one that represents it, with the same ends of the model and the fewest passes.

    Ranks between the first and the last share one, if it has the passes of all of them.
    """
    ranks = [PipelineRank(layout, stage, num_microbatches) for stage in range(layout.pp)]
    if layout.pp == 1:
        return (_shortest(ranks),)
    if layout.num_virtual_stages > ACTIVE_CHUNKS and layout.zero_stage != 1 and layout.dp * layout.cp > 1:
        return tuple(ranks)
    middle = ranks[1:-1]
    chosen = [_shortest(ranks[:1])]
    if middle:
        shared = _shared(middle)
        chosen += [shared] * len(middle) if shared is not None else [_shortest([rank]) for rank in middle]
    return (*chosen, _shortest(ranks[-1:]))


def _shared(ranks: Sequence[PipelineRank]) -> PipelineRank | None:
    """Return one rank that represents all; None if only one of several ``ranks`` itself does."""
    found = _shortest(ranks)
    return None if found in ranks and len(ranks) > 1 else found


def _shortest(ranks: Sequence[PipelineRank]) -> PipelineRank:
    """Return the rank with the fewest passes that has those of all ``ranks``; the first of them if there is none."""
    needed = {around for rank in ranks for around in rank.surroundings}
    largest = max(ranks, key=lambda rank: rank.num_microbatches)
    for tried in _by_cost(largest):
        if needed <= _offered(tried):
            return tried
    return ranks[0]


@functools.lru_cache(maxsize=4096)
def _offered(rank: PipelineRank) -> frozenset[Surroundings]:
    return frozenset(rank.surroundings)


def _by_cost(rank: PipelineRank) -> Iterator[PipelineRank]:
    """Yield smaller pipelines in which a rank has the same place, those with few micro-batches first."""
    layout = rank.layout
    for num_microbatches in range(1, rank.num_microbatches + 1):
        for pp in range(min(layout.pp, 3), min(layout.pp, MOST_RANKS) + 1) if layout.pp > 2 else (layout.pp,):
            if _takes(layout, pp, num_microbatches):
                smaller = _of_size(layout, pp)
                for stage in _same_place(rank.stage, layout.pp, pp):
                    yield PipelineRank(smaller, stage, num_microbatches)


def _takes(layout: Layout, pp: int, num_microbatches: int) -> bool:
    """Whether the schedule allows this many micro-batches."""
    if pp == 1:
        return True
    if layout.schedule == "1f1b":
        return num_microbatches >= pp
    return layout.schedule != "interleaved" or num_microbatches % max(1, num_microbatches // pp) == 0


def _of_size(layout: Layout, pp: int) -> Layout:
    """Return the layout with ``pp`` pipeline ranks and one layer in each of their chunks."""
    counts = ((1,) * pp,) * layout.num_virtual_stages if pp > 1 else ()
    return dataclasses.replace(layout, pp=pp, stage_layers=counts)


def _same_place(stage: int, pp: int, smaller: int) -> Sequence[int]:
    if stage == 0:
        return (0,)
    return (smaller - 1,) if stage == pp - 1 else range(1, smaller - 1)


# The choice of small trials to simulate instead of a large one, and its extrapolation from them.
#
# The number of layers of a kind, of micro-batches and of pipeline ranks is reduced.


SMALL, LARGER = 2 * NUM_NAMED + 1, 2 * NUM_NAMED + 2
"""Equal layers in a row in the smallest model, which has every place, and in the models compared with it."""
FIXED_COST = 12
"""Cost of building a rank and its optimiser, in forward and backward passes of a micro-batch through a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Small trials to run instead of one pipeline rank of a large one.

    ``lengths[i]`` has the lengths of layer runs in ``specs[i]``, by group; ``wanted`` has those of the large trial.
    """

    specs: tuple[TrialSpec, ...]
    lengths: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]
    small: PipelineRank
    """The rank to simulate in each of them."""
    large: PipelineRank

    def extrapolate(self, runs: Sequence[RankRun]) -> RankRun:
        """Extrapolate the large trial's run from those of :attr:`specs`, in their order.

        Raises:
            UnknownOrderError: the schedule's order is not the known one.
        """
        return replayed(lengthened(runs, self.lengths, self.wanted), self.small, self.large)


def plan_small_runs(spec: TrialSpec) -> tuple[StagePlan, ...] | None:
    """Plan every pipeline rank; None if the trial itself is as cheap. Ranks may share trials."""
    candidate = spec.candidate
    if isinstance(spec.workload.model, ResNetModel | UserModel) or _mixes_layers(spec.workload.model):
        return None  # its layers differ, or may
    layout = candidate.layout
    num_microbatches = candidate.num_microbatches(spec.workload.global_batch_size)
    smaller = shorter_ranks(layout, num_microbatches)
    plans = [
        tuple(
            _plan_stage(spec, PipelineRank(layout, stage, num_microbatches), small, shortens=shortens)
            for stage, small in enumerate(smaller)
        )
        for shortens in (False, True)
    ]
    cheapest = min(plans, key=_cost)
    whole = num_microbatches * spec.workload.num_layers + FIXED_COST * layout.pp
    return cheapest if _cost(cheapest) < whole else None


def _cost(plans: Sequence[StagePlan]) -> int:
    """Return layers times micro-batches of all small trials; trials that stages share count once."""
    trials = {(small, plan.small) for plan in plans for small in plan.specs}
    return sum(FIXED_COST + _num_layers(small, rank) * rank.num_microbatches for small, rank in trials)


def _num_layers(spec: TrialSpec, rank: PipelineRank) -> int:
    runs = runs_of_stage(spec.candidate.layout, spec.candidate.recompute, rank.stage, spec.workload.num_layers)
    return sum(run.length for run in runs)


def _plan_stage(spec: TrialSpec, large: PipelineRank, small: PipelineRank, *, shortens: bool) -> StagePlan:
    """Plan one stage: runs of equal kind and length change together, so most stages need two small trials."""
    runs = list(runs_of_stage(large.layout, spec.candidate.recompute, large.stage, spec.workload.num_layers))
    groups = sorted({(run.kind, run.length) for run in runs if run.length > LARGER}) if shortens else []
    base = (SMALL,) * len(groups)
    longer = [tuple(LARGER if i == j else SMALL for j in range(len(groups))) for i in range(len(groups))]
    lengths = (base, *longer)
    spec = with_microbatches(spec, small.num_microbatches)
    return StagePlan(
        specs=tuple(_resized(spec, small, runs, dict(zip(groups, chosen, strict=True))) for chosen in lengths),
        lengths=lengths,
        wanted=tuple(length for _, length in groups),
        small=small,
        large=large,
    )


def with_microbatches(spec: TrialSpec, number: int) -> TrialSpec:
    """Return the trial with a global batch of this many micro-batches."""
    size = number * spec.candidate.micro_batch_size * spec.candidate.layout.dp
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, global_batch_size=size))


def _resized(
    spec: TrialSpec, rank: PipelineRank, runs: list[LayerRun], chosen: Mapping[tuple[LayerKind, int], int]
) -> TrialSpec:
    """Return the trial in the pipeline of ``rank``, which holds the ``runs`` with other lengths; all other ranks hold
    one layer per chunk."""
    layout = rank.layout
    columns = range(layout.pp)
    lengths = [(run, chosen.get((run.kind, run.length), run.length)) for run in runs]

    def counts(belongs: Callable[[LayerRun], bool], other: int) -> Counts:
        return tuple(
            tuple(
                sum(length for run, length in lengths if run.chunk == chunk and belongs(run))
                if at == rank.stage
                else other
                for at in columns
            )
            for chunk in range(layout.num_virtual_stages)
        )

    held = counts(lambda _: True, 1)
    recompute = spec.candidate.recompute
    smaller = Recompute(
        full=counts(lambda run: run.kind[0], 0) if recompute.full else (),
        selective=tuple(
            dataclasses.replace(rule, num_layers=counts(partial(_is_covered, i), 0))
            for i, rule in enumerate(recompute.selective)
        ),
        communication=counts(lambda run: run.kind[0] or run.kind[2], 0) if recompute.communication else (),
    )
    candidate = dataclasses.replace(
        spec.candidate,
        layout=dataclasses.replace(layout, stage_layers=held if layout.pp > 1 else ()),
        recompute=smaller,
    )
    assert isinstance(spec.workload.model, LlamaModel | LinearModel), "others are simulated whole, or not at all"
    model = dataclasses.replace(spec.workload.model, num_layers=sum(sum(row) for row in held))
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=model), candidate=candidate)


def _mixes_layers(model: Model) -> bool:
    """Whether layers with experts follow dense ones: then a layer's size depends on its number."""
    return isinstance(model, LlamaModel) and model.experts is not None and model.experts.num_dense_layers > 0


def _is_covered(rule: int, run: LayerRun) -> bool:
    """Whether the selective rule covers the run. It may cover layers recomputed in full, without effect."""
    is_full, selective, _ = run.kind
    return is_full or selective[rule]
