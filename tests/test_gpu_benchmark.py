"""``python -m benchmarks.gpu`` works wherever torch does, keeps to its time, and says why what it lacks is lacking."""

import importlib
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu.__main__ import parse, run_part
from benchmarks.gpu.parts import NAMES, PARTS, NotHereError, Part, known
from benchmarks.gpu.report import file_name, markdown
from tests.support import ROOT

NOT_INSTALLED = ("ray", "optuna", "mlflow", "pydantic", "yaml", "click", "rich", "transformers", "torchao", "pynvml")
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
    late = run_part(known("cluster"), MACHINE, 5.0, folder=tmp_path, quick=True)
    alone = run_part(known("layouts"), MACHINE | {"num_devices": 1}, 500.0, folder=tmp_path, quick=True)
    rows = [{"trial": "O1 | eager", "step ms": 1234.5}, {"trial": "O2", "failed": "out of\nmemory"}]
    result = {"machine": MACHINE, "quick": False, "parts": [late, alone, {**late, "rows": rows}]}
    text = markdown(result)
    assert "No figures: left out: 5 s of the budget were left, it wants 30." in text
    assert "No figures: needs 2 devices, here is 1." in text
    assert "| trial | step ms | failed |\n|---|---|---|\n| O1 \\| eager | 1,234 |  |\n| O2 |  | out of memory |" in text
    assert file_name(MACHINE | {"kind": "cuda"}) == "gpu-nvidia-h100-80gb-hbm3-x2"


def tells_a_row_and_sleeps(setting):
    setting.tell({"row": 1})
    subprocess.run(["sleep", "100"], check=False)


def lacks_something(setting):
    raise NotHereError("no such thing here")


def breaks(setting):
    setting.tell({"row": 1})
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("function", "why", "rows"),
    [
        (tells_a_row_and_sleeps, "ended after 4 s, all that it was given", 1),
        (lacks_something, "no such thing here", 0),
        (breaks, "failed with exit status 1: ValueError: broken", 1),
    ],
)
def test_a_part_says_why_it_has_no_more_rows(function, why, rows, tmp_path):
    part = Part(name="part", function=f"{__name__}:{function.__name__}", shows="", limit_s=4.0, least_s=1.0)
    start_s = time.monotonic()
    told = run_part(part, MACHINE, 60.0, folder=tmp_path, quick=True)
    assert time.monotonic() - start_s < 12
    assert (told["why"], len(told["rows"])) == (why, rows)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_parts_run_on_cpus_where_only_torch_is_installed(tmp_path):
    done = run(
        tmp_path,
        "--device",
        "cpu",
        "--quick",
        "--json",
        "--budget-s",
        "850",
        "--out",
        str(tmp_path / "out"),
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = {part["name"]: part for part in found["parts"]}
    assert tuple(parts) == NAMES
    failed = {name: part["why"] for name, part in parts.items() if "failed" in part["why"]}
    assert failed == {}
    without_yaml = {name for name, part in parts.items() if "yaml" in part["why"]}
    assert without_yaml == {"cluster", "hang"}
    for name in set(NAMES) - without_yaml:
        rows = parts[name]["rows"]
        assert rows, name
        assert [row for row in rows if "failed" in row] == [], name
    assert all(row["as on the CPU"] for row in parts["weights"]["rows"])
    assert {abs(row["difference %"]) < 1000 for row in parts["memory"]["rows"]} == {True}
    written = (tmp_path / "out").glob("gpu-*.md")
    assert "# Measured on CPUs alone" in next(written).read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_gangs_of_the_local_backend_end_as_they_should(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--json", "--parts", "cluster,hang"]
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row for part in json.loads(done.stdout)["parts"] for row in part["rows"]]
    assert [(row["gang"], row["ended"]) for row in rows] == [(row["gang"], row["wanted"]) for row in rows]
    assert len(rows) == 5
