"""Tensor parallelism by two engines, and the split vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.overrides import wrap_torch_function

from trials.failure import InfeasibleSpec
from trials.models import ImportedModel
from trials.models.built_in import (
    Attention,
    Block,
    FeedForward,
    Head,
    Llama,
    MultiHeadLatentAttention,
    SubLayer,
)
from trials.models.experts import MixtureOfExperts
from trials.models.model import SUM_GRADIENTS, TrainModel, matches
from trials.parallel.mesh import Group, LocalShard, Pending, ShardMap, finish, group_of, launch, reduced, start, wait
from trials.spec import Kernels, Layout, Precision

# Tensor and sequence parallelism as in Megatron: plain local tensors and explicit collectives.
#
# Activations enter and leave each sub-layer through a :class:`Boundary` (Shoeybi et al., arXiv 1909.08053, section 3;
# Korthikanti et al., arXiv 2205.05198, section 4.2)::
#
#                           forward                 backward
#     copy_input            nothing                 sum of gradients
#     reduce_output         sum                     nothing
#     gather_sequence       all-gather              reduce-scatter        with sequence parallelism, where the
#     scatter_sequence      reduce-scatter          all-gather            regions in between hold S / tp positions
#
# A ``TorchFunctionMode`` sees the four functions under these names, to count or recompute them. If a projection follows
# an entry directly, it takes over the entry's backward pass (:class:`ColumnLinear`).


class Crossing(Protocol):
    """One of the four functions for crossing a boundary.

    ``pending`` is the result of its start function for the same ``x``, if that was called. With a ``pending`` already
    used, it starts again from ``x``. With ``detached`` the result has no gradient.
    """

    def __call__(
        self, x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False
    ) -> Tensor: ...


def _visible(function: Any) -> Any:
    """Make calls of the function visible to a ``TorchFunctionMode`` under its name."""
    return wrap_torch_function(lambda x, *_args, **_kwargs: (x,))(function)


@_visible
def copy_input(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """Return ``x``, whole on every rank."""
    return _finished("none", start_copy, x, group, pending, detached)


@_visible
def reduce_output(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """Return the sum of every rank's ``x``."""
    return _finished("all_reduce", start_reduce, x, group, pending, detached)


