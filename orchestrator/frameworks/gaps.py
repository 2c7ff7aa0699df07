"""Rows shared by several frameworks: fields that they leave to the training script or do not support, and layers per
stage in coarser settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from orchestrator.frameworks.spelling import (
    WORKLOAD,
    Found,
    Setting,
    Settings,
    SettingsBuilder,
    custom,
    defaults,
    is_at_or_below,
    lacking,
)
from orchestrator.space.file_types import ALL_LAYERS, RecomputeChoice, layers_of, resolve_recompute
from trials.sizes import all_chunks
from trials.spec import Candidate, Counts, Layout, Recompute, Schedule


def present(builder: SettingsBuilder) -> Counts:
    """Layers of the draft's candidate per chunk and stage."""
    return layers_of(builder.candidate.layout, builder.workload.num_layers)


def first_layers(number: int, held: Counts) -> Counts:
    """Full recompute of the first ``number`` layers of every chunk; ``()`` for none."""
    return resolve_recompute(RecomputeChoice(full=number), held).full


def most(counts: Counts) -> int:
    return max((number for row in counts for number in row), default=0)


def is_first_layers_everywhere(counts: Counts, held: Counts) -> bool:
    """Whether one number for all chunks and stages is equivalent."""
    return first_layers(most(counts), held) == counts


def gathered_again(recompute: Recompute, held: Counts) -> Counts:
    """Recompute of communication in every layer that is not fully recomputed."""
    return resolve_recompute(RecomputeChoice(full=recompute.full, communication=ALL_LAYERS), held).communication


def in_every_layer(counts: Counts, recompute: Recompute, held: Counts) -> bool:
    """Whether a pattern applies to every layer that is not fully recomputed."""
    return counts == gathered_again(recompute, held)


def is_uniform(counts: Counts) -> bool:
    return len({number for row in counts for number in row}) <= 1


def in_model_order(layout: Layout, num_layers: int) -> list[int]:
    """Layers of every virtual stage, first to last."""
    return [len(chunk.layer_ids) for chunk in all_chunks(layout, num_layers)]


def layer_ids(counts: Counts, layout: Layout, num_layers: int) -> list[int]:
    """Global indices of the first ``counts`` layers of every chunk and stage."""
    return sorted(
        layer
        for chunk in all_chunks(layout, num_layers)
        for layer in chunk.layer_ids[: counts[chunk.chunk][chunk.stage]]
    )


def first_layers_of(layers: Collection[int], held: Counts, schedule: Schedule = "1f1b") -> Counts | None:
    """The inverse of :func:`layer_ids`; None unless ``layers`` are the first of every chunk and stage."""
    layout = Layout(pp=len(held[0]), schedule=schedule, num_virtual_stages=len(held), stage_layers=held)
    counts = [[0] * layout.pp for _ in held]
    for chunk in all_chunks(layout, sum(map(sum, held))):
        chosen = [layer in layers for layer in chunk.layer_ids]
        if chosen != sorted(chosen, reverse=True):
            return None
        counts[chunk.chunk][chunk.stage] = sum(chosen)
    return tuple(tuple(each) for each in counts) if any(map(any, counts)) else ()


def refuse_stages(builder: SettingsBuilder, message: str) -> None:
    """Reject the layout's stages, and with them numbers of layers per stage, whose meaning would differ."""
    builder.refuse("layout.stage_layers", message)
    if builder.candidate.recompute != Recompute():
        builder.refuse("recompute", "the numbers of recomputed layers refer to other stages")


def num_microbatches(builder: SettingsBuilder) -> int:
    candidate: Candidate = builder.candidate
    return candidate.num_microbatches(builder.workload.global_batch_size)


def without_pipeline() -> dict[str, Any]:
    """Values of every layout without a pipeline."""
    return {
        "layout.pp": 1,
        "layout.schedule": "1f1b",
        "layout.num_virtual_stages": 1,
        "layout.stage_layers": (),
    }


def in_rows(counts: list[int], pp: int) -> Counts:
    """Layers per chunk and stage, from layers per virtual stage in the order of the model."""
    return tuple(tuple(counts[start : start + pp]) for start in range(0, len(counts), pp))


def all_of(held: Counts) -> Counts:
    """All layers of every chunk and stage."""
    return first_layers(ALL_LAYERS, held)


