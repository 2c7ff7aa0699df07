"""Dry runs: estimates the memory of candidates without hardware, from one simulated rank per pipeline stage.

Decides which ranks to simulate, from how few layers, and what the cache holds already. Torch runs in a process of its
own, never here.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.processes import python_module
from orchestrator.errors import ConfigError
from orchestrator.planning.dryrun.cache import DryRunCache, cache_key
from trials.accelerator.kinds import without_devices
from trials.codec import from_json, to_json
from trials.dryrun.estimate import DryRunEstimate, StageEstimate
from trials.dryrun.records import DryRunRequest, Mode, RankRun, Reply, RunFailure
from trials.dryrun.small.plan import StagePlan, plan_small_runs
from trials.dryrun.small.replay import UnknownOrderError
from trials.spec import Candidate, TrialSpec, Workload

TIMEOUT_S = 600.0
"""Limit for one simulation; the largest take a minute."""

Progress = Callable[[int, int], None]
"""Called with the number of simulations done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The simulations one pipeline stage needs, by their number in the batch."""

    stage: int
    rank: int
    plan: StagePlan | None
    numbers: tuple[int, ...]


class _Batch:
    """Requests, each of them once: stages and candidates have small trials in common."""

    def __init__(self, mode: Mode) -> None:
        self._mode: Mode = mode
        self._numbers: dict[tuple[TrialSpec, int], int] = {}

    @property
    def requests(self) -> list[DryRunRequest]:
        return [DryRunRequest(spec=spec, rank=rank, mode=self._mode) for spec, rank in self._numbers]

    def plan(self, spec: TrialSpec, *, exact: bool) -> list[_Stage]:
        """Add the simulations that the trial needs."""
        plans = None if exact else plan_small_runs(spec)
        stages = []
        for stage in range(spec.candidate.layout.pp):
            plan = None if plans is None else plans[stage]
            small, at = ((spec,), stage) if plan is None else (plan.specs, plan.small.stage)
            numbers = tuple(self._number(one, representative_rank(one.candidate, at)) for one in small)
            rank = representative_rank(spec.candidate, stage)
            stages.append(_Stage(stage=stage, rank=rank, plan=plan, numbers=numbers))
        return stages

    def _number(self, spec: TrialSpec, rank: int) -> int:
        return self._numbers.setdefault((spec, rank), len(self._numbers))


def estimate_all(
    workload: Workload,
    candidates: Sequence[Candidate],
    *,
    mode: Mode = "accelerator",
    exact: bool = False,
    cache: DryRunCache | None = None,
    progress: Progress | None = None,
) -> list[DryRunEstimate | RunFailure]:
    """Simulate every candidate, one rank per pipeline stage; a failure stands for itself and spoils no other. What
    is found goes to ``cache`` at once, so that an interruption loses little.

    ``exact`` simulates all layers, micro-batches and stages instead of extrapolating from few.

    Raises:
        ConfigError: when nothing can be simulated on this machine.
    """
    keys = [cache_key(workload, candidate, mode=mode, exact=exact) for candidate in candidates]
    known = {key: found for key in keys if cache is not None and (found := cache.get(key)) is not None}
    by_key = dict(zip(keys, candidates, strict=True))
    results: dict[str, DryRunEstimate | RunFailure] = dict(known)
    missing = {key: candidate for key, candidate in by_key.items() if key not in known}
    strange: dict[str, Candidate] = {}
    for key, made in _estimates(workload, missing, mode=mode, exact=exact, progress=progress):
        if made is None:
            strange[key] = by_key[key]
            continue
        results[key] = made
        if cache is not None and isinstance(made, DryRunEstimate):
            cache.put(key, by_key[key], made)
    if strange:  # this torch runs the schedule in an order of its own
        results |= zip(strange, estimate_all(workload, [*strange.values()], mode=mode, exact=True), strict=True)
    return [results[key] for key in keys]


def _estimates(
    workload: Workload, candidates: Mapping[str, Candidate], *, mode: Mode, exact: bool, progress: Progress | None
) -> Iterator[tuple[str, DryRunEstimate | RunFailure | None]]:
    """Each candidate's estimate as soon as it is there; None where extrapolating it turns out to be impossible."""
    batch = _Batch(mode)
    missing = {
        key: batch.plan(TrialSpec(workload=workload, candidate=candidate), exact=exact)
        for key, candidate in candidates.items()
    }
    for replies in _simulate(batch.requests, progress):
        for key in [key for key, stages in missing.items() if _is_complete(stages, replies)]:
            yield key, _combine(missing.pop(key), replies)


def representative_rank(candidate: Candidate, stage: int) -> int:
    """The rank simulated for a stage: first on every other mesh axis, whose ranks are all alike."""
    return stage * (candidate.layout.world_size // candidate.layout.pp)


def _is_complete(stages: list[_Stage], replies: dict[int, Reply]) -> bool:
    return all(number in replies for stage in stages for number in stage.numbers)


def _combine(stages: list[_Stage], replies: dict[int, Reply]) -> DryRunEstimate | RunFailure | None:
    runs: dict[int, RankRun] = {}
    for number in sorted({number for stage in stages for number in stage.numbers}):
        reply = replies[number]
        if reply.run is None:
            return reply.failure
        runs[number] = reply.run
    try:
        made = [_of_stage(stage, [runs[number] for number in stage.numbers]) for stage in stages]
    except UnknownOrderError:
        return None
    extrapolated = any(stage.plan is not None for stage in stages)
    return DryRunEstimate(stages=tuple(made), extrapolated=extrapolated, cpu_s=sum(run.cpu_s for run in runs.values()))


def _of_stage(stage: _Stage, runs: Sequence[RankRun]) -> StageEstimate:
    run = runs[0] if stage.plan is None else stage.plan.extrapolate(runs)
    return StageEstimate.of_run(stage.stage, replace(run, rank=stage.rank))


def _simulate(requests: list[DryRunRequest], progress: Progress | None) -> Iterator[dict[int, Reply]]:
    """Replies by the request's number, each time there is one more."""
    replies: dict[int, Reply] = {}
    if not requests:
        return
    tell = progress or _say_nothing
    tell(0, len(requests))
    for index, reply in _batch(requests):
        replies[index] = reply
        tell(len(replies), len(requests))
        yield replies


def _batch(requests: list[DryRunRequest]) -> Iterator[tuple[int, Reply]]:
    """Run the batch in an interpreter of its own.

    Raises:
        ConfigError: when it ends before all replies are there, with its last words.
    """
    body = {
        "requests": [to_json(request) for request in requests],
        "timeout_s": TIMEOUT_S,
        "max_children": os.cpu_count() or 1,
    }
    num_replies = 0
    with tempfile.TemporaryFile("w+") as words, tempfile.TemporaryFile("w+") as asked:
        json.dump(body, asked)
        asked.seek(0)
        command = python_module("trials.dryrun")
        environment = without_devices(os.environ)
        with subprocess.Popen(
            command, stdin=asked, stdout=subprocess.PIPE, stderr=words, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    answer = json.loads(line)
                    num_replies += 1
                    yield answer["index"], from_json(Reply, answer["reply"])
            finally:
                if num_replies < len(requests):
                    process.terminate()  # it ends its children first
        if num_replies < len(requests):
            words.seek(0)
            raise ConfigError(
                f"the dry run ended with status {process.returncode} before it was done: {_last(words.read())}",
                remedy="Is torch installed here, and is there enough memory?",
            )


def _say_nothing(_done: int, _total: int) -> None:
    pass


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
