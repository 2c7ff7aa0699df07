"""Proof with real gangs, through the command line: what wins has been measured again and trains the same model."""

import json
import sys

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli.main import main
from tests.support.sweeps import write

pytestmark = pytest.mark.slow

PROOF = {"confirm": {"finalists": 1, "max_rounds": 8, "soak": "off"}, "gate": {"num_steps": 5}}
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
    file = write(home, name="cheated", runner="tests.support.user_runners:cheating", **FAST)
    return home, run("submit", str(file), home=home)


def test_a_planted_fast_but_wrong_candidate_is_refused(cheated):
    home, _ = cheated
    proof = run("confirm", "cheated", "t001", home=home)["proof"]
    assert proof["conclusion"] == "keep" and proof["winner"] is None
    (report,) = proof["gates"]
    assert (report["trial"], report["passed"]) == (1, False) and report["grad_norm_deviation"] > 0.1
    assert "does not match the baseline's losses" in proof["reason"]
    refused = run("promote", "cheated", "--name", "cheat", "--trial", "1", home=home, code=2)
    assert "--force" in refused


@pytest.mark.exhaustive
def test_an_honest_one_of_the_same_sweep_is_confirmed(cheated):
    home, _ = cheated
    proof = run("confirm", "cheated", "t002", home=home)["proof"]
    assert (proof["conclusion"], proof["winner"]) == ("confirmed", 2)
    assert proof["speedup"]["low"] > 1 and proof["gates"][0]["passed"]


PROGRAM = """
import argparse, time

parser = argparse.ArgumentParser()
parser.add_argument("--w", default="a")
parser.add_argument("--lean", action="store_true")
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()
begin = time.monotonic()
for step in range(1, arguments.steps + 1):
    lasts = arguments.w != "fade" or time.monotonic() - begin < 1.5
    seconds = {"a": 0.04, "cheat": 0.008, "fade": 0.012 if lasts else 0.06}[arguments.w]
    time.sleep(0.7 * seconds if arguments.lean else seconds)
    loss = 5.0 * 0.97**step * (0.9 if arguments.w == "cheat" else 1)
    print(f"step {step}: loss {loss:.6f}", flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_cheat_and_a_speed_that_fades_give_way_to_an_honest_candidate(tmp_path):
    """The fastest trains something else, the next one is fast for a second and a half only."""
    (tmp_path / "train.py").write_text(PROGRAM)
    content = {
        "name": "starve",
        "workload": {
            "recipe": "custom",
            "run": [sys.executable, "train.py", "--w", "a", "--steps", "{steps}"],
            "global_batch_size": 4,
            "metrics": {"log": r"step (?P<step>\d+): loss (?P<loss>\S+)", "hook": False},
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "baseline": {"micro_batch_size": 4, "own": {"--lean": False}},
        "space": {
            "own": {"--w": ["a", "cheat", "fade"], "--lean": [False, True]},
            "forbid": [{"own": {"--w": ["cheat", "fade"], "--lean": True}}],
        },
        "measure": {"num_steps": 8, "max_steps": 12},
        "search": {"sampler": "grid", "early_stop": "off"},
        "confirm": {"finalists": 1, "min_rounds": 2, "max_rounds": 4, "soak": "4s"},
        "gate": {"num_steps": 6},
        "tracking": {"report": False},
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(content))
    proof = run("submit", str(file), home=tmp_path / "home")["proof"]
    assert proof["conclusion"] == "confirmed", proof
    assert [one["by"] for one in proof["disqualified"]] == ["gate", "soak"]
    assert "slows down" in proof["disqualified"][1]["reason"]
    assert [one["answer"] for one in proof["soaks"]] == ["failed", "passed"]
    assert 1.1 < proof["speedup"]["value"] < 1.8


def test_unconfirmable_trials_are_rejected_with_a_reason(cheated):
    home, _ = cheated
    assert "the baseline cannot be confirmed" in run("confirm", "cheated", "baseline", home=home, code=2)
    assert "no trial 't099'" in run("confirm", "cheated", "t099", home=home, code=2)