WHOLE_BETWEEN = "activations between the projections are not sharded, which takes more memory"
"""Message for tensor parallelism without splitting the sequence between the projections."""
TORCH_SCALER: dict[str, Any] = {
    "precision.loss_scale.initial": 2.0**16,
    "precision.loss_scale.growth_factor": 2.0,
    "precision.loss_scale.growth_interval": 2000,
    "precision.loss_scale.backoff_factor": 0.5,
    "precision.loss_scale.backoff_interval": 1,
    "precision.loss_scale.dynamic": True,
}
"""Defaults of ``torch.amp.GradScaler``."""


def requested(builder: SettingsBuilder, part: str) -> dict[str, Any]:
    """Values of the candidate at or below ``part`` that differ from the defaults; all of them for a workload."""
    return {
        path: value
        for path, value in builder.values.items()
        if is_at_or_below(path, part) and (is_at_or_below(path, WORKLOAD) or defaults().get(path) != value)
    }


def left_to_script(part: str, advice: str) -> Setting:
    """Fields at or below ``part`` that only the user's training script can set: a warning with their values."""

    def write(builder: SettingsBuilder) -> None:
        if values := requested(builder, part):
            builder.warn(part, f"{advice}; the configuration has {as_text(values, part)}")

    return custom((part,), (), write)


def takes_torch_scaler(builder: SettingsBuilder) -> bool:
    """Whether the loss scale is that of torch's GradScaler."""
    return all(builder.values[path] == value for path, value in TORCH_SCALER.items())


def as_text(values: Mapping[str, Any], part: str) -> str:
    """``num_workers 2, pin_memory True``; only the value for a single field."""
    return ", ".join(f"{path.removeprefix(part).lstrip('.')} {value}".strip() for path, value in values.items())


def unable(*paths: str, message: str) -> Setting:
    """An error for every field whose value is not the default, which the framework does not support."""

    def write(builder: SettingsBuilder) -> None:
        for path in paths:
            if requested(builder, path):
                builder.refuse(path, message)

    return custom(paths, (), write, lambda _: {path: defaults()[path] for path in paths})


NO_FP32_MODULES = unable("precision.keep_fp32", message="no setting keeps single modules in fp32")


def no_pipeline(message: str) -> Setting:
    """Errors for all pipeline settings."""
    names = ("pp", "schedule", "num_virtual_stages", "stage_layers")
    return unable(*(f"layout.{name}" for name in names), message=message)


def sharded_from(stage: int, *, refused: str, warned: str) -> Setting:
    """``shard_embedding`` if embedding and head are sharded with the other weights from this ZeRO stage on."""

    def write(builder: SettingsBuilder) -> None:
        layout = builder.candidate.layout
        if layout.shard_embedding and layout.zero_stage < stage:
            builder.refuse("layout.shard_embedding", refused)
        elif layout.shard_embedding:
            builder.warn("layout.shard_embedding", warned)

    return custom(("layout.shard_embedding",), (), write)


def own_collectives(message: str, tp: Callable[[Settings], int]) -> Setting:
    """``tp_engine`` if tensor parallelism always runs its collectives outside DTensor; ``tp`` reads its degree."""

    def write(builder: SettingsBuilder) -> None:
        if builder.candidate.layout.tp > 1 and builder.candidate.layout.tp_engine != "local":
            builder.warn("layout.tp_engine", message)

    def read(settings: Settings) -> dict[str, Any]:
        return {"layout.tp_engine": "local" if tp(settings) > 1 else "dtensor"}

    return custom(("layout.tp_engine",), (), write, read)


def weight_decay_but_norms(name: str) -> Setting:
    """Weight decay under ``name``; the framework does not apply it to the weights of norms."""
    path = "workload.optimizer.weight_decay"

    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = builder.workload.optimizer.weight_decay
        if builder.workload.optimizer.weight_decay:
            builder.warn(path, "norm weights are not decayed")

    return custom((path,), (name,), write, lambda settings: {path: float(settings[name])})


def betas(name: str, make: Callable[[tuple[float, float]], Any] = list) -> Setting:
    """Both betas of AdamW under ``name``, in the sequence type that ``make`` returns."""
    paths = ("workload.optimizer.beta1", "workload.optimizer.beta2")

    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = make((builder.workload.optimizer.beta1, builder.workload.optimizer.beta2))

    return custom(paths, (name,), write, lambda settings: dict(zip(paths, settings[name], strict=True)))


