"""Builds this rank's part of the model from a specification: split over the gang, wrapped and initialised."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trials.attention import causal_attention
from trials.kernels import apply_compile, attention_plan
from trials.legality import uses_ddp
from trials.models import TrainModel, build_model
from trials.models.llama import Llama
from trials.offload import OffloadMeter, apply_activation_offload
from trials.parallel.context import apply_context_parallel
from trials.parallel.data_parallel import apply_buckets, apply_ddp, apply_fsdp, uses_fsdp
from trials.parallel.shards import ShardMap, init_parameters, perturb_parameters
from trials.parallel.tensor import apply_copies, apply_tensor_parallel, chunk_loss
from trials.precision import CastMeter, apply_autocast_lists, apply_float8, parameter_dtype
from trials.recompute import RecomputeMeter, apply_recompute
from trials.spec import TrialSpec
from trials.stages import Chunk, chunks_of_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One virtual stage on this rank; the whole model when there is no pipeline."""

    chunk: Chunk
    model: TrainModel
    module: nn.Module
    """What is called: ``model``, or the wrapper around it that reduces its gradients."""
    shard_map: ShardMap
    cast_meter: CastMeter
    recompute_meter: RecomputeMeter
    offload_meter: OffloadMeter

    def with_targets(self, targets: Tensor | None) -> dict[str, Tensor]:
        """What ``module`` takes besides its input: the targets, where it computes the loss itself."""
        if targets is None or not (self.chunk.is_last and self.model.computes_loss):
            return {}
        return {"targets": targets}


def parallelize(spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device, *, stage: int) -> list[ModelPart]:
    """Build what pipeline rank ``stage`` holds, chunk by chunk."""
    num_layers = spec.workload.num_layers
    chunks = chunks_of_stage(spec.candidate.layout, stage, num_layers)
    return [_build_part(spec, chunk, mesh, device) for chunk in chunks]


def _build_part(spec: TrialSpec, chunk: Chunk, mesh: DeviceMesh | None, device: torch.device) -> ModelPart:
    """Build one virtual stage.

    The order matters: tensor parallelism swaps plain weights for sharded ones, so everything after must see those;
    recompute wraps a whole layer, so that compile captures the recomputation too; FSDP's hooks go around the compiled
    layer, because gathering weights is no part of the graph. A model of ours has no storage until all that is done, so
    no rank ever holds more than its part; one of the user's comes with its values, of which each rank keeps its part.
    What reduces in buckets comes last: they are built from real weights.
    """
    candidate = spec.candidate
    layout = candidate.layout
    model = build_model(spec.workload, chunk)
    if model.is_own:
        perturb_parameters(model, spec.workload.seed, spec.perturbation)
    model.store_as(parameter_dtype(candidate.precision, sharded=uses_fsdp(layout)))
    apply_float8(model, candidate.precision, device, tp=candidate.layout.tp)
    shard_map = _split(model, spec, mesh, device)
    cast_meter = apply_autocast_lists(model, candidate.precision)
    recompute_meter = apply_recompute(model, candidate.recompute, chunk)
    apply_compile(model, candidate.kernels)
    offload_meter = apply_activation_offload(model, candidate.offload, chunk, device)
    has_parameters = next(model.parameters(), None) is not None
    if uses_fsdp(layout) and has_parameters:
        assert mesh is not None
        apply_fsdp(model, mesh, layout, candidate.precision)
    if model.is_own:
        model.to(device)
    else:
        model.to_empty(device=device)
        model.materialize(device)
        init_parameters(model, spec.workload.seed, shard_map, spec.perturbation)
    module: nn.Module = model
    if mesh is not None and has_parameters:
        if layout.zero_stage == 1:
            module = apply_buckets(model, mesh, layout, shard_map)
        elif uses_ddp(layout):
            module = apply_ddp(model, mesh, layout, device)
    return ModelPart(
        chunk=chunk,
        model=model,
        module=module,
        shard_map=shard_map,
        cast_meter=cast_meter,
        recompute_meter=recompute_meter,
        offload_meter=offload_meter,
    )


def _split(model: TrainModel, spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device) -> ShardMap:
    """Split what the model computes over tensor- and context-parallel ranks, and over time, in place."""
    candidate, layout = spec.candidate, spec.candidate.layout
    shard_map = ShardMap()
    if layout.tp > 1:
        assert mesh is not None
        shard_map = apply_tensor_parallel(model, mesh["tp"], layout, candidate.precision)
    chunk_loss(model, candidate.kernels.loss_chunks)
    if isinstance(model, Llama):
        _choose_attention(model, spec, mesh, device)
    apply_copies(model, layout)
    return shard_map


def _choose_attention(model: Llama, spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device) -> None:
    layout = spec.candidate.layout
    plan = attention_plan(spec, model.shape, device)
    if layout.cp > 1:
        assert mesh is not None
        apply_context_parallel(model, mesh["cp"], layout, plan)
    elif plan.expands:
        model.attend_by(functools.partial(causal_attention, expands=True))
