"""Sweeps removed: on request, and by others of their name that replace what measured nothing."""

import json
import shutil

import pytest

from orchestrator.sweep.events import Promoted, TrialProposed
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.support import long_story
from tests.support.cli_homes import keep, run
from tests.support.sweep_files import SIMULATED, write

ONE_DEVICE = {
    **SIMULATED,
    "cluster": {"kind": "simulated", "num_nodes": 1, "devices_per_node": 1, "simulation": {"accelerator": "a100-80"}},
    "budget": {"max_trials": 1},
    "confirm": "off",
}


def left_alone(folder, *more, speeds=(0.1, 0.08)):
    return keep(folder, "story", [*long_story.events(long_story.speeds(*speeds), finished=False), *more])


def test_nothing_is_removed_without_confirmation(tmp_path):
    left_alone(tmp_path)
    refused = run("delete", "story", "--home", tmp_path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "use --yes" in refused.stderr
    assert Home(tmp_path).sweeps() == ["story"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_sweep_is_removed_with_its_runs_in_mlflow_and_another_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unused")
    home, file = Home(tmp_path / "home"), write(tmp_path, {**ONE_DEVICE, "budget": {"max_trials": 2}})
    for name in ("one", "two"):
        file.write_text(
            file.read_text().replace("name: simulated", f"name: {name}").replace("name: one", f"name: {name}")
        )
        assert run("submit", file, "--home", home.path).exit_code == 0
    two = home.read("two")
    before = Tracker(home.default_tracking_uri).sweep_runs(two.state)
    removed = run("delete", "two", "--mlflow", "--yes", "--json", "--home", home.path)
    body = json.loads(removed.stdout)
    assert (body["mlflow_runs"], body["trials"]) == (len(before), len(two.state.trials))
    assert len(before) > 2 and not home.sweep_folder("two").exists()
    assert Tracker(home.default_tracking_uri).sweep_runs(two.state) == {}
    assert Tracker(home.default_tracking_uri).sweep_runs(home.read("one").state)
    assert run("submit", file, "--home", home.path).exit_code == 0, "the name is free again"


def test_a_running_sweep_is_not_removed_even_with_force(tmp_path):
    ledger = left_alone(tmp_path)
    with ledger.hold():
        refused = run("delete", "story", "--yes", "--force", "--home", tmp_path)
    assert refused.exit_code == 2
    assert "has a running controller" in refused.stderr and "tune-cluster cancel story" in refused.stderr
    assert Home(tmp_path).sweeps() == ["story"]


def test_a_sweep_behind_a_promoted_version_is_removed_only_with_force(tmp_path):
    record = {"action": "promote", "name": "llama", "from_version": "", "to_version": "3", "trial": "1", "by": "anna"}
    left_alone(tmp_path, Promoted(at_s=1e9, record=record))
    refused = run("delete", "story", "--yes", "--home", tmp_path)
    assert refused.exit_code == 2
    assert "depend on the sweep 'story': llama version 3" in refused.stderr
    assert run("delete", "story", "--yes", "--force", "--home", tmp_path).exit_code == 0
    assert Home(tmp_path).sweeps() == []


def test_a_sweep_whose_ledger_cannot_be_read_can_be_removed(tmp_path):
    left_alone(tmp_path).path.write_bytes(b"SQLite format 3\0 and no more")
    for more in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (Home(tmp_path).sweep_folder("story") / more).unlink(missing_ok=True)
    assert "--force" in run("delete", "story", "--yes", "--home", tmp_path).stderr
    removed = run("delete", "story", "--yes", "--force", "--home", tmp_path)
    assert removed.exit_code == 0, removed.stderr
    assert "an unreadable ledger" in removed.stdout


@pytest.mark.representative("True")
@pytest.mark.parametrize("has_measured", [False, True])
def test_only_a_sweep_without_measurements_is_replaced(tmp_path, has_measured):
    file = write(tmp_path, {**ONE_DEVICE, "name": "story"})
    events = long_story.events(long_story.speeds(0.1), finished=False)
    kept = events if has_measured else [e for e in events if not isinstance(e, TrialProposed)][:1]
    keep(tmp_path / "home", "story", kept)
    assert "was started with a different file" in run("submit", file, "--home", tmp_path / "home").stderr
    replaced = run("submit", file, "--replace", "--home", tmp_path / "home")
    if has_measured:
        assert replaced.exit_code == 2
        for words in ("has measured t000", "another name", "tune-cluster resume story", "tune-cluster delete story"):
            assert words in replaced.stderr
    else:
        assert replaced.exit_code == 0, replaced.stderr
        assert Home(tmp_path / "home").read("story").state.best is not None
    shutil.rmtree(tmp_path / "home")
