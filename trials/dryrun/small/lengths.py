"""Computes the run with all layers from simulated runs with few. Standard library only.

Every quantity is affine in the lengths of the runs of equal layers. At one place of the step
(:mod:`trials.dryrun.simulate`) memory is a constant plus so much per layer of each kind; the peak is then the largest
over all places, at the real number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from trials.dryrun.records import PassRun, Peak, RankRun, Traffic

Fit = Callable[[Callable[[RankRun], int]], int]
"""Gives a quantity of the large trial from where to read it in a small one."""
FitAll = Callable[[Callable[[RankRun], Mapping[str, int]]], dict[str, int]]


def lengthened(runs: Sequence[RankRun], lengths: Sequence[Sequence[int]], wanted: Sequence[int]) -> RankRun:
    """The run with layer runs as long as ``wanted``, group by group, from small ones with those of ``lengths``.

    The first small one is the base; each other one is longer in one group.
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
