"""Sweeps from Python, on a simulated cluster: the notebook in the documentation runs as it stands."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.api import SweepError, load, results, submit
from orchestrator.cli.main import main
from orchestrator.errors import ConfigError
from tests.support import virtual_sweeps
from tests.support.sweep_files import write

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "sweep.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_agrees_with_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "figures in it would be out of date"
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    trials, best = names["trials"], names["found"].verdict["best_of_search"]
    assert len(trials) == 6 and trials["tokens_per_s_per_device"].is_monotonic_decreasing
    assert trials.loc[best["trial"], "tokens_per_s_per_device"] == pytest.approx(
        best["tokens_per_s_per_device"], rel=1e-3
    )
    assert names["found"].curves(best["trial"])["step_time_ms"].median() == pytest.approx(
        trials.loc[best["trial"], "step_time_ms"], rel=1e-3
    )
    _compare_with_a_smaller_budget(tmp_path, trials)


def _compare_with_a_smaller_budget(folder, trials):
    text = (folder / "simulated.yaml").read_text()
    (folder / "other.yaml").write_text(
        text.replace("name: simulated", "name: other")
        .replace("max_trials: 6", "max_trials: 1")
        .replace("[1, 2, 4]", "1")
    )
    assert submit("other.yaml", options=["--no-check"]).trials.index.tolist() == [0]
    shown = CliRunner().invoke(main, ["compare", "simulated", "other", "--json"])
    found = json.loads(shown.stdout)
    assert found["same"] is False and found["budget"] == {"max_trials": ["6", "1"]}
    assert found["knobs"]["recompute"] == [trials.iloc[0]["recompute"], "full:32"]
    ((name, (one, other)),) = found["trials in both"].items()
    assert name == trials.loc[0, "name"] and other == f"{one} (1.00x)", "both measured the baseline, alike"


def test_errors_match_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match=r"no sweep 'nothing'"):
        results("nothing", home=tmp_path)
    broken = write(tmp_path, {**virtual_sweeps.SWEEP, "budget": {"max_trails": 6}})
    with pytest.raises(ConfigError, match="max_trials"):
        load(broken)
    (tmp_path / "taken").write_text("no folder")
    with pytest.raises(SweepError) as failed:
        submit(write(tmp_path, virtual_sweeps.SWEEP), home=tmp_path / "taken")
    assert failed.value.exit_code == 2
