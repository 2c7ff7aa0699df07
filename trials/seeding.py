"""Initial weights that do not depend on the layout.

The global random stream depends on build order and sharding, so every parameter gets a generator seeded by its name;
the full tensor is drawn on the CPU and each rank keeps its slice.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trials.models.llama import Llama

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """The parameter's name without what recompute and compile put in between."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def initial_value(name: str, size: torch.Size, std: float, seed: int) -> Tensor:
    """The full fp32 value of parameter ``name``: a pure function of its arguments. ``std`` 0 gives ones."""
    if std == 0.0:
        return torch.ones(size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return torch.empty(size).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_parameters(model: Llama, seed: int) -> None:
    """Fill the parameters of a model that has just left the meta device, sharded or not."""
    for wrapped_name, parameter in model.named_parameters():
        name = plain_name(wrapped_name)
        full = initial_value(name, parameter.shape, model.init_std(name), seed)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank drew the same full tensor, so none has to be sent.
            full = full.to(parameter.device)
            shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(full)
