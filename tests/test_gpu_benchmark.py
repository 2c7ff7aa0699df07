"""``python -m benchmarks.gpu`` works wherever torch does, keeps to its time, and says why what it lacks is lacking."""

import importlib
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import cases, training
from benchmarks.gpu.__main__ import base_of, parse, run_part, share_of
from benchmarks.gpu.collectives import SIZES, divisible
from benchmarks.gpu.kept import Kept
from benchmarks.gpu.memory import dry_runs
from benchmarks.gpu.parts import LEFT_OUT, NAMES, PARTS, Part, Setting, known, read_rows, rows_path
from benchmarks.gpu.ranks import ALLOCATED, run_ranks
from benchmarks.gpu.report import file_name, markdown
from tests.support import ROOT
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
MACHINE = {
    "kind": "cpu",
    "name": "NVIDIA H100 80GB HBM3",
    "num_devices": 2,
    "device_memory_bytes": None,
    "torch": "2.11",
    "cuda": None,
    "nccl": None,
    "cudnn": None,
    "driver": "",
    "python": "3.12",
    "cores": 4,
    "commit": "abc",
    "host_memory_bytes": 2**34,
    "packages": {},
}


def run(folder, *arguments, **options):
    """The command in a process that finds none of the packages that a bare machine lacks, from a foreign folder."""
    (folder / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False, **options)


