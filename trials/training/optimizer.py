"""Builds the workload's optimiser in the form that layout and precision need."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trials.parallel.data_parallel import uses_fsdp
from trials.parallel.mesh import SHARD_AXES, flat_mesh
from trials.parallel.shards import local_part
from trials.precision.mixed import LossScaler, keeps_masters
from trials.spec import AdamW, TrialSpec

with warnings.catch_warnings():
    # The package compiles deprecated functional optimisers with torch.jit.script at import.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def build_optimizer(
    spec: TrialSpec, parameters: list[nn.Parameter], mesh: DeviceMesh | None, scaler: LossScaler | None
) -> torch.optim.Optimizer | None:
    """AdamW; under ZeRO stage 1 its states are split over ``dp_shard``.

    None for a rank without parameters, as a pipeline stage of no layers may be.
    """
    if not parameters:
        return None
    layout = spec.candidate.layout
    options = _options(spec.workload.optimizer)
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    if _needs_local(spec, parameters):
        optimizer_class = LocalAdamW
        options["grad_scale"] = lambda: 1.0 if scaler is None else scaler.scale
    if layout.zero_stage == 1:
        assert mesh is not None
        group = flat_mesh(mesh, SHARD_AXES).get_group()
        return ZeroRedundancyOptimizer(parameters, optimizer_class, process_group=group, **options)
    return optimizer_class(parameters, **options)


def _needs_local(spec: TrialSpec, parameters: list[nn.Parameter]) -> bool:
    if keeps_masters(spec.candidate.precision, sharded=uses_fsdp(spec.candidate.layout)):
        return True
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _options(config: AdamW) -> dict[str, Any]:
    options = dataclasses.asdict(config)
    betas = (options.pop("beta1"), options.pop("beta2"))
    return {**options, "betas": betas, "foreach": True}


class LocalAdamW(torch.optim.Optimizer):
    """AdamW on this rank's part of every parameter as a plain tensor, over fp32 copies of 16-bit ones.

    The update is element-wise, so shards have nothing to tell each other. Over DTensors every one of its operations is
    dispatched through the placements of all parameters, and first works them out, which takes longer than training a
    small model.

    Gradients of 16-bit parameters are divided by ``grad_scale()`` after the cast to fp32, where small ones do not
    underflow. Parts and copies are taken at the first step, as Adam's states are: FSDP may place shards anew before its
    first forward pass, and parameters have the memory format they train in.

    Composes with ``ZeroRedundancyOptimizer``: each rank's instance is given, and keeps copies of, its own partition.
    """

    def __init__(self, params: Any, *, grad_scale: Callable[[], float], **hyper: Any) -> None:
        super().__init__(params, {"grad_scale": grad_scale, **hyper})
        self._grad_scale = grad_scale
        self._parameters: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self._hyper = hyper
        self._parts: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._inner: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self._inner is None:
            self._parts = [local_part(parameter).detach() for parameter in self._parameters]
            self._masters = [part.float() for part in self._parts]  # fp32 parts are their own masters
            self._inner = torch.optim.AdamW(self._masters, **self._hyper)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else self._unscaled(local_part(parameter.grad))
        self._inner.step()
        for part, master in zip(self._parts, self._masters, strict=True):
            master.grad = None
            if part is not master:
                part.copy_(master)

    def _unscaled(self, grad: Tensor) -> Tensor:
        return grad if grad.dtype == torch.float32 else grad.float().mul_(1.0 / self._grad_scale())