@_visible
def gather_sequence(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """Return all positions ``[B, S, D]`` from every rank's ``x [B, S / tp, D]``."""
    parts = _finished("all_gather", start_gather, x, group, pending, detached)
    return torch.unflatten(parts, 0, (group.size, -1)).movedim(0, 1).flatten(1, 2)


@_visible
def scatter_sequence(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """Return this rank's positions ``[B, S / tp, D]`` of the sum of every rank's ``x [B, S, D]``."""
    return _finished("reduce_scatter", start_scatter, x, group, pending, detached)


def start_copy(x: Tensor, group: Group) -> Pending:
    return start("none", x, group)


def start_reduce(x: Tensor, group: Group) -> Pending:
    return start("all_reduce", x, group)


def start_gather(x: Tensor, group: Group) -> Pending:
    return start("all_gather", x, group)


def start_scatter(x: Tensor, group: Group) -> Pending:
    return start("reduce_scatter", by_part(x, group.size), group)


def by_part(x: Tensor, size: int) -> Tensor:
    """Reshape ``x [B, S, D]`` to ``[size * B, S / size, D]``: the parts of the positions one after the other."""
    return torch.unflatten(x, 1, (size, -1)).movedim(1, 0).flatten(0, 1)


Start = Callable[[Tensor, Group], Pending]


def _finished(kind: Any, begin: Start, x: Tensor, group: Group, pending: Pending | None, detached: bool) -> Tensor:
    halves = None if pending is None else pending.take()
    if halves is None:
        halves = begin(x, group).take()
    assert halves is not None
    return wait(halves[1]) if detached else finish(kind, halves, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Entry or exit of a split sub-layer: cross it at once, or start early and finish later."""

    cross: Crossing
    begin: Start
    group: Group
    in_16_bits: bool = False
    """Whether activations cross in autocast's 16-bit type; the following projection would cast to it anyway."""

    def __call__(self, x: Tensor, pending: Pending | None = None) -> Any:
        return self.cross(self.narrowed(x), self.group, pending)

    def start(self, x: Tensor) -> Pending:
        return self.begin(self.narrowed(x), self.group)

    def narrowed(self, x: Tensor) -> Tensor:
        """Cast ``x`` to the type that crosses."""
        kind = x.device.type
        if self.in_16_bits and torch.is_autocast_enabled(kind):
            return x.to(torch.get_autocast_dtype(kind))
        return x


class Token:
    """Holder of the tensor to which a :class:`ColumnLinear` sends its input's gradient, hidden from code that casts
    tensors: the gradient is in flight, so it must be awaited before any other use."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def take(self) -> Tensor | None:
        """Return the tensor on the first call; then None, so that nothing keeps it alive."""
        tensor, self._tensor = self._tensor, None
        return tensor


class Entered(NamedTuple):
    """Input of a projection: the token for its gradient, and the whole input without a gradient."""

    token: Token
    whole: Tensor


class Entrance(Boundary):
    """A boundary directly before a :class:`ColumnLinear`, which takes over its backward pass."""

    __slots__ = ()

    def __call__(self, x: Tensor, pending: Pending | None = None) -> Entered:
        x = self.narrowed(x)
        pending = pending or self.begin(x, self.group)
        return Entered(Token(pending.take_token()), self.cross(x, self.group, pending, detached=True))


Sum = Literal["all_reduce", "reduce_scatter"]
"""Reduction of a projection's input gradient; the latter with sequence parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """How activations enter and leave the split sub-layers of a model."""

    group: Group
    enter: Boundary
    leave: Boundary
    entrance: Entrance | None
    """Entrance before our own projections; None if the schedule splits the backward pass."""
    sum_by: Sum


def borders(group: Group, *, sequence_parallel: bool, overlap: bool, in_16_bits: bool) -> Borders:
    """Build the borders of a model that is split over ``group``.

    Args:
        overlap: whether projections overlap the reduction of their input's gradient with the weight gradient.
        in_16_bits: see :attr:`Boundary.in_16_bits`.
    """
    cross, begin = (gather_sequence, start_gather) if sequence_parallel else (copy_input, start_copy)
    leave, leaving = (scatter_sequence, start_scatter) if sequence_parallel else (reduce_output, start_reduce)
    entering: dict[str, Any] = {"cross": cross, "begin": begin, "group": group, "in_16_bits": in_16_bits}
    return Borders(
        group=group,
        enter=Boundary(**entering),
        leave=Boundary(cross=leave, begin=leaving, group=group),
        entrance=Entrance(**entering) if overlap else None,
        sum_by="reduce_scatter" if sequence_parallel else "all_reduce",
    )


def split_layers(model: Llama, crossing: Borders, *, sequence_parallel: bool) -> ShardMap:
    """Split the weights of the layers over the group, in place; return the splits."""
    group = crossing.group
    split: dict[str, int] = {}
    for number, layer in model.layers.items():
        assert isinstance(layer, Block)
        names = _split_block(layer, crossing)
        split |= {f"layers.{number}.{name}.weight": dim for name, dim in names.items()}
        if isinstance(layer.feed_forward, MixtureOfExperts) and not sequence_parallel:
            layer.feed_forward.positions = RankPositions(crossing)
    norms = _norm_weights(model) if sequence_parallel else []
    return ShardMap(
        shards={name: LocalShard(dim=dim, index=group.rank, num_shards=group.size) for name, dim in split.items()},
        partial=frozenset([*norms, *_weights_of_mixtures(model), *_narrow_weights(model)]),
    )


_PROJECTIONS: dict[type[SubLayer], tuple[tuple[str, ...], str]] = {
    Attention: (("wqkv",), "wo"),
    MultiHeadLatentAttention: (("wq_b", "wkv_b"), "wo"),
    FeedForward: (("w13",), "w2"),
}
"""Projections of a sub-layer that are split by output features, and the one that is split by input features."""


def _split_block(block: Block, crossing: Borders) -> dict[str, int]:
    """Split projections into a sub-layer by output features, and those out of it by input features."""
    split = {}
    for name in ("attention", "feed_forward"):
        sub_layer: Any = getattr(block, name)
        if isinstance(sub_layer, MixtureOfExperts):
            continue
        sub_layer.enter, sub_layer.leave = crossing.enter, crossing.leave
        into, outer = _PROJECTIONS[type(sub_layer)]
        for projection, dim in (*((inner, 0) for inner in into), (outer, 1)):
            _split_linear(getattr(sub_layer, projection), dim, crossing.group.size)
            split[f"{name}.{projection}"] = dim
        inner, *others = into
        # Other types of linear modules have their own computation.
        if crossing.entrance is not None and not others and type(getattr(sub_layer, inner)) is nn.Linear:
            sub_layer.enter = crossing.entrance
            setattr(sub_layer, inner, ColumnLinear(getattr(sub_layer, inner).weight, crossing))
    return split


def _split_linear(linear: nn.Linear, dim: int, num_shards: int) -> None:
    linear.weight = part_of(linear.weight, dim, num_shards)
    linear.out_features, linear.in_features = linear.weight.shape


def part_of(weight: Tensor, dim: int, num_shards: int) -> nn.Parameter:
    """Return an empty parameter for one of ``num_shards`` parts of ``weight`` along ``dim``."""
    size = list(weight.shape)
    assert size[dim] % num_shards == 0, "legality checks that tensor parallelism divides every split dimension"
    size[dim] //= num_shards
    return nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device))


def _norm_weights(model: Llama) -> list[str]:
    """Return the names of the norms' weights, whose gradients cover only this rank's positions."""
    return [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]


def _narrow_weights(model: Llama) -> list[str]:
    """Return the names of latent attention's whole weights, whose gradients cover only this rank's heads."""
    names = ("wq_a", "q_norm", "wkv_a", "kv_norm")
    ends = tuple(f"attention.{name}.weight" for name in names)
    return [name for name, _ in model.named_parameters() if name.endswith(ends)]


def _weights_of_mixtures(model: Llama) -> list[str]:
    """Return the names of the whole weights in mixtures of experts, whose gradients cover only this rank's tokens."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
        for name, _ in module.named_parameters()
        if not name.startswith("experts.")
    ]


@dataclass(frozen=True, slots=True)
class RankPositions:
    """Splits the positions over the tensor-parallel ranks; a :class:`~trials.models.experts.PositionSplit`."""

    crossing: Borders

    def own(self, x: Tensor) -> Tensor:
        group = self.crossing.group
        out: Tensor = _OwnPositions.apply(x, group.size, group.rank, group.name)  # type: ignore[no-untyped-call]
        return out

    def whole(self, x: Tensor) -> Tensor:
        group = self.crossing.group
        narrow = self.crossing.enter.narrowed(x)
        out: Tensor = _AllPositions.apply(narrow, group.size, group.rank, group.name)  # type: ignore[no-untyped-call]
        return out


class _OwnPositions(torch.autograd.Function):
    """Cuts out this rank's positions; the gradient is gathered, as every rank needs all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, name: str) -> Tensor:
        ctx.sent = (size, name)
        return _part_of_positions(x, size, rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered_positions(grads[0], *ctx.sent), None, None, None


class _AllPositions(torch.autograd.Function):
    """Gathers all positions. Every rank continues with the same, so its part of the gradient is complete."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, name: str) -> Tensor:
        ctx.held = (size, rank)
        return _gathered_positions(x, size, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _part_of_positions(grads[0], *ctx.held), None, None, None


def _part_of_positions(x: Tensor, size: int, rank: int) -> Tensor:
    length = x.shape[1] // size
    return x[:, rank * length : (rank + 1) * length].contiguous()


def _gathered_positions(x: Tensor, size: int, name: str) -> Tensor:
    parts = wait(launch("all_gather", x, size, name))
    return torch.unflatten(parts, 0, (size, -1)).movedim(0, 1).flatten(1, 2)


class ColumnLinear(nn.Linear):
    """This rank's output features of a projection after an :class:`Entrance`.

    Its backward pass computes the gradient of the input, starts its reduction over the group, and meanwhile computes
    the gradient of the weight. The module before the entrance waits for the reduction, which thus overlaps a matmul, as
    in Megatron-LM (Shoeybi et al., arXiv 1909.08053).
    """

    def __init__(self, weight: nn.Parameter, crossing: Borders) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.bias: Any = None
        self._project = functools.partial(linear, group=crossing.group, sum_by=crossing.sum_by)

    def forward(self, x: Entered) -> Tensor:  # type: ignore[override]
        projected: Tensor = self._project(x.whole, self.weight, x.token)
        return projected


@_visible
def linear(whole: Tensor, weight: Tensor, token: Token, group: Group, sum_by: Sum) -> Tensor:
    """Multiply ``whole`` by ``weight``, in autocast's type if active; without gradients on a repeated call."""
    kind = whole.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    sent = token.take()
    with torch.autocast(kind, enabled=False):
        narrow = weight.to(dtype)  # visible to autograd, so that the saved tensor is recognised as a weight
        out = _Projection.apply(whole if sent is None else sent, whole, narrow, sum_by, group.size, group.name)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, whole: Tensor, weight: Tensor, sum_by: Sum, size: int, name: str) -> Tensor:
        ctx.sent = (sum_by, size, name)
        ctx.token_dtype = token.dtype
        x = whole.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        sum_by, size, name = ctx.sent
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, 1)
        summed = weight_grad = None
        if ctx.needs_input_grad[0]:
            # In the type of the token: autograd would cast, and so read, a tensor still in flight.
            input_grad = torch.mm(grad, weight).view(x.shape).to(ctx.token_dtype)
            sent = by_part(input_grad, size) if sum_by == "reduce_scatter" else input_grad
            summed = launch(sum_by, sent, size, name, is_fresh=True)
        if ctx.needs_input_grad[2]:
            weight_grad = torch.mm(grad.t(), x.flatten(0, 1))
        return summed, None, weight_grad, None, None, None


