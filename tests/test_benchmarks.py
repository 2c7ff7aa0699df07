"""Benchmarks that others run: ``benchmarks.gpu`` works wherever torch does, and loops by hand, which
``benchmarks.runner.trial_speed`` compares the runner with, train alike."""

import importlib
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import plain, training
from benchmarks.gpu.__main__ import parse, run_part
from benchmarks.gpu.kept import Kept
from benchmarks.gpu.parts import LEFT_OUT, NAMES, PARTS, Part, Setting, known, rows_path
from benchmarks.gpu.report import markdown
from benchmarks.runner import trial_speed
from benchmarks.runner.trial_speed import SMALL, Plan, cases
from tests.support import ROOT
from tests.trials.ranks import run_ranks
from trials.legality import check

NOT_INSTALLED = (
    "ray",
    "optuna",
    "mlflow",
    "pydantic",
    "yaml",
    "click",
    "rich",
    "transformers",
    "torchao",
    "pynvml",
    "PIL",
)
BLOCKER = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_INSTALLED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
UNKNOWN = dict.fromkeys(("device_memory_bytes", "cuda", "nccl", "cudnn"))
MACHINE = UNKNOWN | {
    "kind": "cpu", "name": "NVIDIA H100 80GB HBM3", "num_devices": 2, "torch": "2.11", "driver": "", "python": "3.12",
    "cores": 4, "commit": "abc", "host_memory_bytes": 2**34, "packages": {},
}  # fmt: skip


def test_bad_arguments_are_refused_and_parts_run_in_their_order(capsys):
    for arguments, words in (
        (["--parts", "training,nonsense"], "there is no part 'nonsense'"),
        (["--budget-s", "0"], "above 0"),
    ):
        with pytest.raises(SystemExit) as refused:
            parse(arguments)
        assert refused.value.code == 2 and words in capsys.readouterr().err
    assert parse(["--parts", "memory, start"]).parts == ("start", "memory")
    for part in PARTS:
        module, _, function = part.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_what_does_not_fit_is_reported_as_left_out(tmp_path):
    late = run_part(known("cluster"), MACHINE, 5.0, limit_s=60.0, folder=tmp_path, quick=True)
    alone = run_part(known("layouts"), MACHINE | {"num_devices": 1}, 500.0, limit_s=60.0, folder=tmp_path, quick=True)
    rows = [{"trial": "O1 | eager", "step ms": 1234.5}, {"trial": "O2", "failed": "out of\nmemory"}]
    text = markdown({"machine": MACHINE, "quick": False, "parts": [late, alone, {**late, "rows": rows}]})
    assert "No figures: left out: 5 s of the budget were left, it wants 30." in text
    assert "No figures: needs 2 devices, here is 1." in text
    assert "| trial | step ms | failed |\n|---|---|---|\n| O1 \\| eager | 1,234 |  |\n| O2 |  | out of memory |" in text


@pytest.mark.representative("reports_a_row_and_sleeps-ended after 4 s, its time limit-1")
@pytest.mark.parametrize(
    ("function", "why", "rows"),
    [
        ("reports_a_row_and_sleeps", "ended after 4 s, its time limit", 1),
        ("lacks_something", "no such thing here", 0),
        ("leaves_out", "1 of 2 rows were left out for lack of time, which --continue brings", 2),
        ("breaks", "failed with exit status 1: ValueError: broken", 1),
    ],
)
def test_a_part_reports_why_it_has_no_more_rows(function, why, rows, tmp_path):
    part = Part(name="part", function=f"tests.support.benchmark_parts:{function}", shows="", share_s=1, least_s=1.0)
    start_s = time.monotonic()
    part_result = run_part(part, MACHINE, 60.0, limit_s=4.0, folder=tmp_path, quick=True)
    assert time.monotonic() - start_s < 12
    assert (part_result["why"], len(part_result["rows"]), part_result["is_whole"]) == (why, rows, False)


def test_a_short_session_begins_with_the_most_important_cases(tmp_path):
    """Starts and faults, then training: the levels that are used most, and fp32 last with one micro-batch size."""
    options = {"device": "cuda", "num_devices": 1, "quick": False, "folder": str(tmp_path), "part": "training"}
    levels = [case.name.split()[0] for case in gpu_cases.matrix(Setting(**options, until_s=time.time()))]
    assert levels == ["O2"] * 4 + ["O1"] * 4 + ["O0"] * 2
    assert NAMES[:4] == ("start", "cluster", "training", "plain") and NAMES[-1] == "memory"


