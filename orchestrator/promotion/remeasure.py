"""Measuring a promoted configuration again: sweeps made from its manifest, and what came of them.

Beside the baseline of the sweep that it was promoted from, it is a finalist that is confirmed once more: rounds of
both, interleaved on the same nodes, by the very mechanism of :mod:`orchestrator.proof`. What the hour does to the
machine then happens to both. A configuration that *is* the baseline has nothing to be interleaved with: every round is
a sweep of one trial.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.knobs import BaselineSection
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller import controller
from orchestrator.errors import ConfigError
from orchestrator.promotion.manifest import is_of_script
from orchestrator.promotion.references import Version
from orchestrator.proof.progress import BASELINE, confirmation
from orchestrator.report import proof, words
from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.canonical import knob_values
from orchestrator.space.knobs.layer_choices import RecomputeChoice, StageSplit
from orchestrator.sweep.home import Home
from orchestrator.sweep.snapshot import Observer
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.tracking.tracker import Tracker
from orchestrator.units import trial_id
from trials.files import write_atomically
from trials.outcome import GangLost, Measurement, TimedOut
from trials.spec import Candidate

FOLDER = EXPERIMENT = "verifications"
_KEPT = ("workload", "cluster", "measure", "runner", "objective", "deadlines")
"""Sections of the promoted sweep's file that say how is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasured:
    """What measuring again gave: runs in the order of their rounds, the baseline's beside the configuration's."""

    states: tuple[SweepState, ...]
    trial: Trial
    """The configuration's own trial, or the first of them that was not measured."""
    runs: tuple[Measurement, ...]
    baseline_runs: tuple[Measurement, ...]
    """Runs of the same rounds; empty where the configuration is the baseline."""
    is_interleaved: bool
    """Whether there is a baseline to compare with."""
    lost: str
    """Why there are too few runs, for reasons that are not the configuration's; empty where there are enough."""
    busy: str
    """What the machine was busy with besides; empty where it was quiet, or nobody could tell."""


def remeasure(
    promoted: Version,
    tracker: Tracker,
    home: Home,
    observer: Observer,
    *,
    address: str | None,
    num_rounds: int,
    at_s: float,
) -> Remeasured:
    """Run the sweeps.

    Raises:
        ConfigError: the version cannot be measured.
        ClusterError: there is no cluster to measure it on.
    """
    spec = verification_spec(promoted, tracker, num_rounds, at_s)
    own = Home(home.path / FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        specs = [_loaded(Path(folder), content) for content in _sweeps(spec, promoted.candidate, Path(folder))]
        states = []
        for one in specs:
            states.append(controller.submit(one, own, observer, address=address).state)
            if _lost(states[-1].trials, states[-1]):
                break
    if len(specs) > 1:
        return _alone(states, num_rounds)
    return _interleaved(states[0], promoted.candidate, num_rounds)


def verification_spec(promoted: Version, tracker: Tracker, num_rounds: int, at_s: float) -> dict[str, Any]:
    """The content of the sweep file that measures the version beside its baseline.

    Raises:
        ConfigError: the version cannot be measured.
    """
    if promoted.spec is None:
        raise ConfigError(
            f"{promoted.label} keeps no sweep file", remedy="Promote a sweep that was submitted from one."
        )
    if promoted.spec["cluster"].get("kind") == "replay":
        raise ConfigError(f"{promoted.label} comes from a table of measurements", remedy="It cannot be measured again.")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(at_s))
    name = re.sub(r"[^a-z0-9._-]", "-", promoted.registered.name[:28])
    return {
        **{key: value for key, value in promoted.spec.items() if key in _KEPT},
        "name": f"verify-{name}-v{promoted.registered.version}-{stamp}",
        "baseline": promoted.spec.get("baseline", {}),
        "space": _space(promoted.candidate, promoted.spec),
        "search": {"sampler": "grid", "early_stop": "off"},
        "budget": {"max_trials": 2},
        "confirm": {"finalists": 1, "min_rounds": num_rounds, "max_rounds": num_rounds, "always": True},
        "gate": "off",
        "tracking": {"uri": tracker.uri, "experiment": EXPERIMENT},
    }


def _sweeps(spec: dict[str, Any], candidate: Candidate, folder: Path) -> list[dict[str, Any]]:
    """The sweeps to run: one, or one per round where the configuration is the baseline itself."""
    num_rounds = spec["confirm"]["min_rounds"]
    if _loaded(folder, spec).baseline_candidate != candidate:
        return [spec]
    space = {"world_size": [candidate.layout.world_size]}
    baseline = spec["baseline"] if candidate.own or is_of_script(spec) else baseline_section(candidate)
    alone = {"baseline": baseline, "space": space, "confirm": "off", "budget": {"max_trials": 1}}
    return [{**spec, **alone, "name": f"{spec['name']}-r{number}"} for number in range(1, num_rounds + 1)]