# Tensor parallelism for imported modules, by their plan.


def apply_plan(model: ImportedModel, mesh: DeviceMesh) -> ShardMap:
    """Split the modules named in the model's plan, in place; return which gradients are partial.

    Raises:
        InfeasibleSpec: the plan does not match the module.
    """
    if model.no_tensor_parallel:
        raise InfeasibleSpec(f"tp: {model.no_tensor_parallel}")
    partial: set[str] = set()
    in_layers = {one for layer in model.layers.values() for one in layer.modules()}
    for path, module, name in matches(model.module, model.tensor_parallel):
        if name == SUM_GRADIENTS:
            partial |= {f"module.{path}.{parameter}" for parameter, _ in module.named_parameters()}
        else:
            # Every rank has the whole weights, so none must be sent.
            parallelize_module(module, mesh, style_of(name, module), src_data_rank=None)
            if module not in in_layers:
                module.register_forward_hook(_arrived)
    return ShardMap(partial=frozenset(partial))


def _arrived(_module: nn.Module, _args: Any, outputs: Any) -> Any:
    """Wait for outputs in flight: as inputs of a compiled layer, they lose the node that makes their gradients DTensors
    again."""
    return _Arrived.apply(outputs) if isinstance(outputs, AsyncCollectiveTensor) else outputs  # type: ignore[no-untyped-call]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        whole: Tensor = x.wait()
        return whole.view_as(whole)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def style_of(name: str, module: nn.Module) -> ParallelStyle:
    """Return the style of splitting called ``name``."""
    match name:
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "rowwise" if isinstance(module, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
    return ColwiseParallel()


# Embedding, head and loss with the vocabulary split over ranks, or the positions into chunks.
#
# No rank ever holds the logits of the whole vocabulary. For each position, the loss needs only the largest logit, the
# sum of exponentials and the target's logit, which are reduced over the group (Shoeybi et al., arXiv 1909.08053,
# section 3). All is computed in fp32, some rows at a time, and gradients overwrite the logits.


PIECE_ELEMENTS = 1 << 24
"""Maximum number of logits with fp32 copies at a time: 64 MiB."""


def split_vocabulary(model: Llama, crossing: Borders, mesh: DeviceMesh | None) -> ShardMap:
    """Split embedding and head over the group, in place, and return the splits; with ``mesh``, use DTensors."""
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


def split_head(model: ImportedModel, crossing: Borders, mesh: DeviceMesh) -> None:
    """Split the head of an imported decoder over the group, in place, as DTensors.

    A head that shares its weights with the embedding stays whole, as does one whose vocabulary is not divisible.
    """
    if model.output is not None and not model.has_tied_head and model.output.out_features % crossing.group.size == 0:
        model.output = VocabParallelHead(model.output, crossing, mesh)


def chunk_loss(model: nn.Module, kernels: Kernels) -> None:
    """Split head and loss into :attr:`~trials.spec.Kernels.loss_chunks` parts of the positions, in place."""
    num_chunks = kernels.loss_chunks
    if num_chunks > 1 and isinstance(model, Llama | ImportedModel) and model.output is not None:
        head = model.output
        by = loss_kernels(None if kernels.compile == "off" else kernels.backend)
        if isinstance(head, VocabParallelHead):
            head.num_chunks = num_chunks
            head.loss_kernels = by
        else:
            head.loss = functools.partial(chunked_loss, num_chunks=num_chunks, group=None, by=by)


def _split(weight: Tensor, group: Group, mesh: DeviceMesh | None) -> nn.Parameter:
    if mesh is None:
        return part_of(weight, 0, group.size)
    # Every rank draws the same values, so none must be sent.
    return nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))


