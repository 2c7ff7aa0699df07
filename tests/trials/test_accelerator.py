"""Devices: kinds, health on NVML's interface, memory outside the allocator, what a rank does with its device; NPUs.

NPUs are a stand-in of torch_npu (``tests/support/ascend``): torch's own kind of device for extensions, whose memory is
the host's. What an Ascend does is not tested here; what trials use of the package is."""

# ruff: noqa: N802  # names are NVML's
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pynvml
import pytest
import torch

from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from orchestrator.errors import ConfigError
from orchestrator.planning import dry_runs
from tests.cluster import vendors
from tests.cluster.gangs import run as run_npu
from tests.support import ROOT
from tests.trials.tiny import tiny_spec
from trials import kernels
from trials.accelerator import device, kinds
from trials.accelerator import device as accelerator
from trials.accelerator.device import collectives_of, is_host, kind_of, mark, open_device, seconds_between
from trials.accelerator.kinds import FAMILIES, HealthWatch, sample, without_devices
from trials.dryrun.estimate import DryRunRequest
from trials.failure import classify
from trials.files import from_json, to_json
from trials.health import (
    THROTTLED_BY,
    DeviceHealth,
    DeviceMemory,
    Disturbance,
    device_health,
    most_noteworthy,
    reasons_in,
    with_throttling,
    worst_memory,
)
from trials.outcome import GangLost, Measured, RankReport
from trials.spec import Kernels, Layout
from trials.training import measure
from trials.training import measure as device_memory
from trials.training.measure import DEFAULT_SETTINGS, MemoryLimit, RankDevice, set_up_allocator
from trials.worker import run_rank

