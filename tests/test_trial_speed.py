"""``python -m benchmarks.runner.trial_speed``: loops by hand train alike, and the page says what was found."""

import json

import pytest

from benchmarks.runner import trial_speed
from benchmarks.runner.trial_speed import MODEL, SMALL, Plan, cases
from tests.trials.ranks import run_ranks

PLAN = Plan(turns=1, steps=1, grad_norm=False, model=SMALL, seq_length=16)
NUM_STEPS = 3


def losses(case, peer, way):
    """Of the first steps of the loop by hand, on this rank."""
    from benchmarks.runner.peers import peer_step

    case = cases(SMALL)[case]
    spec = trial_speed._spec(case, case.ours[way], PLAN)
    from trials.parallel.mesh import RankIdentity

    step = peer_step(peer, spec, trial_speed._batches(spec, RankIdentity.from_env().rank), clips=False)
    return [step() for _ in range(NUM_STEPS)]


@pytest.mark.parametrize(
    ("case", "peer", "way"),
    [
        pytest.param("ddp", "ddp", "ddp", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2", "fsdp2", "zero 3", marks=pytest.mark.exhaustive),
        ("zero1", "zero1", "zero 1"),
        ("tp", "tensor", "local"),
        pytest.param("zero2-accumulating", "each", "each", marks=pytest.mark.exhaustive),
        ("zero3-accumulating", "last", "last"),
    ],
)
def test_loops_by_hand_train_alike(case, peer, way, tmp_path):
    """From equal weights and batches, whatever the layout: a loop that left something out would be faster for it."""
    for folder in ("alone", "both"):
        (tmp_path / folder).mkdir()
    (alone,) = run_ranks(losses, 1, tmp_path / "alone", "single", "plain", "one process")
    both = run_ranks(losses, 2, tmp_path / "both", case, peer, way)
    assert [sum(step) / 2 for step in zip(*both, strict=True)] == pytest.approx(alone, rel=1e-4)
    assert alone[0] != alone[-1]


def test_a_quick_run_compares_every_way_of_a_layout(tmp_path, capsys):
    page = tmp_path / "page.md"
    trial_speed.main(["--quick", "--case", "tp", "--json", "--out", str(page)])
    rows = json.loads(capsys.readouterr().out)["ratios"]
    assert [row["ours"] for row in rows] == ["local", "dtensor"]
    for row in rows:
        time_ratio = row["step_time"]
        assert 0 < time_ratio["low"] <= time_ratio["value"] <= time_ratio["high"]
        assert row["step_bytes"] > 0 and row["ours_s"] > 0
        assert f"| tp | {row['ours']} | parallelize_module, loss_parallel |" in page.read_text()


def test_where_no_loop_by_hand_runs_ours_are_compared_with_each_other():
    ways = cases(MODEL)["cp"].ours
    times = {f"ours, {way}": [float(number), float(number)] for number, way in enumerate(ways, start=1)}
    found = trial_speed._Found(times, dict.fromkeys(times, 1024), {"context": "no such operator"})
    rows, notes = trial_speed.rows_of("cp", cases(MODEL)["cp"], found)
    assert [(row["ours"], row["peer"], row["step_time"]["value"]) for row in rows] == [
        ("ulysses", "ours, all_gather", 2.0),
        ("ring", "ours, all_gather", 3.0),
    ]
    (note,) = notes
    assert note.startswith("cp: context_parallel") and note.endswith("does not run here: no such operator")


def test_the_interval_of_a_median_is_the_binomials():
    """Of 15 values the 4th and the 12th: 3 or fewer of 15 lie on one side with a probability of 0.0176."""
    ratio = trial_speed._ratio([float(value) for value in range(1, 16)])
    assert (ratio.value, ratio.low, ratio.high) == (8.0, 4.0, 12.0)
    few = trial_speed._ratio([1.0, 3.0])
    assert (few.value, few.low, few.high) == (2.0, 1.0, 3.0)
