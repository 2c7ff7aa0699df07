"""Takes one optimiser step: micro-batches forward and backward, global gradient norm, update."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trials.accelerator.device import mark, synchronize, widest_float
from trials.datasets import Batch, StepBatches
from trials.failure import NonFiniteLoss
from trials.models import loss_of
from trials.parallel.context import split_sequence
from trials.parallel.data_parallel import held_tensors
from trials.parallel.shards import HeldTensor, gradients_of
from trials.precision import LossScaler, autocast
from trials.reports import Findings, MemoryFormatReport, OperatorCast, PatternEffect
from trials.spec import Layout, Precision, TrialSpec
from trials.stages import Coordinates
from trials.training.build import ModelPart, parallelize
from trials.training.optimizer import build_optimizer
from trials.training.pipeline import Accumulation, Engine, Marker, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of a step; equal on every rank."""

    loss: float
    """Mean loss over the global batch."""
    grad_norm: float
    """Global gradient norm, unscaled; 0 when the step was skipped."""
    skipped: bool


_ROW = 1 << 16
"""Elements of which fp32 adds up the squares without losing more than a few units in the last place."""


class Trainer:
    """One rank's model and optimiser, and the step that trains them."""

    def __init__(self, spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device, *, place: Coordinates) -> None:
        candidate = spec.candidate
        self.device = device
        self.layout = candidate.layout
        self.place = place
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
        self.reads_inputs = any(part.chunk.is_first for part in self.parts)
        self.reads_targets = any(part.chunk.is_last for part in self.parts)
        self.parameters = [parameter for part in self.parts for parameter in part.model.parameters()]
        self.optimizer = build_optimizer(
            spec.workload.optimizer, self.gradients.held, self.scaler, device, on_host=candidate.offload.optimizer
        )
        # Of the ranks that compute the loss, tensor-parallel peers compute the same one.
        self._num_losses = self.layout.world_size // self.layout.pp

    def step(self, inputs: Tensor | None, targets: Tensor | None, marker: Marker) -> Tensor:
        """Train on this rank's rows; gives the gang's ``[loss, grad_norm]``, still on the device.

        ``inputs`` and ``targets`` may be None on a rank that does not read them (:attr:`reads_inputs`,
        :attr:`reads_targets`).

        The norm is reduced before the update, so with loss scaling all ranks skip the same steps. Without it the host
        never waits for the device here.
        """
        if self.layout.cp > 1:
            inputs, targets = (self._held_positions(batch) for batch in (inputs, targets))
        loss = self.engine.run(inputs, targets, marker)
        self.gradients.complete()
        totals = self._totals(loss, marker)
        self._update_if_finite(totals)
        self._clear_gradients()
        marker.mark("optimizer")
        return totals

    def _held_positions(self, batch: Tensor | None) -> Tensor | None:
        return None if batch is None else split_sequence(batch, self.place.cp, self.layout.cp)

    def _totals(self, loss: Tensor, marker: Marker) -> Tensor:
        """Loss and norm over the gang; ranks that do not compute the loss give 0.

        In a pipeline it is here that stages whose work is done wait for the others.
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
        """Update; with loss scaling only from finite gradients, which the host has to know before it goes on, and let
        the scale follow. Every rank decides alike: the totals are the gang's."""
        scaler = self.scaler
        if scaler is None:
            self._update()
            return
        finite = self._is_finite(totals)
        if finite:
            self.gradients.unscale(scaler.scale)
            self._update()
        scaler.update(finite=finite)

    def _is_finite(self, totals: Tensor) -> bool:
        return bool(torch.isfinite(totals[1]).item())

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def _clear_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Wait for all weights, which after a step may be on their way from other ranks: before reading them, and
        before the gang ends."""
        for held in self.gradients.held:
            held.settle()

    def findings(self, num_steps: int) -> Findings:
        """What this rank found out over the last ``num_steps`` steps."""
        return Findings(
            recompute=merged_effects([part.recompute_meter.effects(num_steps) for part in self.parts]),
            autocast=merged_casts([part.cast_meter.casts(num_steps) for part in self.parts]),
            loss_scale=None if self.scaler is None else self.scaler.state(),
        )

    def result(self, totals: Tensor, step: int) -> StepResult:
        """Read what :meth:`step` gave.

        Raises:
            NonFiniteLoss: for an inf or nan loss, or gradient norm where no loss scaling accounts for it.
        """
        loss, grad_norm = totals.tolist()
        finite = math.isfinite(grad_norm)
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"step {step}: loss is {loss}; try a lower learning rate or a wider number format")
        if not finite and self.scaler is None:
            raise NonFiniteLoss(f"step {step}: gradient norm is {grad_norm}, loss {loss}; try a lower learning rate")
        return StepResult(loss=loss, grad_norm=grad_norm if finite else 0.0, skipped=not finite)


def merged_effects(chunks: Iterable[Iterable[PatternEffect]]) -> tuple[PatternEffect, ...]:
    """A rank's effects over all its chunks, one entry per pattern."""
    merged: dict[str, PatternEffect] = {}
    for effect in itertools.chain.from_iterable(chunks):
        before = merged.get(effect.pattern)
        if before is not None:
            effect = PatternEffect(
                pattern=effect.pattern,
                num_matches=before.num_matches + effect.num_matches,
                saved_bytes=before.saved_bytes + effect.saved_bytes,
                recompute_s=before.recompute_s + effect.recompute_s,
            )
        merged[effect.pattern] = effect
    return tuple(merged.values())


