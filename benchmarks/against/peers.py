"""Optimisers of other projects on synthetic programs, under the same rules as our search.

All peers choose among existing configurations, each once: if a proposal does not exist, the nearest one is tried. A
configuration that runs out of memory counts as slow as the slowest so far. Only ours uses a cost model, which is the
difference to be measured.
"""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import optuna

from benchmarks.search.generic.programs import Program
from benchmarks.search.generic.sweeps import Searched, is_settled, searched, step_times
from benchmarks.search.samplers import Space
from orchestrator.space.notation import flat_params
from trials.spec import Candidate

Point = Mapping[str, int]

NEVER_RAN_S = 1e3
"""What a trial that runs out of memory counts as before any other ran."""


class Optimiser(Protocol):
    def ask(self) -> Point: ...
    def tell(self, point: Point, value: float) -> None:
        """Record a result, of the point proposed or of another one."""


class OptunaPeer:
    """An Optuna sampler with its default settings."""

    def __init__(self, space: Space, sampler: optuna.samplers.BaseSampler) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._distributions = space.distributions
        self._study = optuna.create_study(direction="minimize", sampler=sampler)

    def ask(self) -> Point:
        return self._study.ask(self._distributions).params

    def tell(self, point: Point, value: float) -> None:
        made = optuna.trial.create_trial(params=dict(point), distributions=self._distributions, value=value)
        self._study.add_trial(made)


class AxPeer:
    """Ax's client with its default generation strategy (Sobol, then a Gaussian process)."""

    def __init__(self, space: Space) -> None:
        from ax.api.client import Client
        from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

        self._client = Client()
        self._ordered = {name for name in space.sizes if space.is_ordered(name)}
        parameters: list[Any] = []
        for name, values in space.sizes.items():
            if name in self._ordered:
                parameters.append(RangeParameterConfig(name=name, parameter_type="int", bounds=(0, values - 1)))
            else:
                choices = [str(value) for value in range(values)]
                parameters.append(
                    ChoiceParameterConfig(name=name, parameter_type="str", values=choices, is_ordered=False)
                )
        self._client.configure_experiment(parameters=parameters)
        self._client.configure_optimization(objective="-seconds")

    def ask(self) -> Point:
        ((index, point),) = self._client.get_next_trials(max_trials=1).items()
        self._client.mark_trial_abandoned(index)
        return {name: int(value) for name, value in point.items()}

    def tell(self, point: Point, value: float) -> None:
        encoded = {name: at if name in self._ordered else str(at) for name, at in point.items()}
        index = self._client.attach_trial(encoded)
        self._client.complete_trial(index, raw_data={"seconds": value})


def optimisers() -> dict[str, Callable[[Space, int], Optimiser]]:
    """Peers that are installed, by name."""
    found: dict[str, Callable[[Space, int], Optimiser]] = {
        "Optuna, TPE": lambda space, seed: OptunaPeer(space, optuna.samplers.TPESampler(seed=seed)),
        "Optuna, Gaussian process": lambda space, seed: OptunaPeer(space, optuna.samplers.GPSampler(seed=seed)),
        "random": lambda space, seed: OptunaPeer(space, optuna.samplers.RandomSampler(seed=seed)),
    }
    try:
        import ax.api.client  # noqa: F401
    except ImportError:
        return found
    return found | {"Ax": lambda space, _: AxPeer(space)}


def search(program: Program, make: Callable[[Space, int], Optimiser], seed: int, num_trials: int) -> Searched:
    """A search of so many trials, the baseline first."""
    warnings.simplefilter("ignore")
    candidates = program.candidates
    knobs = [{name: str(value) for name, value in flat_params(one).items()} for one in candidates]
    varied = [name for name in knobs[0] if len({row[name] for row in knobs}) > 1]
    space = Space([{name: row[name] for name in varied} for row in knobs])
    peer = make(space, seed)
    rng = random.Random(f"{program.name}/{seed}")
    left, tried = set(range(len(candidates))), []
    slowest = 0.0
    for number in range(1, min(num_trials, len(candidates)) + 1):
        if number == 1 and program.baseline in candidates:
            row = candidates.index(program.baseline)
        else:
            point = peer.ask()
            row = min(left, key=lambda row: (space.distance(row, point), rng.random()))
        left.discard(row)
        tried.append(candidates[row])
        if is_settled(program, tried):
            break
        cost = _measured(program, candidates[row], rng)
        slowest = max(slowest, cost or 0.0)
        peer.tell(space.points[row], cost or slowest or NEVER_RAN_S)
    return searched(program, tried, num_trials)


def _measured(program: Program, candidate: Candidate, rng: random.Random) -> float | None:
    """Return the device-seconds of a step as a trial measures them; None: out of memory."""
    true_s = program.times_s.get(candidate)
    return None if true_s is None else statistics.median(step_times(true_s, rng)) * candidate.layout.world_size