def _local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight; gradients flow to the whole."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class VocabParallelEmbedding(nn.Embedding):
    """Embedding of the ids in this rank's part of the vocabulary; the boundary's sum adds the others' rows."""

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
    """Logits of this rank's part of the vocabulary, or the loss over all of it, equal on every rank."""

    def __init__(self, whole: Head, crossing: Borders, mesh: DeviceMesh | None) -> None:
        nn.Module.__init__(self)
        self.weight = _split(whole.weight, crossing.group, mesh)
        self.in_features, self.out_features = whole.in_features, whole.out_features // crossing.group.size
        self.bias: Any = None
        self.num_chunks = 1
        self.loss_kernels = loss_kernels(None)
        self._crossing = crossing

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        weight, crossing = _local(self.weight), self._crossing
        x = _local(x)  # the norm's output is a DTensor under sequence parallelism
        if targets is not None and self.num_chunks > 1:
            whole = crossing.enter(x)
            loss: Tensor = chunked_loss(
                whole, weight, targets, num_chunks=self.num_chunks, group=crossing.group, by=self.loss_kernels
            )
            return loss
        if crossing.entrance is None:
            logits = F.linear(crossing.enter(x), weight)
        else:
            entered = crossing.entrance(x)
            logits = linear(entered.whole, weight, entered.token, crossing.group, crossing.sum_by)
        outputs: Tensor = logits if targets is None else split_loss(logits, targets, crossing.group)
        return outputs


