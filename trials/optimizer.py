"""The workload's optimiser, in the form the layout and the precision need."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trials.data_parallel import uses_fsdp
from trials.mesh import SHARD_AXES, flat_mesh
from trials.precision import LossScaler, MasterAdamW, group_by_kind, keeps_masters
from trials.spec import AdamW, TrialSpec

with warnings.catch_warnings():
    # The package compiles deprecated functional optimisers with torch.jit.script at import.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def build_optimizer(
    spec: TrialSpec, parameters: list[nn.Parameter], mesh: DeviceMesh | None, scaler: LossScaler | None
) -> torch.optim.Optimizer | None:
    """AdamW, over fp32 masters for 16-bit parameters; under ZeRO stage 1 its states are split over ``dp_shard``.

    None for a rank without parameters, as a pipeline stage of no layers may be.
    """
    if not parameters:
        return None
    layout = spec.candidate.layout
    options = _options(spec.workload.optimizer)
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    if keeps_masters(spec.candidate.precision, sharded=uses_fsdp(layout)):
        optimizer_class = MasterAdamW
        options["grad_scale"] = lambda: 1.0 if scaler is None else scaler.scale
    if layout.zero_stage == 1:
        assert mesh is not None
        group = flat_mesh(mesh, SHARD_AXES).get_group()
        return ZeroRedundancyOptimizer(parameters, optimizer_class, process_group=group, **options)
    return optimizer_class(group_by_kind(parameters), **options)


def _options(config: AdamW) -> dict[str, Any]:
    options = dataclasses.asdict(config)
    betas = (options.pop("beta1"), options.pop("beta2"))
    return {**options, "betas": betas, "foreach": True}