def merged_casts(chunks: Iterable[Iterable[OperatorCast]]) -> tuple[OperatorCast, ...]:
    """A rank's casts over all its chunks, one entry per operator and list."""
    num_calls: Counter[tuple[str, str]] = Counter()
    for cast in itertools.chain.from_iterable(chunks):
        num_calls[cast.name, cast.list] += cast.num_calls
    return tuple(OperatorCast(name=name, list=list_, num_calls=num) for (name, list_), num in num_calls.items())


class GangMaximum:
    """The gang's maximum of a value of every rank, so that all take the same decision from it.

    Asked for at construction, behind what the device was given, and read when it is needed: until then the host does
    not wait for the device.
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
    """The gang's maximum, now."""
    return GangMaximum(value, device).read()


class Gradients:
    """What the step does with gradients. All that depends on the layout alone is worked out once, here."""

    def __init__(self, parts: list[ModelPart], layout: Layout, mesh: DeviceMesh | None, device: torch.device) -> None:
        self._device = device
        self._group = mesh["tp"].get_group() if mesh is not None and layout.tp > 1 else None
        self.held: list[HeldTensor] = [
            one for part in parts for one in held_tensors(part.module, part.model, part.shard_map, layout)
        ]
        self._partial = [one for one in self.held if one.is_partial]
        parameters = [parameter for part in parts for parameter in part.model.parameters()]
        self._tensor_parallel = [parameter for parameter in parameters if _is_tensor_parallel(parameter)]
        self._by_replicas: dict[int, list[HeldTensor]] = {}
        for one in self.held:
            self._by_replicas.setdefault(one.num_replicas, []).append(one)

    @torch.no_grad()
    def complete(self) -> None:
        """Make every gradient what its parameter needs: summed over the tensor-parallel group, placed like it.

        Under tensor parallelism some arrive as partial sums (norms with sequence parallelism) or whole (the
        embedding).
        """
        if self._partial:
            _sum_in_place(gradients_of(self._partial), self._group)
        for parameter in self._tensor_parallel:
            grad = parameter.grad
            assert isinstance(parameter, DTensor)
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """This rank's share of the squared global gradient norm: summed over all ranks it is the square of the norm.

        Every rank of the gang adds its local squares, divided by the number of ranks that hold the same elements, so
        the one rule is right for every mixture of replication and sharding. A scalar in the widest format there is.
        """
        total = torch.zeros((), dtype=widest_float(self._device), device=self._device)
        for replicas, held in self._by_replicas.items():
            grads = gradients_of(held)
            if grads:
                total += _square_sum(grads) / replicas
        return total

    @torch.no_grad()
    def unscale(self, scale: float) -> None:
        """Divide fp32 gradients by ``scale``; 16-bit ones are left to the optimiser that keeps fp32 masters."""
        grads = [grad for grad in gradients_of(self.held) if grad.dtype == torch.float32]
        if grads:
            torch._foreach_mul_(grads, 1.0 / scale)


def _square_sum(tensors: list[Tensor]) -> Tensor:
    """Sum of all squares. Kernels of the CPU add up in fp32, element by element, so they are given short rows."""
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


