"""The kinds of devices that ranks compute on, and by what names their software knows them. Standard library only."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "npu"]
"""``cuda`` and ``rocm`` are both torch's device ``cuda``, with tools and variables of their own; ``npu`` is Huawei's
Ascend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one kind of device is found, chosen and talked to."""

    kind: DeviceKind
    torch_device: str
    """Type of torch.device."""
    package: str
    """Package whose import adds the device to torch; empty where torch has it."""
    collectives: str
    """Backend of process groups."""
    visible_variable: str
    """Environment variable that lists the devices a process may see; empty for the CPU."""
    order_variables: Mapping[str, str]
    """Environment variables that make the numbers of devices mean the same to all tools."""
    ray_resource: str
    """Name of the resource by which Ray counts the devices."""
    query_tool: str
    """Program that lists devices and their memory; empty for the CPU."""
    visible_otherwise: str = ""
    """Variable that lists them for the kind's software where ``visible_variable`` is not set; empty for none."""
    empty_hides: bool = True
    """Whether an empty value of these variables hides all devices; elsewhere it limits nothing."""
    widest: Literal["float64", "float32"] = "float64"
    """The widest float that all of its devices compute in and its collectives send."""


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
            # CUDA's own order puts the fastest first, nvidia-smi's follows the bus: one index must mean one device.
            order_variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            ray_resource="GPU",
            query_tool="nvidia-smi",
        ),
        Family(
            kind="rocm",
            torch_device="cuda",
            package="",
            collectives="nccl",  # RCCL goes by this name
            visible_variable="HIP_VISIBLE_DEVICES",
            order_variables={},
            ray_resource="GPU",
            query_tool="rocm-smi",
            visible_otherwise="CUDA_VISIBLE_DEVICES",
            empty_hides=False,  # ROCclr takes an empty list for none, and asks the other variable
        ),
        Family(
            kind="xpu",
            torch_device="xpu",
            package="",
            collectives="xccl",
            visible_variable="ZE_AFFINITY_MASK",
            # Each tile of a card is a device, numbered through all cards; otherwise the mask would number cards.
            order_variables={"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
            ray_resource="GPU",
            query_tool="xpu-smi",
            empty_hides=False,
            widest="float32",  # only the devices of data centres have more
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
            widest="float32",  # HCCL reduces no 64-bit floats
        ),
    )
}


def family_of(kind: str) -> Family:
    """The family of a device kind, or of a type of torch.device.

    Raises:
        ValueError: there is none of this name.
    """
    for family in FAMILIES.values():
        if kind in (family.kind, family.torch_device):
            return family
    raise ValueError(f"unknown device {kind!r}; use one of {', '.join(FAMILIES)}")


_HIDDEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",  # an empty value would hide nothing
    "ASCEND_RT_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",  # as no ZE_AFFINITY_MASK does
}


def without_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that computes on no accelerator: none is started, no memory of one taken."""
    return {**environment, **_HIDDEN}


# Clocks, temperature, power and memory errors of a device during a measurement, from NVML.
#
# A thread queries it twice a second, so steps do not wait. If the package or the driver is missing or does not respond,
# these values are unknown, which is not an error. So they are on devices of other makers, whose interfaces are not
# queried. Standard library only; the package ``nvidia-ml-py`` is imported when watching is prepared.


PERIOD_S = 0.5
"""Seconds between two samples."""
MAX_SAMPLES = 4096
"""Most samples that are kept: half an hour of them."""
_PATIENCE_S = 2.0
"""How long the last sample is waited for: a driver in trouble may take for ever."""
POWER_CAP = 0x04
"""NVML's bit for clocks lowered by the software power cap (nvml.h, nvmlClocksThrottleReasonSwPowerCap)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSample:
    """A device at one moment; None for what it does not tell."""

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
    """Errors of the memory that ECC has corrected since the driver was loaded."""
    uncorrected_errors: int | None = None


class HealthWatch:
    """Samples one device, by its UUID, from :meth:`begin` to :meth:`end`; nothing without a UUID."""

    def __init__(self, uuid: str | None, period_s: float = PERIOD_S) -> None:
        self._uuid = uuid
        self._period_s = period_s
        self._may_sample = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[HealthSample] = []

    def prepare(self) -> None:
        """Import the package and start NVML, which take longer than a step may; only the first call counts."""
        if self._thread is None and self._uuid is not None:
            self._thread = threading.Thread(target=self._watch, name="device-health", daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """Start to sample."""
        self.prepare()
        self._may_sample.set()

    def end(self) -> tuple[HealthSample, ...]:
        """Stop, and what was seen."""
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
    """The device that NVML tells clocks of: of a MIG slice, the one it is a part of."""
    found = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(found)
    return found


def sample(nvml: Any, device: Any) -> HealthSample:
    """What the device tells now; each figure that it refuses is left out."""

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
