"""Choice of the memory format of convolutions, NCHW or NHWC ("channels last"), by rule and by measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trials.accelerator.device import is_host, synchronize
from trials.datasets import Batch, StepBatches, micro_batches
from trials.models import loss_of
from trials.precision import autocast
from trials.reports import MemoryFormatReport
from trials.spec import Precision, TrialSpec
from trials.training.loop import Trainer, max_over_ranks

Format = Literal["nchw", "nhwc"]
TORCH_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}

_NUM_ROUNDS = 5
_MIN_GAIN = 0.05
"""Smallest relative gain for the other format to count as faster."""


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def convert_weights(models: Iterable[nn.Module], format_: Format) -> None:
    """Convert the weights of convolutions to this format, in place, under any wrapper.

    Weights held by FSDP stay unchanged, because it requires contiguous ones; their convolutions follow the format of
    their input.
    """
    for model in models:
        for parameter in model.parameters():
            if parameter.dim() == 4 and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.contiguous(memory_format=TORCH_FORMATS[format_])


def in_format(images: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Convert images to this format; only tensors with four dimensions have formats."""
    return images.to(memory_format=memory_format) if images.dim() == 4 else images


def format_by_rule(precision: Precision) -> Format:
    """Apply the usual rule: tensor cores run 16-bit convolutions in NHWC; fp32 kernels are best in NCHW."""
    return "nchw" if precision.dtype == "float32" else "nhwc"


def choose_memory_format(
    trainer: Trainer, spec: TrialSpec, dataset: StepBatches | None
) -> tuple[torch.memory_format, MemoryFormatReport | None]:
    """Convert the trainer's models; return the format for its inputs, and the report of ``auto``.

    Models without convolutions are left unchanged.
    """
    models = [part.model for part in trainer.parts]
    wanted = spec.candidate.kernels.memory_format
    if not any(map(has_convolutions, models)):
        return torch.preserve_format, None
    if wanted != "auto":
        convert_weights(models, wanted)
        return TORCH_FORMATS[wanted], None
    assert dataset is not None, "legality refuses auto in a pipeline"
    with _same_draws(trainer.device):
        report = _compare(trainer, spec, dataset[0])
    chosen: Format = "nhwc" if report.chosen == "nhwc" else "nchw"
    convert_weights(models, chosen)
    return TORCH_FORMATS[chosen], report


def choose_format(rule: Format, times_s: dict[Format, float]) -> Format:
    """Return the rule's format unless the other one is clearly faster."""
    other: Format = "nchw" if rule == "nhwc" else "nhwc"
    return other if times_s[other] < times_s[rule] * (1.0 - _MIN_GAIN) else rule


def _same_draws(device: torch.device) -> AbstractContextManager[Any]:
    """Restore random generators afterwards: dropout in passes before training would otherwise change the training."""
    return torch.random.fork_rng(devices=() if is_host(device) else (device,), device_type=device.type)


def _compare(trainer: Trainer, spec: TrialSpec, sample: Batch) -> MemoryFormatReport:
    """Time a few forward and backward passes of both formats, alternating; all ranks make the same choice."""
    (model,) = (part.model for part in trainer.parts)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    formats: tuple[Format, Format] = ("nchw", "nhwc")
    rounds: dict[Format, list[float]] = {format_: [] for format_ in formats}
    for number in range(_NUM_ROUNDS + 1):
        for format_ in formats:
            convert_weights([model], format_)
            seconds = _time_pass(trainer, spec, sample, TORCH_FORMATS[format_])
            if number:  # the first pass of each is a warm-up
                rounds[format_].append(seconds)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    times_s = {format_: max_over_ranks(statistics.median(rounds[format_]), trainer.device) for format_ in formats}
    rule = format_by_rule(spec.candidate.precision)
    chosen = choose_format(rule, times_s)
    return MemoryFormatReport(rule=rule, chosen=chosen, nchw_s=times_s["nchw"], nhwc_s=times_s["nhwc"])


def _time_pass(trainer: Trainer, spec: TrialSpec, sample: Batch, memory_format: torch.memory_format) -> float:
    """Return seconds of one forward and backward pass over a micro-batch; drop its gradients.

    The model is called without its DDP wrapper, so gradients are not reduced.
    """
    (model,) = (part.model for part in trainer.parts)
    inputs, targets = (micro_batches(rows, spec.candidate.micro_batch_size)[0].to(trainer.device) for rows in sample)
    inputs = in_format(inputs, memory_format)
    synchronize(trainer.device)
    start_s = time.perf_counter()
    with autocast(spec.candidate, trainer.device):
        loss: Tensor = loss_of(spec.workload.model)(model(inputs), targets)
    torch.autograd.backward(loss)
    synchronize(trainer.device)
    seconds = time.perf_counter() - start_s
    for parameter in model.parameters():
        parameter.grad = None
    return seconds