def test_a_loop_by_hand_is_compared_with_its_trial(tmp_path):
    options = {"device": "cpu", "num_devices": 1, "quick": True, "folder": str(tmp_path), "part": "plain"}
    setting = Setting(**options, until_s=time.time() + 60)
    rows_path(tmp_path, "training").write_text('{"trial": "O1 eager b2", "step ms": 50.0}\n')
    plain.loops(setting)
    (row,) = setting.rows_of("plain")
    assert row["trial"] == "O1 eager b2" and row["plain loop ms"] > 0
    assert row["trial / loop"] == pytest.approx(50.0 / row["plain loop ms"], abs=1e-3)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_every_trial_is_possible_or_listed_as_impossible(num_devices, tmp_path):
    setting = Setting(
        device="cuda",
        num_devices=num_devices,
        quick=False,
        folder=str(tmp_path),
        part="training",
        until_s=time.time() + 60,
    )
    trials = [
        case
        for part, found in gpu_cases.TRAINED.items()
        for case in (found(setting) if num_devices > 1 or part != "layouts" else ())
    ]
    assert len({case.name for case in trials}) == len(trials) > 20
    for case in trials:
        if num_devices == 3 and training.impossible(case):
            continue
        check(case.spec)


def part_of(name, *rows, is_whole=True):
    part_result = {
        "name": name,
        "shows": "",
        "rows": list(rows),
        "why": "" if is_whole else "cut",
        "is_whole": is_whole,
    }
    return part_result | {"took_s": 1.0, "torch": "2.11", "commit": "abc"}


def test_another_call_adds_to_what_was_measured(tmp_path):
    base = tmp_path / "gpu-x"
    first = Kept(MACHINE, base, quick=False)
    first.put(part_of("training", {"trial": "a"}, {"trial": "b", LEFT_OUT: "no time was left"}, is_whole=False))
    first.put(part_of("start", {"s": 1.0}))
    second = Kept(MACHINE | {"commit": "def"}, base, quick=False)
    assert [second.is_whole(name) for name in ("start", "training", "knobs")] == [True, False, False]
    assert not second.put(part_of("training", {"trial": "a", LEFT_OUT: "no time was left"}, is_whole=False))
    assert second.put(part_of("training", {"trial": "a"}, {"trial": "b"}))
    assert not second.put(part_of("start", is_whole=False))
    assert json.loads(base.with_suffix(".json").read_text()) == second.result()
    assert "Measured by an earlier call: torch 2.11, commit abc." in base.with_suffix(".md").read_text()
    base.with_suffix(".json").write_text("{}")
    with pytest.raises(ValueError, match=r"gpu-x\.json holds no figures of this version .*parts.*move it away"):
        Kept(MACHINE, base, quick=False)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_parts_of_every_kind_run_on_cpus_where_only_torch_is_installed(tmp_path):
    """The command without ``--parts`` runs all of them."""
    names = "weights,collectives,hang"
    (tmp_path / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--json", "--budget-s", "500"]
    command += ["--out", str(tmp_path / "out"), "--parts", names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    parts = {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    assert ",".join(parts) == names and set(parts) < set(NAMES)
    for name, part in parts.items():
        assert part["rows"] and not part["why"], name
        assert [row for row in part["rows"] if "failed" in row] == [], name
    assert all(row["as on the CPU"] for row in parts["weights"]["rows"])
    gangs = parts["hang"]["rows"]
    assert [(row["gang"], row["ended"]) for row in gangs] == [(row["gang"], row["wanted"]) for row in gangs]
    assert parts["hang"]["rows"][0]["blames it"]


PLAN = Plan(turns=1, steps=1, grad_norm=False, model=SMALL, seq_length=16)


def losses(case, peer, way):
    """Losses of the first steps of the loop by hand, on this rank."""
    from benchmarks.runner.peers import peer_step
    from trials.parallel.mesh import RankIdentity

    case = cases(SMALL)[case]
    spec = trial_speed._spec(case, case.ours[way], PLAN)
    step = peer_step(peer, spec, trial_speed._batches(spec, RankIdentity.from_env().rank), clips=False)
    return [step() for _ in range(3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "peer", "way"),
    [
        ("ddp", "ddp", "ddp"),
        ("fsdp2", "fsdp2", "zero 3"),
        ("zero1", "zero1", "zero 1"),
        ("tp", "tensor", "local"),
        ("zero2-accumulating", "each", "each"),
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


@pytest.mark.exhaustive
def test_a_quick_run_compares_every_way_of_a_layout(tmp_path, capsys):
    page = tmp_path / "page.md"
    trial_speed.main(["--quick", "--case", "tp", "--json", "--out", str(page)])
    rows = json.loads(capsys.readouterr().out)["ratios"]
    assert [row["ours"] for row in rows] == ["local", "dtensor"]
    for row in rows:
        assert 0 < row["step_time"]["low"] <= row["step_time"]["value"] <= row["step_time"]["high"]
        assert f"| tp | {row['ours']} | parallelize_module, loss_parallel |" in page.read_text()


def test_the_interval_of_a_median_is_the_binomials():
    """Of 15 values the 4th and the 12th: 3 or fewer of 15 are on one side with a probability of 0.0176."""
    ratio = trial_speed._ratio([float(value) for value in range(1, 16)])
    assert (ratio.value, ratio.low, ratio.high) == (8.0, 4.0, 12.0)
