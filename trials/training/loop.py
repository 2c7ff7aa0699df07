"""One training step, on one rank or along a pipeline, and the construction of a rank's part of the model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trials.accelerator.device import mark, widest_float
from trials.attention import AttentionPlan, causal_attention
from trials.datasets import Rows, micro_batches
from trials.failure import InfeasibleSpec, NonFiniteLoss
from trials.kernels import apply_compile, attention_plan
from trials.layout_rules import has_experts, uses_ddp
from trials.lengths import num_tokens
from trials.models import FusedMeter, ImportedModel, Loss, TrainModel, build_model, loss_of, merged
from trials.models.built_in import Llama
from trials.models.experts import ExpertBalance, routers_in
from trials.offload import OffloadMeter, apply_activation_offload
from trials.parallel.context import apply_context_parallel, split_sequence
from trials.parallel.copies import apply_copies, interleave_positions
from trials.parallel.data_parallel import (
    BucketedReplica,
    Float8Scales,
    apply_buckets,
    apply_ddp,
    apply_fsdp,
    average_experts,
    begin_backward,
    finish_gradients,
    held_tensors,
    keep_weights,
    leave_experts_out,
    reduce_gradients,
    reduces_each,
    sharded_ends,
    take_in_gradients,
    uses_fsdp,
)
from trials.parallel.expert_parallel import apply_expert_parallel
from trials.parallel.mesh import (
    SEQUENCE_AXES,
    TOKEN_AXES,
    HeldTensor,
    ShardMap,
    flat_mesh,
    gradients_of,
    init_parameters,
    local_part,
    plain_name,
)
from trials.parallel.tensor import apply_tensor_parallel, chunk_loss
from trials.precision import (
    CastMeter,
    LossScaler,
    apply_autocast_lists,
    apply_float8,
    autocast,
    compute_wide,
    store,
)
from trials.recompute import RecomputeMeter, apply_recompute
from trials.reports import Findings, OperatorCast, PatternEffect
from trials.sizes import Chunk, Coordinates, chunks_of_stage, num_virtual_stages_total
from trials.spec import Candidate, Layout, TrialSpec
from trials.training.optimizer import build_optimizer, multiply

# ---- One optimiser step: micro-batches forward and backward, global gradient norm, update


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step; equal on every rank."""

    loss: float
    """Mean loss over the global batch."""
    grad_norm: float
    """Global gradient norm, unscaled; 0 if the step was skipped."""
    skipped: bool


_ROW = 1 << 16
"""Number of elements whose squares fp32 sums with an error of only a few units in the last place."""


_CLIP_EPS = 1e-6
"""Added to the gradient norm when clipping, as in PyTorch, Megatron-LM and DeepSpeed."""


