"""Canonical form: knob values to candidates and back, so that one candidate has one spelling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.layer_choices import layers_of, resolve_recompute, resolve_stage_layers
from orchestrator.space.knobs.own import OwnKnob, OwnScalar, chosen
from trials.legality.rules import holds_plain
from trials.spec import (
    Candidate,
    Kernels,
    Layout,
    Loader,
    LoaderTuning,
    LossScale,
    Model,
    Offload,
    OwnModel,
    Precision,
    ResNetModel,
    ScriptModel,
    decoder_of,
)

DEFAULT_PREFETCH_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Rest:
    """A data-parallel degree that takes up the devices which the other axes leave of ``num_devices``.

    As ``dp_shard`` it does so where something is to be sharded, and is 1 elsewhere.
    """

    num_devices: int

    def of(self, taken: int) -> int:
        """What is left beside ``taken``; where that does not divide, so much that legality rules find fault."""
        return max(1, self.num_devices // max(1, taken))


def build_candidate(
    values: Mapping[str, Any], model: Model, own: Sequence[OwnKnob] = (), own_values: Mapping[str, OwnScalar] = {}
) -> Candidate:
    """The canonical candidate of a full set of knob values, and of values of the user's own knobs."""
    layout = build_layout(values, model.num_layers)
    recompute = resolve_recompute(values["recompute"], layers_of(layout, model.num_layers))
    engine = engine_for(values["tp_engine"], model)
    engine = resolve_tp_engine(engine, layout, recomputes_communication=recompute.communication != ())
    return Candidate(
        layout=with_tp_engine(layout, engine),
        micro_batch_size=values["micro_batch_size"],
        recompute=recompute,
        precision=canonical_precision(values["precision"]),
        loader=build_loader(values),
        kernels=build_kernels(values, model),
        offload=build_offload(values),
        own=chosen(own, own_values),
    )


def knob_values(candidate: Candidate) -> dict[str, Any]:
    """Values of all knobs: the inverse of :func:`build_candidate` for canonical candidates."""
    return {knob.name: knob.read(candidate) for knob in KNOBS}


def build_layout(values: Mapping[str, Any], num_layers: int) -> Layout:
    """The layout in canonical form, with ``replicate_with: auto`` and the layers per stage resolved.

    ``tp_engine`` depends on the recompute policy too and is left at its default, for :func:`with_tp_engine`.
    """
    pp, schedule = values["pp"], values["schedule"]
    chunks = 2 if schedule == "zbv" else values["num_virtual_stages"]
    engine = values["replicate_with"]
    if engine == "auto":
        is_plain = values["tp"] == 1 and (pp == 1 or chunks == 1) and not values["shard_embedding"]
        engine = "ddp" if is_plain else "fsdp2"
    replicate, shard = _data_parallel(values)
    layout = Layout(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=values["cp"],
        tp=values["tp"],
        zero_stage=values["zero_stage"],
        gradient_reduction=values["gradient_reduction"],
        replicate_with=engine,
        shard_embedding=values["shard_embedding"],
        sequence_parallel=values["sequence_parallel"],
        num_copies=values["num_copies"],
        cp_method=values["cp_method"],
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=resolve_stage_layers(
            values["stage_layers"], num_layers=num_layers, pp=pp, num_virtual_stages=chunks, schedule=schedule
        ),
    )
    return canonical_layout(layout)


def _data_parallel(values: Mapping[str, Any]) -> tuple[int, int]:
    """``dp_replicate`` and ``dp_shard``, with what is to take up the rest of the devices resolved."""
    replicate, shard = values["dp_replicate"], values["dp_shard"]
    taken = values["pp"] * values["cp"] * values["tp"]
    if isinstance(shard, Rest):
        rest, others = (replicate, 1) if isinstance(replicate, Rest) else (shard, replicate)
        shard = rest.of(taken * others) if values["zero_stage"] else 1
    return (replicate.of(taken * shard) if isinstance(replicate, Rest) else replicate), shard


