"""Any training program: placeholders of its command receive the knobs, and nothing else in it is changed.

Nothing is read from the command, since the meaning of its arguments is unknown; the baseline provides the values.
"""

from __future__ import annotations

import dataclasses

from orchestrator.frameworks.edit import Overlay, OverlayRequest, Reading, Run, Training
from orchestrator.frameworks.spelling import Note
from trials.script.command import Expected, LogFormat

MICRO_BATCH, WORKERS, EXPERT_PARALLEL = "micro_batch_size", "loader.num_workers", "layout.ep"
ACCUMULATIONS = ("accumulation", "total_accumulation")
"""Placeholders for the micro-batches of an optimiser step: on a rank, and over all ranks."""


def read(run: Run) -> Reading:
    """Only check whether the command has a setting for the micro-batches per step."""
    words = " ".join((*run.argv, *run.env.values(), *run.files.values()))
    if f"{{{MICRO_BATCH}}}" not in words or any(f"{{{name}}}" in words for name in ACCUMULATIONS):
        return Reading(values={})
    message = (
        "the command has {micro_batch_size} but not {accumulation}: unless the program derives accumulation "
        "from global_batch_size, candidates train with different batch sizes"
    )
    return Reading(values={}, notes=(Note(knob=MICRO_BATCH, message=message, severity="warning"),))


def overlay(run: Run, request: OverlayRequest) -> Overlay:  # noqa: ARG001 - placeholders are filled in already
    return Overlay(argv=run.argv, files=run.files)


def trial_mode(laid: Overlay, last_step: int) -> Overlay:  # noqa: ARG001 - {steps} sets it
    """The overlay unchanged: the program controls what it saves, and ``{out}`` and ``{steps}`` set where and when."""
    return dataclasses.replace(laid)


def expected(request: OverlayRequest) -> Expected:
    """The number of ranks, and the batches, loader workers and split of experts if the command sets them."""
    is_templated, has_workers = MICRO_BATCH in request.named, WORKERS in request.templated
    layout = request.candidate.layout
    return Expected(
        world_size=request.world_size,
        micro_batch_size=request.candidate.micro_batch_size if is_templated else None,
        num_microbatches=request.num_microbatches if is_templated and layout.pp == 1 else None,
        expert_parallel=layout.ep if EXPERT_PARALLEL in request.templated else None,
        num_workers=request.candidate.loader.num_workers if has_workers else None,
    )


TRAINING = Training(
    name="custom",
    title="a custom program",
    package=None,
    log=LogFormat(),
    recognises=lambda run: True,  # noqa: ARG005
    read=read,
    overlay=overlay,
    trial_mode=trial_mode,
    expected=expected,
)