class Trainer:
    """One rank's model and optimiser, and the training step."""

    def __init__(self, spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device, *, place: Coordinates) -> None:
        candidate = spec.candidate
        self.device = device
        self.layout = candidate.layout
        self.place = place
        self._splits_positions = candidate.splits_positions
        self.parts = parallelize(spec, mesh, device, stage=place.pp)
        loss_scale = candidate.precision.loss_scale
        self.scaler = LossScaler(loss_scale) if loss_scale is not None else None
        loss = loss_of(spec.workload.model)
        self.engine: Engine
        if self.layout.pp > 1:
            assert mesh is not None
            self.engine = Pipeline(spec, self.parts, mesh, device, loss, self._scale)
        else:
            self.engine = Accumulation(self.parts[0], loss, candidate, device, self._scale)
        self.gradients = Gradients(self.parts, self.layout, mesh, device)
        self.balance = _balance(spec, self.parts, mesh)
        self._rank = 0 if mesh is None else mesh.get_rank()
        self.reads_inputs = any(part.chunk.is_first for part in self.parts)
        self.reads_targets = any(part.chunk.is_last for part in self.parts)
        self.parameters = [parameter for part in self.parts for parameter in part.model.parameters()]
        self._num_microbatches = candidate.num_microbatches(spec.workload.global_batch_size)
        self._clip_norm = spec.workload.optimizer.clip_norm
        self._grad_factor: float | Tensor = 1.0
        self._workload = spec.workload
        self._num_begun = 0
        self.optimizer = build_optimizer(
            spec.workload.optimizer,
            self.gradients.held,
            device,
            grad_factor=lambda: self._grad_factor,
            on_host=candidate.offload.optimizer,
        )
        self._scales = [Float8Scales(part.model, mesh) for part in self.parts]
        self._compute_scales()
        # Among the ranks that compute the loss, tensor-parallel peers compute the same one.
        self._num_losses = self.layout.world_size // self.layout.pp

    def step(self, inputs: Rows | None, targets: Rows | None, marker: Marker) -> Tensor:
        """Train on this rank's rows of the next step; return the gang's ``[loss, grad_norm]``, still on the device.

        ``inputs`` and ``targets`` may be None on a rank that does not read them (:attr:`reads_inputs`,
        :attr:`reads_targets`).

        The norm is reduced before the update, so that with loss scaling all ranks skip the same steps. Without it, the
        host never waits for the device here.
        """
        inputs, targets = (self._placed(batch) for batch in (inputs, targets))
        if self._workload.lengths:
            self.engine.mean_tokens = num_tokens(self._workload, self._num_begun) / self.layout.dp
            self._num_begun += 1
        if self.balance is not None:
            # Tensor-parallel ranks add up the gradients of the means over their tokens.
            self.balance.scale_losses(self._scale() / (self._num_microbatches * self.layout.tp))
        loss = self.engine.run(inputs, targets, marker)
        self.gradients.complete()
        totals = self._totals(loss, marker)
        self._update_if_finite(totals)
        self._clear_gradients()
        marker.mark("optimizer")
        return totals

    def _placed(self, batch: Rows | None) -> Rows | None:
        """Return this rank's positions, in the order in which the model takes them."""
        if batch is None:
            return None
        if self.layout.cp > 1:
            assert isinstance(batch, Tensor), "lengths do not vary under context parallelism"
            return split_sequence(batch, self.place.cp, self.layout.cp)
        if self._splits_positions and self.layout.sequence_parallel:
            assert isinstance(batch, Tensor), "rows have one length if their positions are split"
            return interleave_positions(batch, self.layout.tp)
        return batch

    def _totals(self, loss: Tensor, marker: Marker) -> Tensor:
        """Sum loss and norm over the gang; ranks that do not compute the loss contribute 0.

        In a pipeline, stages that have finished wait here for the others.
        """
        totals = torch.stack([loss.to(widest_float(self.device)) / self._num_losses, self.gradients.square_sum()])
        marker.mark("other")
        if self.layout.world_size > 1:
            dist.all_reduce(totals)
            marker.mark("bubble" if self.layout.pp > 1 else "other")
        totals[1] = totals[1].sqrt() / self._scale()
        marker.mark("other")
        return totals

    def _scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def _update_if_finite(self, totals: Tensor) -> None:
        """Update, with loss scaling only if the gradients are finite, which the host must wait for; then adjust the
        scale. All ranks decide alike, because the totals are the gang's."""
        scaler = self.scaler
        finite = scaler is None or self._is_finite(totals)
        if finite:
            self._grad_factor = self._factor_for(totals[1])
            self.gradients.multiply(self._grad_factor)
            self._update()
        if scaler is not None:
            scaler.update(finite=finite)

    def _factor_for(self, norm: Tensor) -> float | Tensor:
        """Return what gradients are multiplied by before the update: it removes the loss scale and, if their unscaled
        ``norm`` exceeds the limit, clips them to it. With clipping it stays on the device, equal on every rank."""
        unscaling = 1.0 / self._scale()
        if not self._clip_norm:
            return unscaling
        clipping = (self._clip_norm / (norm + _CLIP_EPS)).clamp(max=1.0)
        return (unscaling * clipping).to(torch.float32)

    def _is_finite(self, totals: Tensor) -> bool:
        return bool(torch.isfinite(totals[1]).item())

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self._compute_scales()
        if self.balance is not None:
            self.balance.update()

    def _compute_scales(self) -> None:
        for scales in self._scales:
            scales.compute()

    def _clear_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def wait_for_values(self) -> None:
        """Wait for all weights, which may still be in transit from other ranks after a step. Call it before reading
        weights and before the gang ends."""
        for held in self.gradients.held:
            held.wait_for_values()

    def findings(self, num_steps: int) -> Findings:
        """Return what this rank found out over the last ``num_steps`` steps."""
        return Findings(
            recompute=merged_effects([part.recompute_meter.effects(num_steps) for part in self.parts]),
            autocast=merged_casts([part.cast_meter.casts(num_steps) for part in self.parts]),
            fused=merged(part.fused_meter.operators(num_steps) for part in self.parts),
            loss_scale=None if self.scaler is None else self.scaler.state(),
            experts=() if self.balance is None else self.balance.loads(self._rank),
        )

    def result(self, totals: Tensor, step: int) -> StepResult:
        """Read the result of :meth:`step`.

        Raises:
            NonFiniteLoss: inf or nan in the loss, or in the gradient norm without loss scaling.
        """
        loss, grad_norm = totals.tolist()
        finite = math.isfinite(grad_norm)
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"step {step}: loss is {loss}; try a lower learning rate or a wider number format")
        if not finite and self.scaler is None:
            raise NonFiniteLoss(f"step {step}: gradient norm is {grad_norm}, loss {loss}; try a lower learning rate")
        return StepResult(loss=loss, grad_norm=grad_norm if finite else 0.0, skipped=not finite)


