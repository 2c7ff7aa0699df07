"""One optimiser step: micro-batches forward and backward, global norm, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trials.failure import NonFiniteLoss
from trials.gradients import align_gradients, local_square_sum, sum_over_ranks, unscale_gradients
from trials.optimizer import build_optimizer
from trials.parallel import parallelize, set_gradient_sync
from trials.precision import LossScaler, autocast
from trials.spec import TrialSpec


class Marker(Protocol):
    """Told the name of the phase that has just ended."""

    def mark(self, phase: str) -> None: ...


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

    def __init__(self, spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device) -> None:
        candidate = spec.candidate
        self.device = device
        self.world_size = candidate.layout.world_size
        self.precision = candidate.precision
        self.micro_batch_size = candidate.micro_batch_size
        self.num_microbatches = candidate.num_microbatches(spec.workload.global_batch_size)
        self.model: nn.Module = parallelize(spec, mesh, device)
        self.parameters = list(self.model.parameters())
        loss_scale = candidate.precision.loss_scale
        self.scaler = LossScaler(loss_scale) if loss_scale is not None else None
        self.optimizer: Any = build_optimizer(spec, self.parameters, mesh, self.scaler)

    def step(self, batch: Tensor, marker: Marker) -> Tensor:
        """Train on this rank's rows ``[rows, S + 1]``; gives the gang's ``[loss, grad_norm]``, still on the device.

        The norm is reduced before the update, so with loss scaling all ranks skip the same steps. Without it the host
        never waits for the device here.
        """
        loss = self._accumulate(batch, marker)
        align_gradients(self.parameters)
        square_sum = local_square_sum(self.parameters, self.world_size)
        totals = sum_over_ranks(torch.stack([loss.double() / self.world_size, square_sum]))
        totals[1] = totals[1].sqrt() / self._scale
        marker.mark("other")
        if self.scaler is None or self._can_update(self.scaler, totals):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marker.mark("optimizer")
        return totals

    def _accumulate(self, batch: Tensor, marker: Marker) -> Tensor:
        """Forward and backward over all micro-batches; only the last one reduces gradients. Gives the mean loss."""
        total = torch.zeros((), device=self.device)
        for i, rows in enumerate(torch.split(batch, self.micro_batch_size)):
            set_gradient_sync(self.model, i == self.num_microbatches - 1)
            with autocast(self.precision, self.device):
                loss = next_token_loss(self.model(rows[:, :-1]), rows[:, 1:]) / self.num_microbatches
            marker.mark("forward")
            torch.autograd.backward(loss * self._scale)
            total += loss.detach()
            marker.mark("backward")
        return total

    @property
    def _scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def _can_update(self, scaler: LossScaler, totals: Tensor) -> bool:
        """Unscale finite gradients; skip the update for others. Every rank decides alike: the totals are the gang's."""
        finite = bool(torch.isfinite(totals[1]))
        if finite:
            unscale_gradients(self.parameters, scaler.scale)
        return finite

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


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of logits ``[B, S, V]`` against tokens ``[B, S]``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def max_over_ranks(value: float, device: torch.device) -> float:
    """The gang's maximum, so that all ranks take the same decision from it."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
