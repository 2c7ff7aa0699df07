"""Mixture-of-experts feed-forward: a router chooses some experts for each token, and all run as grouped products.

Shape letters: T tokens of this rank, K experts per token, E routed experts, D hidden size, F width of an expert.

Nothing here waits for the device: which rows go to which expert is known only there, so the sizes of all tensors are
those of all rows together. Tokens are dropped only if a capacity is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from trials.reports import ExpertLoad
from trials.spec import Experts

# ---- Grouped matrix products: consecutive rows, a matrix for each group
#
# An operator of its own rather than torch's, which has no shape function for fp32, no FLOP formula, and no kernel on
# some devices.


@torch.library.custom_op("tune_cluster::grouped_matmul", mutates_args=())
def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows with a matrix each.

    Args:
        rows: ``[R, D]``, the rows of one group after those of another.
        weights: ``[E, D, F]``.
        ends: ``[E]`` int32, the number of the row after each group's last. Groups may be empty.

    Returns:
        ``[R, F]``
    """
    if _has_kernel(rows):
        return torch._grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        torch.mm(rows[begin:end], weight, out=out[begin:end])
        begin = end
    return out


@torch.library.custom_op("tune_cluster::grouped_outer", mutates_args=())
def grouped_outer(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    """Gradient ``[E, D, F]`` of the matrices of :func:`grouped_matmul`: rows ``[R, D]``, gradients ``[R, F]``."""
    if _has_kernel(rows):
        return torch._grouped_mm(rows.t(), grads, offs=ends)
    out = rows.new_empty(ends.shape[0], rows.shape[1], grads.shape[1])
    begin = 0
    for part, end in zip(out, ends.tolist(), strict=True):
        torch.mm(rows[begin:end].t(), grads[begin:end], out=part)
        begin = end
    return out


def _has_kernel(rows: Tensor) -> bool:
    """Whether torch has a kernel for all groups at once, which never waits for ``ends``. Not yet run on GPUs."""
    return rows.device.type == "cuda" and rows.dtype == torch.bfloat16


@grouped_matmul.register_fake
def _matmul_shape(rows: Tensor, weights: Tensor, _ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@grouped_outer.register_fake
def _outer_shape(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grads.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    grad = grad.contiguous()
    of_rows, of_weights = ctx.needs_input_grad[:2]
    return (
        grouped_matmul(grad, weights.transpose(1, 2), ends) if of_rows else None,
        grouped_outer(rows, grad, ends) if of_weights else None,
        None,
    )


grouped_matmul.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.tune_cluster.grouped_matmul)
def _matmul_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * int(rows[0]) * int(rows[1]) * int(weights[2])


@register_flop_formula(torch.ops.tune_cluster.grouped_outer)
def _outer_flops(rows: Any, grads: Any, *_: Any, **__: Any) -> int:
    return 2 * int(rows[0]) * int(rows[1]) * int(grads[1])


# ---- The layer


class _AddLoss(torch.autograd.Function):
    """Passes values on unchanged; in the backward pass ``loss`` gets ``factor`` as its gradient.

    So a loss inside the model needs no way to the end of it, which may be on another rank (as in Megatron-LM).
    """

    @staticmethod
    def forward(values: Tensor, loss: Tensor, factor: Tensor) -> Tensor:  # noqa: ARG004
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad, factor, None


class Router(nn.Module):
    """Chooses the experts of every token, in fp32.

    ``bias`` is added to the scores for the choice alone, not to the weights of the results. It moves towards experts
    that are chosen less than others (Wang et al., arXiv 2408.15664), which balances them without an auxiliary loss.
    """

    def __init__(self, hidden_size: int, shape: Experts, layer: int = 0) -> None:
        """``layer`` is its number in the whole model."""
        super().__init__()
        self.shape = shape
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(shape.num_experts, hidden_size))
        # Plain attributes, not buffers: DDP sends buffers around at every step.
        self.bias: Tensor
        self.load: Tensor
        self.loss_factor: Tensor
        """What the gradients of the router's own losses are multiplied by, as those of the model's loss are."""
        self.num_copies = 1
        """Equal parts of a micro-batch that are routed one by one."""
        self.sequence_group: dist.ProcessGroup | None = None
        """Ranks with the other positions of the same sequences, under context or tensor parallelism."""

    def materialize(self, device: torch.device) -> None:
        """Create the bias and the counts, all zero, and the factor of a single micro-batch."""
        self.bias = torch.zeros(self.shape.num_experts, device=device)
        self.load = torch.zeros(self.shape.num_experts, device=device)
        self.loss_factor = torch.ones((), device=device)

    def forward(self, x: Tensor, num_sequences: int = 1) -> tuple[Tensor, Tensor]:
        """Return the weights in fp32 and the numbers of each token's experts, both ``[T, K]``, for ``x [T, D]``, the
        tokens of one sequence after those of another."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
            scores = logits.sigmoid() if shape.scores == "sigmoid" else logits.softmax(-1)
            ids = self._in_turn(x) if shape.routing == "balanced" else self._best(scores)
            if shape.aux_loss or shape.z_loss:
                loss = self._losses(logits, scores, ids, num_sequences)
                scores = _AddLoss.apply(scores, loss, self.loss_factor)  # type: ignore[no-untyped-call]
            chosen = scores.gather(1, ids)
            if shape.normalizes:
                chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen, ids

    def _best(self, scores: Tensor) -> Tensor:
        return (scores.detach() + self.bias).topk(self.shape.top_k, dim=-1, sorted=False).indices

    def _losses(self, logits: Tensor, scores: Tensor, ids: Tensor, num_sequences: int) -> Tensor:
        """Return the auxiliary loss, a mean over sequences (DeepSeek-AI, arXiv 2412.19437, equations 17 to 20), plus
        the z-loss, a mean over tokens (Zoph et al., arXiv 2202.08906, equation 5).

        Both are sums over tokens once the experts' load is known, so they do not depend on how a batch is split.
        """
        shape = self.shape
        total = logits.new_zeros(())
        if shape.z_loss:
            total = total + shape.z_loss * logits.logsumexp(-1).square().mean()
        if shape.aux_loss:
            counts = counts_of(ids.view(num_sequences, -1), shape.num_experts).float()
            if self.sequence_group is not None:
                counts = summed(counts, self.sequence_group)
            load = counts * (shape.num_experts / counts.sum(-1, keepdim=True))
            probabilities = scores / scores.sum(-1, keepdim=True)
            mean = probabilities.view(num_sequences, -1, shape.num_experts).mean(1)
            total = total + shape.aux_loss * (load * mean).sum(-1).mean()
        return total / self.num_copies

    def _in_turn(self, x: Tensor) -> Tensor:
        size = (x.shape[0], self.shape.top_k)
        return (torch.arange(size[0] * size[1], device=x.device) % self.shape.num_experts).view(size)


def counts_of(ids: Tensor, num_experts: int) -> Tensor:
    """Return how often each of the experts occurs in every row of ``ids [N, R]``, as ``[N, E]``.

    bincount would do for one row, but the shape of its result depends on values.
    """
    counts = torch.zeros(ids.shape[0], num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(1, ids, torch.ones_like(ids))


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group, in a form that graph mode can capture."""
    total: Tensor = funcol.all_reduce(values, "sum", group)
    return total


class RoutedExperts(nn.Module):
    """The experts' SwiGLU matrices, ``w13 [E, D, 2F]`` with the gate first, and ``w2 [E, F, D]``."""

    def __init__(self, hidden_size: int, shape: Experts) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(shape.num_experts, hidden_size, 2 * shape.ffn_hidden_size))
        self.w2 = nn.Parameter(torch.empty(shape.num_experts, shape.ffn_hidden_size, hidden_size))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results ``[R, D]`` for rows sorted by expert, of which expert ``e`` has ``counts[e]``."""
        ends = counts.cumsum(0).to(torch.int32)
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.w13.dtype
        gate, up = grouped_matmul(rows.to(dtype), self.w13.to(dtype), ends).chunk(2, -1)
        out: Tensor = grouped_matmul(F.silu(gate) * up, self.w2.to(dtype), ends)
        return out


class SharedExpert(nn.Module):
    """The experts that every token passes through, as one SwiGLU of their total width."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        out: Tensor = self.w2(F.silu(gate) * up)
        return out


