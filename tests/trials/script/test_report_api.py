"""The report API: lines, limits, silence outside of trials, and that it never raises."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tune_cluster_report
from tests.support import ROOT
from trials.script.command import API_FOLDER, HOOK_FOLDER, hook_path, with_hook


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_CLUSTER_REPORT", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    return tmp_path


def lines(folder, rank=3):
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def test_a_step_is_one_line_with_plain_numbers(folder):
    report = tune_cluster_report.Reporter()
    report.begin()
    report(step=np.int64(1), loss=torch.tensor(2.5), tokens=np.float32(64), grad_norm=torch.tensor([0.5]), lr=1e-3)
    report(step=3, loss=math.nan, step_time_s=0.25)
    begin, first, third = lines(folder)
    assert begin["event"] == "begin"
    assert (first["v"], first["source"]) == (1, "report")
    assert 0 < first.pop("step_time_s") < 60
    assert first == first | {"step": 1, "loss": 2.5, "tokens": 64.0, "grad_norm": 0.5, "lr": 1e-3}
    assert math.isnan(third["loss"])
    assert third["step_time_s"] == 0.25


def test_time_between_reports_is_shared_by_the_steps_between_them(folder, monkeypatch):
    clock = iter([10.0, 11.0, 14.0])
    monkeypatch.setattr(tune_cluster_report.time, "perf_counter", lambda: next(clock))
    report = tune_cluster_report.Reporter()
    for step in (1, 2, 5):
        report(step=step)
    assert [line.get("step_time_s") for line in lines(folder)] == [None, 1.0, 1.0]


def test_it_is_silent_outside_of_trials(tmp_path, monkeypatch):
    monkeypatch.delenv("TUNE_CLUSTER_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    report = tune_cluster_report.Reporter()
    report.begin()
    report(step=1, loss=object())
    report.end()
    assert not report.should_stop()
    assert list(tmp_path.iterdir()) == []


def test_it_stops_at_the_step_in_the_file(folder):
    report = tune_cluster_report.Reporter()
    report(step=4)
    assert not report.should_stop()
    (folder / "stop").write_text("5\n")
    assert not report.should_stop()
    assert report.should_stop(step=5)
    report(step=5)
    assert report.should_stop()
    (folder / "stop").write_text("soon")
    assert not report.should_stop()


def test_it_never_raises(folder):
    report = tune_cluster_report.Reporter()
    report()
    report(step="third", loss=object())
    report(step=1, loss=torch.tensor([1.0, 2.0]), odd={1: object()})
    note, step = lines(folder)
    assert note["event"] == "note"
    assert "TypeError" in note["text"]
    assert step["step"] == 1


def test_a_missing_folder_or_full_disk_is_tolerated(tmp_path, monkeypatch):
    for place in ("gone", "full"):
        report = tune_cluster_report.Reporter()
        monkeypatch.setenv("TUNE_CLUSTER_REPORT", str(tmp_path / place))
        monkeypatch.setenv("RANK", "0")
        if place == "full":
            (tmp_path / place).mkdir()
            (tmp_path / place / "rank0.jsonl").symlink_to("/dev/full")
        report(step=1, loss=1.0)
        report(step=2, loss=1.0)


def test_lines_and_files_are_bounded(folder, monkeypatch):
    report = tune_cluster_report.Reporter()
    report(step=1, loss=2.0, **{f"layer{i}": "x" * 500 for i in range(100)})
    (raw,) = (folder / "rank3.jsonl").read_bytes().splitlines(keepends=True)
    assert len(raw) <= tune_cluster_report.MAX_LINE_BYTES
    assert json.loads(raw) == json.loads(raw) | {"step": 1, "loss": 2.0, "shortened": True}
    monkeypatch.setattr(tune_cluster_report, "MAX_FILE_BYTES", 20 << 10)
    for step in range(2, 200):
        report(step=step, loss=2.0)
    assert (folder / "rank3.jsonl").stat().st_size <= 20 << 10
    (note,) = (line["text"] for line in lines(folder) if line.get("event") == "note")
    assert f"{20 << 10} bytes" in note
    size = (folder / "rank3.jsonl").stat().st_size
    tune_cluster_report.Reporter()(step=200)
    assert (folder / "rank3.jsonl").stat().st_size == size


def test_forked_ranks_write_separate_files(folder):
    report = tune_cluster_report.Reporter()
    report(step=1)
    child = os.fork()
    if not child:
        os.environ["RANK"] = "4"
        report(step=2)
        os._exit(0)
    os.waitpid(child, 0)
    assert [line["step"] for line in lines(folder)] == [1]
    assert [line["step"] for line in lines(folder, rank=4)] == [2]


def test_a_copy_of_the_file_works_standalone(folder):
    copy = folder / "vendored.py"
    copy.write_bytes((API_FOLDER / "tune_cluster_report.py").read_bytes())
    program = "from vendored import report; report(step=1, loss=3)"
    subprocess.run([sys.executable, "-S", "-c", program], cwd=folder, check=True)
    assert lines(folder)[0]["loss"] == 3


def test_the_program_path_contains_only_the_api_and_the_hook():
    assert hook_path() == (str(HOOK_FOLDER), str(API_FOLDER))
    assert hook_path(hook=False) == (str(API_FOLDER),)
    assert with_hook("/theirs", hook=False).split(os.pathsep) == [str(API_FOLDER), "/theirs"]
    assert [path.name for path in API_FOLDER.iterdir() if path.suffix == ".py"] == ["tune_cluster_report.py"]
    spec = importlib.util.spec_from_file_location("api", API_FOLDER / "tune_cluster_report.py")
    assert Path(spec.origin).resolve() == ROOT / "tune_cluster_report.py"
