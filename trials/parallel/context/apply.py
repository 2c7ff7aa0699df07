"""Splits sequences over ranks, and replaces a model's attention by one that works on what they hold.

A sequence is cut into ``2 cp`` pieces, and rank r holds pieces r and ``2 cp - 1 - r``: the later a piece, the more keys
it attends to, so this gives every rank the same work (as in Grattafiori et al., arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import wrap_torch_function

from trials.attention.pieces import Parts
from trials.attention.plan import AttentionPlan
from trials.models.base import TrainModel
from trials.models.llama import AttentionCore, Llama
from trials.parallel.collectives import Group, group_of
from trials.parallel.context.gathered import GatheredAttention
from trials.parallel.context.ring import RingAttention
from trials.parallel.context.ulysses import ulysses_attention
from trials.spec import Layout


def apply_context_parallel(model: TrainModel, mesh: DeviceMesh, layout: Layout, plan: AttentionPlan) -> None:
    """Split the sequences over ``mesh``, the cp one, in place."""
    assert isinstance(model, Llama), "legality keeps context parallelism to models that have it"
    group = group_of(mesh)
    # One object for all layers, so that they share compiled code.
    core: AttentionCore
    if layout.cp_method == "ulysses":
        core = functools.partial(ulysses_attention, plan=plan, group=group)
    else:
        function = RingAttention if layout.cp_method == "ring" else GatheredAttention
        core = functools.partial(scaled_dot_product_attention, plan=plan, group=group, function=function)
    model.attend_by(core)
    model.held_positions = functools.partial(split_sequence, index=group.rank, cp=group.size)


def _attended(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return q, k, v


@wrap_torch_function(cast(Any, _attended))
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, group: Group, function: type[torch.autograd.Function]
) -> Tensor:
    """Causal attention of this rank's ``q [B, H, S / cp, head_size]`` to the keys and values of all ranks.

    A ``TorchFunctionMode`` sees it under the name of what it replaces, to be cast or called again.
    """
    q, k, v = (t.to(plan.dtype) for t in (q, k, v))
    out: Tensor = function.apply(q, k, v, Parts.by(plan), group)  # type: ignore[no-untyped-call]
    return out


def split_sequence(tensor: Tensor, index: int, cp: int) -> Tensor:
    """The positions ``[B, S / cp, ...]`` of ``tensor [B, S, ...]`` that context-parallel rank ``index`` holds."""
    assert tensor.shape[1] % (2 * cp) == 0, "legality checks that 2 cp divides the sequence"
    pieces = tensor.chunk(2 * cp, dim=1)
    return torch.cat([pieces[index], pieces[2 * cp - 1 - index]], dim=1)
