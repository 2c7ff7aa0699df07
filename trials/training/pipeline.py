"""Runs a step's micro-batches one after the other on a rank that holds all layers; also the interface of any engine."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trials.failure import InfeasibleSpec
from trials.models import Loss
from trials.parallel.data_parallel import (
    BucketedReplica,
    begin_backward,
    finish_gradients,
    keep_weights,
    reduce_gradients,
    reduces_each,
    sharded_ends,
    take_in_gradients,
)
from trials.precision import autocast
from trials.spec import Candidate, Layout, TrialSpec
from trials.stages import num_virtual_stages_total
from trials.training.build import ModelPart


class Marker(Protocol):
    """Is told the name of each phase of a step that has just ended."""

    def mark(self, phase: str) -> None: ...


class SilentMarker:
    """The :class:`Marker` that drops what it is told."""

    def mark(self, phase: str) -> None:
        pass


class Engine(Protocol):
    """Runs all micro-batches of a step."""

    def run(self, inputs: Tensor | None, targets: Tensor | None, marker: Marker) -> Tensor:
        """Forward and backward over this rank's rows; gradients are then averages over data-parallel ranks.

        Gives the mean loss of the rows, a scalar; 0 on a rank that does not compute it.
        """
        ...


class Accumulation:
    """The :class:`Engine` without a pipeline: gradients add up, and the last micro-batch reduces them, or each one."""

    def __init__(
        self, part: ModelPart, loss: Loss, candidate: Candidate, device: torch.device, scale: Callable[[], float]
    ) -> None:
        self._part = part
        self._loss = loss
        self._micro_batch_size = candidate.micro_batch_size
        self._precision = candidate.precision
        self._device = device
        self._scale = scale
        self._layout = candidate.layout
        self._each = reduces_each(candidate.layout)
        self._is_last: bool | None = None

    def run(self, inputs: Tensor | None, targets: Tensor | None, marker: Marker) -> Tensor:
        assert inputs is not None and targets is not None, "it holds the first and the last layer"
        micro_batches = list(
            zip(torch.split(inputs, self._micro_batch_size), torch.split(targets, self._micro_batch_size), strict=True)
        )
        factor = 1.0 / len(micro_batches)
        module, scale = self._part.module, self._scale()
        losses = []
        for i, (rows, wanted) in enumerate(micro_batches, start=1):
            self._begin(is_last=i == len(micro_batches))
            with autocast(self._precision, self._device):
                loss = self._loss(module(rows, **self._part.with_targets(wanted)), wanted)
            losses.append(loss.detach())
            marker.mark("forward")
            torch.autograd.backward(loss, torch.full_like(loss, factor * scale))
            if i == len(micro_batches):
                finish_gradients(module)
            marker.mark("backward")
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _begin(self, *, is_last: bool) -> None:
        """Say what the next micro-batch does to gradients; only on a change, as that walks all modules."""
        if is_last != self._is_last:
            begin_backward(self._part.module, is_last=is_last, each=self._each)
            keep_weights(self._part.module, self._part.model, self._layout, is_last=is_last)
            self._is_last = is_last


# Runs a step's micro-batches through pipeline stages that different ranks hold.


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
    """A virtual stage that marks what it spends time on, and computes its forward pass in ``context``.

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
        """Those of every micro-batch, on a rank that reads them."""
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
        """Reduce gradients over data-parallel ranks, which without a pipeline is part of the backward pass too."""
        with self._phase("backward"):
            super().perform_reduce_grad(grad_scale_factor)
            for unit in self._sharded_ends:
                reduce_gradients(unit)
            finish_gradients(self.submod)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        """Go through the graph; torch's own way has FSDP reduce no gradients before :meth:`perform_reduce_grad`."""
        if isinstance(self.submod, BucketedReplica):
            begin_backward(self.submod, is_last=last_backward, each=False)
        unit = self._reduces_each
        if unit is None:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight" and isinstance(self.submod, FSDPModule):
                # Hooks of the other part have taken in those gradients that it had, in the format of reductions.
                take_in_gradients(self.submod)
            return result
        unit.set_is_last_backward(False)
        unit.set_reshard_after_backward(False)
        begin_backward(self.submod, is_last=last_backward, each=True)
        result = self._backward(backward_type, bwd_kwargs)
        if backward_type == "weight":
            # It adds gradients up by itself, past the hooks that see to them.
            reduce_gradients(unit)
        return result

    def _backward(self, kind: str, found: dict[str, Any]) -> tuple[Any, Any]:
        """Gradients of the stage's inputs, and what a backward pass in two parts goes on with."""
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
        """Let a backward pass in two parts see the parameters of the forward pass, not FSDP's shards of them.

        It looks for the former in the graph before FSDP's hooks gather them, and without a word leaves out the
        gradients of those it does not find.
        """
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def forward_maybe_with_nosync(self, *args: Any, **options: Any) -> Any:
        with self._context():
            options |= self._part.with_targets(self._wanted)
            output = super().forward_maybe_with_nosync(*args, **options)  # type: ignore[no-untyped-call]
        # A stage of no layers gives its input, a receive buffer; a module of the user's may give a view. The schedule
        # must not detach the one, and cannot detach the other.
        is_buffer = bool(args) and output is args[0]
        return output.clone() if is_buffer or (isinstance(output, Tensor) and output._is_view()) else output

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What torch before 2.12 connects ranks with, first of all; not with themselves, where a V turns."""
        rank = dist.get_rank()
        return [operation for operation in super()._get_init_p2p_neighbors_ops() if operation.peer != rank]

    def _shape_inference(self, *args: Any, **options: Any) -> Any:
        """What torch before 2.12 has in place of :meth:`_compute_outputs`, which it calls as the stage's module."""
        module = self.submod
        self.submod = functools.partial(self._compute_outputs, module=module)  # type: ignore[assignment]
        try:
            return super()._shape_inference(*args, **options)  # type: ignore[misc]
        finally:
            self.submod = module

    def _compute_outputs(self, *args: Any, module: nn.Module, **options: Any) -> Any:
        """Run the stage without gradients, before the first step, for the schedule to find out shapes and types."""
        model = module.module if isinstance(module, DistributedDataParallel | BucketedReplica) else module
        options |= self._part.with_targets(self.targets[0] if self.targets else None)
        with self._context():
            return model(*args, **options)