def _balance(spec: TrialSpec, parts: list[ModelPart], mesh: DeviceMesh | None) -> ExpertBalance | None:
    """What balances the experts of this rank's layers; None for dense models. All ranks of the gang call it."""
    if not has_experts(spec.workload.model):
        return None
    layout = spec.candidate.layout
    group = None
    if mesh is not None and layout.dp * layout.cp * layout.tp > 1:
        group = flat_mesh(mesh, TOKEN_AXES).get_group()
    routers = routers_in(part.model for part in parts)
    if mesh is not None and layout.cp * layout.tp > 1:
        sequence_group = flat_mesh(mesh, SEQUENCE_AXES).get_group()
        for router in routers:
            router.sequence_group = sequence_group
    return ExpertBalance(routers, group, layout.ep)


def merged_effects(chunks: Iterable[Iterable[PatternEffect]]) -> tuple[PatternEffect, ...]:
    """Sum a rank's effects over all its chunks, one entry per pattern."""
    merged: dict[str, PatternEffect] = {}
    for effect in itertools.chain.from_iterable(chunks):
        before = merged.get(effect.pattern)
        if before is not None:
            effect = PatternEffect(
                pattern=effect.pattern,
                num_matches=before.num_matches + effect.num_matches,
                saved_bytes=before.saved_bytes + effect.saved_bytes,
                recompute_s=before.recompute_s + effect.recompute_s,
                is_compiled=effect.is_compiled,
            )
        merged[effect.pattern] = effect
    return tuple(merged.values())


def merged_casts(chunks: Iterable[Iterable[OperatorCast]]) -> tuple[OperatorCast, ...]:
    """Sum a rank's casts over all its chunks, one entry per operator and list."""
    num_calls: Counter[tuple[str, str]] = Counter()
    for cast in itertools.chain.from_iterable(chunks):
        num_calls[cast.name, cast.list] += cast.num_calls
    return tuple(OperatorCast(name=name, list=list_, num_calls=num) for (name, list_), num in num_calls.items())