class Exchange(Protocol):
    """Lets the rows of this rank pass experts on several ranks, in steps with other work in between."""

    def send(self, rows: Tensor, counts: Tensor) -> Any:
        """Start sending rows, sorted by expert, of which expert ``e`` gets ``counts[e]``."""
        ...

    def through(self, experts: RoutedExperts, sent: Any) -> Any:
        """Pass the rows that arrive through ``experts``, those of this rank, and start sending the results back."""
        ...

    def results(self, returning: Any) -> Tensor:
        """Return the results for all rows sent, in their order."""
        ...


class PositionSplit(Protocol):
    """Gives each of the ranks with the same tokens ``[B, S, D]`` its share of the positions."""

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's share."""
        ...

    def whole(self, x: Tensor) -> Tensor:
        """Return the shares of all ranks, possibly in autocast's type."""
        ...


class Routed(NamedTuple):
    """Tokens between the pieces of a mixture of experts."""

    x: Tensor
    """Hidden states of this rank's positions."""
    weights: Tensor
    """Weights of each token's experts, ``[T, K]``."""
    place: Tensor
    """Row of each of the tokens' results, ``[T * K]``."""
    rows: Any
    """Rows on their way to the experts, and back; without an exchange, the rows and their numbers, and the results."""
    shared: Tensor | None = None
    """Result of the shared experts."""


