"""Proof with real gangs, through the command line: what wins has been measured again and trains the same model."""

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from tests.support.sweeps import write

pytestmark = pytest.mark.slow

PROOF = {"confirm": {"finalists": 1, "max_rounds": 8}, "gate": {"num_steps": 5}}
FAST = {
    "workload": {"global_batch_size": 16},
    "space": {"dp_replicate": [1], "micro_batch_size": [4, 8]},
    "baseline": {"dp_replicate": 2, "micro_batch_size": 1},
    "budget": {"max_trials": 3},
    **PROOF,
}


def run(*words, home, code=0):
    done = CliRunner().invoke(main, [*words, "--home", str(home), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.fixture(scope="module")
def cheated(tmp_path_factory):
    """A sweep in which micro-batches of 4 are fast because every other one is not learned from."""
    home = tmp_path_factory.mktemp("cheated")
    file = write(home, name="cheated", runner="tests.support.wrong_runner:run_rank", **FAST)
    return home, run("submit", str(file), home=home)


def test_a_planted_fast_but_wrong_candidate_is_refused(cheated):
    home, _ = cheated
    proof = run("confirm", "cheated", "t001", home=home)["proof"]
    assert proof["conclusion"] == "keep" and proof["winner"] is None
    (report,) = proof["gates"]
    assert (report["trial"], report["passed"]) == (1, False) and report["grad_norm_deviation"] > 0.1
    assert "does not train the same model" in proof["reason"]
    refused = run("promote", "cheated", "--name", "cheat", "--trial", "1", home=home, code=2)
    assert "--force" in refused


@pytest.mark.exhaustive
def test_an_honest_one_of_the_same_sweep_is_confirmed(cheated):
    home, _ = cheated
    proof = run("confirm", "cheated", "t002", home=home)["proof"]
    assert (proof["conclusion"], proof["winner"]) == ("confirmed", 2)
    assert proof["speedup"]["low"] > 1 and proof["gates"][0]["passed"]


def test_what_cannot_be_confirmed_is_said(cheated):
    home, _ = cheated
    assert "is the baseline" in run("confirm", "cheated", "baseline", home=home, code=2)
    assert "no trial 't099'" in run("confirm", "cheated", "t099", home=home, code=2)