# names are NVML's


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cuda", "sees no such device; check nvidia-smi, CUDA_VISIBLE_DEVICES"),
        ("rocm", f"requires a torch built for ROCm, but this is {re.escape(torch.__version__)}"),
        ("xpu", "sees no such device; check xpu-smi, ZE_AFFINITY_MASK"),
        ("npu", "requires the package torch_npu, which cannot be imported"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device here")
def test_a_device_unusable_by_torch_is_the_fault_of_the_node_and_not_replaced_by_cores(kind, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        open_device(kind, 0)
    assert classify(caught.value, kind) == "node_setup"


def test_cpus_are_timed_by_the_host_clock():
    device = open_device("cpu", 3)
    assert is_host(device) and kind_of(device) == "cpu" and collectives_of(device) == "gloo"
    start = mark(device)
    assert 0 <= seconds_between(start, mark(device)) < 60


def test_every_device_kind_defines_the_same_entries():
    for family in FAMILIES.values():
        assert family.ray_resource and family.collectives
        assert bool(family.visible_variable) == bool(family.query_tool) == (family.kind != "cpu")


def test_children_that_do_not_compute_see_no_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    reported = "import os, sys; sys.exit(' '.join(f'{n}={os.environ.get(n)}' for n in sys.argv[1:]))"
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    reported_of = "CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=-1 ASCEND_RT_VISIBLE_DEVICES="
    monkeypatch.setattr(dry_runs, "python_module", lambda _: [sys.executable, "-c", reported, *names])
    with pytest.raises(ConfigError, match=reported_of):
        list(dry_runs._batch([DryRunRequest(spec=tiny_spec(Layout()), rank=0)]))
    assert without_devices({"A": "1"})["A"] == "1"


# names are NVML's


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

    def __init__(self):
        super().__init__("pynvml")
        self.num_looks = 0
        self.is_open = False
        self.opened, self.queried = threading.Event(), threading.Event()

    def nvmlInit(self):
        self.is_open = True
        self.opened.set()

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in (UUID, SLICE):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle" if uuid == UUID else "slice"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        if handle != "slice":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        if handle != "handle":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert self.is_open
        self.num_looks += kind == self.NVML_CLOCK_SM
        self.queried.set()
        return 2619 if kind == self.NVML_CLOCK_MEM else (1980 if self.num_looks == 1 else 1200)

    def nvmlDeviceGetMaxClockInfo(self, _handle, _kind):
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle):
        return POWER_CAP if self.num_looks == 1 else POWER_CAP | THERMAL

    def nvmlDeviceGetTemperature(self, _handle, _kind):
        return 60 if self.num_looks == 1 else 89

    def nvmlDeviceGetPowerUsage(self, _handle):
        return 700_000

    def nvmlDeviceGetEnforcedPowerLimit(self, _handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetTotalEccErrors(self, _handle, kind, _counter):
        return 7 if kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 10 + self.num_looks


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def watched(uuid, driver=None, **options):
    watch = HealthWatch(uuid, **options)
    watch.begin()
    if driver is not None:
        assert driver.queried.wait(30.0)
    return watch.end()


def test_a_hot_device_is_reported_with_its_figures(driver):
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


def test_a_slice_has_the_clocks_of_its_gpu(driver):
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
def test_a_slice_has_the_name_that_nvml_uses(monkeypatch, visible, name, index, expected):
    """torch gives the digits alone; with the prefix of whole GPUs NVML would find no device and report nothing."""
    module = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(uuid=UUID[4:]), get_device_name=lambda _: name
    )
    monkeypatch.setattr(device, "module_of", lambda _: module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.device_uuid(torch.device("cuda", index)) == expected


def test_reasons_for_lowered_clocks_are_nvmls_bits():
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


def test_a_driver_that_does_not_answer_is_not_waited_for(driver, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr("trials.accelerator.kinds._PATIENCE_S", 0.1)
    monkeypatch.setattr(driver, "nvmlDeviceGetTemperature", lambda *_: never.wait(60.0), raising=False)
    start_s = time.monotonic()
    assert device_health(0, watched(UUID, driver)) == ()
    assert time.monotonic() - start_s < 30.0
    never.set()


@pytest.mark.parametrize("uuid", [None, "GPU-of-somebody-else"])
def test_figures_unknown_to_nvml_are_no_error(driver, uuid):
    del driver
    assert watched(uuid) == ()


def test_the_package_without_a_driver_reports_nothing():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert watched(UUID) == ()
    else:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert sample(pynvml, device).sm_clock_mhz
    missing = [name for name in vars(Driver) if name.startswith("nvml") and not hasattr(pynvml, name)]
    assert not missing, "the stand-in has what the package lacks"


def test_a_throttled_device_disturbs_its_node():
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


DEVICE = torch.device("meta")
GIB = 1 << 30


class Memory(SimpleNamespace):
    """80 GiB, of which another process has 1 GiB and the allocator 30; what it may take is kept in ``allowed``."""

    free, reserved, total = 49 * GIB, 30 * GIB, 80 * GIB
    allowed: float = 0.0

    def mem_get_info(self, _device):
        return self.free, self.total

    def memory_reserved(self, _device):
        return self.reserved

    def memory_stats(self, _device):
        return {"num_alloc_retries": 3, "num_ooms": 1}

    def get_device_properties(self, _device):
        return SimpleNamespace(total_memory=self.total)

    def set_per_process_memory_fraction(self, fraction, _device):
        self.allowed = fraction * self.total


@pytest.fixture
def memory(monkeypatch):
    found = Memory()
    for module in (accelerator, device_memory):
        monkeypatch.setattr(module, "module_of", lambda _: found)
    return found


def test_memory_outside_the_allocator_is_reported(memory):
    del memory
    assert device_memory.device_memory(DEVICE, "x:y") == DeviceMemory(
        total_bytes=80 * GIB, outside_bytes=GIB, num_retries=3, num_ooms=1, settings="x:y"
    )
    assert device_memory.device_memory(torch.device("cpu"), "") is None


def test_a_limit_counts_memory_outside_the_allocator(memory):
    """Also what communicators took in the first step."""
    limit = MemoryLimit(DEVICE, 40 * GIB)
    assert memory.allowed == pytest.approx(39 * GIB)
    limit.before_step(1)
    memory.free -= 2 * GIB
    limit.before_step(2)
    assert memory.allowed == pytest.approx(37 * GIB)


def test_segments_are_expandable_unless_the_user_configures_otherwise(monkeypatch):
    reported = []
    monkeypatch.setattr(device_memory, "_configure", reported.append)
    assert set_up_allocator(torch.device("cpu"), {}) == "" and not reported
    monkeypatch.setattr(device_memory, "kind_of", lambda _: "cuda")
    assert set_up_allocator(DEVICE, {}) == DEFAULT_SETTINGS
    own = "max_split_size_mb:128"
    assert set_up_allocator(DEVICE, {"PYTORCH_ALLOC_CONF": own}) == own
    other = "backend:cudaMallocAsync"
    assert set_up_allocator(DEVICE, {"PYTORCH_CUDA_ALLOC_CONF": other}) == other
    assert reported == [DEFAULT_SETTINGS, own]  # the backend was chosen when torch was imported

    def refuse(*_args, **_options):
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    assert set_up_allocator(DEVICE, {}) == ""
    assert reported[-1] == "expandable_segments:False"


def test_the_memory_of_a_gang_is_that_of_its_worst_rank():
    one = DeviceMemory(total_bytes=9, outside_bytes=2, num_retries=0, settings="s")
    other = DeviceMemory(total_bytes=8, outside_bytes=1, num_retries=4)
    assert worst_memory([None, one, other]) == DeviceMemory(total_bytes=8, outside_bytes=2, num_retries=4, settings="s")
    assert worst_memory([None]) is None


@pytest.fixture
def own_driver(driver, monkeypatch):
    """NVML, to which this process's device is known."""
    monkeypatch.setattr(measure, "device_uuid", lambda _: UUID)
    return driver


def ignore(phase, **_):
    del phase


def run(spec):
    return from_json(RankReport, run_rank(to_json(spec), ignore))


def test_health_is_set_up_in_warmup_and_sampled_while_measuring(own_driver):
    """The package's import and NVML's start would fall into the first measured steps."""
    reported = []
    own = RankDevice(tiny_spec(), torch.device("cpu"))
    tell = own.watched(lambda phase, **_: reported.append(phase))
    tell("starting")
    assert not own_driver.opened.is_set()
    tell("warmup")
    assert own_driver.opened.wait(30.0) and not own_driver.queried.wait(0.2)
    tell("measuring", step=1)
    assert own_driver.queried.wait(30.0)
    (health,) = own.health(2)
    assert (health.rank, health.num_samples >= 2, health.highest_temperature_c) == (2, True, 89)
    assert reported == ["starting", "warmup", "measuring"]
    assert own.memory() is None, "cores have no memory of their own"


def test_a_rank_that_never_measured_reports_no_device_health(own_driver):
    own = RankDevice(tiny_spec(), torch.device("cpu"))
    own.watched(ignore)("warmup")
    assert own_driver.opened.wait(30.0)
    assert own.health(0) == ()


def test_health_samples_are_in_the_report_of_the_rank(own_driver):
    report = run(tiny_spec())
    (health,) = report.findings.devices
    assert health.rank == 0 and health.num_samples == own_driver.num_looks >= 1
    assert not own_driver.is_open


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_the_allocator_is_set_up_before_a_kernel_is_tried(monkeypatch, kernel):
    """Both are what trials do, in the order of their calls."""
    calls = []

    def kept(module, name):
        function = getattr(module, name)

        def keep(*args):
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, keep)

    kept(measure, "set_up_allocator")
    kept(measure, "MemoryLimit")
    kept(kernels, "_runs_attention")
    assert len(run(tiny_spec(kernels=Kernels(attention=kernel))).losses) == 5
    assert calls[0] == "set_up_allocator" and calls[-1] == "MemoryLimit"
    assert ("_runs_attention" in calls) == (kernel == "math")


STAND_IN = ROOT / "tests/support/ascend"


def train(tmp_path, spec):
    """Report of the only rank, and its calls to the device."""
    (tmp_path / "spec.json").write_text(json.dumps(to_json(spec)))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{STAND_IN}"}
    command = [sys.executable, STAND_IN / "train.py", tmp_path / "spec.json", tmp_path / "answer.json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((tmp_path / "answer.json").read_text())
    return from_json(RankReport, answer["report"]), answer["calls"]


@pytest.mark.slow
def test_a_trial_runs_on_the_device_as_on_cores(tmp_path):
    spec = tiny_spec(num_microbatches=2)
    report, calls = train(tmp_path, replace(spec, device="npu", memory_limit_bytes=32 << 30))
    cores, none = train(tmp_path, spec)
    assert none == []
    assert report.losses == pytest.approx(cores.losses, abs=1e-6)
    assert report.grad_norms == pytest.approx(cores.grad_norms, rel=1e-5)
    names = [call[0] for call in calls]
    assert calls[0] == ["set_device", "npu:0"], "before anything is allocated"
    assert ["set_per_process_memory_fraction", (32 - 4) / 64, "npu:0"] in calls, "what others hold is not ours"
    assert {"Event", "stream", "wait_stream", "record_stream", "reset_peak_memory_stats"} <= set(names)
    assert report.peak_allocated_bytes > 0
    assert report.device_memory is not None
    assert (report.device_memory.total_bytes, report.device_memory.settings) == (64 << 30, "")
    assert report.device_memory.outside_bytes <= 4 << 30
    assert names.count("set_per_process_memory_fraction") == 2, "again when communicators have been made"
    assert report.findings.devices == (), "NVML has no NPUs"
    assert report.breakdown.backward_s > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_node_with_npus_runs_gangs_on_free_ones(tmp_path, monkeypatch):
    vendors.install(tmp_path, monkeypatch, npu_smi=vendors.ASCEND)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{STAND_IN}")
    node = discover_node(name="ascend", device="npu")
    spec = to_json(replace(tiny_spec(num_microbatches=2), device="npu"))
    with LocalCluster(tmp_path / "work", node) as cluster:
        free, used = cluster.topology.devices
        end = run_npu(cluster, "trials.worker:run_rank", spec=spec, on=(free,))
        busy = run_npu(cluster, "trials.worker:run_rank", spec=spec, on=(used,))
    assert isinstance(end.outcome, Measured), end.outcome
    assert len(end.outcome.measurement.losses) == 5
    assert isinstance(busy.outcome, GangLost)
    assert "NPU 1 has 46455 MiB in use" in busy.outcome.evidence.message
