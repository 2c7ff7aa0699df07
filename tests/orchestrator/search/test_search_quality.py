"""The benchmark of the samplers, on published problems: whole, damaged, and of unknown devices."""

import csv
import json

import numpy as np
import pytest

from benchmarks.search.priors import Posteriors, Priors
from benchmarks.search.quality import main
from benchmarks.search.runs import measure
from benchmarks.search.samplers import guided
from benchmarks.search.tables import load_problems
from benchmarks.search.transfer import in_sequence
from tests.support import ROOT

TABLE = ROOT / "tests" / "data" / "published.csv"
NAME = "bigscience-1b3-ec369f"
with TABLE.open(encoding="utf-8", newline="") as _file:
    ROWS = [row for row in csv.DictReader(_file) if row["problem"] == NAME]


def rate(row):
    """Tokens per second and device, in full; empty where it did not run."""
    tokens = int(row["global_batch"]) * int(row["seq_len"]) / int(row["n_gpus"])
    return row["step_time_s"] and str(tokens / float(row["step_time_s"]))


UNSAID = ("heads", "vocab", "gpus_per_node", "interconnect", "n_micro_batches", "precision_detail", "sp", "gpu_mem_GB")
TABLES = {
    "whole": ROWS,
    "blanks": [{**row, **dict.fromkeys(UNSAID, "")} for row in ROWS],
    "some blank": [{**row, "dp": "", "recompute": ""} if i % 3 == 0 else row for i, row in enumerate(ROWS)],
    "nothing out of memory": [row for row in ROWS if row["oom"] != "true"],
    "repeated": [*ROWS, *({**row, "id": row["id"] + "-again"} for row in ROWS)],
    "rates only": [{**row, "step_time_s": "", "tokens_per_s_per_gpu": rate(row)} for row in ROWS],
    "an unknown device": [{**row, "gpu": "Quux 9000"} for row in ROWS],
    "mixtures of experts": [{**row, "moe": "experts of some kind"} for row in ROWS],
}


def search(rows, tmp_path, capsys, *options):
    path = tmp_path / "table.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(rows)
    main(["--table", str(path), "--json", "--seeds", "1", "--jobs", "1", *options])
    return json.loads(capsys.readouterr().out)


@pytest.mark.representative("blanks", "an unknown device", "mixtures of experts")
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_searched_to_its_best(name, tmp_path, capsys):
    (problem,) = search(TABLES[name], tmp_path, capsys, "--samplers", "guided", "--no-transfer")["problems"]
    assert (problem["problem"], list(problem["samplers"])) == (NAME, ["guided"])
    assert 1 <= problem["samplers"]["guided"]["trials_to_2pct"] <= problem["size"]
    is_modelled = name not in ("an unknown device", "mixtures of experts")
    assert is_modelled == (problem.get("notes") is None)
    if is_modelled:
        assert problem["samplers"]["guided"]["trials_to_2pct"] <= 4
    else:
        assert all("16 of 16 configurations are not modelled" in note for note in problem["notes"][:1])


@pytest.mark.exhaustive
def test_samplers_are_compared_with_and_without_earlier_sweeps(tmp_path, capsys):
    (problem,) = search(ROWS, tmp_path, capsys, "--samplers", "guided", "tpe")["problems"]
    assert problem["samplers"].keys() == {"guided", "tpe", "guided_without_transfer", "tpe_without_transfer"}
    for figures in problem["samplers"].values():
        assert 1 <= figures["trials_to_2pct"] <= problem["size"]


@pytest.mark.exhaustive
def test_every_sampler_is_reported_and_a_table_without_problems_is_refused(tmp_path, capsys):
    found = search(ROWS, tmp_path, capsys, "--no-transfer")
    (entry,) = found["sources"]
    assert list(entry["samplers"]) == ["guided", "tpe", "plain_order", "optuna_default", "random"]
    for figures in entry["samplers"].values():
        assert {"median_trials_to_2pct", "first_oom", "regret_after_5"} <= figures.keys()
    with pytest.raises(SystemExit):
        search(ROWS[:5], tmp_path, capsys)
    assert "no problem with at least 8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        search([{**ROWS[0], "layers": "many"}], tmp_path, capsys)
    assert "layers is 'many'" in capsys.readouterr().err


def test_published_problems_are_solved_within_few_trials_from_nothing():
    """The prior has seen none of these sources."""
    trials = []
    for problem in load_problems(TABLE):
        posteriors = Posteriors(problem, Priors.named("unseen", problem.source))
        trials.append(measure(problem, guided(problem, posteriors, 0)).trials_to_2pct)
    assert len(trials) == 4
    assert np.mean(trials) <= 4


def test_a_later_sweep_learns_only_from_trials_of_earlier_ones():
    problems = [problem for problem in load_problems(TABLE) if problem.source == "vtrain-single"]
    (first, alone), (second, taught) = in_sequence(problems, "unseen", 0)
    assert alone.history == {}
    known = {c.time_s for c in first.configurations}
    assert taught.history and set(taught.history.values()) <= known
    assert min(taught.history) >= len(second)
