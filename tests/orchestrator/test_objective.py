"""All that compares speeds obeys the sweep's objective: each part against brute force over the formulas."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.base import GangProgress
from cluster.hardware.topology import describe_topology, uniform_topology
from orchestrator.controller.step import ALLOWANCE, EarlyStop
from orchestrator.diagnosis.effects import tabulate
from orchestrator.objective import Objective
from orchestrator.proof.next_check import choose_finalists
from orchestrator.proof.progress import confirmation, confirmed_step_times
from orchestrator.report.curves import history
from orchestrator.report.summary import summarize
from orchestrator.report.tables import by_speed, make_trial_table
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.notation import flat_params
from orchestrator.sweep.events import (
    Budget,
    ConfirmationRun,
    ConfirmSettings,
    FinalistsChosen,
    FinishCause,
    ProofSettings,
)
from orchestrator.sweep.fold import fold
from tests.support.story import WORKLOAD, created, ended, launched, measured, proposed
from trials.outcome import StoppedEarly
from trials.spec import Candidate, Layout, Protocol

DEVICES_PER_NODE = 4
OBJECTIVES = {
    name: Objective(name=name, devices_per_node=DEVICES_PER_NODE)
    for name in ("tokens_per_s_per_device", "step_time", "device_cost")
}
MACHINE = uniform_topology(4, DEVICES_PER_NODE, device_name="A100-80GB", memory_bytes=80 * 10**9)

sizes = st.sampled_from((1, 2, 3, 4, 5, 8, 16))
runs = st.lists(st.tuples(sizes, st.floats(0.01, 10.0)), min_size=2, max_size=8)
each_objective = pytest.mark.parametrize("name", OBJECTIVES)


def score(name: str, num_devices: int, step_time_s: float, tokens: int = 512) -> float:
    """The formulas of docs/objective.md, written down again."""
    nodes = math.ceil(num_devices / DEVICES_PER_NODE)
    divisor = {"tokens_per_s_per_device": num_devices, "step_time": 1, "device_cost": nodes * DEVICES_PER_NODE}[name]
    return tokens / (step_time_s * divisor)


def candidate(num_devices: int, number: int = 0) -> Candidate:
    return Candidate(layout=Layout(dp_replicate=num_devices), micro_batch_size=number + 1)


def outcome(num_devices: int, step_time_s: float):
    return measured(step_time_s, world_size=num_devices)


def searched(name: str, found: list[tuple[int, float]]):
    """Events of a search whose trials took these step times on so many devices; the first is the baseline."""
    proof = ProofSettings(confirm=ConfirmSettings())
    events = [created(objective=OBJECTIVES[name], budget=Budget(max_trials=20), proof=proof)]
    for number, (num_devices, step_time_s) in enumerate(found):
        events += [proposed(number, candidate(num_devices, number)), launched(number)]
        events.append(ended(number, outcome(num_devices, step_time_s)))
    return events


@each_objective
@settings(max_examples=25)
@given(found=runs)
def test_ranking_and_ratios_follow_the_formulas(name, found):
    state = fold(searched(name, found))
    scores = [score(name, *run) for run in found]
    ranked = sorted(range(len(found)), key=lambda number: (-scores[number], number))
    assert [one.number for one in state.fastest] == ranked
    assert [trial.number for trial in by_speed(state)] == ranked == [state.best_trial, *ranked[1:]]
    shown = [row.cells["speed"].by for row in make_trial_table(state, by_speed(state)).rows]
    assert shown == pytest.approx(sorted(scores)[::-1])
    summary = summarize(state, "")
    assert summary.speedup.ratio.value == pytest.approx(max(scores) / scores[0])
    assert summary.best.speed.value == pytest.approx(max(scores)) == history(state).best.speed
    assert [row.log_time for row in tabulate(state.searched(), state.objective).rows] == pytest.approx(
        [math.log(512 / value) for value in scores]
    )


@each_objective
@settings(max_examples=25)
@given(found=runs, late=st.tuples(sizes, st.floats(0.01, 10.0)))
def test_early_stop_follows_the_formulas(name, found, late):
    num_devices, step_time_s = late
    number = len(found)
    state = fold([*searched(name, found), proposed(number, candidate(num_devices, number)), launched(number)])
    rule = EarlyStop(factor=1.5, protocol=Protocol(min_warmup_steps=3, num_steps=10))
    seen = [
        GangProgress(attempt_id="a", token="t", phase="warmup", step=step, step_time_s=step_time_s)
        for step in range(1, 5)
    ]
    stopped = rule.verdict(state, state.trials[number], seen)
    best = max(score(name, *run) for run in found)
    slower = best / score(name, num_devices, step_time_s * (1 - ALLOWANCE))
    if abs(slower - 1.5) > 1e-9:
        assert isinstance(stopped, StoppedEarly) == (slower > 1.5)


@each_objective
@settings(max_examples=25)
@given(found=runs)
def test_optuna_gets_the_scores(name, found):
    state = fold(searched(name, found))
    candidates = [trial.candidate for trial in state.trials]
    if len({c.config_key for c in candidates}) < 2:
        return
    study = Search(candidates, features=flat_params)._rebuild_study(state, seed=0)
    assert [trial.value for trial in study.trials] == pytest.approx([score(name, *run) for run in found])


@each_objective
def test_the_guided_search_proposes_the_best_by_the_formulas(name):
    """Before any measurement, the best prediction; after some, what is best on a machine unlike the cost model."""
    pairs = product((1, 2, 4, 8, 16), (1, 2, 4))
    candidates = [Candidate(layout=Layout(dp_replicate=d), micro_batch_size=m) for d, m in pairs]
    workload = replace(WORKLOAD, global_batch_size=64)
    predictor = Predictor(
        workload, candidates, describe_topology(MACHINE), features=flat_params, objective=OBJECTIVES[name]
    )
    search = Search(candidates, features=flat_params, sampler="guided", guide=GuidedSearch(predictor))
    steps_s = predictor.estimates.step_s.tolist()
    tokens = workload.tokens_per_step
    expected = [score(name, c.layout.world_size, t, tokens) for c, t in zip(candidates, steps_s, strict=True)]
    events = [created(workload=workload, objective=OBJECTIVES[name], budget=Budget(max_trials=20))]
    first = search.suggest(0, fold(events))
    assert first.candidate == candidates[int(np.argmax(expected))]
    assert first.expected.step_time_s == pytest.approx(steps_s[int(np.argmax(expected))])

    noise = np.exp(0.3 * np.random.default_rng(1).standard_normal(len(candidates)))
    truth = {c: float(t) for c, t in zip(candidates, np.array(steps_s) * noise, strict=True)}
    for number in range(10):
        found = search.suggest(number, fold(events)).candidate
        one = measured(truth[found], world_size=found.layout.world_size, tokens_per_step=tokens)
        events += [proposed(number, found), launched(number), ended(number, one)]
    scores = {c: score(name, c.layout.world_size, t, tokens) for c, t in truth.items()}
    state = fold(events)
    assert state.best.candidate == max((trial.candidate for trial in state.trials), key=scores.__getitem__)
    assert scores[state.best.candidate] > 0.9 * max(scores.values())


@each_objective
@settings(max_examples=25)
@given(found=runs)
def test_finalists_and_confirmed_ratios_follow_the_formulas(name, found):
    events = searched(name, found)
    state = fold(events)
    scores = [score(name, *run) for run in found]
    finalists = choose_finalists(state)
    sure = [number for number in range(1, len(found)) if scores[number] > 1.1 * scores[0]]  # noise is 2%
    assert len(set(finalists) & set(sure)) == min(len(sure), ConfirmSettings().num_finalists)
    assert all(scores[number] > 0.9 * scores[0] for number in finalists)
    assert list(finalists) == sorted(finalists, key=lambda number: (-scores[number], number))
    if not finalists:
        return
    events.append(
        FinalistsChosen(
            at_s=4.0, finalists=finalists, reason="test", first_check=len(found), cause=FinishCause.BUDGET_TRIALS
        )
    )
    number = len(found)
    for round_number in range(3):
        for of in (0, *finalists):
            check = ConfirmationRun(of=of, round=round_number)
            proposal = replace(proposed(number, state.trials[of].candidate), origin="check", check=check)
            events += [proposal, launched(number), ended(number, outcome(*found[of]))]
            number += 1
    confirmed = confirmation(fold(events))
    for of in finalists:
        assert confirmed.judgement.against_baseline[of].ratio.value == pytest.approx(scores[of] / scores[0])
        own_s, base_s = confirmed_step_times(confirmed, of)
        assert score(name, found[of][0], own_s) / score(name, found[0][0], base_s) == pytest.approx(
            confirmed.judgement.against_baseline[of].ratio.value
        )
    assert confirmed.judgement.leader in {
        None,
        *(n for n in finalists if scores[n] == max(scores[f] for f in finalists)),
    }


def test_an_objective_names_its_figures_units_and_costs():
    found = Objective(name="device_cost", devices_per_node=8, price_per_device_hour=2.0).figures(1000, 0.5, 12)
    assert (found.tokens_per_s, found.num_devices) == (2000, 12)
    assert found.tokens_per_s_per_device == pytest.approx(2000 / 12)
    assert found.device_hours_per_token == pytest.approx(16 * 0.5 / 1000 / 3600)  # two whole nodes are paid for
    assert found.price_per_token == pytest.approx(2.0 * found.device_hours_per_token)
    assert [Objective(name=name).unit("tokens/s/p") for name in OBJECTIVES] == [
        "tokens/s/p",
        "tokens/s",
        "tokens/s/paid",
    ]
