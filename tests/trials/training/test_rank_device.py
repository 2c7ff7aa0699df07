"""What a rank does with its device around training: real trials on cores, to which NVML tells what it does of GPUs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.trials.accelerator.test_telemetry import UUID, Driver
from tests.trials.tiny import tiny_spec
from trials import kernels
from trials.files import from_json, to_json
from trials.outcome import Phase, RankReport
from trials.spec import Kernels, TrialSpec
from trials.training import measure
from trials.training.measure import RankDevice
from trials.worker import run_rank


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """NVML here, and this process's device known to it."""
    found = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(measure, "device_uuid", lambda _: UUID)
    return found


def ignore(phase: Phase, **_: Any) -> None:
    del phase


def run(spec: TrialSpec) -> RankReport:
    report: RankReport = from_json(RankReport, run_rank(to_json(spec), ignore))
    return report


def test_health_is_made_ready_in_the_warm_up_and_looked_at_while_measuring(driver: Driver) -> None:
    """The package's import and NVML's start would lie in the first measured steps."""
    told: list[str] = []
    own = RankDevice(tiny_spec(), torch.device("cpu"))
    tell = own.watched(lambda phase, **_: told.append(phase))
    tell("starting")
    assert not driver.opened.is_set()
    tell("warmup")
    assert driver.opened.wait(30.0) and not driver.asked.wait(0.2)
    tell("measuring", step=1)
    assert driver.asked.wait(30.0)
    (health,) = own.health(2)
    assert (health.rank, health.num_samples >= 2, health.highest_temperature_c) == (2, True, 89)
    assert told == ["starting", "warmup", "measuring"]
    assert own.memory() is None, "cores have no memory of their own"


def test_a_rank_that_never_measured_has_nothing_to_tell_of_its_device(driver: Driver) -> None:
    own = RankDevice(tiny_spec(), torch.device("cpu"))
    own.watched(ignore)("warmup")
    assert driver.opened.wait(30.0)
    assert own.health(0) == ()


def test_what_was_seen_is_in_the_ranks_report(driver: Driver) -> None:
    report = run(tiny_spec())
    (health,) = report.findings.devices
    assert health.rank == 0 and health.num_samples == driver.num_looks >= 1
    assert not driver.is_open


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_the_allocator_is_set_up_before_a_kernel_is_tried(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    """Both are what trials do, in the order of their calls."""
    calls: list[str] = []

    def kept(module: Any, name: str) -> None:
        function = getattr(module, name)

        def keep(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, keep)

    kept(measure, "set_up_allocator")
    kept(measure, "MemoryLimit")
    kept(kernels, "_runs_attention")
    assert len(run(tiny_spec(kernels=Kernels(attention=kernel))).losses) == 5
    assert calls[0] == "set_up_allocator" and calls[-1] == "MemoryLimit"
    assert ("_runs_attention" in calls) == (kernel == "math")
