"""Supported torch releases, and what the installed one lacks.

    python -m trials.torch_support        prints the findings as JSON

No version is pinned, because vendors' containers bring their own builds. Trials use recent and partly private APIs of
torch, which are checked by name. Standard library only, until :func:`probe` imports torch.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from trials.accelerator.kinds import FAMILIES

OLDEST = (2, 10)
"""Oldest release with everything in :data:`NEEDED`."""
TESTED = (2, 13)
"""Release that the tests run with."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "torch._utils": ("_flatten_dense_tensors", "_unflatten_dense_tensors"),
    "torch.autograd.graph": ("saved_tensors_hooks",),
    "torch.distributed._composable.replicate_with_fsdp": ("ReplicateModule", "replicate"),
    "torch.distributed._functional_collectives": ("AsyncCollectiveTensor",),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("checkpoint_wrapper",),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": ("FSDPModule", "MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.pipelining": ("PipelineStage", "schedules"),
    "torch.distributed.pipelining.schedules": (
        "Schedule1F1B",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
        "ScheduleLoopedBFS",
        "ScheduleZBVZeroBubble",
        "_PipelineSchedule",
    ),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel",
        "ParallelStyle",
        "PrepareModuleInput",
        "RowwiseParallel",
        "SequenceParallel",
        "parallelize_module",
    ),
    "torch.distributed.tensor.placement_types": ("Placement",),
}
"""Names by module that trials import from torch and that not every release has."""
NEEDED_BY_DRY_RUNS: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.tensor._sharding_prop": ("ShardingPropagator",),
}
"""Additional names for dry runs."""


def installed_version() -> str | None:
    """Return the version of the installed torch without importing it; None if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def problem(version: str | None) -> str:
    """Describe why trials cannot run with this version of torch; empty if no reason is known."""
    if version is None:
        return "torch is not installed"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) < OLDEST:
        return f"torch {version} is too old: trials require {OLDEST[0]}.{OLDEST[1]} or newer"
    return ""


REMEDY = (
    f"Install torch {OLDEST[0]}.{OLDEST[1]} or newer (tested with {TESTED[0]}.{TESTED[1]}) on the nodes, in the "
    "build for their driver; plan, report, promote and similar commands run with any torch or none."
)


def lacking(needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Import torch and return which of these names it lacks."""
    missing = []
    for module, names in needed.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            missing.append(module)
            continue
        missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return missing


def replicas_keep_buffers() -> dict[str, Any]:
    """Return arguments with which ``DistributedDataParallel`` never sends buffers; one was renamed in 2.13."""
    from torch.nn.parallel import DistributedDataParallel

    accepted = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
    return {"init_sync": False, name: False}


def parameter_groups(state: Any) -> list[Any]:
    """Return the parameter groups that an FSDP2 state gathers and reduces together; before 2.12 at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def probe() -> dict[str, Any]:
    """Describe this interpreter's torch: version, build, devices, collectives, and what trials miss in it."""
    import torch
    import torch.distributed as dist

    from trials.accelerator.device import device_name, installed_kind

    kind = installed_kind()
    type_ = FAMILIES[kind].torch_device
    count = 0 if kind == "cpu" else getattr(torch, type_).device_count()
    collectives: Any = torch.cuda.nccl  # its annotations lack the function
    nccl: Any = collectives.version() if type_ == "cuda" and dist.is_nccl_available() else None
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "kind": kind,
        "devices": [device_name(torch.device(type_, index)) for index in range(count)],
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "lacking": lacking(NEEDED),
        "lacking_for_dry_runs": lacking(NEEDED_BY_DRY_RUNS),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