def two_batches_ahead(num_workers: Callable[[Found], Any], *, in_overlays: bool = False) -> Setting:
    """``prefetch_factor`` if every data-loading process, whose number ``num_workers`` reads, prefetches 2 batches."""
    path = "loader.prefetch_factor"

    def write(builder: SettingsBuilder) -> None:
        loader = builder.candidate.loader
        if loader.num_workers and loader.prefetch_factor != 2:
            builder.warn(path, "always prefetches 2 batches")

    def read(found: Found) -> dict[str, Any]:
        number = num_workers(found)
        return {} if number is None and not found.is_export else {path: 2 if number else 0}

    return custom((path,), (), write, read, overlay="read" if in_overlays else "none")


def own_data(reader: str) -> Setting:
    """The training data; in every framework, the user's own ``reader`` reads them."""
    return left_to_script("workload.data", reader)


def own_seed() -> Setting:
    return left_to_script("workload.seed", "the seed is set by your script")


def refuse_fp8(builder: SettingsBuilder, reason: str = "no setting for 8-bit floats") -> None:
    """Reject 8-bit matmuls if the format has no equivalent setting."""
    if builder.candidate.precision.is_fp8:
        builder.refuse("precision.level", f"{reason}; exported as bfloat16" if builder.is_export else reason)


def memory_savers(**ways: Setting | str) -> tuple[Setting, ...]:
    """Settings that save memory at a cost, which most frameworks lack. ``ways`` has the existing ones for
    ``loss_chunks``, ``activations`` and ``optimizer``, or the reason why the framework's setting is not equivalent."""
    paths = {name: f"offload.{name}" for name in ("activations", "optimizer")} | {"loss_chunks": "kernels.loss_chunks"}
    found = {name: ways.get(name, "no such setting") for name in paths}
    return tuple(unable(paths[name], message=way) if isinstance(way, str) else way for name, way in found.items())


def offloads_inputs(name: str, *, applies: Callable[[Settings], bool] = lambda _: True) -> Setting:
    """``offload.activations`` under ``name``, which moves the inputs of recomputed layers; equivalent if all layers are
    recomputed."""
    path = "offload.activations"

    def write(builder: SettingsBuilder) -> None:
        is_on, num_full = builder.candidate.offload.activations, sum(map(sum, builder.candidate.recompute.full))
        if is_on and not applies(builder.settings):
            builder.refuse(path, f"{name} requires FSDP")
        elif is_on and num_full < builder.workload.num_layers:
            builder.refuse(path, f"{name} moves only inputs of layers recomputed in full: recompute all layers")
        elif is_on:
            builder.settings[name] = True

    return custom((path,), (name,), write, lambda settings: {path: bool(settings.get(name, False))})


NO_EXPERTS = lacking(
    "workload.model.llama.experts",
    "mixtures of experts are not exported to this format; use torchrun or megatron",
    severity="error",
)
"""Setting of formats that describe dense decoders."""
NO_LATENT = lacking(
    "workload.model.llama.latent", "latent attention is not exported to this format; use torchrun", severity="error"
)
"""The same for multi-head latent attention."""
NO_EXPERT_PARALLEL = lacking(
    "layout.ep", "experts are not split over ranks in this format; use torchrun or megatron", severity="error"
)
"""The same for the degree that splits them."""
REDUCES_EACH = lacking("layout.gradient_reduction", "stages 2 and 3 reduce the gradients of every micro-batch")
"""Setting for when gradients are reduced, if the framework has only one way, which is our default."""

NO_FUSED = left_to_script("kernels.fused", "your script must replace the model's operators")
"""Setting of formats whose script builds the model."""
OWN_FUSED = lacking("kernels.fused", "the framework has its own model with its own fused operators")
"""Setting of formats with a model of their own."""
OWN_KERNELS = (
    lacking("kernels.cudnn_tuning_range", "no convolutions"),
    lacking("kernels.memory_format", "no convolutions"),
    OWN_FUSED,
)
"""Settings of formats with a decoder of their own."""
DYNAMIC_SHAPES = lacking("kernels.dynamic", "shapes are compiled as torch chooses; mark_dynamic in your code sets it")
"""Setting of formats without a choice between one graph per length and one for all."""
VARYING_LENGTHS = (
    lacking("loader.batching", "your data set must pad, pack or sort its samples"),
    DYNAMIC_SHAPES,
)
"""Settings for samples of varying length, which formats leave to the data set."""

KERNELS_OF_SCRIPT = (
    left_to_script("kernels.attention", "your script must select it: torch.nn.attention.sdpa_kernel(...)"),
    left_to_script("kernels.cudnn_tuning_range", "your script must set torch.backends.cudnn.benchmark in these steps"),
    left_to_script("kernels.memory_format", "your script must call model.to(memory_format=torch.channels_last)"),
)
"""Kernel choices that are calls into torch."""
