"""The kinds of devices that ranks compute on, and their names in software. Standard library only."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "npu"]
"""``cuda`` and ``rocm`` are both torch's device ``cuda``, with different tools and variables; ``npu`` is Ascend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to find, choose and use one kind of device."""

    kind: DeviceKind
    torch_device: str
    """Type of torch.device."""
    package: str
    """Package whose import adds the device to torch; empty if torch includes it."""
    collectives: str
    """Backend of process groups."""
    visible_variable: str
    """Environment variable that lists a process's visible devices; empty for the CPU."""
    order_variables: Mapping[str, str]
    """Environment variables that give devices the same numbers in all tools."""
    ray_resource: str
    """Name of Ray's resource for the devices."""
    query_tool: str
    """Program that lists devices and their memory; empty for the CPU."""
    visible_otherwise: str = ""
    """Variable that the kind's software reads if ``visible_variable`` is not set; empty for none."""
    empty_hides: bool = True
    """Whether an empty value of these variables hides all devices; otherwise it limits nothing."""
    widest: Literal["float64", "float32"] = "float64"
    """The widest float that all its devices can compute in and send in collectives."""


FAMILIES: Mapping[DeviceKind, Family] = {
    family.kind: family
    for family in (
        Family(
            kind="cpu",
            torch_device="cpu",
            package="",
            collectives="gloo",
            visible_variable="",
            order_variables={},
            ray_resource="CPU",
            query_tool="",
        ),
        Family(
            kind="cuda",
            torch_device="cuda",
            package="",
            collectives="nccl",
            visible_variable="CUDA_VISIBLE_DEVICES",
            # CUDA's default order puts the fastest first, nvidia-smi's follows the bus; an index must mean one device.
            order_variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            ray_resource="GPU",
            query_tool="nvidia-smi",
        ),
        Family(
            kind="rocm",
            torch_device="cuda",
            package="",
            collectives="nccl",  # RCCL uses this name
            visible_variable="HIP_VISIBLE_DEVICES",
            order_variables={},
            ray_resource="GPU",
            query_tool="rocm-smi",
            visible_otherwise="CUDA_VISIBLE_DEVICES",
            empty_hides=False,  # ROCclr treats an empty list as unset, and reads the other variable
        ),
        Family(
            kind="xpu",
            torch_device="xpu",
            package="",
            collectives="xccl",
            visible_variable="ZE_AFFINITY_MASK",
            # Each tile of a card is a device, numbered over all cards; otherwise the mask would number cards.
            order_variables={"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
            ray_resource="GPU",
            query_tool="xpu-smi",
            empty_hides=False,
            widest="float32",  # only data-centre devices support more
        ),
        Family(
            kind="npu",
            torch_device="npu",
            package="torch_npu",
            collectives="hccl",
            visible_variable="ASCEND_RT_VISIBLE_DEVICES",
            order_variables={},
            ray_resource="NPU",
            query_tool="npu-smi",
            widest="float32",  # HCCL cannot reduce 64-bit floats
        ),
    )
}


def family_of(kind: str) -> Family:
    """Return the family of a device kind or of a type of torch.device.

    Raises:
        ValueError: the name is unknown.
    """
    for family in FAMILIES.values():
        if kind in (family.kind, family.torch_device):
            return family
    raise ValueError(f"unknown device {kind!r}; use one of {', '.join(FAMILIES)}")


_HIDDEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",  # an empty value would hide nothing
    "ASCEND_RT_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",  # no value of ZE_AFFINITY_MASK does that
}


def without_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that must not start any accelerator or use its memory."""
    return {**environment, **_HIDDEN}


# Clocks, temperature, power and memory errors of a device during a measurement, from NVML.
#
# A thread samples it twice a second, so steps do not wait. If the package or the driver is missing or does not respond,
# these values are unknown, which is not an error. They are also unknown on other makers' devices. Standard library
# only; the package ``nvidia-ml-py`` is imported by :meth:`HealthWatch.prepare`.


PERIOD_S = 0.5
"""Seconds between two samples."""
MAX_SAMPLES = 4096
"""Maximum number of samples to keep: half an hour of them."""
_PATIENCE_S = 2.0
"""Time limit for the last sample, in seconds: a faulty driver may block for ever."""
POWER_CAP = 0x04
"""NVML's bit for clocks lowered by the software power cap (nvml.h, nvmlClocksThrottleReasonSwPowerCap)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSample:
    """State of a device at one moment; None for unknown values."""

    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors."""
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_mask: int | None = None
    """NVML's bits for the reasons why the clocks are not higher."""
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    corrected_errors: int | None = None
    """Memory errors corrected by ECC since the driver was loaded."""
    uncorrected_errors: int | None = None


class HealthWatch:
    """Samples one device, by its UUID, from :meth:`begin` to :meth:`end`; does nothing without a UUID."""

    def __init__(self, uuid: str | None, period_s: float = PERIOD_S) -> None:
        self._uuid = uuid
        self._period_s = period_s
        self._may_sample = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[HealthSample] = []

    def prepare(self) -> None:
        """Import the package and start NVML, which may take longer than a step; only the first call counts."""
        if self._thread is None and self._uuid is not None:
            self._thread = threading.Thread(target=self._watch, name="device-health", daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """Start sampling."""
        self.prepare()
        self._may_sample.set()

    def end(self) -> tuple[HealthSample, ...]:
        """Stop sampling; return the samples."""
        has_begun = self._may_sample.is_set()
        self._over.set()
        self._may_sample.set()
        if self._thread is not None and has_begun:
            self._thread.join(_PATIENCE_S)
        return tuple(self._samples) if has_begun else ()

    def _watch(self) -> None:
        with contextlib.suppress(ImportError), contextlib.ExitStack() as stack:
            nvml: Any = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
                stack.callback(nvml.nvmlShutdown)
                device = _handle(nvml, self._uuid or "")
                self._may_sample.wait()
                is_over = False
                while not is_over and len(self._samples) < MAX_SAMPLES:
                    is_over = self._over.is_set()  # then this is the last
                    self._samples.append(sample(nvml, device))
                    self._over.wait(0 if is_over else self._period_s)


def _handle(nvml: Any, uuid: str) -> Any:
    """Return the NVML device that has clocks: for a MIG slice, the device that contains it."""
    found = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(found)
    return found


def sample(nvml: Any, device: Any) -> HealthSample:
    """Read the device's state; figures that it does not support are left out."""

    def query(function: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(device, *arguments)
        return None

    def errors(kind: int) -> Any:
        return query("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)

    return HealthSample(
        sm_clock_mhz=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=query("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        throttle_mask=query("nvmlDeviceGetCurrentClocksThrottleReasons"),
        temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=_watts(query("nvmlDeviceGetPowerUsage")),
        power_limit_w=_watts(query("nvmlDeviceGetEnforcedPowerLimit")),
        corrected_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
