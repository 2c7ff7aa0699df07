from itertools import product

import pytest

from orchestrator.search.search import Search
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from tests.support.story import created, ended, failures, launched, measured, proposed
from trials.spec import Candidate, Layout, Loader, Precision, Recompute

CANDIDATES = [
    Candidate(
        layout=Layout(dp_replicate=dp),
        micro_batch_size=mbs,
        recompute=recompute,
        precision=precision,
        loader=Loader(num_workers=workers, prefetch_factor=2 if workers else 0),
    )
    for dp, mbs, recompute, precision, workers in product(
        (1, 2),
        (1, 2, 4, 8),
        (Recompute(), Recompute(full=((2,),))),
        (Precision(), Precision(level="O1", dtype="bfloat16")),
        (0, 1, 2, 3, 4),
    )
    if dp * mbs <= 8
]


def features(candidate):
    return {
        "dp": candidate.layout.dp,
        "mbs": candidate.micro_batch_size,
        "recompute": bool(candidate.recompute.full),
        "amp": candidate.precision.level,
        "workers": candidate.loader.num_workers,
        "constant": 1,
    }


def step_time(candidate):
    """A smooth made-up machine: larger micro-batches, no recompute and O1 are faster."""
    time_s = 0.1 + 0.2 / candidate.micro_batch_size
    time_s *= 1.3 if candidate.recompute.full else 1.0
    time_s *= 0.7 if candidate.precision.level == "O1" else 1.0
    return time_s * candidate.layout.dp**-0.9


def outcome_of(candidate):
    """Half of the space, everything without recompute, is refused when run: a constraint, but no proof about memory."""
    if not candidate.recompute.full:
        return failures()["infeasible"]
    return measured(step_time(candidate), world_size=candidate.layout.world_size)


def run(search, num_trials, events=None):
    events = list(events or [created(budget=Budget(max_trials=num_trials))])
    state = fold(events)
    while len(state.trials) < num_trials:
        number = len(state.trials)
        suggestion = search.suggest(number, state)
        if suggestion is None:
            break
        events += [proposed(number, suggestion.candidate), launched(number)]
        events.append(ended(number, outcome_of(suggestion.candidate)))
        state = fold(events)
    return state, events


def candidates_of(state):
    return [trial.candidate for trial in state.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_every_legal_candidate_is_proposed_exactly_once_then_nothing(sampler):
    some = CANDIDATES[::3]
    state, _ = run(Search(some, features=features, sampler=sampler, seed=3), len(some) + 5)
    assert sorted(map(repr, candidates_of(state))) == sorted(map(repr, some))


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_restarted_search_continues_as_if_undisturbed(sampler):
    whole, events = run(Search(CANDIDATES, features=features, sampler=sampler, seed=5), 16)
    half = events[: 1 + 3 * 9]
    resumed, _ = run(Search(CANDIDATES, features=features, sampler=sampler, seed=5), 16, events=half)
    assert candidates_of(resumed) == candidates_of(whole)
    other, _ = run(Search(CANDIDATES, features=features, sampler=sampler, seed=6), 16)
    assert candidates_of(other) != candidates_of(whole)


def test_tpe_learns_from_constraints_and_finds_better_than_random_in_the_median():
    def best_and_late_refusals(sampler, seed):
        state, _ = run(Search(CANDIDATES, features=features, sampler=sampler, seed=seed), 30)
        assert state.best is not None
        late = [trial.status for trial in state.trials[10:]]
        return state.best.measurement.tokens_per_s_per_device, late.count("infeasible")

    tpe = sorted(best_and_late_refusals("tpe", seed) for seed in range(5))
    chance = sorted(best_and_late_refusals("random", seed) for seed in range(5))
    assert tpe[2][0] >= chance[2][0]
    assert sum(refusals for _, refusals in tpe) < 0.7 * sum(refusals for _, refusals in chance)


def test_running_trials_faults_and_a_baseline_outside_the_space_are_no_obstacle():
    search = Search(CANDIDATES, features=features, sampler="tpe", seed=1)
    outside = Candidate(micro_batch_size=3)
    events = [created(max_concurrent=3), proposed(0, outside), launched(0), ended(0, measured())]
    events += [proposed(1, CANDIDATES[0]), launched(1), ended(1, failures()["crashed"])]
    events += [proposed(2, CANDIDATES[1]), launched(2)]
    suggestion = search.suggest(3, fold(events))
    assert suggestion is not None
    assert suggestion.candidate in CANDIDATES[2:]