class GangMaximum:
    """Maximum over the gang of a value of every rank, from which all take the same decision.

    Requested at construction, after the work already queued on the device, and read when needed; the host waits for the
    device only then.
    """

    def __init__(self, value: float, device: torch.device) -> None:
        tensor = torch.full((), value, dtype=widest_float(device), device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        self._on_host = tensor.to("cpu", non_blocking=True)
        self._there = mark(device)

    def read(self) -> float:
        """Wait for the maximum."""
        self._there.synchronize()
        return self._on_host.item()


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the gang's maximum now."""
    return GangMaximum(value, device).read()


class Gradients:
    """Operations on gradients in a step. Everything that depends only on the layout is computed once, here."""

    def __init__(self, parts: list[ModelPart], layout: Layout, mesh: DeviceMesh | None, device: torch.device) -> None:
        self._device = device
        self._group = mesh["tp"].get_group() if mesh is not None and layout.tp > 1 else None
        self.held: list[HeldTensor] = [
            one for part in parts for one in held_tensors(part.module, part.model, part.shard_map, layout)
        ]
        self._partial = [one for one in self.held if one.is_partial]
        parameters = [parameter for part in parts for parameter in part.model.parameters()]
        self._tensor_parallel = [parameter for parameter in parameters if _is_tensor_parallel(parameter)]
        self._summed = [
            (parameter, part.shard_map.summed[plain_name(name)])
            for part in parts
            for name, parameter in part.model.named_parameters()
            if plain_name(name) in part.shard_map.summed
        ]
        self._by_replicas: dict[int, list[HeldTensor]] = {}
        for one in self.held:
            self._by_replicas.setdefault(one.num_replicas, []).append(one)

    @torch.no_grad()
    def complete(self) -> None:
        """Complete every gradient: summed over the tensor-parallel group, and placed like its parameter.

        Under tensor parallelism some arrive as partial sums (norms with sequence parallelism) or whole (the embedding).
        Experts see the tokens of all ranks of their group, but data parallelism averages over those with the same ones.
        """
        for parameter, number in self._summed:
            if parameter.grad is not None:
                local_part(parameter.grad).div_(number)
        if self._partial:
            _sum_in_place(gradients_of(self._partial), self._group)
        for parameter in self._tensor_parallel:
            grad = parameter.grad
            assert isinstance(parameter, DTensor)
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Return this rank's share of the squared global gradient norm; summed over all ranks, it is the squared norm.

        Each rank adds its local squares, divided by the number of ranks that hold the same elements, so one rule covers
        every mixture of replication and sharding. The result is a scalar in the widest available format.
        """
        total = torch.zeros((), dtype=widest_float(self._device), device=self._device)
        for replicas, held in self._by_replicas.items():
            grads = gradients_of(held)
            if grads:
                total += _square_sum(grads) / replicas
        return total

    @torch.no_grad()
    def multiply(self, factor: float | Tensor) -> None:
        """Multiply fp32 gradients by ``factor``; 16-bit ones are left to the optimiser with fp32 masters."""
        grads = [grad for grad in gradients_of(self.held) if grad.dtype == torch.float32]
        if grads:
            multiply(grads, factor)


def _square_sum(tensors: list[Tensor]) -> Tensor:
    """Sum all squares. CPU kernels sum in fp32, element by element, so they get short rows."""
    norms = []
    if tensors[0].device.type == "cpu":
        flat = [tensor.reshape(-1) for tensor in tensors]
        whole = [len(one) // _ROW * _ROW for one in flat]
        rows = [one[:end].view(-1, _ROW) for one, end in zip(flat, whole, strict=True) if end]
        norms += [torch.linalg.vector_norm(one, dim=1, dtype=torch.float32) for one in rows]
        tensors = [one[end:] for one, end in zip(flat, whole, strict=True)]
    norms.append(torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32)))
    found = torch.cat(norms).to(widest_float(norms[0].device))
    return torch.dot(found, found)


def _is_tensor_parallel(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and "tp" in (tensor.device_mesh.mesh_dim_names or ())


def _sum_in_place(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum over the group with one collective."""
    flat = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]


