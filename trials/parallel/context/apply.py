"""Replaces the attention core of a model by one that works on split sequences."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import wrap_torch_function

from trials.attention.kernels import causal_attention
from trials.attention.pieces import Parts
from trials.attention.plan import AttentionPlan
from trials.models.base import TrainModel
from trials.models.llama import AttentionCore, Llama
from trials.parallel.collectives import Group, communicate, group_of
from trials.parallel.context.gathered import GatheredAttention
from trials.parallel.context.positions import by_holder, in_order, split_sequence
from trials.parallel.context.ring import RingAttention
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


@wrap_torch_function(lambda q, k, v, **_: (q, k, v))
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, group: Group, function: type[torch.autograd.Function]
) -> Tensor:
    """Causal attention of this rank's ``q [B, H, S / cp, head_size]`` to the keys and values of all ranks.

    A ``TorchFunctionMode`` sees it under the name of what it replaces, to be cast or called again.
    """
    q, k, v = (t.to(plan.dtype) for t in (q, k, v))
    out: Tensor = function.apply(q, k, v, Parts.by(plan), group)  # type: ignore[no-untyped-call]
    return out


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, group: Group) -> Tensor:
    """Causal attention over whole sequences of ``H / cp`` heads, exchanged for parts of all heads and back (Jacobs et
    al., arXiv 2309.14509)."""
    by_rank = [torch.unflatten(t, 1, (group.size, -1)).movedim(1, 0) for t in (q, k, v)]
    num_heads = [t.shape[2] for t in by_rank]
    heads = in_order(communicate("all_to_all", torch.cat(by_rank, dim=2), group))
    out = causal_attention(*torch.split(heads, num_heads, dim=1), expands=plan.expands)
    return communicate("all_to_all", by_holder(out, group.size), group).movedim(0, 1).flatten(1, 2)
