"""The knobs of the search, one table: name, type, default, place in a :class:`~trials.spec.Candidate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.knob_types import CompileValue, Degree, PrecisionValue, RecomputeValue
from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing to turn. ``default``, as it would stand in a file, is for a baseline that leaves the knob out.

    ``part`` is the field of Candidate it belongs to; ``read`` gets its value back from a candidate.
    """

    name: str
    type: Any
    default: Any
    part: str
    read: Callable[[Candidate], Any]
    description: str
    resolved_type: Any = None
    """Type in ``forbid`` and ``require`` patterns, where it differs."""


KNOBS: tuple[Knob, ...] = (
    Knob(
        name="dp_replicate",
        type=Degree,
        default=1,
        part="layout",
        read=lambda c: c.layout.dp_replicate,
        description="Data-parallel replicas (outer degree): every replica holds all states.",
    ),
    Knob(
        name="dp_shard",
        type=Degree,
        default=1,
        part="layout",
        read=lambda c: c.layout.dp_shard,
        description="Data-parallel ranks that share one copy of what `zero_stage` names.",
    ),
    Knob(
        name="zero_stage",
        type=Annotated[int, Field(ge=0, le=3)],
        default=0,
        part="layout",
        read=lambda c: c.layout.zero_stage,
        description="What `dp_shard` shards: 1 optimiser states, 2 also gradients, 3 also parameters. "
        "Becomes 0 where dp_shard is 1.",
    ),
    Knob(
        name="tp",
        type=Degree,
        default=1,
        part="layout",
        read=lambda c: c.layout.tp,
        description="Tensor-parallel degree, kept inside a node.",
    ),
    Knob(
        name="sequence_parallel",
        type=bool,
        default=False,
        part="layout",
        read=lambda c: c.layout.sequence_parallel,
        description="Shard the norm regions along the sequence over the tp ranks. Becomes false where tp is 1.",
    ),
    Knob(
        name="replicate_with",
        type=Literal["auto", "ddp", "fsdp2"],
        default="auto",
        part="layout",
        read=lambda c: c.layout.replicate_with,
        description="Engine of `dp_replicate` without sharding; auto: ddp where tp is 1, fsdp2 otherwise. "
        "ZeRO-1 always uses DDP, ZeRO-2 and 3 always FSDP2.",
        resolved_type=Literal["ddp", "fsdp2"],
    ),
    Knob(
        name="micro_batch_size",
        type=Degree,
        default=1,
        part="micro_batch_size",
        read=lambda c: c.micro_batch_size,
        description="Sequences per data-parallel rank per micro-batch.",
    ),
    Knob(
        name="recompute",
        type=RecomputeValue,
        default="none",
        part="recompute",
        read=lambda c: c.recompute,
        description="none, full, or {full: n}: keep only the inputs of the first n layers and recompute the rest.",
    ),
    Knob(
        name="precision",
        type=PrecisionValue,
        default="O0",
        part="precision",
        read=lambda c: c.precision,
        description="O0 (fp32), O1 (autocast) or O2 (16-bit parameters, fp32 masters), both with bfloat16; "
        "or a mapping of level, dtype, loss_scale.",
    ),
    Knob(
        name="num_workers",
        type=Annotated[int, Field(ge=0, le=1024)],
        default=0,
        part="loader",
        read=lambda c: c.loader.num_workers,
        description="Data-loading processes per rank; 0 loads in the training process.",
    ),
    Knob(
        name="prefetch_factor",
        type=Annotated[int, Field(ge=0, le=1024)],
        default=2,
        part="loader",
        read=lambda c: c.loader.prefetch_factor,
        description="Batches ahead per data-loading process (0: the default of 2). Becomes 0 without such processes.",
    ),
    Knob(
        name="compile",
        type=CompileValue,
        default="off",
        part="kernels",
        read=lambda c: c.kernels.compile,
        description='off, or block: compile every transformer block. A bare `off` and `"off"` mean the same here.',
    ),
)
KNOB_NAMES = tuple(knob.name for knob in KNOBS)