# ---- A step's micro-batches on a rank with all layers, and the interface of every engine


class Marker(Protocol):
    """Receiver of the name of each phase of a step as it ends."""

    def mark(self, phase: str) -> None: ...


class SilentMarker:
    """A :class:`Marker` that does nothing."""

    def mark(self, phase: str) -> None:
        pass


class Engine(Protocol):
    """Runs all micro-batches of a step."""

    mean_tokens: float | None
    """Tokens without padding of a data-parallel rank in this step, on average over the ranks: the loss is the mean over
    all tokens of the step. None if samples are of one length, or not of tokens: the mean over micro-batches."""

    def run(self, inputs: Rows | None, targets: Rows | None, marker: Marker) -> Tensor:
        """Run forward and backward passes over this rank's rows; gradients are then averages over data-parallel ranks.

        Return the mean loss of the rows, a scalar; 0 on a rank that does not compute it.
        """
        ...


class Accumulation:
    """The :class:`Engine` without a pipeline: gradients accumulate; the last micro-batch, or each one, reduces them."""

    def __init__(
        self, part: ModelPart, loss: Loss, candidate: Candidate, device: torch.device, scale: Callable[[], float]
    ) -> None:
        self._part = part
        self._loss = loss
        self._micro_batch_size = candidate.micro_batch_size
        self._candidate = candidate
        self._device = device
        self._scale = scale
        self._layout = candidate.layout
        self._each = reduces_each(candidate.layout)
        self._is_last: bool | None = None
        self.mean_tokens: float | None = None

    def run(self, inputs: Rows | None, targets: Rows | None, marker: Marker) -> Tensor:
        assert inputs is not None and targets is not None, "it holds the first and the last layer"
        split = [micro_batches(rows, self._micro_batch_size) for rows in (inputs, targets)]
        number = len(split[0])
        module, scale = self._part.module, self._scale()
        losses = []
        for i, (rows, wanted) in enumerate(zip(*split, strict=True), start=1):
            self._begin(is_last=i == number)
            with autocast(self._candidate, self._device):
                loss = self._loss(module(rows, **self._part.with_targets(wanted)), wanted)
            weight = 1.0 if self.mean_tokens is None else wanted.numel() * number / self.mean_tokens
            losses.append(loss.detach() if weight == 1.0 else loss.detach() * weight)
            marker.mark("forward")
            torch.autograd.backward(loss, torch.full_like(loss, weight * scale / number))
            if i == number:
                finish_gradients(module)
            marker.mark("backward")
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _begin(self, *, is_last: bool) -> None:
        """Set what the next micro-batch does to gradients; only on a change, because it walks all modules."""
        if is_last != self._is_last:
            begin_backward(self._part.module, is_last=is_last, each=self._each)
            keep_weights(self._part.module, self._part.model, self._layout, is_last=is_last)
            self._is_last = is_last


# A step's micro-batches through pipeline stages on several ranks.


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
    from torch.distributed.pipelining.schedules import (
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
    )


