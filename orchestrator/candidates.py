"""Knob values to canonical candidates and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from orchestrator.knobs import KNOBS
from trials.spec import Candidate, FullRecompute, Kernels, Layout, Loader, LossScale, NoRecompute, Precision, Recompute

DEFAULT_PREFETCH_FACTOR = 2


def build_candidate(values: Mapping[str, Any], num_layers: int) -> Candidate:
    """The canonical candidate of a full set of knob values, for a model of ``num_layers`` layers."""
    return Candidate(
        layout=build_layout(values),
        micro_batch_size=values["micro_batch_size"],
        recompute=canonical_recompute(values["recompute"], num_layers),
        precision=canonical_precision(values["precision"]),
        loader=build_loader(values),
        kernels=Kernels(compile=values["compile"]),
    )


def knob_values(candidate: Candidate) -> dict[str, Any]:
    """Values of all knobs: the inverse of :func:`build_candidate` for canonical candidates."""
    return {knob.name: knob.read(candidate) for knob in KNOBS}


def canonicalize(candidate: Candidate, num_layers: int) -> Candidate:
    """Give knobs without effect their neutral value, so that candidates that run alike are equal."""
    kernels = candidate.kernels
    return dataclasses.replace(
        candidate,
        layout=canonical_layout(candidate.layout),
        recompute=canonical_recompute(candidate.recompute, num_layers),
        precision=canonical_precision(candidate.precision),
        loader=canonical_loader(candidate.loader),
        kernels=Kernels() if kernels.compile == "off" else kernels,
    )


def build_layout(values: Mapping[str, Any]) -> Layout:
    """Resolve ``replicate_with: auto`` and bring the layout into canonical form."""
    engine: Literal["auto", "ddp", "fsdp2"] = values["replicate_with"]
    if engine == "auto":
        engine = "ddp" if values["tp"] == 1 else "fsdp2"
    layout = Layout(
        dp_replicate=values["dp_replicate"],
        dp_shard=values["dp_shard"],
        tp=values["tp"],
        zero_stage=values["zero_stage"],
        sequence_parallel=values["sequence_parallel"],
        replicate_with=engine,
    )
    return canonical_layout(layout)


def canonical_layout(layout: Layout) -> Layout:
    """``zero_stage`` needs a shard group, sequence parallelism a tp group, ``replicate_with`` replicas.

    ZeRO-1 always works on DDP, and FSDP2, which does ZeRO-2 and ZeRO-3, also replicates: no choice of engine there.
    """
    zero_stage = layout.zero_stage if layout.dp_shard > 1 else 0
    has_engine_choice = layout.dp_replicate > 1 and zero_stage == 0
    return dataclasses.replace(
        layout,
        zero_stage=zero_stage,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        replicate_with=layout.replicate_with if has_engine_choice else "ddp",
    )


def canonical_recompute(recompute: Recompute, num_layers: int) -> Recompute:
    """Recompute of no layer is none; of more layers than there are, all."""
    if isinstance(recompute, NoRecompute) or recompute.num_layers <= 0:
        return NoRecompute()
    return FullRecompute(num_layers=min(recompute.num_layers, num_layers))


def canonical_precision(precision: Precision) -> Precision:
    """O0 is float32; float16 always has a loss scale and nothing else has one."""
    if precision.level == "O0":
        return Precision()
    scale = (precision.loss_scale or LossScale()) if precision.dtype == "float16" else None
    return dataclasses.replace(precision, loss_scale=scale)


def build_loader(values: Mapping[str, Any]) -> Loader:
    return canonical_loader(Loader(num_workers=values["num_workers"], prefetch_factor=values["prefetch_factor"]))


def canonical_loader(loader: Loader) -> Loader:
    """Nothing to prefetch without workers; 0 with workers means the default."""
    if loader.num_workers == 0:
        return Loader()
    return dataclasses.replace(loader, prefetch_factor=loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR)
