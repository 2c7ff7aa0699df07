"""The check: one short run in a real gang, of programs that hold, and of those with the usual mistakes."""

import json
import sys

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.commands.short_run import Checked, expected_duration
from orchestrator.config.sweep import load_sweep
from orchestrator.frameworks.catalog import training
from trials.outcome import Measured, Measurement, StepBreakdown
from trials.reports import Findings, ScriptFacts, ScriptReport

PROGRAM = """\
import argparse, json, os, pathlib, time

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int)
parser.add_argument("--quiet", action="store_true")
parser.add_argument("--claim", type=int)
parser.add_argument("--need")
parser.add_argument("--takes", type=float, default=0.02)
options = parser.parse_args()
if options.need:
    __import__(options.need)
if options.claim is not None:
    file = pathlib.Path(os.environ["TUNE_CLUSTER_REPORT"], "rank" + os.environ["RANK"] + ".jsonl")
    line = {"v": 1, "source": "report", "t": time.time(), "event": "facts", "micro_batch_size": options.claim}
    file.write_text(json.dumps(line) + "\\n")
for step in range(1, 200):
    time.sleep(options.takes)
    if not options.quiet:
        print(f"step {step}: loss {1 / step:.3f}, 20.5 ms", flush=True)
    elif step > 20:
        break
"""


