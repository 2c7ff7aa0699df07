"""The benchmark of made problems: what they are, and that searches of them are judged by their truth."""

import json

import numpy as np
import pytest

from benchmarks.search.figures import follow
from benchmarks.search.made import problem as made
from benchmarks.search.made.__main__ import main
from benchmarks.search.made.knowledge import MadeKnowledge
from benchmarks.search.samplers import SAMPLERS
from orchestrator.space.rules import Filters, check

FAMILY = "gathered-logits/small"
NAMES = ("buffers/small/0", "dry-run/small/0", "mixed/medium/1")


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


def test_halves_are_disjoint_and_together_all():
    tune, report, both = (set(made.problem_names(half)) for half in ("tune", "report", None))
    assert not tune & report
    assert tune | report == both
    assert 0.4 <= len(tune) / len(both) <= 0.6
    assert len(both) >= 300


def test_the_command_reports_every_family_with_its_goals(capsys):
    main(["--families", FAMILY, "--problems", "2", "--samplers", "plain_order", "--jobs", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["families"]) == ["all", *FAMILY.split("/")]
    entry = found["families"]["all"]
    assert entry["problems"] == len(found["problems"]) >= 1
    assert 1 <= entry["samplers"]["plain_order"]["mean_trials_to_2pct"] <= found["max_trials"] + 1
    assert all(0 <= rate <= 1 for belief in entry["belief"].values() for rate in belief.values())
    with pytest.raises(SystemExit):
        main(["--families", "nothing of that name"])
    assert "no problem has such a name" in capsys.readouterr().err
