"""One optimiser step: micro-batches forward and backward, global norm, update."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trials.failure import NonFiniteLoss
from trials.models import loss_of
from trials.parallel.context_parallel import split_sequence
from trials.precision.mixed import LossScaler
from trials.reports.findings import Findings, OperatorCast, PatternEffect
from trials.spec import TrialSpec
from trials.stages import Coordinates
from trials.training.build import parallelize
from trials.training.gradients import Gradients
from trials.training.microbatches import Accumulation, Engine, Marker
from trials.training.optimizer import build_optimizer
from trials.training.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Equal on every rank."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Global, unscaled; 0 when the step was skipped."""
    skipped: bool


class Trainer:
    """Model and optimiser of one rank."""

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
        self.optimizer = build_optimizer(spec, self.parameters, mesh, self.scaler)
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
        if self.scaler is None or self._can_update(self.scaler, totals):
            self._update()
        self._clear_gradients()
        marker.mark("optimizer")
        return totals

    def _held_positions(self, batch: Tensor | None) -> Tensor | None:
        return None if batch is None else split_sequence(batch, self.place.cp, self.layout.cp)

    def _totals(self, loss: Tensor, marker: Marker) -> Tensor:
        """Loss and norm over the gang; ranks that do not compute the loss give 0.

        In a pipeline it is here that stages whose work is done wait for the others.
        """
        totals = torch.stack([loss.double() / self._num_losses, self.gradients.square_sum()])
        marker.mark("other")
        if self.layout.world_size > 1:
            dist.all_reduce(totals)
            marker.mark("bubble" if self.layout.pp > 1 else "other")
        totals[1] = totals[1].sqrt() / self._scale()
        marker.mark("other")
        return totals

    def _scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def _can_update(self, scaler: LossScaler, totals: Tensor) -> bool:
        """Unscale finite gradients; skip the update for others. Every rank decides alike: the totals are the gang's."""
        finite = bool(torch.isfinite(totals[1]))
        if finite:
            self.gradients.unscale(scaler.scale)
        return finite

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def _clear_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def findings(self, num_steps: int) -> Findings:
        """What this rank found out over the last ``num_steps`` steps."""
        return Findings(
            recompute=merged_effects([part.recompute_meter.effects(num_steps) for part in self.parts]),
            autocast=merged_casts([part.cast_meter.casts(num_steps) for part in self.parts]),
            loss_scale=None if self.scaler is None else self.scaler.state(),
        )

    def result(self, totals: Tensor, step: int) -> StepResult:
        """Read what :meth:`step` gave and let the loss scale follow it.

        Raises:
            NonFiniteLoss: for an inf or nan loss, or gradient norm where no loss scaling accounts for it.
        """
        loss, grad_norm = totals.tolist()
        finite = math.isfinite(grad_norm)
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"step {step}: loss is {loss}; try a lower learning rate or a wider number format")
        if not finite and self.scaler is None:
            raise NonFiniteLoss(f"step {step}: gradient norm is {grad_norm}, loss {loss}; try a lower learning rate")
        if self.scaler is not None:
            self.scaler.update(finite=finite)
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


def max_over_ranks(value: float, device: torch.device) -> float:
    """The gang's maximum, so that all ranks take the same decision from it."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