def split_loss(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Return the mean cross entropy in fp32 of this rank's logits ``[B, S, V / tp]`` against the tokens ``[B, S]``.

    The gradient overwrites the logits.
    """
    loss: Tensor = _SplitLoss.apply(logits.flatten(0, 1), targets.flatten(), group.size, group.rank, group.name)  # type: ignore[no-untyped-call]
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_loss(
    x: Tensor, weight: Tensor, targets: Tensor, *, num_chunks: int, group: Group | None, by: LossKernels | None = None
) -> Tensor:
    """Return the mean cross entropy in fp32 of hidden states ``[B, S, D]`` against the tokens ``[B, S]``, by chunks.

    The logits of a chunk are dropped after the forward pass and recomputed in the backward pass, where the scale of the
    loss is known; so no buffer of the weight's size is kept. It is not part of a compiled graph, which would keep what
    is computed twice; ``by`` may be compiled.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        rows = x.flatten(0, 1).to(dtype)
        loss: Tensor = _ChunkedLoss.apply(rows, weight, targets.flatten(), num_chunks, group, by or loss_kernels(None))  # type: ignore[no-untyped-call]
    return loss


class _SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, size: int, rank: int, name: str) -> Tensor:
        ids, absent = _own_ids(targets, logits.shape[1], rank)
        sums = _fused_row_sums if torch.compiler.is_compiling() else _row_sums
        total, wanted = _combined(*sums(logits, ids, absent), Group(name=name, size=size, rank=rank))
        ignored = targets < 0
        ctx.save_for_backward(logits, total.masked_fill(ignored, torch.inf), ids, absent)
        return (total - wanted).masked_fill(ignored, 0.0).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, total, ids, absent = ctx.saved_tensors
        scale = grads[0] / len(total)
        if torch.compiler.is_compiling():
            return _fused_gradient(logits, total, ids, absent, scale), None, None, None, None
        _into_gradient(logits, total, ids, absent, scale)
        return logits, None, None, None, None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, num_chunks: int, group: Group | None, by: LossKernels
    ) -> Tensor:
        ids, absent = _own_ids(targets, weight.shape[0], 0 if group is None else group.rank)
        narrow = weight.to(x.dtype)
        sums = [
            by.row_sums(F.linear(part, narrow), *labels)
            for part, *labels in zip(*(t.tensor_split(num_chunks) for t in (x, ids, absent)), strict=True)
        ]
        total, wanted = (torch.cat(parts) for parts in zip(*sums, strict=True))
        if group is not None:
            total, wanted = _combined(total, wanted, group)
        ignored = targets < 0  # an infinite sum makes their gradients 0
        ctx.save_for_backward(x, weight, total.masked_fill(ignored, torch.inf), ids, absent)
        ctx.num_chunks, ctx.by = num_chunks, by
        return (total - wanted).masked_fill(ignored, 0.0).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        x, weight, *rows = ctx.saved_tensors
        narrow, scale = weight.to(x.dtype), grads[0] / len(x)
        input_grad, weight_grad = torch.empty_like(x), torch.zeros_like(narrow, dtype=torch.float32)
        parts = zip(*(t.tensor_split(ctx.num_chunks) for t in (x, input_grad, *rows)), strict=True)
        for part, part_grad, *labels in parts:
            _chunk_gradients(part, part_grad, labels, narrow, weight_grad, scale, ctx.by)
        return input_grad, weight_grad.to(weight.dtype), None, None, None, None