class Pipeline:
    """The :class:`~trials.training.pipeline.Engine` of a rank in a pipeline."""

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
        self._marker: Marker = SilentMarker()

        def context() -> AbstractContextManager[Any]:
            return autocast(candidate.precision, device)

        self._context = context
        self.stages = [Stage(part, candidate.layout, mesh, device, context) for part in parts]
        self.schedule = build_schedule(candidate.layout, self.stages, self._num_microbatches, self._scaled_loss)

    def run(self, inputs: Tensor | None, targets: Tensor | None, marker: Marker) -> Tensor:
        self._marker = marker
        for stage in self.stages:
            stage.marker = marker
            stage.targets = () if targets is None else targets.tensor_split(self._num_microbatches)
        self._losses.clear()
        arguments = (inputs,) if self._is_first else ()
        self.schedule.step(*arguments, target=targets if self._is_last else None, return_outputs=False)
        marker.mark("bubble")
        if not self._is_last:
            return torch.zeros((), device=self._device)
        # In the first step the schedule has called the loss once more, before, to find out shapes.
        return torch.stack(self._losses[-self._num_microbatches :]).mean()

    def _scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the schedule runs backward from: gradients of the mean over micro-batches, scaled for 16 bits."""
        self._marker.mark("bubble")
        with self._context():
            loss = self._loss(outputs, targets)
        self._losses.append(loss.detach())
        scaled = loss * (self._scale() / self._num_microbatches)
        self._marker.mark("forward")
        return scaled


def build_schedule(
    layout: Layout, stages: list[Stage], num_microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """The order in which a rank works on its stages and micro-batches. ``loss`` is divided by their number already.

    Raises:
        InfeasibleSpec: this torch cannot order them so; before 2.11 it wants as many micro-batches as stages.
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
        raise InfeasibleSpec(f"torch {torch.__version__} refuses schedule {layout.schedule}: {error}") from error