MixturePiece = Literal["send", "experts", "shared", "combine"]


class MixtureOfExperts(nn.Module):
    """Feed-forward of hidden states ``[B, S, D]`` through the experts that a router chooses for each token.

    A schedule that runs the pieces separately does so through the module's own call, as those of dense sub-layers.
    """

    def __init__(self, hidden_size: int, shape: Experts, layer: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(hidden_size, shape, layer)
        self.experts = RoutedExperts(hidden_size, shape)
        width = shape.shared_ffn_hidden_size
        self.shared = SharedExpert(hidden_size, width) if width else None
        self.exchange: Exchange | None = None
        """Set if other ranks hold some of the experts."""
        self.positions: PositionSplit | None = None
        """Set if other ranks have the same tokens."""

    def forward(self, x: Any, piece: MixturePiece | None = None) -> Any:
        """Run all, or one piece: ``send`` takes hidden states, and each of the others what the one before returned."""
        if piece == "send":
            return self._sent(x)
        if piece == "experts":
            return self._through_experts(x)
        if piece == "shared":
            return self._with_shared(x)
        if piece == "combine":
            return self._combined(x)
        return self._combined(self._through_experts(self._with_shared(self._sent(x))))

    def _sent(self, x: Tensor) -> Routed:
        if self.positions is not None:
            x = self.positions.own(x)
        flat = x.flatten(0, -2)
        weights, ids = self.router(flat, num_sequences=x.shape[0])
        counts = counts_of(ids.view(1, -1), self.shape.num_experts)[0]
        # A layer that is recomputed counts all of its tokens twice, which changes no expert's share.
        self.router.load.add_(counts)
        if self.shape.capacity is None:
            order = ids.flatten().argsort(stable=True)
            rows = flat[order // self.shape.top_k]
            # Back by the inverse order: a sum over indices would add in no particular order on GPUs.
            place = order.argsort()
        else:
            source, place, counts = self._slots(ids.view(x.shape[0], -1), self.shape.capacity)
            rows = with_zeros(flat)[source]
        return Routed(x, weights, place, (rows, counts) if self.exchange is None else self.exchange.send(rows, counts))

    def _with_shared(self, routed: Routed) -> Routed:
        return routed if self.shared is None else routed._replace(shared=self.shared(routed.x.flatten(0, -2)))

    def _through_experts(self, routed: Routed) -> Routed:
        rows = routed.rows
        if self.exchange is None:
            return routed._replace(rows=self.experts(*rows))
        return routed._replace(rows=self.exchange.through(self.experts, rows))

    def _combined(self, routed: Routed) -> Tensor:
        x, weights = routed.x, routed.weights
        out = routed.rows if self.exchange is None else self.exchange.results(routed.rows)
        if self.shape.capacity is not None:
            out = with_zeros(out)
        by_token = out[routed.place].unflatten(0, weights.shape)
        result = torch.bmm(weights.to(by_token.dtype).unsqueeze(1), by_token).squeeze(1).to(x.dtype)
        if routed.shared is not None:
            result = result + routed.shared
        result = result.view_as(x)
        return result if self.positions is None else self.positions.whole(result).to(x.dtype)

    def _slots(self, ids: Tensor, capacity: float) -> tuple[Tensor, Tensor, Tensor]:
        """Assign a fixed number of slots per expert and sequence, to tokens in order of position.

        Slots per sequence, not per micro-batch, make the choice independent of the layout.

        Args:
            ids: the experts of every sequence's tokens, ``[B, S * K]``.

        Returns:
            The token of each of the R slots, sorted by expert, or T for an empty one; the slot of each of a token's
            results ``[T * K]``, or R for a dropped one; and the number of slots of each expert.
        """
        num_experts, num_sequences = self.shape.num_experts, ids.shape[0]
        limit = math.ceil(capacity * ids.shape[1] / num_experts)
        num_slots = num_experts * num_sequences * limit
        groups = (ids * num_sequences + torch.arange(num_sequences, device=ids.device).unsqueeze(1)).flatten()
        counts = counts_of(groups.view(1, -1), num_experts * num_sequences)[0]
        order = groups.argsort(stable=True)
        rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=ids.device))
        position = rank - (counts.cumsum(0) - counts)[groups]
        place = torch.where(position < limit, groups * limit + position, num_slots)
        tokens = torch.arange(len(order), device=ids.device) // self.shape.top_k
        source = torch.full((num_slots + 1,), ids.numel() // self.shape.top_k, device=ids.device)
        source = source.scatter(0, place, tokens)[:-1]
        return source, place, torch.full((num_experts,), num_sequences * limit, device=ids.device)


def with_zeros(rows: Tensor) -> Tensor:
    """Return the rows, and one of zeros after them."""
    return F.pad(rows, (0, 0, 0, 1))


def mixtures_in(modules: Iterable[nn.Module]) -> list[MixtureOfExperts]:
    """Return all mixtures of experts, in the order of the layers."""
    return [one for module in modules for one in module.modules() if isinstance(one, MixtureOfExperts)]


def routers_in(modules: Iterable[nn.Module]) -> list[Router]:
    """Return all routers, in the order of the layers."""
    return [one for module in modules for one in module.modules() if isinstance(one, Router)]


class ExpertBalance:
    """Updates the biases of a rank's routers once per step, from the token counts of all ranks with the same layers,
    and keeps these counts."""

    def __init__(self, routers: list[Router], group: dist.ProcessGroup | None, ep: int = 1) -> None:
        """``group`` are the ranks that route other tokens through the same layers; None if this is the only one. ``ep``
        is the number of ranks that a layer's experts are split over."""
        self._routers = [router for router in routers if router.shape.routing == "learned"]
        self._with_losses = routers
        self._factor = 1.0
        self._group = group
        self._ep = ep
        self._total: Tensor | None = None

    @torch.no_grad()
    def update(self) -> None:
        """Take one step towards equal load, and start counting the next step."""
        if not self._routers:
            return
        own = torch.stack([router.load for router in self._routers])
        load = own
        if self._group is not None:
            load = own.clone()
            dist.all_reduce(load, group=self._group)
        counts = torch.stack([load, own])
        self._total = counts if self._total is None else self._total + counts
        moves = torch.sign(load.mean(-1, keepdim=True) - load)
        for router, move in zip(self._routers, moves, strict=True):
            router.bias.add_(move, alpha=router.shape.balance_rate)
            router.load.zero_()

    def scale_losses(self, factor: float) -> None:
        """Multiply the routers' own losses by ``factor`` in the backward pass, as the model's loss is."""
        if factor != self._factor:
            self._factor = factor
            for router in self._with_losses:
                router.loss_factor.fill_(factor)

    def reset(self) -> None:
        """Forget the counts of earlier steps."""
        self._total = None

    def loads(self, rank: int) -> tuple[ExpertLoad, ...]:
        """Return the load of this rank's layers since the last reset; waits for the device."""
        if self._total is None:
            return ()
        load, own = self._total.cpu()
        return tuple(
            ExpertLoad(
                layer=router.layer,
                busiest=_busiest(everywhere),
                num_idle=int((everywhere == 0).sum()),
                rank=rank,
                busiest_on_rank=_busiest(here),
                # All slots of a capacity are multiplied, used or not.
                busiest_rank=1.0 if router.shape.capacity else _busiest(everywhere.view(self._ep, -1).sum(-1)),
            )
            for router, everywhere, here in zip(self._routers, load, own, strict=True)
        )


def _busiest(load: Tensor) -> float:
    """Return the largest count over the mean."""
    return float(load.max() / load.mean().clamp(min=1e-9))