@pytest.mark.parametrize("arguments", [["--parts", "training,nonsense"], ["--budget-s", "0"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2
    assert "there is no part 'nonsense'" in (told := capsys.readouterr().err) or "above 0" in told


def test_parts_run_in_their_order():
    assert parse(["--parts", "memory, start"]).parts == ("start", "memory")
    assert len(set(NAMES)) == len(PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_what_a_part_takes_from_the_runner_is_there(part):
    module, _, function = part.function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_what_does_not_fit_is_said_to_be_left_out(tmp_path):
    late = run_part(known("cluster"), MACHINE, 5.0, limit_s=60.0, folder=tmp_path, quick=True)
    lonely = MACHINE | {"num_devices": 1}
    alone = run_part(known("layouts"), lonely, 500.0, limit_s=60.0, folder=tmp_path, quick=True)
    rows = [{"trial": "O1 | eager", "step ms": 1234.5}, {"trial": "O2", "failed": "out of\nmemory"}]
    result = {"machine": MACHINE, "quick": False, "parts": [late, alone, {**late, "rows": rows}]}
    text = markdown(result)
    assert "No figures: left out: 5 s of the budget were left, it wants 30." in text
    assert "No figures: needs 2 devices, here is 1." in text
    assert "| trial | step ms | failed |\n|---|---|---|\n| O1 \\| eager | 1,234 |  |\n| O2 |  | out of memory |" in text
    assert file_name(MACHINE | {"kind": "cuda"}, quick=False) == "gpu-nvidia-h100-80gb-hbm3-x2"
    assert file_name(MACHINE | {"kind": "cuda"}, quick=True) == "gpu-nvidia-h100-80gb-hbm3-x2-quick"


@pytest.mark.parametrize(
    ("function", "why", "rows"),
    [
        ("tells_a_row_and_sleeps", "ended after 4 s, all that it was given", 1),
        ("lacks_something", "no such thing here", 0),
        ("leaves_out", "1 of 2 rows were left out for lack of time, which --continue brings", 2),
        ("breaks", "failed with exit status 1: ValueError: broken", 1),
    ],
)
def test_a_part_says_why_it_has_no_more_rows(function, why, rows, tmp_path):
    part = Part(name="part", function=f"tests.support.benchmark_parts:{function}", shows="", share_s=1, least_s=1.0)
    start_s = time.monotonic()
    told = run_part(part, MACHINE, 60.0, limit_s=4.0, folder=tmp_path, quick=True)
    assert time.monotonic() - start_s < 12
    assert (told["why"], len(told["rows"]), told["is_whole"]) == (why, rows, False)


def setting_of(folder, **other):
    options = {"device": "cpu", "num_devices": 2, "quick": True, "folder": str(folder), "part": "training"}
    return Setting(**options | {"until_s": time.time() + 60} | other)


def test_one_device_gets_the_usual_budget_and_none_of_it_is_lost():
    alone = [part for part in PARTS if part.least_devices == 1]
    assert sum(part.share_s for part in alone) == parse([]).budget_s
    left_s, waiting, given = 540.0, list(PARTS), {}
    while waiting:
        given[waiting[0].name] = left_s * share_of(waiting, 8)
        left_s -= given[waiting.pop(0).name]
    assert left_s == pytest.approx(0)
    assert min(given.values()) > 10


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_every_trial_is_possible(num_devices, tmp_path):
    setting = setting_of(tmp_path, device="cuda", num_devices=num_devices, quick=False)
    names = []
    for part, found in cases.TRAINED.items():
        for case in found(setting) if num_devices > 1 or part != "layouts" else ():
            check(case.spec)
            names.append(case.name)
    assert len(names) == len(set(names)) > 20


def test_what_devices_cannot_share_is_no_failure(tmp_path):
    found = {case.name: training.impossible(case) for case in cases.layouts(setting_of(tmp_path, num_devices=3))}
    assert found["tp local"] == "num_heads 8 is not divisible by tp 3"
    assert (found["zero3"], found["ddp"]) == ("", "")


@pytest.mark.parametrize("num_devices", range(2, 9))
def test_ranks_share_out_what_they_send(num_devices):
    for size in SIZES:
        given = divisible(size, num_devices)
        assert given % (2 * num_devices) == 0 and 0 <= given - size < 2 * num_devices


def test_trials_for_which_no_time_is_left_have_not_failed(tmp_path):
    setting = setting_of(tmp_path, until_s=time.time() + 3)
    training.matrix(setting)
    rows = setting.rows_of("training")
    assert rows == [{"trial": case.name, LEFT_OUT: "no time was left"} for case in cases.matrix(setting)]
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(100)\n", encoding="utf-8")
    run = run_ranks(setting, "sleeper", [], world_size=2, env={"PYTHONPATH": str(tmp_path)})
    assert run.failure() == {LEFT_OUT: f"cut off after {run.took_s:.0f} s"}


def test_a_dry_run_that_comes_too_late_is_told_as_such(tmp_path):
    first, *_ = cases.matrix(setting_of(tmp_path))
    rows_path(tmp_path, "training").write_text(json.dumps({"trial": first.name, ALLOCATED: 1.5}) + "\n")
    dry_runs(setting_of(tmp_path, part="memory", until_s=time.time() + 1.5))
    assert read_rows(rows_path(tmp_path, "memory")) == [
        {"trial": f"training: {first.name}", LEFT_OUT: "no reply in time"}
    ]


def part_of(name, *rows, is_whole=True):
    return {
        "name": name,
        "shows": "",
        "rows": list(rows),
        "why": "" if is_whole else "cut",
        "took_s": 1.0,
        "is_whole": is_whole,
        "torch": "2.11",
        "commit": "abc",
    }


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
    assert [part["name"] for part in second.result()["parts"]] == ["start", "training"]
    assert json.loads(base.with_suffix(".json").read_text()) == second.result()
    assert "Measured by an earlier call: torch 2.11, commit abc." in base.with_suffix(".md").read_text()
    told = second.result()
    older = [{key: value for key, value in part.items() if key != "is_whole"} for part in told["parts"]]
    for lacking, what in (({}, "parts"), (told | {"parts": older}, "is_whole")):
        base.with_suffix(".json").write_text(json.dumps(lacking))
        with pytest.raises(ValueError, match=rf"gpu-x\.json holds no figures of this version .*{what}.*move it away"):
            Kept(MACHINE, base, quick=False)


def test_quick_runs_and_cores_overwrite_nothing(tmp_path):
    device = MACHINE | {"kind": "cuda"}
    assert base_of(device, tmp_path, quick=True) != base_of(device, tmp_path, quick=False)
    assert base_of(MACHINE, None, quick=False) is None


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_parts_of_every_kind_run_on_cpus_where_only_torch_is_installed(tmp_path):
    """The command without ``--parts`` runs all of them."""
    names = "start,cluster,weights,collectives,hang"
    given = ["--device", "cpu", "--quick", "--json", "--budget-s", "500", "--out", str(tmp_path / "out")]
    given += ["--parts", names]
    done = run(tmp_path, *given, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = {part["name"]: part for part in found["parts"]}
    assert ",".join(parts) == names
    assert {name: part["why"] for name, part in parts.items() if part["why"]} == {}
    for name, part in parts.items():
        assert part["rows"], name
        assert [row for row in part["rows"] if "failed" in row] == [], name
    assert all(row["as on the CPU"] for row in parts["weights"]["rows"])
    assert all(row["worked"] for row in parts["start"]["rows"])
    gangs = [row for name in ("cluster", "hang") for row in parts[name]["rows"]]
    assert [(row["gang"], row["ended"]) for row in gangs] == [(row["gang"], row["wanted"]) for row in gangs]
    assert parts["hang"]["rows"][0]["blames it"]
    written = next((tmp_path / "out").glob("gpu-*-quick.md")).read_text(encoding="utf-8")
    assert "# Measured on CPUs alone" in written
    again = run(tmp_path, *given, "--continue", timeout=120)
    assert json.loads(again.stdout)["parts"] == found["parts"]
