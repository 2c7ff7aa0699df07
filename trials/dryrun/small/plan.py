"""Which small trials to simulate instead of a large one, and the large one's run from theirs. Standard library only.

Layers of a kind become few (:mod:`trials.dryrun.small.lengths`), and so do micro-batches and pipeline ranks
(:mod:`trials.dryrun.small.replay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trials.dryrun.records import RankRun
from trials.dryrun.small.layer_runs import NUM_NAMED, LayerKind, LayerRun, runs_of_stage
from trials.dryrun.small.lengths import lengthened
from trials.dryrun.small.replay import PipelineRank, replayed
from trials.dryrun.small.shorter import shorter_ranks
from trials.spec import Counts, LinearModel, LlamaModel, Recompute, ResNetModel, TrialSpec

SMALL, LARGER = 2 * NUM_NAMED + 1, 2 * NUM_NAMED + 2
"""Equal layers in a row in the smallest model, which has every place, and in the models it is compared with."""
FIXED_COST = 12
"""What building a rank and its optimiser takes, in passes of a micro-batch forward and backward through a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Small trials to run instead of one pipeline rank of a large one.

    ``lengths[i]`` holds the length of layer runs in ``specs[i]``, group by group; ``wanted`` those of the large trial.
    """

    specs: tuple[TrialSpec, ...]
    lengths: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]
    small: PipelineRank
    """The rank to simulate in each of them."""
    large: PipelineRank

    def extrapolate(self, runs: Sequence[RankRun]) -> RankRun:
        """The large trial's run from those of :attr:`specs`, in their order.

        Raises:
            UnknownOrderError: the schedule ran in another order than is known of it.
        """
        return replayed(lengthened(runs, self.lengths, self.wanted), self.small, self.large)


def plan_small_runs(spec: TrialSpec) -> tuple[StagePlan, ...] | None:
    """A plan for every pipeline rank; None where the trial itself is as cheap. Ranks may have trials in common."""
    candidate = spec.candidate
    if isinstance(spec.workload.model, ResNetModel):
        return None  # its blocks differ
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
    """Layers times micro-batches of all small trials together, those that stages have in common once."""
    trials = {(small, plan.small) for plan in plans for small in plan.specs}
    return sum(FIXED_COST + _num_layers(small, rank) * rank.num_microbatches for small, rank in trials)


def _num_layers(spec: TrialSpec, rank: PipelineRank) -> int:
    runs = runs_of_stage(spec.candidate.layout, spec.candidate.recompute, rank.stage, spec.workload.num_layers)
    return sum(run.length for run in runs)


def _plan_stage(spec: TrialSpec, large: PipelineRank, small: PipelineRank, *, shortens: bool) -> StagePlan:
    """Runs of equal kind and length change together, so most stages need two small trials."""
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
    """The trial with a global batch of so many micro-batches."""
    size = number * spec.candidate.micro_batch_size * spec.candidate.layout.dp
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, global_batch_size=size))


def _resized(
    spec: TrialSpec, rank: PipelineRank, runs: list[LayerRun], chosen: Mapping[tuple[LayerKind, int], int]
) -> TrialSpec:
    """The trial in the pipeline of ``rank``, where that holds the ``runs`` in other lengths; all other ranks hold one
    layer in every chunk."""
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


def _is_covered(rule: int, run: LayerRun) -> bool:
    """Whether the selective rule reaches the run. It may reach layers that are recomputed in full, for nothing."""
    is_full, selective, _ = run.kind
    return is_full or selective[rule]