def canonical_layout(layout: Layout) -> Layout:
    """The layout with knobs of an axis at their defaults where its degree is 1: they mean nothing there.

    Sharding comes with its engine, which also replicates: no choice of one there.
    """
    has_pipeline, has_tp = layout.pp > 1, layout.tp > 1
    zero_stage = layout.zero_stage if layout.dp_shard > 1 else 0
    has_engine_choice = layout.dp_replicate * layout.cp > 1 and zero_stage == 0
    schedule = layout.schedule if has_pipeline else "1f1b"
    chunks = (2 if schedule == "zbv" else layout.num_virtual_stages) if has_pipeline else 1
    return dataclasses.replace(
        layout,
        zero_stage=zero_stage,
        gradient_reduction=layout.gradient_reduction if zero_stage >= 2 else "each",
        replicate_with=layout.replicate_with if has_engine_choice else "ddp",
        shard_embedding=layout.shard_embedding and layout.dp * layout.cp > 1,
        sequence_parallel=layout.sequence_parallel and has_tp,
        tp_engine=layout.tp_engine if has_tp else "dtensor",
        num_copies=layout.num_copies if has_tp else 1,
        cp_method=layout.cp_method if layout.cp > 1 else "all_gather",
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=layout.stage_layers if has_pipeline else (),
    )


def engine_for(engine: str, model: Model) -> str:
    """The engine as asked for; tensor parallelism of the user's modules goes by a plan, which only one engine reads."""
    return "dtensor" if isinstance(model, OwnModel) and engine == "auto" else engine


def resolve_tp_engine(engine: str, layout: Layout, *, recomputes_communication: bool) -> str:
    """The engine of tensor parallelism: ``auto`` becomes ``local`` for what DTensors cannot do."""
    if engine != "auto":
        return engine
    needs_local = layout.num_copies > 1 or holds_plain(layout) or recomputes_communication
    return "local" if needs_local else "dtensor"


def with_tp_engine(layout: Layout, engine: Any) -> Layout:
    """The layout with that engine where there is tensor parallelism."""
    return dataclasses.replace(layout, tp_engine=engine) if layout.tp > 1 else layout


def canonical_precision(precision: Precision) -> Precision:
    """The precision with O0 as float32, a loss scale for float16 and nothing else, and its lists sorted."""
    if precision.level == "O0":
        return Precision()
    scale = (precision.loss_scale or LossScale()) if precision.dtype == "float16" else None
    white, black = tuple(sorted(set(precision.white))), tuple(sorted(set(precision.black)))
    return dataclasses.replace(precision, loss_scale=scale, white=white, black=black)


def build_offload(values: Mapping[str, Any]) -> Offload:
    """What waits in host memory, from the values of its knobs."""
    return Offload(activations=values["offload_activations"], optimizer=values["offload_optimizer"])


def build_loader(values: Mapping[str, Any]) -> Loader:
    """The loader in canonical form, from the values of its knobs."""
    tuning: LoaderTuning | None = values["dataloader"]
    return canonical_loader(
        Loader(
            num_workers=values["num_workers"],
            prefetch_factor=values["prefetch_factor"],
            pin_memory=values["pin_memory"],
            persistent_workers=values["persistent_workers"],
            full_batch=values["full_batch"],
            tuning=tuning,
        )
    )


def canonical_loader(loader: Loader) -> Loader:
    """The loader without settings that mean nothing.

    Without workers there is nothing to prefetch or to keep; a tuned loader finds its numbers itself; 0 batches ahead
    with workers means the default.
    """
    num_workers = 0 if loader.tuning is not None else loader.num_workers
    return dataclasses.replace(
        loader,
        num_workers=num_workers,
        prefetch_factor=(loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR) if num_workers else 0,
        persistent_workers=loader.persistent_workers and (num_workers > 0 or loader.tuning is not None),
    )


def build_kernels(values: Mapping[str, Any], model: Model) -> Kernels:
    """The kernels in canonical form, from the values of their knobs."""
    kernels = Kernels(
        compile=values["compile"],
        compile_mode=values["compile_mode"],
        attention=values["attention"],
        matmul_precision=values["matmul_precision"],
        cudnn_tuning_range=values["cudnn_benchmark"],
        memory_format=values["memory_format"],
        loss_chunks=values["loss_chunks"],
    )
    return canonical_kernels(kernels, model)


def canonical_kernels(kernels: Kernels, model: Model) -> Kernels:
    """The kernels with defaults for settings of absent compilers and for kernels of absent operators."""
    default = Kernels()
    compiles = kernels.compile != "off"
    if isinstance(model, ScriptModel):
        has_attention = has_convolutions = True  # as far as anybody knows
    else:
        has_attention, has_convolutions = decoder_of(model) is not None, isinstance(model, ResNetModel)
    return dataclasses.replace(
        kernels,
        backend=kernels.backend if compiles else default.backend,
        compile_mode=kernels.compile_mode if compiles else default.compile_mode,
        attention=kernels.attention if has_attention else default.attention,
        cudnn_tuning_range=kernels.cudnn_tuning_range if has_convolutions else (),
        memory_format=kernels.memory_format if has_convolutions else default.memory_format,
    )
