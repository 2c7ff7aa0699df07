"""How far knobs usually go: normal distributions with their sources, and draws from all of them together.

Effects are natural logarithms of a factor on time, or of a share of the baseline's computing time. They are wide on
purpose: a trial tells more of a program than all that is known of others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cluster.cost.inputs import Array
from cluster.hardware.accelerators import Accelerator

NUM_DRAWS = 128
"""Programs drawn: together they have exactly the mean and covariance of the effects."""
HAS_UNITS = 1.5
"""Ratio of 16-bit to 32-bit peaks from which on a device has units of its own for 16 bits."""

Kind = Literal["accelerator", "accelerator_without_units", "cpu"]
Draw = Mapping[str, Array]
"""Effects by name: shape () for the usual program, (draws, 1) for many."""


@dataclass(frozen=True, slots=True)
class Effect:
    """An effect on accelerators and on CPUs: mean and standard deviation of each, and where they come from."""

    name: str
    mean: float
    std: float
    cpu_mean: float
    cpu_std: float
    source: str

    def on(self, kind: Kind) -> tuple[float, float]:
        """Mean and standard deviation on a kind of device."""
        if kind == "accelerator_without_units" and self.name in _NEEDS_UNITS:
            return self.cpu_mean, self.cpu_std
        return (self.cpu_mean, self.cpu_std) if kind == "cpu" else (self.mean, self.std)


_NEEDS_UNITS = ("low_precision", "low_weights", "eight_bits", "fast_fp32", "channels_last_low")

EFFECTS: tuple[Effect, ...] = (
    Effect(
        "half_batch",
        np.log(0.25),
        1.5,
        np.log(0.06),
        1.3,
        "Samples at which launches and idle units take as long as computing, as a share of the baseline's micro-batch: "
        "t(b) = b + h is the fixed and the proportional part of a kernel's time (Williams et al., Roofline, CACM 52:4, "
        "for the limit). People choose batches near saturation; CPUs have no launches to wait for.",
    ),
    Effect(
        "batch_slope",
        0.0,
        0.03,
        0.0,
        0.08,
        "Change of the time per sample by doubling of the micro-batch that the former does not explain: kernels "
        "change their tiles; on CPUs activations fall out of the cache.",
    ),
    Effect(
        "low_precision",
        -np.log(1.7),
        0.75,
        np.log(1.05),
        0.45,
        "16-bit operators: 1.5 to 3 times as fast in NVIDIA's table of mixed precision (Deep Learning Performance "
        "guide; Micikevicius et al., arXiv 1710.03740), nothing where other things bind; without units of "
        "their own none or slower, by the casts.",
    ),
    Effect(
        "low_weights",
        -0.08,
        0.12,
        -0.03,
        0.15,
        "16-bit weights besides: no casts of weights in every forward pass (apex's O2 against O1, some percent).",
    ),
    Effect(
        "eight_bits",
        -0.1,
        0.2,
        0.3,
        0.4,
        "8-bit products besides 16-bit operators: up to 1.5 times as fast where matmuls are large, slower where "
        "scaling costs more than is gained (torchao's README of float8 training).",
    ),
    Effect(
        "fast_fp32",
        -0.4,
        0.3,
        0.0,
        0.1,
        "fp32 products rounded to TF32: 8 times the peak, 1.2 to 2.5 times in training (NVIDIA, A100 blog).",
    ),
    Effect(
        "recompute",
        np.log(1 / 3),
        0.25,
        np.log(1 / 3),
        0.25,
        "A repeated forward pass relative to forward and backward: one third, as backward costs two (Chen et al., "
        "arXiv 1604.06174).",
    ),
    Effect(
        "compiled",
        -0.17,
        0.25,
        -0.07,
        0.2,
        "torch.compile: 1.36 times for training with autocast, 1.2 in fp32, over 163 models on an A100 (PyTorch 2.0 "
        "release notes); less where time goes into large matmuls, and on CPUs.",
    ),
    Effect("whole_model", 0.0, 0.05, 0.0, 0.05, "Compiling all at once against block by block: no usual direction."),
    Effect(
        "compiled_launches",
        np.log(0.6),
        0.4,
        np.log(0.8),
        0.3,
        "Fused operators are fewer launches: some 40 % less in the release notes' models.",
    ),
    Effect(
        "graphs", np.log(0.3), 0.5, 0.0, 0.05, "CUDA graphs leave little of the launches (PyTorch CUDA graphs blog)."
    ),
    Effect("autotuned", -0.03, 0.04, 0.0, 0.04, "Autotuned matmul templates: some percent (PyTorch 2.0)."),
    Effect(
        "channels_last_low",
        -np.log(1.2),
        0.13,
        -0.1,
        0.2,
        "Convolutions in channels-last order and 16 bits with tensor cores: 8 to 35 % (PyTorch's tutorial of channels "
        "last memory format); on CPUs oneDNN reorders otherwise, 1.1 to 1.8 times for inference, less in training.",
    ),
    Effect(
        "channels_last_full",
        0.0,
        0.12,
        -0.1,
        0.2,
        "The same in fp32: cuDNN's kernels are made for the other order; CPUs as in 16 bits.",
    ),
    Effect(
        "cudnn_tuned",
        -0.04,
        0.05,
        0.0,
        0.01,
        "Measured instead of guessed algorithms: up to 10 % of convolutional models (PyTorch's tuning guide).",
    ),
    Effect(
        "math_attention",
        0.25,
        0.25,
        0.05,
        0.15,
        "Attention with all scores in memory: fused kernels are 2 to 4 times as fast (Dao, arXiv 2307.08691) at "
        "10 to 20 % of a step.",
    ),
    Effect("loss_chunks", 0.01, 0.015, 0.01, 0.02, "By doubling: more and smaller matmuls of the head."),
    Effect(
        "offload_activations",
        np.log(0.15),
        1.0,
        np.log(0.05),
        1.0,
        "What copies over PCIe leave visible, as a share of computing (Rajbhandari et al., ZeRO-Infinity).",
    ),
    Effect(
        "offload_optimizer",
        np.log(0.3),
        1.0,
        np.log(0.02),
        1.0,
        "The optimiser's step on the host (Ren et al., ZeRO-Offload, arXiv 2101.06840), part of the baseline's step.",
    ),
    Effect(
        "exchange",
        np.log(0.06),
        1.2,
        np.log(0.08),
        1.2,
        "Visible gradient reduction of two ranks relative to computing: bytes over links against FLOPs; DDP hides most "
        "(Li et al., arXiv 2006.15704).",
    ),
    Effect(
        "update",
        np.log(0.03),
        0.8,
        np.log(0.05),
        0.8,
        "The optimiser's pass over its states: 3 to 10 % of steps without accumulation, less with.",
    ),
    Effect("tensor_parallel", 0.1, 0.15, 0.15, 0.2, "Collectives per doubling (Shoeybi et al., arXiv 1909.08053)."),
    Effect("pipelined", 0.03, 0.08, 0.05, 0.1, "Transfers per doubling of stages, besides the bubble (m + p - 1) / m."),
    Effect("context_parallel", 0.08, 0.12, 0.1, 0.15, "Exchange of keys and values per doubling."),
    Effect(
        "reading",
        np.log(0.1),
        2.0,
        np.log(0.01),
        1.7,
        "Time in which one process reads a sample relative to that in which the device trains on it: 0.001 for tokens "
        "in memory, 5 for JPEGs on an accelerator (Mohan et al., arXiv 2007.06775: 10 to 70 % of epochs are waiting); "
        "the device is so much slower on CPUs.",
    ),
    Effect(
        "reading_error",
        0.0,
        0.6,
        0.0,
        0.6,
        "The same, where the kind of data says what reading costs: processors and files differ.",
    ),
    Effect(
        "most_workers",
        np.log(8.0),
        0.5,
        np.log(2.0),
        0.5,
        "Workers per rank beyond which more bring nothing: cores per device, storage.",
    ),
    Effect("worker_efficiency", np.log(0.8), 0.2, np.log(0.8), 0.2, "What copies between processes leave of a worker."),
    Effect(
        "contention",
        -9.0,
        0.1,
        np.log(0.7),
        0.3,
        "Share of reading that still delays computing where workers use the same cores.",
    ),
    Effect("worker_cost", np.log(0.002), 0.7, np.log(0.008), 0.8, "What each worker costs the training process."),
    Effect("prefetch", -0.004, 0.012, 0.0, 0.012, "By doubling, while there are workers: evens out slow samples."),
    Effect("pinned", -0.015, 0.025, 0.0, 0.005, "Copies to the device run beside computing (PyTorch's tuning guide)."),
    Effect("persistent", -0.003, 0.008, -0.003, 0.008, "Workers start again only between epochs."),
)


def kind_of_device(accelerator: Accelerator | None) -> Kind:
    """Which of an effect's distributions counts; for an unknown device that of accelerators."""
    if accelerator is None:
        return "accelerator"
    if accelerator.is_core:
        return "cpu"
    low, full = accelerator.peak("bfloat16") or accelerator.peak("float16"), accelerator.peak("float32")
    return "accelerator_without_units" if low and full and low < HAS_UNITS * full else "accelerator"


@functools.cache
def usual_program(kind: Kind) -> Draw:
    """The program with the mean of every effect."""
    return {effect.name: np.asarray(effect.on(kind)[0]) for effect in EFFECTS}


@functools.cache
def drawn_programs(kind: Kind) -> Draw:
    """``NUM_DRAWS`` programs whose effects have the means, and no correlation, of the table; the same at every call."""
    normal = np.random.default_rng(0).standard_normal((NUM_DRAWS // 2, len(EFFECTS)))
    both = np.concatenate([normal, -normal])
    exact = both @ np.linalg.inv(np.linalg.cholesky(both.T @ both / NUM_DRAWS)).T
    pairs = [effect.on(kind) for effect in EFFECTS]
    return {
        effect.name: (mean + std * exact[:, i])[:, None]
        for i, (effect, (mean, std)) in enumerate(zip(EFFECTS, pairs, strict=True))
    }
