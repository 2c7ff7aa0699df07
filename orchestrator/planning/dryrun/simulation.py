"""Dry runs: estimates the memory of candidates without hardware, from one simulated rank per pipeline stage.

Decides which ranks to simulate, from how few layers, and what the cache holds already. Torch runs in a process of its
own, never here.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.processes import python_module
from orchestrator.errors import ConfigError
from orchestrator.planning.dryrun.cache import DryRunCache, cache_key
from trials.accelerator.kinds import without_devices
from trials.codec import from_json, to_json
from trials.dryrun.estimate import DryRunEstimate, StageEstimate
from trials.dryrun.extrapolate import Extrapolation, extrapolate, plan_small_runs
from trials.dryrun.records import DryRunRequest, Mode, RankRun, Reply, RunFailure
from trials.spec import Candidate, TrialSpec, Workload

TIMEOUT_S = 600.0
"""Limit for one simulation; the largest take a minute."""

Progress = Callable[[int, int], None]
"""Called with the number of simulations done and their total."""


@dataclass(slots=True, kw_only=True)
class _Stage:
    """The simulations one pipeline stage needs, by their number in the batch."""

    stage: int
    plan: Extrapolation | None
    numbers: list[int] = field(default_factory=list)


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

    ``exact`` simulates all layers instead of extrapolating from few.

    Raises:
        ConfigError: when nothing can be simulated on this machine.
    """
    keys = [cache_key(workload, candidate, mode=mode, exact=exact) for candidate in candidates]
    known = {key: found for key in keys if cache is not None and (found := cache.get(key)) is not None}
    requests: list[DryRunRequest] = []
    missing: dict[str, list[_Stage]] = {}
    for key, candidate in zip(keys, candidates, strict=True):
        if key not in known and key not in missing:
            missing[key] = _plan(TrialSpec(workload=workload, candidate=candidate), mode, exact, requests)
    results: dict[str, DryRunEstimate | RunFailure] = dict(known)
    by_key = dict(zip(keys, candidates, strict=True))
    for replies in _simulate(requests, progress):
        for key in [key for key, stages in missing.items() if _is_complete(stages, replies)]:
            results[key] = made = _combine(missing.pop(key), replies)
            if cache is not None and isinstance(made, DryRunEstimate):
                cache.put(key, by_key[key], made)
    return [results[key] for key in keys]


def representative_rank(candidate: Candidate, stage: int) -> int:
    """The rank simulated for a stage: first on every other mesh axis, whose ranks are all alike."""
    return stage * (candidate.layout.world_size // candidate.layout.pp)


def _plan(spec: TrialSpec, mode: Mode, exact: bool, requests: list[DryRunRequest]) -> list[_Stage]:
    """Add the simulations that the trial needs to ``requests``."""
    stages = []
    for number in range(spec.candidate.layout.pp):
        plan = None if exact else plan_small_runs(spec, number)
        stage = _Stage(stage=number, plan=plan)
        for small in (spec,) if plan is None else plan.specs:
            stage.numbers.append(len(requests))
            requests.append(DryRunRequest(spec=small, rank=representative_rank(small.candidate, number), mode=mode))
        stages.append(stage)
    return stages


def _is_complete(stages: list[_Stage], replies: dict[int, Reply]) -> bool:
    return all(number in replies for stage in stages for number in stage.numbers)


def _combine(stages: list[_Stage], replies: dict[int, Reply]) -> DryRunEstimate | RunFailure:
    made, cpu_s = [], 0.0
    for stage in stages:
        runs: list[RankRun] = []
        for number in stage.numbers:
            reply = replies[number]
            if reply.run is None:
                assert reply.failure is not None
                return reply.failure
            runs.append(reply.run)
        run = runs[0] if stage.plan is None else extrapolate(stage.plan, runs)
        cpu_s += run.cpu_s
        made.append(StageEstimate.of_run(stage.stage, run))
    extrapolated = any(stage.plan is not None for stage in stages)
    return DryRunEstimate(stages=tuple(made), extrapolated=extrapolated, cpu_s=cpu_s)


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
