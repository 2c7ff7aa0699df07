"""Computes the run with all layers and micro-batches from simulated runs with few.

Every quantity is affine in the lengths of the runs of equal layers; for micro-batches see
:mod:`trials.dryrun.microbatches`.

At one place of the step (:mod:`trials.dryrun.simulate`) memory is a constant plus so much per layer of each kind; the
peak is then the largest over all places, at the real number of layers. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trials.dryrun.layer_runs import NUM_NAMED, LayerKind, LayerRun, runs_of_stage
from trials.dryrun.microbatches import enough_microbatches, grown, with_microbatches
from trials.dryrun.records import Growth, Peak, RankRun, Traffic
from trials.spec import Counts, Layout, LinearModel, LlamaModel, Recompute, ResNetModel, TrialSpec

SMALL, LARGER = 2 * NUM_NAMED + 1, 2 * NUM_NAMED + 2
"""Equal layers in a row in the smallest model, which has every place, and in the models it is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """Small trials to run instead of a large one.

    ``lengths[i]`` holds the length of layer runs in ``specs[i]``, group by group; ``wanted`` those of the large trial.
    The first spec is the base, and each other one is longer in one group. All have ``num_microbatches``.
    """

    specs: tuple[TrialSpec, ...]
    lengths: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]
    layout: Layout
    """Layout of the large trial."""
    num_microbatches: int
    wanted_microbatches: int


def plan_small_runs(spec: TrialSpec, stage: int) -> Extrapolation | None:
    """The small trials to simulate for pipeline rank ``stage``; None where the trial itself is as cheap.

    Runs of equal kind and length change together, so most trials need two small ones.
    """
    candidate = spec.candidate
    if isinstance(spec.workload.model, ResNetModel):
        return None  # its blocks differ
    layout = candidate.layout
    wanted_microbatches = candidate.num_microbatches(spec.workload.global_batch_size)
    num_microbatches = enough_microbatches(layout, stage, wanted_microbatches)
    runs = list(runs_of_stage(layout, candidate.recompute, stage, spec.workload.num_layers))
    groups = sorted({(run.kind, run.length) for run in runs if run.length > LARGER})
    if _cost_of_small_runs(runs, groups, num_microbatches) >= sum(run.length for run in runs) * wanted_microbatches:
        return None
    spec = with_microbatches(spec, num_microbatches)
    base = (SMALL,) * len(groups)
    longer = [tuple(LARGER if i == j else SMALL for j in range(len(groups))) for i in range(len(groups))]
    lengths = (base, *longer)
    return Extrapolation(
        specs=tuple(_resized(spec, stage, runs, dict(zip(groups, chosen, strict=True))) for chosen in lengths),
        lengths=lengths,
        wanted=tuple(length for _, length in groups),
        layout=layout,
        num_microbatches=num_microbatches,
        wanted_microbatches=wanted_microbatches,
    )


def _cost_of_small_runs(
    runs: Sequence[LayerRun], groups: Sequence[tuple[LayerKind, int]], num_microbatches: int
) -> int:
    """Layers times micro-batches of all small trials together."""
    rest = sum(run.length for run in runs if (run.kind, run.length) not in groups)
    num_in_groups = sum((run.kind, run.length) in groups for run in runs)
    base = rest + SMALL * num_in_groups
    return ((1 + len(groups)) * base + (LARGER - SMALL) * num_in_groups) * num_microbatches


def extrapolate(plan: Extrapolation, runs: Sequence[RankRun]) -> RankRun:
    """The large trial's run from those of the plan's specs, in their order."""
    return grown(_lengthened(plan, runs), plan.layout, plan.num_microbatches, plan.wanted_microbatches)


def _lengthened(plan: Extrapolation, runs: Sequence[RankRun]) -> RankRun:
    """The run with all layers, but still few micro-batches."""
    base, *longer = runs
    steps = [larger[i] - plan.lengths[0][i] for i, larger in enumerate(plan.lengths[1:])]
    extra = [wanted - small for wanted, small in zip(plan.wanted, plan.lengths[0], strict=True)]

    def fit(read: Callable[[RankRun], int]) -> int:
        start = read(base)
        growth = sum((read(run) - start) * more / step for run, step, more in zip(longer, steps, extra, strict=True))
        return round(start + growth)

    def fit_all(read: Callable[[RankRun], Mapping[str, int]]) -> dict[str, int]:
        names = dict.fromkeys(name for run in runs for name in read(run))
        return {name: fit(partial(_entry, read, name)) for name in names}

    places = [place for place in base.peaks if all(place in run.peaks for run in longer)]

    def fit_traffic(read: Callable[[RankRun], Mapping[str, Traffic]]) -> dict[str, Traffic]:
        calls = fit_all(lambda run: {name: traffic.num_calls for name, traffic in read(run).items()})
        sizes = fit_all(lambda run: {name: traffic.num_bytes for name, traffic in read(run).items()})
        return {name: Traffic(num_calls=calls[name], num_bytes=sizes[name]) for name in calls}

    return RankRun(
        rank=base.rank,
        num_parameters=fit(lambda run: run.num_parameters),
        peaks={place: _peak_at(place, fit, fit_all) for place in places},
        host_bytes=fit(lambda run: run.host_bytes),
        flops=fit_all(lambda run: run.flops),
        collectives=fit_traffic(lambda run: run.collectives),
        growth=Growth(collectives=fit_traffic(lambda run: run.growth.collectives)),
        cpu_s=sum(run.cpu_s for run in runs),
    )


def _peak_at(
    place: str,
    fit: Callable[[Callable[[RankRun], int]], int],
    fit_all: Callable[[Callable[[RankRun], Mapping[str, int]]], dict[str, int]],
) -> Peak:
    by_category = fit_all(lambda run: run.peaks[place].by_category)
    return Peak(
        total_bytes=fit(lambda run: run.peaks[place].total_bytes),
        by_category={name: max(0, size) for name, size in by_category.items()},
    )


def _resized(
    spec: TrialSpec, stage: int, runs: list[LayerRun], chosen: Mapping[tuple[LayerKind, int], int]
) -> TrialSpec:
    """The trial with other lengths of the stage's runs; all other stages hold one layer in every chunk."""
    layout = spec.candidate.layout
    columns = range(layout.pp)
    lengths = [(run, chosen.get((run.kind, run.length), run.length)) for run in runs]

    def counts(belongs: Callable[[LayerRun], bool], other: int) -> Counts:
        return tuple(
            tuple(
                sum(length for run, length in lengths if run.chunk == chunk and belongs(run)) if at == stage else other
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
        layout=dataclasses.replace(layout, stage_layers=held if layout.stage_layers else ()),
        recompute=smaller,
    )
    assert isinstance(spec.workload.model, LlamaModel | LinearModel), "others are simulated whole, or not at all"
    model = dataclasses.replace(spec.workload.model, num_layers=sum(sum(row) for row in held))
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=model), candidate=candidate)


def _entry(read: Callable[[RankRun], Mapping[str, int]], name: str, run: RankRun) -> int:
    return read(run).get(name, 0)


def _is_covered(rule: int, run: LayerRun) -> bool:
    """Whether the selective rule reaches the run. It may reach layers that are recomputed in full, for nothing."""
    is_full, selective, _ = run.kind
    return is_full or selective[rule]
