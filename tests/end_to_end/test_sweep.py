"""Whole sweeps: the real runtime, real gangs on this host, a real MLflow store."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.base import ClusterError
from cluster.connect import connect
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, TrialProposed
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.sweep_screen import LiveView
from tests.support import sweeps
from tests.support.cli_homes import run
from tests.support.mlflow_store import new_store
from trials.outcome import Measured

pytestmark = pytest.mark.slow


def submit(file, home):
    with LiveView() as view:
        return controller.submit(load_sweep(file), Home(home), observer=view)


def command(*arguments, home, **options):
    return subprocess.Popen(
        [Path(sys.executable).with_name("tune-cluster"), *arguments, "--home", home],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def processes_mentioning(text):
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                reported = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in reported:
                found.append((int(folder.name), reported[:200]))
    return found


def eventually_gone(text, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while (left := processes_mentioning(text)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def fresh_home(folder):
    """A home with an empty MLflow store: making one takes seconds."""
    home = folder / "home"
    home.mkdir()
    new_store(home)
    return home


class Undisturbed(NamedTuple):
    """A sweep that ran in peace, and was then submitted again."""

    home: Path
    first: controller.SweepResult
    again: controller.SweepResult


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    file, home = sweeps.write(folder, budget={"max_trials": 5}), folder / "home"
    return Undisturbed(home, submit(file, home), submit(file, home))


def test_a_sweep_is_measured_once_and_only_read_the_second_time(undisturbed):
    state = undisturbed.first.state
    assert state.status == "finished"
    assert [trial.status for trial in state.trials] == ["measured"] * 5
    assert state.trials[0].candidate.layout.dp_replicate == 2
    keys = [trial.candidate.config_key for trial in state.trials]
    assert len(set(keys)) == 5
    assert state.device_seconds > 0
    assert undisturbed.again.state == state
    assert recorded_trials(undisturbed.home) == [(str(trial), "FINISHED") for trial in range(5)]


@pytest.mark.exhaustive
def test_small_gangs_run_side_by_side_on_disjoint_devices(tmp_path):
    file = sweeps.write(
        tmp_path,
        cluster={"isolation": "device"},
        search={"max_concurrent": 2},
        space={"dp_replicate": [1]},
        baseline={"dp_replicate": 1},
        measure={"num_steps": 40, "max_steps": 40},
        budget={"max_trials": 3},
    )
    home = fresh_home(tmp_path)
    result = submit(file, home)
    assert [trial.status for trial in result.state.trials] == ["measured"] * 3
    with Ledger.open_existing(home / "sweeps" / "tiny") as ledger:
        events = list(ledger.events())
    running, most = {}, 0
    for event in events:
        if isinstance(event, AttemptLaunched):
            assert not set(event.ranks) & {device for ranks in running.values() for device in ranks}
            running[event.trial] = event.ranks
        elif isinstance(event, AttemptEnded):
            del running[event.trial]
        most = max(most, len(running))
    assert most == 2


def test_every_kind_of_failure_has_its_outcome_and_the_sweep_goes_on(tmp_path):
    file = sweeps.write(
        tmp_path,
        runner="tests.support.user_runners:faulty",
        space={"dp_replicate": [2], "micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]},
        budget={"max_trials": 6, "consecutive_failures": 6},
        deadlines={"starting_s": 20, "stall_s": 3},
    )
    result = submit(file, fresh_home(tmp_path))
    found = {
        (trial.candidate.micro_batch_size, "full" if trial.candidate.recompute.full else "none"): trial.outcome
        for trial in result.state.trials
    }
    assert result.state.status == "finished"
    assert found[1, "none"].kind == "measured"
    assert found[1, "full"].kind == "diverged"
    assert found[2, "none"].kind == "crashed"
    assert "a fault of this candidate" in found[2, "none"].evidence.message
    assert found[4, "none"].kind == "crashed"
    assert found[4, "none"].evidence.exit_code == -signal.SIGKILL
    assert found[4, "none"].evidence.rank == 1
    assert eventually_gone(str(tmp_path)) == []


@pytest.mark.exhaustive
def test_impossible_figures_are_faults_and_cannot_be_promoted(tmp_path):
    """Negative and zero step times: neither measured, nor explained into a traceback, nor promoted with --force."""
    file = sweeps.write(
        tmp_path,
        runner="tests.support.user_runners:lying",
        workload={"global_batch_size": 16},
        space={"dp_replicate": [2], "micro_batch_size": [1, 2, 4, 8]},
        budget={"max_trials": 4},
    )
    home = fresh_home(tmp_path)
    result = submit(file, home)
    found = {trial.candidate.micro_batch_size: trial.outcome for trial in result.state.trials}
    kinds = {size: outcome.kind for size, outcome in found.items()}
    assert kinds == {1: "measured", 2: "crashed", 4: "crashed", 8: "not_believed"}
    assert "1 ms per step by the rank, but " in found[8].evidence.message
    assert "reported step_times_s[1] = -0.1" in found[2].evidence.message
    assert "reported step_times_s[0] = 0.0" in found[4].evidence.message
    explained = run("explain", "tiny", "--home", home)
    assert explained.exit_code == 0, explained.output
    for trial in result.state.trials[1:]:
        refused = run("promote", "tiny", "--trial", f"t{trial.number:03d}", "--force", "--name", "lie", "--home", home)
        assert refused.exit_code == 2 and "was not measured" in refused.stderr


@pytest.mark.exhaustive
def test_a_hang_ends_at_its_deadline_and_too_little_memory_is_an_out_of_memory(tmp_path):
    file = sweeps.write(
        tmp_path,
        runner="tests.support.user_runners:faulty",
        workload={"seq_length": 1024, "global_batch_size": 64},
        space={"dp_replicate": [1], "micro_batch_size": [1, 8, 64]},
        baseline={"dp_replicate": 1, "micro_batch_size": 1},
        cluster={"device_memory": "200MiB"},
        measure={"max_warmup_steps": 1},
        deadlines={"starting_s": 6},
    )
    result = submit(file, fresh_home(tmp_path))
    found = {trial.candidate.micro_batch_size: trial.status for trial in result.state.trials}
    assert found == {1: "measured", 8: "timed_out", 64: "oom"}


@pytest.mark.exhaustive
def test_the_same_error_on_the_first_three_attempts_stops_the_sweep_with_it(tmp_path):
    file = sweeps.write(tmp_path, runner="tests.support.user_runners:always_raises")
    process = command("submit", file, "--json", home=fresh_home(tmp_path))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    body = json.loads(stdout)
    assert body["state"] == "failed"
    assert body["trials"]["crashed"] == 3
    assert "a mistake in the user's code" in stderr
    lines = stderr.splitlines()
    assert not any(line.startswith("Traceback") for line in lines)
    assert any(line.startswith("  | ") and "always_raises" in line for line in lines), "the rank's last words"
    assert body["best_of_search"] is None


def num_events(home):
    try:
        with Ledger.open_existing(home / "sweeps" / "tiny") as ledger:
            return len(list(ledger.events()))
    except LookupError:
        return 0


def recorded_trials(home):
    """(trial, status) of every trial run in the sweep's MLflow store."""
    from mlflow import MlflowClient

    client = MlflowClient(Home(home).default_tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.`tc.kind` = 'trial'")
    return sorted((run.data.tags["tc.trial"], run.info.status) for run in runs)


def kill_after(process, home, target, delay_s):
    """SIGKILL the controller some moments after its ledger holds ``target`` events; False if it ended before."""
    while num_events(home) < target:
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    time.sleep(delay_s)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.exhaustive
@pytest.mark.fault
def test_a_controller_killed_at_any_moment_resumes_and_measures_nothing_twice(tmp_path, undisturbed):
    """SIGKILL along the way; then every trial is there once, as without kills, and no process is left."""
    file = sweeps.write(tmp_path, budget={"max_trials": 5})
    home = fresh_home(tmp_path)
    rng = random.Random(0)
    num_kills = 0
    for target in (3, 9):
        process = command("submit", file, "--json", home=home)
        num_kills += kill_after(process, home, target, rng.uniform(0.0, 0.4))
        assert eventually_gone(str(home)) == []
    process = command("submit", file, "--json", home=home)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["trials"]["measured"] == 5
    assert num_kills >= 1
    with Ledger.open_existing(home / "sweeps" / "tiny") as ledger:
        events = list(ledger.events())
    proposals = [event.candidate for event in events if isinstance(event, TrialProposed)]
    assert proposals == [trial.candidate for trial in undisturbed.first.state.trials]
    measured = [e.trial for e in events if isinstance(e, AttemptEnded) and isinstance(e.outcome, Measured)]
    assert sorted(measured) == list(range(5))
    assert eventually_gone(str(home)) == []
    assert recorded_trials(home) == [(str(trial), "FINISHED") for trial in range(5)]


class LosingCluster:
    """A backend around a real one, whose gangs are lost soon after their launch."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def launch(self, launch):
        self._inner.launch(launch)
        self._inner.kill(launch.attempt_id, "the cable was pulled")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._inner.close()


@pytest.mark.exhaustive
@pytest.mark.fault
def test_a_cluster_that_loses_every_gang_stops_the_sweep_which_can_resume(tmp_path, monkeypatch):
    file, home = sweeps.write(tmp_path, budget={"max_trials": 3}), fresh_home(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(controller, "connect", lambda *args, **options: LosingCluster(connect(*args, **options)))
        with pytest.raises(ClusterError, match=r"5 attempts in a row.*the cable was pulled"):
            submit(file, home)
    assert not controller.load("tiny", Home(home)).state.is_over
    result = submit(file, home)
    assert result.state.status == "finished"
    assert result.state.trials[2].status == "measured"


@pytest.mark.exhaustive
@pytest.mark.fault
def test_sigterm_shuts_down_cleanly_and_the_next_submit_resumes(tmp_path):
    home = fresh_home(tmp_path)
    file = sweeps.write(tmp_path, measure={"num_steps": 400, "max_steps": 400}, budget={"max_trials": 1})
    process = command("submit", file, home=home)
    while num_events(home) < 4:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(0.5)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; to continue the sweep tiny: " in stderr
    assert eventually_gone(str(home)) == []
    state = controller.load("tiny", Home(home)).state
    assert state.trials[0].status == "gang_lost"
    assert state.trials[0].num_lost == 0
    assert state.device_seconds > 0
    assert [trial.status for trial in submit(file, home).state.trials] == ["measured"]


def test_another_file_under_the_same_name_is_refused_and_nothing_changes(tmp_path, undisturbed):
    home = undisturbed.home
    before = (home / "sweeps" / "tiny" / "ledger.sqlite").read_bytes()
    process = command("submit", sweeps.write(tmp_path, search={"seed": 99}), home=home)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Rename this sweep" in stderr
    assert (home / "sweeps" / "tiny" / "ledger.sqlite").read_bytes() == before