def sweep(folder, *words):
    (folder / "program.py").write_text(PROGRAM)
    content = {
        "name": "checked",
        "workload": {
            "recipe": "custom",
            "run": ["python", "program.py", "--bs", "{micro_batch_size}", *words],
            "global_batch_size": 4,
            "metrics": {"log": r"step (?P<step>\d+): loss (?P<loss>\S+), (?P<step_ms>\S+) ms", "hook": False},
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "baseline": {"micro_batch_size": 4},
        "space": {"micro_batch_size": [4]},
    }
    file = folder / "checked.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.representative("good", "typo")
@pytest.mark.parametrize(
    ("words", "ok", "outcome", "problem"),
    [
        pytest.param([], True, "measured", None, id="good"),
        pytest.param(["--bz", "1"], False, "crashed", "exited with code 2", id="typo"),
        pytest.param(["--need", "no_such_module"], False, "crashed", "No module named", id="module-missing"),
        pytest.param(["--quiet"], False, "crashed", "step", id="metrics-missing"),
        pytest.param(["--claim", "2"], False, "infeasible", "not applied", id="knob-without-effect"),
        pytest.param(
            ["--takes", "0.3"], False, "not_believed", "20 ms per step by log:pattern, but ", id="wrong-timer"
        ),
    ],
)
def test_a_short_run_shows_whether_trials_can_be_measured(tmp_path, words, ok, outcome, problem):
    file = sweep(tmp_path, *words)
    result = run("check", file, "--home", tmp_path / "home", "--json")
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["outcome"]) == (ok, outcome), (answer["problem"], answer["log_tail"])
    assert result.exit_code == (0 if ok else 2)
    assert problem is None or problem in answer["problem"]
    if ok:
        sources = {source["name"]: source for source in answer["sources"]}
        assert sources["loss"]["source"].startswith("log")
        assert sources["loss"]["resolution"] == pytest.approx(0.001)
        assert sources["step_time_s"]["resolution"] == pytest.approx(0.0001)
        assert 0 < answer["starting_s"] < 60
        assert answer["expected"]["num_trials"] == 1, "the baseline is all there is"
        assert answer["starting_s"] < answer["expected"]["least_s"] <= answer["expected"]["most_s"]
    assert ("on PATH" in (answer["remedy"] or "")) is ("--need" in words)
    if outcome == "crashed" and words[0] == "--bz":
        assert any("unrecognized arguments: --bz 1" in line for line in answer["log_tail"][-3:])
    assert not list((tmp_path / "home").glob("checks/*"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_submit_does_not_begin_what_the_check_refuses(tmp_path):
    file = sweep(tmp_path, "--bz", "1")
    refused = run("submit", file, "--home", tmp_path / "home")
    assert refused.exit_code == 2
    assert "unrecognized arguments" in refused.stderr
    assert "--no-check" in refused.stderr
    assert not (tmp_path / "home" / "sweeps").exists() or not list((tmp_path / "home" / "sweeps").iterdir())


MODEL = """\
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2000):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ({"precision": ["O0", "O1"]}, None),
        ({"precision": ["O0", "O1"], "recompute": ["none", "full"]}, "recompute is refused"),
    ],
)
def test_a_check_shows_which_knobs_the_program_takes(tmp_path, inside, problem):
    file = sweep(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    content = yaml.safe_load(file.read_text())
    content["workload"] |= {"run": [sys.executable, "model.py"], "metrics": {}, "launcher": "own"}
    file.write_text(yaml.safe_dump(content | {"space": {"inside": inside}}))
    result = run("check", file, "--home", tmp_path / "home", "--json")
    found = json.loads(result.stdout)["inside"]
    assert result.exit_code == 0, "what is refused is no fault of the file"
    assert set(found["knobs"]) == set(inside)
    assert (found["problem"] is None) == (problem is None) and (problem or "") in (found["problem"] or "")
    assert [name for name, _ in found["applied"]] == ([] if problem else list(inside))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_gang_that_is_lost_once_is_launched_again(tmp_path):
    file = sweep(tmp_path)
    marker = tmp_path / "lost-before"
    (tmp_path / "program.py").write_text(
        "import os, pathlib, signal\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    warden = pathlib.Path('/proc', str(os.getppid()), 'stat').read_text().rpartition(')')[2].split()[1]\n"
        "    os.kill(int(warden), signal.SIGKILL)\n" + PROGRAM
    )
    result = run("check", file, "--home", tmp_path / "home", "--json")
    assert json.loads(result.stdout)["outcome"] == "measured", result.output
    assert marker.exists()
    assert "launching again" in result.stderr


def test_a_virtual_cluster_has_nothing_to_check(tmp_path):
    file = sweep(tmp_path)
    content = yaml.safe_load(file.read_text())
    file.write_text(
        yaml.safe_dump({**content, "cluster": {"kind": "simulated", "simulation": {"accelerator": "h100"}}})
    )
    result = run("check", file, "--home", tmp_path / "home")
    assert result.exit_code == 2
    assert "cluster.kind" in result.stderr or "simulated" in result.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_pythonpath_set_by_the_program_does_not_hide_the_hook(tmp_path):
    file = sweep(tmp_path)
    content = yaml.safe_load(file.read_text())
    content["workload"]["env"] = {"PYTHONPATH": "{out}"}
    content["workload"]["metrics"]["hook"] = True
    file.write_text(yaml.safe_dump(content))
    (tmp_path / "program.py").write_text(
        "import os, time\n"
        "ours, own = os.environ['PYTHONPATH'].rsplit(os.pathsep, 1)\n"
        "assert 'hook' in ours and os.path.isdir(own)\n"
        "from tune_cluster_report import report\n"
        "for step in range(1, 200):\n"
        "    time.sleep(0.02)\n"
        "    report(step=step, loss=1 / step)\n"
    )
    answer = json.loads(run("check", file, "--home", tmp_path / "home", "--json").stdout)
    assert {source["source"] for source in answer["sources"] if source["name"] == "loss"} == {"report"}, answer


def checked_with(report, **fields):
    found = Measurement(
        world_size=1,
        tokens_per_step=1,
        step_times_s=(0.1,),
        breakdown=StepBreakdown(),
        peak_allocated_bytes=(),
        peak_reserved_bytes=(),
        num_warmup_steps=1,
        losses=(),
        grad_norms=(),
        model_flops_per_token=0.0,
        findings=Findings(script=report),
    )
    outcome = Measured(measurement=found)
    return Checked(
        sweep="mine",
        candidate="mbs1",
        values={},
        command=(),
        outcome=outcome,
        starting_s=1.0,
        deadline_s=120.0,
        duration_s=2.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("release", "is_known"), [("5.23.0", True), ("5.24.0.dev0", True), ("4.30.1", False), ("9.0", False)]
)
def test_a_release_unknown_to_the_recipe_is_refused(release, is_known):
    report = ScriptReport(versions=(("torch", "2.13.0"), ("transformers", release)))
    checked = checked_with(report, training=training("transformers"))
    assert checked.is_good is is_known
    assert (release in (checked.to_json()["problem"] or "")) is not is_known


def test_the_expected_duration_counts_every_launch(tmp_path):
    def expected(num_legal, **changes):
        spec = load_sweep(changed(sweep(tmp_path), **changes))
        found = expected_duration(spec, num_legal, starting_s=10.0, step_s=0.5)
        return found.num_trials, found.least_s, found.most_s

    steps = {"min_warmup_steps": 2, "max_warmup_steps": 4, "num_steps": 8, "max_steps": 16}
    short, long = 10 + 10 * 0.5, 10 + 20 * 0.5
    confirm = {"finalists": 2, "min_rounds": 3, "max_rounds": 6, "soak": "off"}
    settings = {"measure": steps, "confirm": confirm, "gate": "off"}
    assert expected(9, **settings, budget={"max_trials": 5}) == (5, (5 + 3 * 3) * short, (5 + 6 * 3) * long)
    assert expected(3, **settings) == (3, (3 + 3 * 3) * short, (3 + 6 * 3) * long)
    gated = {**settings, "gate": {"num_steps": 20}}
    assert expected(3, **gated)[1] == (3 + 3 * 3) * short + 2 * (10 + 20 * 0.5)
    soaked = {**settings, "confirm": {**confirm, "soak": "90s"}}
    assert expected(3, **soaked)[1] == (3 + 3 * 3) * short + 2 * (10 + 90)
    assert expected(1, **gated) == (1, short, long), "nothing but the baseline: nothing to confirm"
    assert expected(9, **{**settings, "confirm": "off"}, budget={"wall_time": "1m"}) == (9, 60.0, 60.0)


def changed(file, **sections):
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **sections}))
    return file


@pytest.mark.parametrize(
    ("written", "seen", "right"), [(64, 64, True), (64, 65, True), (64, 32, True), (64, 128, False)]
)
def test_longer_samples_than_the_file_counts_are_refused(written, seen, right):
    checked = checked_with(ScriptReport(facts=ScriptFacts(seq_length=seen)), seq_length=written)
    assert checked.is_good is right
    assert right or "seq_length: 128" in checked.to_json()["remedy"]


@pytest.mark.parametrize(
    ("batch", "micro", "forwards", "ranks", "right"),
    [(64, 32, 2, 1, True), (64, 16, 2, 2, True), (32, 16, 3, 2, True), (7, 32, 2, 1, False), (128, 32, 2, 1, False)],
    ids=["accumulated", "two-ranks", "several-forwards", "typed-at-random", "twice-as-much"],
)
def test_a_batch_that_the_program_does_not_train_is_refused(batch, micro, forwards, ranks, right):
    facts = ScriptFacts(micro_batch_size=micro, forwards_per_step=forwards)
    checked = checked_with(ScriptReport(facts=facts), global_batch_size=batch, data_parallel=ranks)
    assert checked.is_good is right
    if not right:
        shown = checked.to_json()
        assert f"global_batch_size is {batch}" in shown["problem"]
        assert "trains 64 samples" in shown["problem"]
        assert "global_batch_size: 64" in shown["remedy"]
