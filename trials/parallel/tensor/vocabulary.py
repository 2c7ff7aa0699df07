"""Embedding, head and loss where the vocabulary is split over ranks, or the positions into chunks.

No rank ever holds the logits of the whole vocabulary: the loss needs only the largest of each position's logits, the
sum of their exponentials and the one of its target, which are summed over the group (Shoeybi et al., arXiv 1909.08053,
section 3). All is computed in fp32, a piece of the rows at a time, and gradients take the place of the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trials.models import GivenModel
from trials.models.llama import Head, Llama
from trials.parallel.collectives import Group, reduced
from trials.parallel.shards import LocalShard, ShardMap
from trials.parallel.tensor.local import Borders, Boundary, linear, part_of

PIECE_ELEMENTS = 1 << 24
"""Most logits of which fp32 copies exist at a time: 64 MiB."""


def split_vocabulary(model: Llama, crossing: Borders, mesh: DeviceMesh | None) -> ShardMap:
    """Split embedding and head over the group, in place, and say how; with ``mesh`` as DTensors, which say so."""
    group, split = crossing.group, []
    if model.tok_embeddings is not None:
        model.tok_embeddings = VocabParallelEmbedding(model.tok_embeddings, crossing.leave, mesh)
        split.append("tok_embeddings.weight")
    if model.output is not None:
        model.output = VocabParallelHead(model.output, crossing, mesh)
        split.append("output.weight")
    if mesh is not None:
        return ShardMap()
    return ShardMap(shards={name: LocalShard(dim=0, index=group.rank, num_shards=group.size) for name in split})


def split_head(model: GivenModel, crossing: Borders, mesh: DeviceMesh) -> None:
    """Split the head of a decoder that is not ours over the group, in place, as DTensors.

    One that shares its weights with the embedding stays whole, like one whose vocabulary the group does not divide.
    """
    if model.output is not None and not model.has_tied_head and model.output.out_features % crossing.group.size == 0:
        model.output = VocabParallelHead(model.output, crossing, mesh)


def chunk_loss(model: nn.Module, num_chunks: int) -> None:
    """Compute head and loss in so many parts of the positions, in place."""
    if num_chunks > 1 and isinstance(model, Llama | GivenModel) and model.output is not None:
        head = model.output
        if isinstance(head, VocabParallelHead):
            head.num_chunks = num_chunks
        else:
            head.loss = functools.partial(chunked_loss, num_chunks=num_chunks, group=None)


def _split(weight: Tensor, group: Group, mesh: DeviceMesh | None) -> nn.Parameter:
    if mesh is None:
        return part_of(weight, 0, group.size)
    # Every rank draws the same values, so none has to be sent.
    return nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a weight; gradients flow to the whole."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class VocabParallelEmbedding(nn.Embedding):
    """Embedding of the ids of this rank's part of the vocabulary; the others' rows come with the boundary's sum."""

    def __init__(self, whole: nn.Embedding, leave: Boundary, mesh: DeviceMesh | None) -> None:
        nn.Module.__init__(self)
        self.weight = _split(whole.weight, leave.group, mesh)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings // leave.group.size, whole.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.leave = leave

    def forward(self, tokens: Tensor) -> Tensor:
        ids, absent = _own_ids(tokens, self.num_embeddings, self.leave.group.rank)
        rows = F.embedding(ids, _local(self.weight))
        embedded: Tensor = self.leave(rows.masked_fill(absent[..., None], 0.0))
        return embedded


class VocabParallelHead(Head):
    """Logits of this rank's part of the vocabulary, or the loss over all of it, which every rank gives alike."""

    def __init__(self, whole: Head, crossing: Borders, mesh: DeviceMesh | None) -> None:
        nn.Module.__init__(self)
        self.weight = _split(whole.weight, crossing.group, mesh)
        self.in_features, self.out_features = whole.in_features, whole.out_features // crossing.group.size
        self.bias: Any = None
        self.num_chunks = 1
        self._crossing = crossing

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        weight, crossing = _local(self.weight), self._crossing
        x = _local(x)  # of the norm under sequence parallelism by DTensors
        if targets is not None and self.num_chunks > 1:
            whole = crossing.enter(x)
            loss: Tensor = chunked_loss(whole, weight, targets, num_chunks=self.num_chunks, group=crossing.group)
            return loss
        if crossing.entrance is None:
            logits = F.linear(crossing.enter(x), weight)
        else:
            entered = crossing.entrance(x)
            logits = linear(entered.whole, weight, entered.token, crossing.group, crossing.sum_by)
        outputs: Tensor = logits if targets is None else split_loss(logits, targets, crossing.group)
        return outputs


