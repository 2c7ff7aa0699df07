"""The benchmark of made problems: what they are, and that searches of them are judged by their truth."""

import json

import numpy as np
import pytest

from benchmarks.search.figures import follow
from benchmarks.search.made import problem as made
from benchmarks.search.made.__main__ import main
from benchmarks.search.made.holdings import SEALED
from benchmarks.search.made.knowledge import MadeKnowledge
from benchmarks.search.made.machine import CONTRARY, PASSES
from benchmarks.search.samplers import SAMPLERS
from benchmarks.search.seeds import TUNING, chosen
from cluster.cost.cost_model import inputs_of
from orchestrator.space.rules import Filters, check

FAMILY = "gathered-logits/small"
NAMES = ("buffers/small/0", "dry-run/small/0", "mixed/medium/1", "hurtful-overlap/medium/5.0")


@pytest.fixture(scope="module", params=NAMES)
def problem(request):
    found = made.make_problem(request.param)
    assert found is not None
    return found


def test_memory_binds_and_the_start_runs_but_is_not_the_best(problem):
    fits = problem.true_bytes <= problem.limit_bytes
    assert 0.2 <= 1 - fits.mean() <= 0.8
    assert not fits[np.argmin(problem.true_s)], "without the limit another candidate would be best"
    assert fits[problem.baseline]
    assert problem.true_s[problem.baseline] > 1.02 * problem.best_s
    topology = problem.setup.topology(problem.limit_bytes)
    for candidate in problem.candidates[:: max(1, len(problem) // 20)]:
        assert not check(candidate, problem.setup.workload, topology, Filters(whole_lease=True))


def test_the_best_matches_exhaustive_search(problem):
    truth = [float(t) if fits else None for t, fits in zip(problem.true_s, problem.fits, strict=True)]
    order = list(range(len(problem)))
    found = follow(iter(order), truth, len(problem))
    ran = [t for t in truth if t is not None]
    assert problem.best_s == min(ran)
    first = next(i for i in order if truth[i] is not None and truth[i] <= 1.02 * min(ran))
    assert found.trials_to_2pct == first + 1
    assert found.first_oom == sum(t is None for t in truth[:10])


def test_a_problem_is_a_function_of_its_name(problem):
    again = made.make_problem(problem.name)
    assert (again.candidates, again.planted, again.baseline) == (problem.candidates, problem.planted, problem.baseline)
    np.testing.assert_array_equal(again.measured_s, problem.measured_s)
    np.testing.assert_array_equal(again.true_bytes, problem.true_bytes)


def test_no_outcome_rules_out_tried_candidates_and_knowledge_covers_only_trials(problem):
    knowledge = MadeKnowledge(problem)
    trials = [row for row, _ in zip(SAMPLERS["plain_order"](problem, knowledge, 0), range(8), strict=False)]
    assert trials[0] == problem.baseline
    assert len(set(trials)) == len(trials)
    ran = {row: float(problem.measured_s[row]) for row in trials if problem.fits[row]}
    seen = knowledge.seen(ran, frozenset(set(trials) - ran.keys()))
    assert seen.peaks.keys() in (set(), ran.keys())
    assert not seen.excluded & set(trials)


def test_every_run_draws_other_problems_unless_the_seed_is_given():
    first, other = made.problem_names(1, 100), made.problem_names(2, 100)
    assert made.problem_names(1, 100) == first
    assert len({*first, *other}) == 200
    assert {name.rpartition("/")[0] for name in first} == set(made.families())
    drawn = {chosen(None) for _ in range(20)}
    assert len(drawn) > 10 and min(drawn) >= TUNING and chosen(7) == 7
    assert not any(name.startswith(SEALED) for name in made.problem_names(1, 100, tuning=True))


def test_on_contrary_problems_the_error_decides_what_is_best():
    names = made.problem_names(1, 100, contrary=True)
    assert {name.split("/")[0] for name in names} == set(CONTRARY)
    problem = made.make_problem("hurtful-overlap/medium/5.0")
    assert problem.planted[-1] == "hurtful-overlap"
    x = inputs_of([(problem.setup.decoder_workload, c) for c in problem.candidates], problem.cluster)
    rng = np.random.default_rng(0)
    for name, error in CONTRARY.items():
        changed = error(x, terms_of_one(x), rng)
        assert any(np.any(values != 1.0) for values in changed.values()), name


def terms_of_one(x):
    names = (*PASSES, "gradient_reduction", "sharding", "stage_transfers", "bubble")
    return {name: np.ones(len(x)) for name in names}


def test_the_command_reports_every_family_with_its_goals(capsys):
    main(["--families", FAMILY, "--problems", "1", "--seed", "3", "--samplers", "plain_order", "--jobs", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 3
    assert list(found["families"]) == ["all", *FAMILY.split("/")]
    entry = found["families"]["all"]
    assert entry["problems"] == len(found["problems"]) >= 1
    assert 1 <= entry["samplers"]["plain_order"]["mean_trials_to_2pct"] <= found["max_trials"] + 1
    assert all(0 <= rate <= 1 for belief in entry["belief"].values() for rate in belief.values())
    with pytest.raises(SystemExit):
        main(["--families", "nothing of that name"])
    assert "no problem has such a name" in capsys.readouterr().err