class Stage(PipelineStage):
    """A virtual stage that marks its phases, and computes its forward pass in ``context``.

    Time between its own phases is marked as bubble.
    """

    def __init__(
        self,
        part: ModelPart,
        layout: Layout,
        mesh: DeviceMesh,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        group = mesh["pp"].get_group()
        super().__init__(part.module, part.chunk.virtual_stage, num_virtual_stages_total(layout), device, group=group)
        self.marker: Marker = SilentMarker()
        self.targets: Sequence[Tensor] = ()
        """Targets of every micro-batch, on a rank that reads them."""
        self._part = part
        self._wanted: Tensor | None = None
        self._context = context
        self._sharded_ends = sharded_ends(part.model)
        module: Any = part.module
        self._reduces_each: FSDPModule | None = (
            module if reduces_each(layout) and isinstance(module, FSDPModule) else None
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._wanted = self.targets[fwd_chunk_id] if self.targets else None
        with self._phase("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._phase("backward"):
            if not full_backward:
                self._gather_weights()
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._phase("backward"):
            self._gather_weights()
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients over data-parallel ranks; without a pipeline this is part of the backward pass."""
        with self._phase("backward"):
            super().perform_reduce_grad(grad_scale_factor)
            for unit in self._sharded_ends:
                reduce_gradients(unit)
            finish_gradients(self.submod)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        """Run the backward pass; in torch's version, FSDP reduces no gradients before :meth:`perform_reduce_grad`."""
        if isinstance(self.submod, BucketedReplica):
            begin_backward(self.submod, is_last=last_backward, each=False)
        unit = self._reduces_each
        if unit is None:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight" and isinstance(self.submod, FSDPModule):
                # Hooks of the other part have already accumulated its gradients, in the format of reductions.
                take_in_gradients(self.submod)
            return result
        unit.set_is_last_backward(False)
        unit.set_reshard_after_backward(False)
        begin_backward(self.submod, is_last=last_backward, each=True)
        result = self._backward(backward_type, bwd_kwargs)
        if backward_type == "weight":
            # It accumulates gradients itself, without running the hooks for them.
            reduce_gradients(unit)
        return result

    def _backward(self, kind: str, found: dict[str, Any]) -> tuple[Any, Any]:
        """Return gradients of the stage's inputs, and the state for the second part of a split backward pass."""
        if kind == "weight":
            return stage_backward_weight(self.submod.parameters(), found["param_groups"]), None
        given = found["stage_output"], found["output_grads"], found["input_values"]
        if kind == "full":
            return stage_backward(*given), None
        return stage_backward_input(*given, self.submod.parameters())

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.marker.mark("bubble")
        yield
        self.marker.mark(name)

    def _gather_weights(self) -> None:
        """Make a split backward pass see the parameters of the forward pass instead of FSDP's shards.

        It searches the graph for these parameters before FSDP's hooks gather them, and silently omits the gradients of
        those it does not find.
        """
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def forward_maybe_with_nosync(self, *args: Any, **options: Any) -> Any:
        with self._context():
            options |= self._part.with_targets(self._wanted)
            output = super().forward_maybe_with_nosync(*args, **options)  # type: ignore[no-untyped-call]
        # A stage without layers returns its input, a receive buffer; a custom module may return a view. The schedule
        # must not detach the former and cannot detach the latter.
        is_buffer = bool(args) and output is args[0]
        return output.clone() if is_buffer or (isinstance(output, Tensor) and output._is_view()) else output

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the operations with which torch before 2.12 connects ranks; none to itself, at the turn of a V."""
        rank = dist.get_rank()
        return [operation for operation in super()._get_init_p2p_neighbors_ops() if operation.peer != rank]

    def _shape_inference(self, *args: Any, **options: Any) -> Any:
        """Adapt torch before 2.12, which calls this as the stage's module instead of :meth:`_compute_outputs`."""
        module = self.submod
        self.submod = functools.partial(self._compute_outputs, module=module)  # type: ignore[assignment]
        try:
            return super()._shape_inference(*args, **options)  # type: ignore[misc]
        finally:
            self.submod = module

    def _compute_outputs(self, *args: Any, module: nn.Module, **options: Any) -> Any:
        """Run the stage without gradients before the first step, so that the schedule learns shapes and types."""
        model = module.module if isinstance(module, DistributedDataParallel | BucketedReplica) else module
        options |= self._part.with_targets(self.targets[0] if self.targets else None)
        with self._context():
            outputs = model(*args, **options)
        for router in routers_in([model]):
            router.load.zero_()  # this pass trains on nothing
        return outputs


class Pipeline:
    """The :class:`~trials.training.loop.Engine` of a rank in a pipeline."""

    def __init__(
        self,
        spec: TrialSpec,
        parts: list[ModelPart],
        mesh: DeviceMesh,
        device: torch.device,
        loss: Loss,
        scale: Callable[[], float],
    ) -> None:
        candidate = spec.candidate
        self._device = device
        self._is_first = any(part.chunk.is_first for part in parts)
        self._is_last = any(part.chunk.is_last for part in parts)
        self._num_microbatches = candidate.num_microbatches(spec.workload.global_batch_size)
        self._loss = loss
        self._scale = scale
        self._losses: list[Tensor] = []
        self._weight = 1.0
        self.mean_tokens: float | None = None
        self._marker: Marker = SilentMarker()

        def context() -> AbstractContextManager[Any]:
            return autocast(candidate, device)

        self._context = context
        self.stages = [Stage(part, candidate.layout, mesh, device, context) for part in parts]
        self.schedule = build_schedule(candidate.layout, self.stages, self._num_microbatches, self._scaled_loss)

    def run(self, inputs: Rows | None, targets: Rows | None, marker: Marker) -> Tensor:
        assert not isinstance(inputs, tuple) and not isinstance(targets, tuple), "stages exchange one shape"
        self._marker = marker
        if targets is not None and self.mean_tokens is not None:
            self._weight = targets.numel() / self.mean_tokens
        for stage in self.stages:
            stage.marker = marker
            stage.targets = () if targets is None else targets.tensor_split(self._num_microbatches)
        self._losses.clear()
        arguments = (inputs,) if self._is_first else ()
        self.schedule.step(*arguments, target=targets if self._is_last else None, return_outputs=False)
        marker.mark("bubble")
        if not self._is_last:
            return torch.zeros((), device=self._device)
        # Before the first step, the schedule also calls the loss to find out shapes.
        return torch.stack(self._losses[-self._num_microbatches :]).mean()

    def _scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for the schedule's backward pass: for gradients of the mean over micro-batches, scaled."""
        self._marker.mark("bubble")
        with self._context():
            loss = self._loss(outputs, targets) * self._weight
        self._losses.append(loss.detach())
        scaled = loss * (self._scale() / self._num_microbatches)
        self._marker.mark("forward")
        return scaled


def build_schedule(
    layout: Layout, stages: list[Stage], num_microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Build the order of a rank's stages and micro-batches. ``loss`` is already divided by their number.

    Raises:
        InfeasibleSpec: this torch lacks the order; before 2.11 it requires as many micro-batches as stages.
    """
    looped = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble, "gpipe": ScheduleLoopedBFS}
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if layout.schedule in ("interleaved", "zbv") or layout.num_virtual_stages > 1:
        return looped[layout.schedule](stages, num_microbatches, **options)
    single = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    (stage,) = stages
    try:
        return single[layout.schedule](stage, num_microbatches, **options)
    except ValueError as error:
        raise InfeasibleSpec(f"torch {torch.__version__} rejects schedule {layout.schedule}: {error}") from error


# ---- Construction of this rank's part of the model: split over the gang, wrapped and initialised


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One virtual stage on this rank; the whole model if there is no pipeline."""

    chunk: Chunk
    model: TrainModel
    module: nn.Module
    """The module to call: ``model``, or the wrapper around it that reduces its gradients."""
    shard_map: ShardMap
    cast_meter: CastMeter
    recompute_meter: RecomputeMeter
    fused_meter: FusedMeter
    offload_meter: OffloadMeter

    def with_targets(self, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the further arguments of ``module``: the targets, if it computes the loss itself."""
        if targets is None or not (self.chunk.is_last and self.model.computes_loss):
            return {}
        return {"targets": targets}


def parallelize(spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device, *, stage: int) -> list[ModelPart]:
    """Build the part of pipeline rank ``stage``, chunk by chunk."""
    num_layers = spec.workload.num_layers
    chunks = chunks_of_stage(spec.candidate.layout, stage, num_layers)
    return [_build_part(spec, chunk, mesh, device) for chunk in chunks]


def _build_part(spec: TrialSpec, chunk: Chunk, mesh: DeviceMesh | None, device: torch.device) -> ModelPart:
    """Build one virtual stage.

    The order matters. Tensor parallelism replaces plain weights by sharded ones, which all later steps must see.
    Recompute wraps a whole layer, so that compilation captures the recomputation. FSDP's hooks go around the compiled
    layer, because gathering weights is not part of the graph. The model has no storage until then, so no rank ever
    holds more than its part and, of a custom model, one whole tensor. Reduction in buckets comes last: buckets are
    built from real weights.
    """
    candidate = spec.candidate
    layout = candidate.layout
    model = build_model(spec.workload, chunk, candidate.kernels.fused)
    store(model, candidate.precision, sharded=uses_fsdp(layout), is_whole=layout.pp == 1)
    apply_float8(model, candidate.precision, device, tp=layout.tp, num_shards=layout.dp_shard * layout.cp)
    shard_map = _split(model, spec, mesh, device)
    cast_meter = apply_autocast_lists(model, candidate.precision)
    compute_wide(model, candidate.precision)
    num_passes = candidate.num_microbatches(spec.workload.global_batch_size)
    num_graph_passes = 0 if candidate.kernels.compile == "off" else num_passes
    recompute_meter = apply_recompute(model, candidate.recompute, chunk, num_graph_passes=num_graph_passes)
    apply_compile(model, candidate.kernels)
    offload_meter = apply_activation_offload(model, candidate.offload, chunk, device)
    has_parameters = next(model.parameters(), None) is not None
    if uses_fsdp(layout) and has_parameters:
        assert mesh is not None
        apply_fsdp(model, mesh, layout, candidate.precision)
    model.to_empty(device=device)
    with torch.no_grad():
        model.materialize(device)
    init_parameters(model, spec.workload.seed, shard_map, spec.perturbation)
    module: nn.Module = model
    if mesh is not None and has_parameters:
        if layout.zero_stage == 1:
            module = apply_buckets(model, mesh, layout, shard_map)
        elif uses_ddp(layout):
            if layout.ep > 1:
                leave_experts_out(model)
            module = apply_ddp(model, mesh, layout, device)
            if layout.ep > 1:
                average_experts(module, model, mesh)
    return ModelPart(
        chunk=chunk,
        model=model,
        module=module,
        shard_map=shard_map,
        cast_meter=cast_meter,
        recompute_meter=recompute_meter,
        fused_meter=model.fused_meter if isinstance(model, ImportedModel) else FusedMeter(),
        offload_meter=offload_meter,
    )


def _split(model: TrainModel, spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device) -> ShardMap:
    """Split the model's computation over tensor- and context-parallel ranks, and over time, in place."""
    candidate, layout = spec.candidate, spec.candidate.layout
    shard_map = ShardMap()
    if layout.tp > 1:
        assert mesh is not None
        shard_map = apply_tensor_parallel(model, mesh["tp"], layout, candidate.precision)
    if layout.ep > 1:
        assert mesh is not None
        shard_map = shard_map.with_(apply_expert_parallel(model, mesh, layout.tp))
    chunk_loss(model, candidate.kernels)
    if isinstance(model, Llama):
        plan = attention_plan(spec, model.shape, device)
        _choose_attention(model, layout, mesh, plan)
        apply_copies(model, candidate, plan)
    return shard_map


def _choose_attention(model: Llama, layout: Layout, mesh: DeviceMesh | None, plan: AttentionPlan) -> None:
    if layout.cp > 1:
        assert mesh is not None
        apply_context_parallel(model, mesh, layout, plan)
    elif plan.expands:
        model.attend_by(functools.partial(causal_attention, expands=True))
