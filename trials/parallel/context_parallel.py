"""Context parallelism: every rank holds a part of each sequence, and attention communicates.

A sequence is cut into ``2 cp`` pieces, and rank r holds pieces r and ``2 cp - 1 - r``: the later a piece, the more keys
it attends to, so this gives every rank the same work (as in Grattafiori et al., arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trials.models.base import TrainModel
from trials.models.llama import Block, Llama, causal_attention
from trials.parallel.collectives import Group, communicate, group_of
from trials.spec import Layout


def apply_context_parallel(model: TrainModel, mesh: DeviceMesh, layout: Layout, dtype: torch.dtype) -> None:
    """Replace the attention core by one that works on split sequences, in place.

    ``mesh`` is the cp one, ``dtype`` that of attention.
    """
    assert isinstance(model, Llama), "legality keeps context parallelism to models that have it"
    group = group_of(mesh)
    # One object for all layers, so that they share compiled code, and the mask.
    core = functools.partial(ulysses_attention, group=group)
    if layout.cp_method == "all_gather":
        masks: list[Tensor] = []
        core = functools.partial(all_gather_attention, group=group, masks=masks)
        num_positions = model.seq_length
        model.on_materialize.append(lambda device: masks.append(causal_mask(group, num_positions, dtype, device)))
    for layer in model.layers.values():
        assert isinstance(layer, Block)
        layer.attention.core = core
    model.held_positions = functools.partial(split_sequence, index=group.rank, cp=group.size)


def split_sequence(tensor: Tensor, index: int, cp: int) -> Tensor:
    """The positions ``[B, S / cp, ...]`` of ``tensor [B, S, ...]`` that context-parallel rank ``index`` holds."""
    assert tensor.shape[1] % (2 * cp) == 0, "legality checks that 2 cp divides the sequence"
    pieces = tensor.chunk(2 * cp, dim=1)
    return torch.cat([pieces[index], pieces[2 * cp - 1 - index]], dim=1)


def causal_mask(group: Group, seq_length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What to add to the scores of this rank's later piece, ``[S / 2 cp, end of the piece]``: 0 or minus infinity.

    Attention keeps its mask for the backward pass: of a boolean one it would keep a copy in its own type per layer.
    """
    length = seq_length // (2 * group.size)
    end = (2 * group.size - group.rank) * length
    return torch.full((length, end), -torch.inf, dtype=dtype, device=device).triu(end - length + 1)


def all_gather_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Group, masks: list[Tensor]) -> Tensor:
    """Causal attention of this rank's ``q [B, H, S / cp, head_size]`` to the keys and values of all ranks.

    Each of the two pieces sees only the keys up to its own end. Gathering keeps the few heads of grouped-query
    attention (as in arXiv 2407.21783). ``masks`` holds the :func:`causal_mask`.
    """
    keys, values = in_order(communicate("all_gather", torch.stack([k, v])[None], group))
    outputs = []
    for piece, part in zip((group.rank, 2 * group.size - 1 - group.rank), q.chunk(2, dim=2), strict=True):
        end = (piece + 1) * part.shape[2]
        outputs.append(attend_to_the_end(part, keys[:, :, :end], values[:, :, :end], masks[0]))
    return torch.cat(outputs, dim=2)


def attend_to_the_end(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention of queries that are the last positions of the keys.

    ``mask`` is for as many keys or more: its last columns are what counts. The functional form without a mask
    (``causal_lower_right``) can be neither compiled nor run on fake tensors.
    """
    length, end = q.shape[2], k.shape[2]
    if length == end:
        return causal_attention(q, k, v)
    num_shared = q.shape[1] // k.shape[1]
    if num_shared > 1:
        # Fused CUDA kernels that take a mask take no grouped heads.
        k, v = k.repeat_interleave(num_shared, dim=1), v.repeat_interleave(num_shared, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, -end:].to(q.dtype))


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Group) -> Tensor:
    """Causal attention over whole sequences of ``H / cp`` heads, exchanged for parts of all heads and back (Jacobs et
    al., arXiv 2309.14509)."""
    by_rank = [torch.unflatten(t, 1, (group.size, -1)).movedim(1, 0) for t in (q, k, v)]
    num_heads = [t.shape[2] for t in by_rank]
    heads = in_order(communicate("all_to_all", torch.cat(by_rank, dim=2), group))
    out = causal_attention(*torch.split(heads, num_heads, dim=1))
    return communicate("all_to_all", by_holder(out, group.size), group).movedim(0, 1).flatten(1, 2)


def in_order(parts: Tensor) -> Tensor:
    """Whole sequences ``[..., S, D]`` from what the ranks hold, ``[cp, ..., S / cp, D]``."""
    early, late = torch.unflatten(parts, -2, (2, -1)).unbind(-3)
    return torch.cat([early, late.flip(0)]).movedim(0, -3).flatten(-3, -2)


def by_holder(x: Tensor, cp: int) -> Tensor:
    """The inverse of :func:`in_order`."""
    early, late = torch.unflatten(x, -2, (2 * cp, -1)).movedim(-3, 0).chunk(2)
    return torch.stack([early, late.flip(0)], dim=-3).flatten(-3, -2)
