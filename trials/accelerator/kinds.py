"""The kinds of devices that ranks compute on, and by what names their software knows them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
    raise ValueError(f"device {kind!r} is none of {', '.join(FAMILIES)}")


_HIDDEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",  # an empty value would hide nothing
    "ASCEND_RT_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",  # as no ZE_AFFINITY_MASK does
}


def without_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that computes on no accelerator: none is started, no memory of one taken."""
    return {**environment, **_HIDDEN}
