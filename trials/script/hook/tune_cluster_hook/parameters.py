"""How many bytes of parameters this process holds, and how many the whole model has where that can be seen."""

from __future__ import annotations

import sys
from typing import Any


def numel(parameter: Any) -> int:
    """Elements of the whole parameter, as far as its own type knows."""
    whole = getattr(parameter, "ds_numel", None)
    return int(whole if whole is not None else parameter.numel())


def local_numel(parameter: Any) -> int:
    """Elements that this process holds when nothing is gathered."""
    for name in ("ds_tensor", "_local_tensor"):  # DeepSpeed's ZeRO-3, DTensor
        shard = getattr(parameter, name, None)
        if shard is not None:
            return int(shard.numel())
    return int(parameter.numel())


def facts(root: Any) -> dict[str, int]:
    """``parameter_bytes_local`` and, if known, ``parameter_bytes_global`` and ``parameters``."""
    flat = _flat_parameters(root)
    local, whole, count = flat["local"], flat["whole"], flat["count"]
    sharded = bool(flat["whole"])
    for parameter in root.parameters():
        if id(parameter) in flat["ids"]:
            continue
        size = int(parameter.element_size())
        local += local_numel(parameter) * size
        whole += numel(parameter) * size
        count += numel(parameter)
        sharded = sharded or hasattr(parameter, "ds_numel") or hasattr(parameter, "_local_tensor")
    found = {"parameter_bytes_local": local}
    if _is_whole(root, sharded):
        found.update(parameter_bytes_global=whole, parameters=count)
    return found


def _flat_parameters(root: Any) -> dict[str, Any]:
    """What FSDP's first version has flattened; their originals come back as ids, not to be counted twice."""
    sizes: dict[str, Any] = {"local": 0, "whole": 0, "count": 0}
    ids: set[int] = set()
    for module in root.modules():
        handle: Any | None = module.__dict__.get("_handle")
        flat = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_unpadded_unsharded_size"):
            continue
        elements = int(flat._unpadded_unsharded_size.numel())
        sizes["local"] += int(flat._sharded_size.numel()) * flat.element_size()
        sizes["whole"] += elements * flat.element_size()
        sizes["count"] += elements
        ids.update(id(parameter) for parameter in (getattr(flat, "_params", None) or []))
        ids.add(id(flat))
    return {**sizes, "ids": ids}


def _is_whole(root: Any, sharded: bool) -> bool:
    """Whether what this process sees is the whole model: not a stage of a pipeline, no unmarked shards of tensors."""
    if any(name in sys.modules for name in ("megatron.core.parallel_state", "deepspeed.runtime.pipe.engine")) and any(
        "Pipeline" in type(module).__name__ or type(module).__module__.startswith("megatron.")
        for module in root.modules()
    ):
        return False
    if _uses_pipelining():
        return False
    replicated = any(
        type(module).__name__ in ("DistributedDataParallel", "DeepSpeedEngine") for module in root.modules()
    )
    return sharded or replicated or world_size() == 1


def _uses_pipelining() -> bool:
    """Whether the program has imported what splits models into stages."""
    return "torch.distributed.pipelining.schedules" in sys.modules and world_size() > 1


def world_size() -> int:
    """Ranks of the default process group, 1 without one: then every process trains on its own."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size())
