"""The knobs beside the layout: micro-batch, recompute, precision, data reading and kernels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.space.knobs.knob import Knob
from orchestrator.space.knobs.layer_choices import layers_of, resolve_recompute
from orchestrator.space.knobs.layer_types import BaselineRecompute, RecomputeValue
from orchestrator.space.knobs.run_types import CompileValue, CudnnValue, DataloaderValue, PrecisionValue
from orchestrator.space.knobs.sections import Degree
from trials.spec import Candidate, Kernels, Loader


def _resolve_recompute(value: Any, candidate: Candidate, num_layers: int) -> Any:
    return resolve_recompute(value, layers_of(candidate.layout, num_layers))


def _loader(name: str, value_type: Any, description: str, **options: Any) -> Knob:
    default = options.pop("default", getattr(Loader(), name, None))
    field = options.pop("field", name)
    return Knob(
        name=name,
        type=value_type,
        default=default,
        part="loader",
        read=lambda candidate: getattr(candidate.loader, field),
        description=description,
        **options,
    )


def _kernel(name: str, value_type: Any, description: str, **options: Any) -> Knob:
    default = options.pop("default", getattr(Kernels(), name, None))
    field = options.pop("field", name)
    return Knob(
        name=name,
        type=value_type,
        default=default,
        part="kernels",
        read=lambda candidate: getattr(candidate.kernels, field),
        description=description,
        **options,
    )


def _offload(name: str, description: str) -> Knob:
    return Knob(
        name=f"offload_{name}",
        type=bool,
        default=False,
        part="offload",
        read=lambda candidate: getattr(candidate.offload, name),
        description=description,
    )


RUN_KNOBS: tuple[Knob, ...] = (
    Knob(
        name="micro_batch_size",
        type=Degree,
        default=1,
        part="micro_batch_size",
        read=lambda c: c.micro_batch_size,
        description="Samples (sequences) per data-parallel rank per micro-batch.",
    ),
    Knob(
        name="recompute",
        type=RecomputeValue,
        default="none",
        part="recompute",
        read=lambda c: c.recompute,
        description="none, full (keep only every layer's input), or a mapping that says how many layers of each "
        "stage recompute what, like {full: [4, 0]}; in `baseline` a bare list means the same.",
        single_type=BaselineRecompute,
        resolve=_resolve_recompute,
    ),
    Knob(
        name="precision",
        type=PrecisionValue,
        default="O0",
        part="precision",
        read=lambda c: c.precision,
        description="O0 (fp32), O1 (autocast), O2 (16-bit parameters, fp32 masters), both with bfloat16, or O1-fp8 "
        "(O1 with the layers' matmuls in 8-bit floats); or a mapping of level, dtype, loss_scale, white, black.",
    ),
    _offload("activations", "Keep in host memory what layers need for the backward pass."),
    _offload("optimizer", "Keep states of the optimiser and master weights in host memory, and step there."),
    _loader(
        "dataloader",
        DataloaderValue,
        "manual: num_workers and prefetch_factor as given; auto: found by hill climbing before training, which makes "
        "those two 0; or a mapping of tuning_steps and max_workers.",
        default="manual",
        field="tuning",
    ),
    _loader(
        "num_workers",
        Annotated[int, Field(ge=0, le=1024)],
        "Data-loading processes per rank; 0 loads in the training process.",
    ),
    _loader(
        "prefetch_factor",
        Annotated[int, Field(ge=0, le=1024)],
        "Batches ahead per data-loading process (0: the default of 2). Becomes 0 without such processes.",
        default=2,
    ),
    _loader("pin_memory", bool, "Page-locked host memory for asynchronous copies to a GPU."),
    _loader(
        "persistent_workers",
        bool,
        "Keep data-loading processes from one epoch to the next. Becomes false without such processes.",
    ),
    _loader(
        "full_batch",
        bool,
        "Every rank reads the whole global batch and keeps its rows, instead of reading only those.",
    ),
    _kernel(
        "compile",
        CompileValue,
        'off, block (every repeated layer) or model. A bare `off` and `"off"` mean the same here.',
    ),
    _kernel(
        "compile_mode",
        Literal["default", "reduce-overhead", "max-autotune"],
        "Mode of torch.compile. Becomes default where compile is off.",
    ),
    _kernel(
        "attention",
        Literal["auto", "flash", "efficient", "cudnn", "math"],
        "Kernel of scaled dot-product attention. Becomes auto for models without attention.",
    ),
    _kernel("matmul_precision", Literal["highest", "high", "medium"], "Precision of fp32 matrix products (TF32)."),
    _kernel(
        "cudnn_benchmark",
        CudnnValue,
        "off, or {first: 1, last: 10}: steps in which cuDNN measures its convolutions. "
        "Becomes off for models without convolutions.",
        default="off",
        field="cudnn_tuning_range",
    ),
    _kernel(
        "memory_format",
        Literal["nchw", "nhwc", "auto"],
        "Memory format of convolutions; auto: by number format, verified by timing both. "
        "Becomes nchw for models without convolutions.",
    ),
    _kernel(
        "loss_chunks",
        Annotated[int, Field(ge=1, le=2**20)],
        "Parts of a micro-batch's positions whose logits and loss are computed one after the other.",
    ),
)