# Settles the memory format of convolutions, NCHW or NHWC ("channels last"), by rule and by measurement.


Format = Literal["nchw", "nhwc"]
TORCH_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}

_NUM_ROUNDS = 5
_MIN_GAIN = 0.05
"""Share by which the other format has to be faster to be taken for faster."""


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def convert_weights(models: Iterable[nn.Module], format_: Format) -> None:
    """Bring the weights of convolutions to this format, in place, whatever wraps the models.

    Weights that FSDP holds stay as they are, because it wants them contiguous; their convolutions follow the format of
    their input.
    """
    for model in models:
        for parameter in model.parameters():
            if parameter.dim() == 4 and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.contiguous(memory_format=TORCH_FORMATS[format_])


def format_by_rule(precision: Precision) -> Format:
    """The format of the usual rule: tensor cores take 16-bit convolutions in NHWC; fp32 kernels are best in NCHW."""
    return "nchw" if precision.dtype == "float32" else "nhwc"


def settle_memory_format(
    trainer: Trainer, spec: TrialSpec, dataset: StepBatches | None
) -> tuple[torch.memory_format, MemoryFormatReport | None]:
    """Convert the trainer's models; gives the format its inputs need, and what ``auto`` found out.

    Models without convolutions are left alone, and those of the user's, who has chosen.
    """
    models = [part.model for part in trainer.parts]
    wanted = spec.candidate.kernels.memory_format
    if not any(has_convolutions(model) and not model.is_own for model in models):
        return torch.preserve_format, None
    if wanted != "auto":
        convert_weights(models, wanted)
        return TORCH_FORMATS[wanted], None
    assert dataset is not None, "no pipeline splits a model with convolutions"
    report = _compare(trainer, spec, dataset[0])
    chosen: Format = "nhwc" if report.chosen == "nhwc" else "nchw"
    convert_weights(models, chosen)
    return TORCH_FORMATS[chosen], report


def choose_format(rule: Format, times_s: dict[Format, float]) -> Format:
    """The rule's format, unless the other one is clearly faster."""
    other: Format = "nchw" if rule == "nhwc" else "nhwc"
    return other if times_s[other] < times_s[rule] * (1.0 - _MIN_GAIN) else rule


def _compare(trainer: Trainer, spec: TrialSpec, sample: Batch) -> MemoryFormatReport:
    """Time a few forward and backward passes of both formats, in turns; all ranks come to the same choice."""
    (model,) = (part.model for part in trainer.parts)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    formats: tuple[Format, Format] = ("nchw", "nhwc")
    rounds: dict[Format, list[float]] = {format_: [] for format_ in formats}
    for number in range(_NUM_ROUNDS + 1):
        for format_ in formats:
            convert_weights([model], format_)
            seconds = _time_pass(trainer, spec, sample, TORCH_FORMATS[format_])
            if number:  # the first pass of each is warm-up
                rounds[format_].append(seconds)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    times_s = {format_: max_over_ranks(statistics.median(rounds[format_]), trainer.device) for format_ in formats}
    rule = format_by_rule(spec.candidate.precision)
    chosen = choose_format(rule, times_s)
    return MemoryFormatReport(rule=rule, chosen=chosen, nchw_s=times_s["nchw"], nhwc_s=times_s["nhwc"])


def _time_pass(trainer: Trainer, spec: TrialSpec, sample: Batch, memory_format: torch.memory_format) -> float:
    """Seconds of one forward and backward pass over a micro-batch; its gradients are dropped.

    The model is called without its DDP wrapper, so gradients are reduced by nobody.
    """
    (model,) = (part.model for part in trainer.parts)
    rows = slice(0, spec.candidate.micro_batch_size)
    inputs = sample[0][rows].to(trainer.device, memory_format=memory_format)
    targets = sample[1][rows].to(trainer.device)
    synchronize(trainer.device)
    start_s = time.perf_counter()
    with autocast(spec.candidate.precision, trainer.device):
        loss: Tensor = loss_of(spec.workload.model)(model(inputs), targets)
    torch.autograd.backward(loss)
    synchronize(trainer.device)
    seconds = time.perf_counter() - start_s
    for parameter in model.parameters():
        parameter.grad = None
    return seconds