def _chunk_gradients(
    x: Tensor,
    input_grad: Tensor,
    rows: list[Tensor],
    weight: Tensor,
    weight_grad: Tensor,
    scale: Tensor,
    by: LossKernels,
) -> None:
    """Write one chunk's ``input_grad``, and add to the weight's; ``rows`` are arguments of :func:`_into_gradient`."""
    logits = F.linear(x, weight)
    total, ids, absent = rows
    by.into_gradient(logits, total, ids, absent, scale)
    torch.mm(logits, weight, out=input_grad)
    _add_product(weight_grad, logits, x)


def _add_product(sums: Tensor, logits: Tensor, x: Tensor) -> None:
    """Add the product of ``logits [N, V]`` and ``x [N, D]`` to ``sums [V, D]`` in fp32.

    In the logits' 16 bits, every addition would round the sum. So a product in 16 bits covers only a few rows of the
    sums at a time.
    """
    if logits.dtype == sums.dtype:
        torch.addmm(sums, logits.t(), x, out=sums)
        return
    for rows, columns in _pieces(sums, logits.t()):
        rows.add_(torch.mm(columns, x))


def _own_ids(tokens: Tensor, num_own: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return positions of the ids in this rank's part of the vocabulary, and which are not in it; those are at 0."""
    ids = tokens - rank * num_own
    absent = (ids < 0) | (ids >= num_own)
    return ids.masked_fill(absent, 0), absent


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows of the tensors at a time, :data:`PIECE_ELEMENTS` elements of the first one."""
    num_pieces = -(-tensors[0].numel() // PIECE_ELEMENTS)
    return zip(*(tensor.tensor_split(max(1, num_pieces)) for tensor in tensors), strict=True)


def _row_sums(logits: Tensor, ids: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp of each row and its target's logit (0 if absent), both in fp32."""
    sums = []
    for (piece,) in _pieces(logits):
        top = piece.amax(1).float()
        # The subtraction makes the only fp32 copy.
        sums.append(torch.sub(piece, top[:, None]).exp_().sum(1).log_().add_(top))
    wanted = logits.gather(1, ids[:, None])[:, 0].float().masked_fill_(absent, 0.0)
    return torch.cat(sums), wanted


def _fused_row_sums(logits: Tensor, ids: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """Variant of :func:`_row_sums` that compiles to one kernel, without fp32 copies in memory."""
    wanted = logits.gather(1, ids[:, None])[:, 0].float()
    return logits.float().logsumexp(1), torch.where(absent, 0.0, wanted)


def _fused_gradient(logits: Tensor, total: Tensor, ids: Tensor, absent: Tensor, scale: Tensor) -> Tensor:
    """Return what :func:`_into_gradient` writes; for compilation."""
    one = torch.where(absent, 0.0, scale)[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    grad = (logits.float() - total[:, None]).exp() * scale
    return torch.where(columns == ids[:, None], grad - one, grad).to(logits.dtype)


def _fused_into_gradient(logits: Tensor, total: Tensor, ids: Tensor, absent: Tensor, scale: Tensor) -> None:
    logits.copy_(_fused_gradient(logits, total, ids, absent, scale))


@dataclass(frozen=True, slots=True)
class LossKernels:
    """Elementwise kernels of a chunked loss."""

    row_sums: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    into_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


@functools.cache
def loss_kernels(backend: str | None) -> LossKernels:
    """Return eager kernels or, with a backend of torch.compile, compiled ones."""
    if backend is None:
        return LossKernels(_row_sums, _into_gradient)
    compiled = functools.partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
    return LossKernels(compiled(_fused_row_sums), compiled(_fused_into_gradient))


def _combined(total: Tensor, wanted: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Combine the results of :func:`_row_sums` over the whole vocabulary."""
    top = reduced(total, "max", group)
    exponentials, wanted = reduced(torch.stack([(total - top).exp_(), wanted]), "sum", group).unbind()
    return exponentials.log().add_(top), wanted


def _into_gradient(logits: Tensor, total: Tensor, ids: Tensor, absent: Tensor, scale: Tensor) -> None:
    """Overwrite the logits with the gradient of the loss: probabilities, less 1 at the targets, times ``scale``."""
    one = torch.where(absent, 0.0, -scale)
    for piece, sums, columns, less in _pieces(logits, total, ids, one):
        _piece_gradient(piece, sums, columns, less, scale)


def _piece_gradient(logits: Tensor, total: Tensor, ids: Tensor, one: Tensor, scale: Tensor) -> None:
    shift = total[:, None]
    # The subtraction makes the only fp32 copy, if one is needed.
    grad = logits.sub_(shift) if logits.dtype == torch.float32 else torch.sub(logits, shift)
    grad.exp_().mul_(scale).scatter_add_(1, ids[:, None], one[:, None])
    if grad is not logits:
        logits.copy_(grad)


# Tensor and sequence parallelism by either engine: DTensor here, or the local one above.
#
# Both share the code for embedding, head and loss.


Plan = dict[str, ParallelStyle]


def apply_tensor_parallel(
    model: TrainModel, mesh: DeviceMesh, layout: Layout, precision: Precision | None = None
) -> ShardMap:
    """Split projections over heads and feed-forward columns (Shoeybi et al., arXiv 1909.08053), and embedding and head
    over the vocabulary, in place.

    With sequence parallelism the regions between them, including norms, hold ``S / tp`` positions each (Korthikanti et
    al., arXiv 2205.05198). ``mesh`` is the tensor-parallel one.
    """
    crossing = borders(
        group_of(mesh),
        sequence_parallel=layout.sequence_parallel,
        # The schedule itself splits the backward pass of every operator.
        overlap=layout.schedule != "zbv",
        in_16_bits=precision is None or "linear" not in precision.black,
    )
    if isinstance(model, ImportedModel):
        shard_map = apply_plan(model, mesh)
        split_head(model, crossing, mesh)
        return shard_map
    assert isinstance(model, Llama), "legality keeps tensor parallelism to models that have it"
    is_local = layout.tp_engine == "local"
    vocabulary = split_vocabulary(model, crossing, None if is_local else mesh)
    if is_local:
        layers = split_layers(model, crossing, sequence_parallel=layout.sequence_parallel)
        return ShardMap(shards={**vocabulary.shards, **layers.shards}, partial=layers.partial)
    _split_by_dtensor(model, mesh, sequence_parallel=layout.sequence_parallel)
    return vocabulary


def _split_by_dtensor(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    block = _sequence_parallel_plan() if sequence_parallel else _tensor_parallel_plan()
    if sequence_parallel and model.norm is not None:
        parallelize_module(model.norm, mesh, SequenceParallel())
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)


def _tensor_parallel_plan() -> Plan:
    return {
        "attention.wqkv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.w13": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }


def _sequence_parallel_plan() -> Plan:
    split, whole = Shard(1), Replicate()
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(split, None), desired_input_layouts=(whole, None)),
        "attention.wqkv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=split),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        "feed_forward.w13": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=split),
    }