def _loaded(folder: Path, content: Mapping[str, Any]) -> SweepSpec:
    """The sweep of this content. A program of the user's own has its configuration files as they were promoted."""
    if is_of_script(content):
        return SweepSpec.from_json(content)
    file = folder / f"{content['name']}.yaml"
    write_atomically(file, [yaml.safe_dump(dict(content), sort_keys=False).encode()])
    return load_sweep(file)


def baseline_section(candidate: Candidate) -> dict[str, Any]:
    """The candidate as section ``baseline`` of a sweep file: layers per stage written out, nothing left to ``auto``."""
    values = knob_values(candidate)
    layers, policy = candidate.layout.stage_layers, candidate.recompute
    values["stage_layers"] = StageSplit(kind="counts", rows=layers) if layers else StageSplit()
    select = tuple((part.pattern, part.num_layers) for part in policy.selective)
    values["recompute"] = RecomputeChoice(full=policy.full, select=select, communication=policy.communication)
    body: dict[str, Any] = BaselineSection.model_construct(**values).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    return body


def space_section(candidate: Candidate) -> dict[str, Any]:
    """The candidate as section ``space`` of a sweep file, which then has it alone, whatever the baseline is."""
    body = baseline_section(candidate)
    only = {knob.name: [body.get(knob.name, knob.default)] for knob in KNOBS}
    return {**only, "world_size": [candidate.layout.world_size]}


def _space(candidate: Candidate, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The candidate alone as section ``space``; of a program of the user's own only what the sweep changed in it: what
    its file does not name stays as the command says."""
    if not is_of_script(spec):
        return space_section(candidate)
    named, own = spec.get("space") or {}, {choice.name: choice.value for choice in candidate.own}
    body = {name: values for name, values in space_section(candidate).items() if named.get(name) is not None}
    return {**body, "world_size": [candidate.layout.world_size], "own": _own_section(named.get("own") or {}, own)}


def _own_section(named: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Own knobs as the file describes them, each with the one value that the candidate has; all of those without one,
    which mean nothing beside the others."""
    section = {}
    for name, knob in named.items():
        described = knob if isinstance(knob, Mapping) else {"values": knob}
        section[name] = {**described, "values": [own[name]]} if name in own else knob
    return section


def _interleaved(state: SweepState, candidate: Candidate, num_rounds: int) -> Remeasured:
    found = next((trial for trial in state.searched() if trial.candidate == candidate), None)
    if found is None:
        raise ConfigError(
            f"the configuration cannot run on this cluster: {state.finish_reason}",
            remedy="tune-cluster plan shows which rule refuses it.",
        )
    confirmed = confirmation(state)
    rounds = [one.runs for one in confirmed.complete] if confirmed else []
    pairs = [(one[found.number].measurement, one[BASELINE].measurement) for one in rounds if found.number in one]
    lost = _lost([state.trials[BASELINE], found], state)
    if not lost and found.measurement is not None and len(pairs) < num_rounds:
        why = state.verdict.reason if state.verdict else state.finish_reason
        lost = f"{len(pairs)} of {num_rounds} rounds could be measured: {why}"
    return Remeasured(
        states=(state,),
        trial=found,
        runs=tuple(run for run, _ in pairs if run is not None),
        baseline_runs=tuple(run for _, run in pairs if run is not None),
        is_interleaved=True,
        lost=lost,
        busy=proof.caution(state),
    )


def _alone(states: list[SweepState], num_rounds: int) -> Remeasured:
    trials = [state.trials[BASELINE] for state in states if state.trials]
    runs = [trial.measurement for trial in trials if trial.measurement is not None]
    lost = next((why for state in states if (why := _lost(state.trials, state))), "")
    if not trials:
        raise ConfigError(f"the configuration could not be launched: {states[-1].finish_reason}")
    return Remeasured(
        states=tuple(states),
        trial=next((trial for trial in trials if trial.measurement is None), trials[0]),
        runs=tuple(runs),
        baseline_runs=(),
        is_interleaved=False,
        lost=lost or ("" if len(states) == num_rounds else f"{len(states)} of {num_rounds} rounds could be measured"),
        busy=words.busy_note(dict(enumerate(runs))).removeprefix(f"{words.BUSY_MARK} "),
    )


def _lost(trials: Any, state: SweepState) -> str:
    """Why one of the trials says nothing about its configuration: its gang was lost, or hung, or never launched."""
    for trial in trials:
        if trial.outcome is None:
            return f"the sweep {state.sweep.sweep} ended before {trial_id(trial.number)} ran: {state.finish_reason}"
        if isinstance(trial.outcome, GangLost | TimedOut):
            return f"{trial_id(trial.number)} of {state.sweep.sweep} was lost: {words.failure(trial)}"
    return ""