def split_loss(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Mean cross entropy in fp32 of this rank's part ``[B, S, V / tp]`` of the logits against the tokens ``[B, S]``.

    The gradient is written over the logits.
    """
    loss: Tensor = _SplitLoss.apply(logits.flatten(0, 1), targets.flatten(), group.size, group.rank, group.name)  # type: ignore[no-untyped-call]
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, *, num_chunks: int, group: Group | None) -> Tensor:
    """Mean cross entropy in fp32 of hidden states ``[B, S, D]`` against the tokens ``[B, S]``, chunk by chunk.

    The logits of a chunk are dropped after the forward pass and computed again in the backward pass, where the scale
    of the loss is known, and nothing of the size of the weight waits for it. Not part of a compiled graph, which would
    keep what is computed twice.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        rows = x.flatten(0, 1).to(dtype)
        loss: Tensor = _ChunkedLoss.apply(rows, weight, targets.flatten(), num_chunks, group)  # type: ignore[no-untyped-call]
    return loss


class _SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, size: int, rank: int, name: str) -> Tensor:
        ids, absent = _own_ids(targets, logits.shape[1], rank)
        total, wanted = _combined(*_row_sums(logits, ids, absent), Group(name=name, size=size, rank=rank))
        ctx.save_for_backward(logits, total, ids, absent)
        return (total - wanted).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, total, ids, absent = ctx.saved_tensors
        _into_gradient(logits, total, ids, absent, grads[0] / len(total))
        return logits, None, None, None, None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, num_chunks: int, group: Group | None) -> Tensor:
        ids, absent = _own_ids(targets, weight.shape[0], 0 if group is None else group.rank)
        narrow = weight.to(x.dtype)
        sums = [
            _row_sums(F.linear(part, narrow), *labels)
            for part, *labels in zip(*(t.tensor_split(num_chunks) for t in (x, ids, absent)), strict=True)
        ]
        total, wanted = (torch.cat(parts) for parts in zip(*sums, strict=True))
        if group is not None:
            total, wanted = _combined(total, wanted, group)
        ctx.save_for_backward(x, weight, total, ids, absent)
        ctx.num_chunks = num_chunks
        return (total - wanted).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, *rows = ctx.saved_tensors
        narrow, scale = weight.to(x.dtype), grads[0] / len(x)
        input_grad, weight_grad = torch.empty_like(x), torch.zeros_like(narrow, dtype=torch.float32)
        parts = zip(*(t.tensor_split(ctx.num_chunks) for t in (x, input_grad, *rows)), strict=True)
        for part, part_grad, *labels in parts:
            _chunk_gradients(part, part_grad, labels, narrow, weight_grad, scale)
        return input_grad, weight_grad.to(weight.dtype), None, None, None


def _chunk_gradients(
    x: Tensor, input_grad: Tensor, rows: list[Tensor], weight: Tensor, weight_grad: Tensor, scale: Tensor
) -> None:
    """Write one chunk's ``input_grad``, and add to the weight's; ``rows`` are what :func:`_into_gradient` takes."""
    logits = F.linear(x, weight)
    total, ids, absent = rows
    _into_gradient(logits, total, ids, absent, scale)
    torch.mm(logits, weight, out=input_grad)
    _add_product(weight_grad, logits, x)


def _add_product(sums: Tensor, logits: Tensor, x: Tensor) -> None:
    """Add the product of ``logits [N, V]`` and ``x [N, D]`` to ``sums [V, D]`` in fp32.

    In the logits' 16 bits, every further addition would round the sum so far. A product in these is made for a few rows
    of the sums at a time.
    """
    if logits.dtype == sums.dtype:
        torch.addmm(sums, logits.t(), x, out=sums)
        return
    for rows, columns in _pieces(sums, logits.t()):
        rows.add_(torch.mm(columns, x))


def _own_ids(tokens: Tensor, num_own: int, rank: int) -> tuple[Tensor, Tensor]:
    """Positions of the ids within this rank's part of the vocabulary, and which are not in it; those are at 0."""
    ids = tokens - rank * num_own
    absent = (ids < 0) | (ids >= num_own)
    return ids.masked_fill(absent, 0), absent


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors a few rows at a time, as many as :data:`PIECE_ELEMENTS` are of the first one."""
    num_pieces = -(-tensors[0].numel() // PIECE_ELEMENTS)
    return zip(*(tensor.tensor_split(max(1, num_pieces)) for tensor in tensors), strict=True)


def _row_sums(logits: Tensor, ids: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the sum of the exponentials of each row, and its target's logit, 0 where absent; both in fp32."""
    sums = []
    for (piece,) in _pieces(logits):
        top = piece.amax(1).float()
        # The subtraction makes the one fp32 copy.
        sums.append(torch.sub(piece, top[:, None]).exp_().sum(1).log_().add_(top))
    wanted = logits.gather(1, ids[:, None])[:, 0].float().masked_fill_(absent, 0.0)
    return torch.cat(sums), wanted


def _combined(total: Tensor, wanted: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """What :func:`_row_sums` gives, over the whole vocabulary."""
    top = reduced(total, "max", group)
    exponentials, wanted = reduced(torch.stack([(total - top).exp_(), wanted]), "sum", group).unbind()
    return exponentials.log().add_(top), wanted


def _into_gradient(logits: Tensor, total: Tensor, ids: Tensor, absent: Tensor, scale: Tensor) -> None:
    """Write the gradient of the loss over the logits: probabilities, less 1 at the targets, times ``scale``."""
    one = torch.where(absent, 0.0, -scale)
    for piece, sums, columns, less in _pieces(logits, total, ids, one):
        _piece_gradient(piece, sums, columns, less, scale)


def _piece_gradient(logits: Tensor, total: Tensor, ids: Tensor, one: Tensor, scale: Tensor) -> None:
    shift = total[:, None]
    # The subtraction makes the one fp32 copy, where there has to be one.
    grad = logits.sub_(shift) if logits.dtype == torch.float32 else torch.sub(logits, shift)
    grad.exp_().mul_(scale).scatter_add_(1, ids[:, None], one[:, None])
    if grad is not logits:
        logits.copy_(grad)
