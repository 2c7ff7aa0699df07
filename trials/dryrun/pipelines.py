"""Lets pipeline schedules run on one rank alone: shapes at stage boundaries are told, not asked of the neighbours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from trials.dryrun.fake import replaced
from trials.failure import InfeasibleSpec
from trials.precision.mixed import parameter_dtype
from trials.spec import LinearModel, LlamaModel, TrialSpec
from trials.training.build import ModelPart
from trials.training.pipeline import Stage

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.pipelining import _utils, schedules
    from torch.distributed.pipelining.schedules import _PipelineSchedule

_VOTES = hasattr(_PipelineSchedule, "_warmup_p2p")
"""Whether stages agree on what is known of shapes before the first step, as they do since torch 2.12."""


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Skip the vote of all stages on whether shapes are known: it reads numbers the neighbours sent.

    Torch before 2.12 has no vote: it sends a number to each neighbour, and asks for shapes that it was not told.
    """
    if not _VOTES:
        with replaced(Stage, "_get_init_p2p_neighbors_ops", lambda _: []):
            yield
        return

    def agree(_schedule: Any, stages: list[Stage], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    with replaced(_PipelineSchedule, "_warmup_p2p", agree):
        yield


class _HeldWorks:
    """Works that hold what they send until somebody waits for them, as those of real groups do."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors.clear()


@contextlib.contextmanager
def held_sends() -> Iterator[None]:
    """Schedules of several chunks wait for their sends at the end of the step; until then the tensors live."""
    original = schedules._batch_p2p

    def batch_p2p(operations: list[Any], desc: str | None = None) -> list[_HeldWorks]:
        works = original(operations, desc)
        return [_HeldWorks(works, [operation.tensor for operation in operations])] if works else []

    with replaced(schedules, "_batch_p2p", batch_p2p):
        yield


def tell_shapes(stages: list[Stage], parts: list[ModelPart], spec: TrialSpec) -> None:
    """Give each stage the shapes and types that cross its boundaries."""
    hidden = _meta(boundary_size(spec), _boundary_dtype(spec)).requires_grad_()
    for stage, part in zip(stages, parts, strict=True):
        first, last = part.chunk.is_first, part.chunk.is_last
        if not _VOTES:
            older: Any = stage
            older.inputs_meta = (_meta(_input_size(spec), torch.long) if first else hidden,)
            older._configure_outputs_meta((_output(spec) if last else hidden,))
            continue
        stage._user_meta = _utils._StageMeta(
            inputs=_metas(_meta(_input_size(spec), torch.long) if first else hidden),
            outputs=_metas(_output(spec) if last else hidden),
            input_grads=None if first else _metas(hidden.detach()),
            output_grads=None if last else _metas(hidden.detach()),
        )


def boundary_size(spec: TrialSpec) -> tuple[int, ...]:
    """Hidden states of one micro-batch as one rank sends them.

    Raises:
        InfeasibleSpec: for a model whose stages exchange tensors of different shapes.
    """
    model, candidate = spec.workload.model, spec.candidate
    layout, rows = candidate.layout, candidate.micro_batch_size
    if isinstance(model, LlamaModel):
        split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        return (rows, spec.workload.seq_length // split, model.hidden_size)
    if isinstance(model, LinearModel):
        return (rows, model.size)
    raise InfeasibleSpec(f"the dry run does not simulate pipelines of model kind {model.kind}")


def _boundary_dtype(spec: TrialSpec) -> torch.dtype:
    """Residual streams stay fp32 under autocast; O2 computes in 16 bits."""
    precision = spec.candidate.precision
    if precision.level in ("O1", "O1-fp8") and isinstance(spec.workload.model, LinearModel):
        return getattr(torch, precision.dtype)  # type: ignore[no-any-return]
    return parameter_dtype(precision, sharded=False)


def _input_size(spec: TrialSpec) -> tuple[int, ...]:
    return (spec.candidate.micro_batch_size, spec.workload.seq_length // spec.candidate.layout.cp)


def _output(spec: TrialSpec) -> torch.Tensor:
    """What the last stage gives: a Llama its loss."""
    if isinstance(spec.workload.model, LlamaModel):
        return _meta((), torch.float32).requires_grad_()
    return _meta(boundary_size(spec), getattr(torch, spec.candidate.precision.dtype)).requires_grad_()


def _meta(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _metas(tensor: torch.Tensor) -> Any:
    return _utils.extract_tensor_metas((tensor,))
