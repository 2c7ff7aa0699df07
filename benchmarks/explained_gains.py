"""Whether the gains that `explain` promises come true, on simulated machines that are not what the cost model assumes.

    python -m benchmarks.explained_gains

Each machine's coefficients lie one standard deviation of the cost model's prior away from it, in a direction of its
own. The baseline and some random candidates of configs/sweeps/llama2-13b-ascend.yaml are measured on it; the changes
that `explain` then proposes untried are measured as well. Reported by number of trials known: how often a change was
faster indeed and fitted, the error of the gain, and how often it lay within two of its own standard deviations.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.hardware.topology import Topology, describe_topology
from cluster.virtual import ModelledCost
from configs import CONFIGS
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.diagnosis.explain import Basis, explain_sweep
from orchestrator.diagnosis.values import Remedy
from orchestrator.planning.dry_runs import known_topology
from orchestrator.planning.planner import make_plan
from tests.orchestrator.diagnosis.diagnosed import measurement, sweep
from tests.support.story import evidence
from trials.outcome import Outcome, OutOfMemory
from trials.spec import Candidate, TrialSpec

SWEEP = CONFIGS / "sweeps" / "llama2-13b-ascend.yaml"
NUM_MACHINES = 12
NUM_TRIALS = (1, 3, 8)


@dataclass(frozen=True, slots=True)
class Promise:
    """A gain that was promised, and what came of it."""

    remedy: Remedy
    gain: float
    fits: bool

    @property
    def spreads_off(self) -> float:
        assert self.remedy.log_spread is not None
        return math.log(self.gain / self.remedy.gain) / self.remedy.log_spread


class Machine:
    """A simulated machine on which candidates of a sweep are measured."""

    def __init__(self, spec: SweepSpec, topology: Topology, seed: int) -> None:
        self._workload = spec.to_workload()
        self._limit_bytes = min(node.device_memory_bytes for node in topology.nodes)
        self._cost = ModelledCost(describe_topology(topology), deviation=1.0, seed=seed)

    def measure(self, candidate: Candidate) -> Outcome:
        trial = TrialSpec(workload=self._workload, candidate=candidate)
        taken = self._cost(trial)
        if taken.peak_bytes > self._limit_bytes:
            return OutOfMemory(evidence=evidence("out of memory"))
        outcome: Outcome = measurement(trial, taken.step_time_s, taken.peak_bytes)
        return outcome

    def device_seconds(self, candidate: Candidate) -> float:
        taken = self._cost(TrialSpec(workload=self._workload, candidate=candidate))
        return taken.step_time_s * candidate.layout.world_size

    def fits(self, candidate: Candidate) -> bool:
        return not isinstance(self.measure(candidate), OutOfMemory)


def promises(spec: SweepSpec, topology: Topology, seed: int, num_trials: int) -> Iterator[Promise]:
    """Changes that were not tried, for the baseline and for the fastest of so many trials on one machine."""
    machine, plan = Machine(spec, topology, seed), make_plan(spec, topology)
    others = [candidate for candidate in plan.candidates if candidate != plan.baseline]
    candidates = [plan.baseline, *random.Random(seed).sample(others, num_trials - 1)]
    state = sweep(candidates, [machine.measure(candidate) for candidate in candidates], spec.to_workload())
    explained = explain_sweep(state, Basis(candidates=plan.candidates, topology=topology))
    for side in (explained.baseline, explained.chosen):
        for one in side.bottlenecks if side else ():
            if one.remedy is not None and one.remedy.source == "modelled":
                changed = one.remedy.candidate
                gain = machine.device_seconds(candidates[side.trial]) / machine.device_seconds(changed)
                yield Promise(one.remedy, gain, machine.fits(changed))


def report(found: Sequence[Promise]) -> str:
    faster = statistics.fmean(promise.gain > 1 for promise in found)
    fits = statistics.fmean(promise.fits for promise in found)
    error = statistics.median(abs(promise.gain / promise.remedy.gain - 1) for promise in found)
    within = statistics.fmean(abs(promise.spreads_off) <= 2 for promise in found)
    return f"{len(found):8} {faster:8.0%} {fits:8.0%} {error:8.1%} {within:10.0%}"


def main() -> None:
    spec = load_sweep(SWEEP)
    spec = spec.model_copy(update={"space": spec.space.model_copy(update={"balance": False})})
    topology = known_topology(spec)
    assert topology is not None
    print(f"{'trials':>6} {'changes':>8} {'faster':>8} {'fit':>8} {'error':>8} {'within 2':>10}")
    for num_trials in NUM_TRIALS:
        found = [p for seed in range(NUM_MACHINES) for p in promises(spec, topology, seed, num_trials)]
        print(f"{num_trials:6} {report(found)}")


if __name__ == "__main__":
    main()
