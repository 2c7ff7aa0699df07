"""Health of devices, on NVML's interface: functions of the package with answers of ours, and the package itself."""

# ruff: noqa: N802  # names are NVML's

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from trials.accelerator import device, kinds
from trials.accelerator.kinds import HealthSample, HealthWatch, sample
from trials.reports import (
    THROTTLED_BY,
    DeviceHealth,
    Disturbance,
    device_health,
    most_noteworthy,
    reasons_in,
    with_throttling,
)

UUID = "GPU-1f6b2a54-7a1e-ea31-9c5d-6c2f2b1f0a01"
SLICE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
THERMAL, POWER_CAP = 0x20, 0x04


class Driver(ModuleType):
    """NVML with one H100 that gets hot: clocks fall and memory errors come, from one look to the next."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_VOLATILE_ECC
    NVML_MEMORY_ERROR_TYPE_CORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.num_looks = 0
        self.is_open = False
        self.opened, self.asked = threading.Event(), threading.Event()

    def nvmlInit(self) -> None:
        self.is_open = True
        self.opened.set()

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (UUID, SLICE):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle" if uuid == UUID else "slice"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        if handle != "slice":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if handle != "handle":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert self.is_open
        self.num_looks += kind == self.NVML_CLOCK_SM
        self.asked.set()
        return 2619 if kind == self.NVML_CLOCK_MEM else (1980 if self.num_looks == 1 else 1200)

    def nvmlDeviceGetMaxClockInfo(self, _handle: str, _kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:
        return POWER_CAP if self.num_looks == 1 else POWER_CAP | THERMAL

    def nvmlDeviceGetTemperature(self, _handle: str, _kind: int) -> int:
        return 60 if self.num_looks == 1 else 89

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        return 700_000

    def nvmlDeviceGetEnforcedPowerLimit(self, _handle: str) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetTotalEccErrors(self, _handle: str, kind: int, _counter: int) -> int:
        return 7 if kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 10 + self.num_looks


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def watched(uuid: str | None, driver: Driver | None = None, **options: Any) -> tuple[HealthSample, ...]:
    watch = HealthWatch(uuid, **options)
    watch.begin()
    if driver is not None:
        assert driver.asked.wait(30.0)
    return watch.end()


def test_a_device_that_got_hot_is_told_with_its_figures(driver: Driver) -> None:
    """Between beginning and end there are two samples at least; the thread sleeps in between."""
    samples = watched(UUID, driver, period_s=60.0)
    assert not driver.is_open
    (found,) = device_health(3, samples)
    assert found == DeviceHealth(
        rank=3,
        num_samples=2,
        sm_clock_mhz=1590.0,
        lowest_sm_clock_mhz=1200,
        max_sm_clock_mhz=1980,
        memory_clock_mhz=2619.0,
        throttled_by=("sw_thermal",),
        power_capped=1.0,
        highest_temperature_c=89,
        mean_power_w=700.0,
        power_limit_w=None,
        corrected_errors=1,
        uncorrected_errors=0,
    )


def test_a_slice_has_the_clocks_of_its_gpu(driver: Driver) -> None:
    (found,) = device_health(0, watched(SLICE, driver, period_s=60.0))
    assert (found.num_samples, found.lowest_sm_clock_mhz, found.throttled_by) == (2, 1200, ("sw_thermal",))


@pytest.mark.parametrize(
    ("visible", "name", "index", "expected"),
    [
        (None, "NVIDIA H100 80GB HBM3", 0, f"GPU-{UUID[4:]}"),
        ("1,0", "NVIDIA H100 80GB HBM3", 1, f"GPU-{UUID[4:]}"),
        (SLICE, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0, SLICE),
        (f"{SLICE}-other, {SLICE}", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 1, SLICE),
        (None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0, f"MIG-{UUID[4:]}"),
    ],
)
def test_a_slice_is_called_as_nvml_calls_it(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str, index: int, expected: str
) -> None:
    """torch gives the digits alone; with the prefix of whole GPUs NVML would know no such device, and tell nothing."""
    module = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(uuid=UUID[4:]), get_device_name=lambda _: name
    )
    monkeypatch.setattr(device, "module_of", lambda _: module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.device_uuid(torch.device("cuda", index)) == expected


def test_reasons_for_lowered_clocks_are_nvmls_bits() -> None:
    bits = {
        "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "sw_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    assert bits == THROTTLED_BY
    assert kinds.POWER_CAP == POWER_CAP == pynvml.nvmlClocksThrottleReasonSwPowerCap
    normal = pynvml.nvmlClocksThrottleReasonAll & ~sum(THROTTLED_BY.values())
    assert reasons_in(normal) == () and reasons_in(pynvml.nvmlClocksThrottleReasonAll) == tuple(THROTTLED_BY)


def test_nobody_waits_for_a_driver_that_does_not_answer(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr("trials.accelerator.kinds._PATIENCE_S", 0.1)
    monkeypatch.setattr(driver, "nvmlDeviceGetTemperature", lambda *_: never.wait(60.0), raising=False)
    start_s = time.monotonic()
    assert device_health(0, watched(UUID, driver)) == ()
    assert time.monotonic() - start_s < 30.0
    never.set()


@pytest.mark.parametrize("uuid", [None, "GPU-of-somebody-else"])
def test_what_nvml_does_not_know_is_no_error(driver: Driver, uuid: str | None) -> None:
    del driver
    assert watched(uuid) == ()


def test_the_package_without_a_driver_tells_nothing() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert watched(UUID) == ()
    else:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert sample(pynvml, device).sm_clock_mhz
    missing = [name for name in vars(Driver) if name.startswith("nvml") and not hasattr(pynvml, name)]
    assert not missing, "the stand-in has what the package lacks"


def test_a_throttled_device_disturbs_its_node() -> None:
    seen = Disturbance(node="a", seconds=9.0, foreign_cpu=0.01, lowest_clock=0.9)
    hot = DeviceHealth(
        rank=1, num_samples=2, throttled_by=("hw_thermal",), lowest_sm_clock_mhz=600, max_sm_clock_mhz=1200
    )
    fine = DeviceHealth(rank=2, num_samples=2)
    a, b = with_throttling([seen], [("a", fine), ("a", hot), ("b", hot)])
    assert (a.foreign_cpu, a.throttled_by, a.lowest_clock, a.is_disturbing) == (0.01, ("hw_thermal",), 0.5, True)
    assert (b.node, b.is_disturbing) == ("b", True)
    assert with_throttling([seen], [("a", fine)]) == [seen]
    assert most_noteworthy([fine, hot]) == (hot, fine)
