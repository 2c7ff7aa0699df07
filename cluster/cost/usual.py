"""Usual effects of knobs on an unknown training program: effects with their spread and source.

:class:`KnobColumns` describes candidates by numbers, ``EFFECTS`` lists the usual size of each effect, ``relative_step``
and ``relative_peak`` combine them. Everything is relative: the first trial shows the program's speed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import Array
from cluster.hardware.topology import Accelerator
from trials.lengths import expected_positions
from trials.spec import Candidate, CustomChoice, Workload

# Usual sizes of effects: normal distributions with their sources, and joint draws from all of them.
#
# Effects are natural logarithms of a factor on time, or of a share of the baseline's computing time. They are wide on
# purpose: one trial shows more about a program than everything known of others.


NUM_DRAWS = 128
"""Number of drawn programs. Together they have exactly the mean and covariance of the effects."""
HAS_UNITS = 1.5
"""Least ratio of 16-bit to 32-bit peaks of a device with 16-bit units."""

Kind = Literal["accelerator", "accelerator_without_units", "cpu"]
Draw = Mapping[str, Array]
"""Effects by name: shape () for the usual program, (draws, 1) for many."""


@dataclass(frozen=True, slots=True)
class Effect:
    """An effect on accelerators and on CPUs: mean and standard deviation of each."""

    name: str
    mean: float
    std: float
    cpu_mean: float
    cpu_std: float

    def on(self, kind: Kind) -> tuple[float, float]:
        """Return mean and standard deviation on a kind of device."""
        if kind == "accelerator_without_units" and self.name in _NEEDS_UNITS:
            return self.cpu_mean, self.cpu_std
        return (self.cpu_mean, self.cpu_std) if kind == "cpu" else (self.mean, self.std)


_NEEDS_UNITS = ("low_precision", "low_weights", "eight_bits", "fast_fp32", "channels_last_low")

EFFECTS: tuple[Effect, ...] = (
    # Samples at which launches and idle units take as long as computing, as a share of the baseline's micro-batch: in
    # t(b) = b + h, h is the fixed part of a kernel's time (limit: Williams et al., Roofline, CACM 52:4). Users choose
    # batches near saturation. CPUs have no launches to wait for.
    Effect("half_batch", np.log(0.25), 1.5, np.log(0.06), 1.3),
    # Further change of the time per sample when the micro-batch doubles: kernels change their tiles; on CPUs,
    # activations no longer fit the cache.
    Effect("batch_slope", 0.0, 0.03, 0.0, 0.08),
    # 16-bit operators: 1.5 to 3 times as fast in NVIDIA's table of mixed precision (Deep Learning Performance guide;
    # Micikevicius et al., arXiv 1710.03740), without effect if something else is the bottleneck. On devices without
    # 16-bit units no gain, or slower because of casts.
    Effect("low_precision", -np.log(1.7), 0.75, np.log(1.05), 0.45),
    # 16-bit weights too: no casts of weights in forward passes (apex's O2 against O1, some percent).
    Effect("low_weights", -0.08, 0.12, -0.03, 0.15),
    # 8-bit products with 16-bit operators: up to 1.5 times as fast with large matmuls, slower if scaling costs more
    # than it gains (README of torchao's float8 training).
    Effect("eight_bits", -0.1, 0.2, 0.3, 0.4),
    # fp32 products rounded to TF32: 8 times the peak, 1.2 to 2.5 times in training (NVIDIA, A100 blog).
    Effect("fast_fp32", -0.4, 0.3, 0.0, 0.1),
    # A repeated forward pass relative to forward and backward: one third, as backward costs two (Chen et al., arXiv
    # 1604.06174).
    Effect("recompute", np.log(1 / 3), 0.25, np.log(1 / 3), 0.25),
    # torch.compile: 1.36 times for training with autocast, 1.2 in fp32, over 163 models on an A100 (PyTorch 2.0 release
    # notes). Less with large matmuls and on CPUs.
    Effect("compiled", -0.17, 0.25, -0.07, 0.2),
    # Compiling the whole model relative to block by block: no usual direction.
    Effect("whole_model", 0.0, 0.05, 0.0, 0.05),
    # Fused operators need fewer launches: about 40% fewer for the models in the release notes.
    Effect("compiled_launches", np.log(0.6), 0.4, np.log(0.8), 0.3),
    # CUDA graphs leave little of the launches (PyTorch CUDA graphs blog).
    Effect("graphs", np.log(0.3), 0.5, 0.0, 0.05),
    # Autotuned matmul templates: some percent (PyTorch 2.0).
    Effect("autotuned", -0.03, 0.04, 0.0, 0.04),
    # Convolutions in channels-last order, in 16 bits with tensor cores: 8 to 35% (PyTorch's tutorial of channels last
    # memory format). On CPUs, oneDNN otherwise reorders: 1.1 to 1.8 times for inference, less in training.
    Effect("channels_last_low", -np.log(1.2), 0.13, -0.1, 0.2),
    # The same in fp32: cuDNN's kernels prefer the other order; CPUs as in 16 bits.
    Effect("channels_last_full", 0.0, 0.12, -0.1, 0.2),
    # Measured instead of guessed algorithms: up to 10% of convolutional models (PyTorch's tuning guide).
    Effect("cudnn_tuned", -0.04, 0.05, 0.0, 0.01),
    # Attention with all scores in memory: fused kernels are 2 to 4 times as fast (Dao, arXiv 2307.08691) at 10 to 20%
    # of a step.
    Effect("math_attention", 0.25, 0.25, 0.05, 0.15),
    # Per doubling of the chunks: more and smaller matmuls of the head.
    Effect("loss_chunks", 0.01, 0.015, 0.01, 0.02),
    # Exposed part of copies over PCIe, as a share of computing (Rajbhandari et al., ZeRO-Infinity).
    Effect("offload_activations", np.log(0.15), 1.0, np.log(0.05), 1.0),
    # The optimiser's step on the host (Ren et al., ZeRO-Offload, arXiv 2101.06840), as a share of the baseline's step.
    Effect("offload_optimizer", np.log(0.3), 1.0, np.log(0.02), 1.0),
    # Exposed gradient reduction of two ranks relative to computing: bytes over links against FLOPs. DDP hides most (Li
    # et al., arXiv 2006.15704).
    Effect("exchange", np.log(0.06), 1.2, np.log(0.08), 1.2),
    # The optimiser's pass over its states: 3 to 10% of steps without accumulation, less with it.
    Effect("update", np.log(0.03), 0.8, np.log(0.05), 0.8),
    # Collectives, per doubling (Shoeybi et al., arXiv 1909.08053).
    Effect("tensor_parallel", 0.1, 0.15, 0.15, 0.2),
    # Transfers, per doubling of stages, in addition to the bubble (m + p - 1) / m.
    Effect("pipelined", 0.03, 0.08, 0.05, 0.1),
    # Exchange of keys and values, per doubling.
    Effect("context_parallel", 0.08, 0.12, 0.1, 0.15),
    # Time of one process to read a sample, relative to the device's time to train on it: 0.001 for tokens in memory, 5
    # for JPEGs on an accelerator (Mohan et al., arXiv 2007.06775: 10 to 70% of epochs are waiting). The ratio is lower
    # on CPUs because the device is slower.
    Effect("reading", np.log(0.1), 2.0, np.log(0.01), 1.7),
    # The same if the kind of data determines the cost of reading: processors and files differ.
    Effect("reading_error", 0.0, 0.6, 0.0, 0.6),
    # Workers per rank beyond which more have no effect: cores per device, storage.
    Effect("most_workers", np.log(8.0), 0.5, np.log(2.0), 0.5),
    # Share of a worker's time that copies between processes leave.
    Effect("worker_efficiency", np.log(0.8), 0.2, np.log(0.8), 0.2),
    # Share of reading that still delays computing if workers use the same cores.
    Effect("contention", -9.0, 0.1, np.log(0.7), 0.3),
    # Cost of each worker to the training process.
    Effect("worker_cost", np.log(0.002), 0.7, np.log(0.008), 0.8),
    # Per doubling, with workers: evens out slow samples.
    Effect("prefetch", -0.004, 0.012, 0.0, 0.012),
    # Copies to the device overlap computing (PyTorch's tuning guide).
    Effect("pinned", -0.015, 0.025, 0.0, 0.005),
    # Workers restart only between epochs.
    Effect("persistent", -0.003, 0.008, -0.003, 0.008),
)


def kind_of_device(accelerator: Accelerator | None) -> Kind:
    """Return the kind of a device, which selects effects' distributions; an unknown device is an accelerator."""
    if accelerator is None:
        return "accelerator"
    if accelerator.is_core:
        return "cpu"
    low, full = accelerator.peak("bfloat16") or accelerator.peak("float16"), accelerator.peak("float32")
    return "accelerator_without_units" if low and full and low < HAS_UNITS * full else "accelerator"


@functools.cache
def usual_program(kind: Kind) -> Draw:
    """Return the program with the mean of every effect."""
    return {effect.name: np.asarray(effect.on(kind)[0]) for effect in EFFECTS}


@functools.cache
def drawn_programs(kind: Kind) -> Draw:
    """Return ``NUM_DRAWS`` programs with the table's means and uncorrelated effects; the same at every call."""
    normal = np.random.default_rng(0).standard_normal((NUM_DRAWS // 2, len(EFFECTS)))
    both = np.concatenate([normal, -normal])
    exact = both @ np.linalg.inv(np.linalg.cholesky(both.T @ both / NUM_DRAWS)).T
    pairs = [effect.on(kind) for effect in EFFECTS]
    return {
        effect.name: (mean + std * exact[:, i])[:, None]
        for i, (effect, (mean, std)) in enumerate(zip(EFFECTS, pairs, strict=True))
    }


# Candidates as numbers: all that usually changes the speed of a program, from built-in and custom knobs alike.
#
# Custom knobs count if their names show their effect: ``--num-workers`` reads data in any program.


TUNED_WORKERS = 4.0
"""Assumed number of workers after hill climbing: with it, most programs no longer wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobColumns:
    """Knobs of n candidates, arrays of shape (n,). Switches are 0 or 1."""

    micro_batch_size: Array
    num_microbatches: Array
    dp: Array
    num_shards: Array
    """Ranks that share optimiser states; 1: not sharded."""
    zero_stage: Array
    reductions: Array
    """Gradient reductions per step."""
    tp: Array
    pp: Array
    cp: Array
    repeated_share: Array
    """Share of the layers recomputed in the backward pass."""
    low_precision: Array
    """Operators in 16 bits, by autocast or entirely."""
    low_weights: Array
    """Weights in 16 bits (O2)."""
    eight_bits: Array
    fast_fp32: Array
    """fp32 products may be rounded (TF32), where they are in fp32."""
    compiled: Array
    whole_model: Array
    graphs: Array
    """Kernels launched as recorded graphs (``reduce-overhead``)."""
    autotuned: Array
    channels_last: Array
    cudnn_tuned: Array
    math_attention: Array
    """Attention by separate matmuls and softmax instead of a fused kernel."""
    loss_chunks: Array
    offload_activations: Array
    offload_optimizer: Array
    num_workers: Array
    prefetch_factor: Array
    pinned: Array
    persistent: Array
    full_batch: Array

    def __len__(self) -> int:
        return len(self.dp)

    def take(self, rows: Any) -> KnobColumns:
        """Select ``rows`` (indices, a mask or a slice)."""
        return KnobColumns(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def matrix(self) -> Array:
        """Return all columns in one array, shape (n, number of columns)."""
        return np.stack([getattr(self, f.name) for f in fields(self)], axis=1)

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[Workload, Candidate]]) -> KnobColumns:
        """Build one row per workload and candidate."""
        rows = [_row(workload, candidate) for workload, candidate in pairs]
        return cls(**{f.name: np.array([row[f.name] for row in rows], dtype=np.float64) for f in fields(cls)})

    @classmethod
    def of_table(cls, workload: Workload, table: CandidateTable) -> KnobColumns:
        """Build one row per candidate of the table, computed once per combination of its dependencies."""
        columns: dict[str, Array] = {}
        for reads, read in _PARTS:
            rows, places = table.each(reads, functools.partial(read, workload))
            for name in rows[0] if rows else ():
                columns[name] = np.array([row[name] for row in rows], dtype=np.float64)[places]
        effects, places = table.each(("own",), lambda candidate: _effects_by_name(candidate.own))
        for name in dict.fromkeys(name for row in effects for name in row):
            values = np.array([row.get(name, np.nan) for row in effects])[places]
            columns[name] = np.where(np.isnan(values), columns[name], values)
        return cls(**columns)

    def followed_by(self, others: KnobColumns) -> KnobColumns:
        """Append the rows of ``others``."""
        pairs = {f.name: (getattr(self, f.name), getattr(others, f.name)) for f in fields(self)}
        return KnobColumns(**{name: np.concatenate(pair) for name, pair in pairs.items()})


def _row(workload: Workload, candidate: Candidate) -> dict[str, float]:
    parts = (read(workload, candidate) for _, read in _PARTS)
    return {name: value for part in (*parts, _effects_by_name(candidate.own)) for name, value in part.items()}


def _layout_row(workload: Workload, candidate: Candidate) -> dict[str, float]:
    layout = candidate.layout
    number = max(1, candidate.num_microbatches(workload.global_batch_size))
    each = layout.zero_stage >= 2 and layout.gradient_reduction == "each"
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "num_microbatches": number * expected_positions(workload, candidate),
        "dp": layout.dp,
        "num_shards": layout.dp_shard if layout.zero_stage else 1,
        "zero_stage": layout.zero_stage,
        "reductions": number if each else 1,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "repeated_share": min(1.0, sum(map(sum, candidate.recompute.full)) / workload.num_layers),
    }


def _kernel_row(_workload: Workload, candidate: Candidate) -> dict[str, float]:
    level, kernels = candidate.precision.base, candidate.kernels
    fits_format = level != "O0"
    return {
        "low_precision": level != "O0",
        "low_weights": level == "O2",
        "eight_bits": candidate.precision.is_fp8,
        "fast_fp32": level == "O0" and kernels.matmul_precision != "highest",
        "compiled": kernels.compile != "off",
        "whole_model": kernels.compile == "model",
        "graphs": kernels.compile_mode == "reduce-overhead",
        "autotuned": kernels.compile_mode == "max-autotune",
        "channels_last": kernels.memory_format == "nhwc" or (kernels.memory_format == "auto" and fits_format),
        "cudnn_tuned": bool(kernels.cudnn_tuning_range),
        "math_attention": kernels.attention == "math",
        "loss_chunks": kernels.loss_chunks,
    }


def _loader_row(_workload: Workload, candidate: Candidate) -> dict[str, float]:
    loader = candidate.loader
    tuned = loader.tuning is not None
    return {
        "num_workers": TUNED_WORKERS if tuned else loader.num_workers,
        "prefetch_factor": 2 if tuned or not loader.prefetch_factor else loader.prefetch_factor,
        "pinned": loader.pin_memory,
        "persistent": loader.persistent_workers,
        "full_batch": loader.full_batch,
        "offload_activations": candidate.offload.activations,
        "offload_optimizer": candidate.offload.optimizer,
    }


_PARTS: tuple[tuple[tuple[str, ...], Callable[[Workload, Candidate], dict[str, float]]], ...] = (
    (("layout", "micro_batch_size", "loader.batching", "recompute"), _layout_row),
    (("precision", "kernels"), _kernel_row),
    (("loader", "offload"), _loader_row),
)
"""Fields of candidates, and the columns they determine."""


# ---- the custom knobs, by their names ----

LOW = frozenset(("bf16", "bfloat16", "fp16", "float16", "half", "16", "amp", "mixed", "o1"))
"""Programs' names for 16-bit formats."""


def _words(text: str) -> frozenset[str]:
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return frozenset(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def _is_on(value: Any) -> float | None:
    """Return 1 for true, 0 for false, in any common spelling; None for other values."""
    if isinstance(value, bool):
        return float(value)
    text = str(value).lower()
    if text in ("true", "yes", "on", "1"):
        return 1.0
    return 0.0 if text in ("false", "no", "off", "0", "none") else None


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if found >= 0 and not isinstance(value, bool) else None


def _is_low(value: Any) -> float | None:
    """Whether a value names a 16-bit format; None if it is not a format."""
    on = _is_on(value)
    if on is not None:
        return on
    words = _words(str(value))
    if words & LOW:
        return 1.0
    return 0.0 if words & {"fp32", "float32", "32", "full", "tf32"} else None


def _is_last(value: Any) -> float | None:
    on = _is_on(value)
    if on is not None:
        return on
    words = _words(str(value))
    if words & {"nhwc", "last"}:
        return 1.0
    return 0.0 if words & {"nchw", "contiguous", "first"} else None


KNOBS = {
    "num_workers": "num_workers",
    "prefetch_factor": "prefetch_factor",
    "pinned": "pin_memory",
    "persistent": "persistent_workers",
    "compiled": "compile",
    "channels_last": "memory_format",
    "fast_fp32": "matmul_precision",
    "low_precision": "precision",
    "repeated_share": "recompute",
    "cudnn_tuned": "cudnn_benchmark",
}
"""Built-in knob of each column."""

Meaning = tuple[str, Callable[[frozenset[str]], bool], Callable[[Any], float | None]]

MEANINGS: tuple[Meaning, ...] = (
    ("num_workers", lambda words: bool(words & {"worker", "workers"}) and "persistent" not in words, _number),
    ("prefetch_factor", lambda words: "prefetch" in words, _number),
    ("pinned", lambda words: bool(words & {"pin", "pinned"}), _is_on),
    ("persistent", lambda words: "persistent" in words, _is_on),
    ("compiled", lambda words: bool(words & {"compile", "torchcompile"}) and "mode" not in words, _is_on),
    ("channels_last", lambda words: {"channels", "last"} <= words or {"memory", "format"} <= words, _is_last),
    ("fast_fp32", lambda words: "tf32" in words, _is_on),
    ("low_precision", lambda words: bool(words & {"bf16", "fp16", "amp", "dtype", "precision", "mixed"}), _is_low),
    ("repeated_share", lambda words: bool(words & {"recompute", "checkpointing", "remat"}), _is_on),
    ("cudnn_tuned", lambda words: {"cudnn", "benchmark"} <= words, _is_on),
)
"""Columns, words in names that mean them, and parsers of values; the first match counts."""


def column_of(name: str, value: Any) -> tuple[str, float] | None:
    """Guess the column that a custom knob of this name sets, and its value; None if the name has no match."""
    words = _words(name)
    for column, is_meant, read in MEANINGS:
        if is_meant(words) and (found := read(value)) is not None:
            return column, found
    return None


def built_in_knob(name: str, value: Any) -> str | None:
    """Guess the built-in knob that corresponds to this custom knob; None if the name has no match."""
    found = column_of(name, value)
    return KNOBS[found[0]] if found is not None else None


def _effects_by_name(own: Sequence[CustomChoice]) -> Mapping[str, float]:
    return dict(found for choice in own if (found := column_of(choice.name, choice.value)) is not None)


# The peak memory of a program relative to that of one of its candidates: of the baseline at first, then of a candidate
# whose measured peak was decomposed.


@dataclass(frozen=True, slots=True)
class MemoryEffect:
    """A normally distributed quantity of a program's memory."""

    name: str
    mean: float
    std: float


MEMORY_EFFECTS = (
    # Logit of the activations' share of the baseline's peak: 60%, from a quarter to nearly all. The rest is weights,
    # gradients, optimiser states and the process.
    MemoryEffect("activations", 0.4, 1.2),
    # Logit of the activations' share that full recompute saves: about 80% (Chen et al., arXiv 1604.06174).
    MemoryEffect("kept", 1.4, 0.7),
    # Activations under autocast: half the bytes, except for norms, losses and copies of weights.
    MemoryEffect("low_precision", -0.45, 0.2),
    # 16-bit weights with fp32 masters: gradients shrink, masters are added (16 bytes a parameter as in fp32).
    MemoryEffect("low_weights", -0.05, 0.15),
    # Logit of the states' share that ZeRO shards: optimiser states are 8 of 16 bytes (arXiv 1910.02054).
    MemoryEffect("sharded", 0.8, 0.7),
    # Logit of the share that offloading moves off the device.
    MemoryEffect("offloaded", 0.4, 0.7),
    # Fused operators keep less (PyTorch 2.0, min-cut partitioner).
    MemoryEffect("compiled", -0.08, 0.12),
    # Log of the shortfall of tensor and pipeline parallelism from an even split.
    MemoryEffect("split", -0.1, 0.3),
)

MEASURED_MEMORY_EFFECTS = (
    # Log of all memory that grows with the activations over the activations: kernels' workspaces, the allocator's part.
    MemoryEffect("activations", 0.03, 0.05),
    # Logit of the activations' part that does not grow with the micro-batch, relative to the weights' bytes: gathered
    # weights, their 16-bit copies under autocast, gradient buckets.
    MemoryEffect("constant", -1.0, 1.5),
    # Logit of the share that ZeRO really shards of what its stage shards: buffers stay whole (arXiv 1910.02054).
    MemoryEffect("sharded", 2.0, 1.0),
)
"""Effects that replace those of the same names once a measured peak was decomposed."""

RESIDENT_MEMORY_EFFECTS = (
    # The same for a process on CPUs: the C library keeps some of the memory that tensors release. Measured on plain
    # PyTorch (docs/measured/program-memory.md).
    MemoryEffect("activations", 0.22, 0.15),
    # Logit of the share that recompute saves of a resident set: less than of tensors, as recomputed tensors leave holes
    # between those that stay. Measured likewise.
    MemoryEffect("kept", 0.3, 0.8),
)
"""Effects that replace those for the peak of a process on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Parts of a measured peak, as shares of it. The rest is the process, the framework and their buffers."""

    activations: float
    weights: float = 0.0
    gradients: float = 0.0
    states: float = 0.0


def drawn_memory(kind: Kind, shares: MemoryShares | None = None) -> Draw:
    """Draw the memory effects of ``NUM_DRAWS`` programs, or of one with known shares; the same at every call."""
    known = () if shares is None else MEASURED_MEMORY_EFFECTS
    resident = RESIDENT_MEMORY_EFFECTS if known and kind == "cpu" else ()
    effects = {effect.name: effect for effect in (*MEMORY_EFFECTS, *known, *resident)}
    normal = np.random.default_rng(1).standard_normal((NUM_DRAWS // 2, len(effects)))
    both = np.concatenate([normal, -normal])
    exact = both @ np.linalg.inv(np.linalg.cholesky(both.T @ both / NUM_DRAWS)).T
    return {e.name: (e.mean + e.std * exact[:, i])[:, None] for i, e in enumerate(effects.values())}


def relative_peak(k: KnobColumns, reference: KnobColumns, usual: Draw, shares: MemoryShares | None = None) -> Array:
    """Return the log of the peak relative to that of ``reference``, a single row; shape (n,) or (draws, n).

    ``shares``: parts of the reference's measured peak; None: it was not decomposed.
    """
    return np.log(_peak(k, reference, usual, shares)) - np.log(_peak(reference, reference, usual, shares))


def _peak(k: KnobColumns, reference: KnobColumns, usual: Draw, shares: MemoryShares | None) -> Array:
    growing = _growing(k, usual) / float(reference.micro_batch_size[0])
    if shares is None:
        share = _logistic(usual["activations"])
        states = (1 - share) * _unsplit(k, usual, 1) * _state_size(k, usual)
        return np.asarray((share * growing + states) * _split(k, usual))
    constant = _logistic(usual["constant"]) * min(shares.weights, shares.activations)
    reference_growing = _growing(reference, usual) / float(reference.micro_batch_size[0])
    activations = (shares.activations - constant) * np.exp(usual["activations"]) * growing / reference_growing
    parts = ((1, shares.states), (2, shares.gradients), (3, shares.weights))
    held = [share * _unsplit(k, usual, stage) / _unsplit(reference, usual, stage) for stage, share in parts]
    states = np.sum(held, axis=0) * _state_size(k, usual) / _state_size(reference, usual)
    excess = np.expm1(usual["activations"]) * (shares.activations - constant)
    rest = 1 - shares.activations - shares.states - shares.gradients - shares.weights
    split = _split(k, usual) / _split(reference, usual)
    return np.asarray((activations + constant + states) * split + np.maximum(rest - excess, 0.0))


def _split(k: KnobColumns, usual: Draw) -> Array:
    """Return a rank's part of the model's memory under tensor and pipeline parallelism."""
    return np.where(k.tp * k.pp > 1, np.exp(-usual["split"]), 1.0) / (k.tp * k.pp)


def _state_size(k: KnobColumns, usual: Draw) -> Array:
    """Return the size of weights, gradients and states by number format and offloading."""
    on_device = 1 - _logistic(usual["offloaded"]) * k.offload_optimizer
    return np.asarray(np.exp(usual["low_weights"] * k.low_weights) * on_device)


def _growing(k: KnobColumns, usual: Draw) -> Array:
    """Return the quantity that activations are proportional to: the micro-batch, and the kept share."""
    low = usual["low_precision"] * k.low_precision + usual["compiled"] * k.compiled
    saved = 1 - k.repeated_share * _logistic(usual["kept"])
    offloaded = _logistic(usual["offloaded"]) * k.offload_activations
    return np.asarray(k.micro_batch_size * np.exp(low) * saved * (1 - offloaded) / k.cp)


def _unsplit(k: KnobColumns, usual: Draw, stage: int) -> Array:
    """Return one rank's part of a state that ZeRO shards from ``stage`` on."""
    is_split = (k.zero_stage >= stage).astype(np.float64)
    return np.asarray(1 - is_split * _logistic(usual["sharded"]) * (1 - 1 / k.num_shards))


def _logistic(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


# The step time of an unknown program relative to its baseline. Also the usual changes by data loading and kernels of a
# step described by a cost model.
#
# Arrays of n candidates have shape (n,); with many drawn programs, (draws, n).


SHARPNESS = 6.0
"""Exponent p of (a^p + b^p)^(1/p), a smooth max(a, b): if reading and computing take equally long, their fluctuations
cost time."""
GATHERS = 2.0
"""ZeRO-3's gathers of the weights per micro-batch, one each before forward and backward pass. Each sends half of an
all-reduce (Rajbhandari et al., arXiv 1910.02054, section 7)."""


def kernel_effect(k: KnobColumns, usual: Draw) -> Array:
    """Return the log of the factor on computing by compilation, memory format, cuDNN, attention and loss chunks."""
    last_low = k.channels_last * k.low_precision
    last_full = k.channels_last * (1 - k.low_precision)
    return np.asarray(
        usual["compiled"] * k.compiled
        + usual["whole_model"] * k.whole_model
        + usual["autotuned"] * k.autotuned
        + usual["channels_last_low"] * last_low
        + usual["channels_last_full"] * last_full
        + usual["cudnn_tuned"] * k.cudnn_tuned
        + usual["math_attention"] * k.math_attention
        + usual["loss_chunks"] * np.log2(np.maximum(k.loss_chunks, 1.0))
    )


def launch_effect(k: KnobColumns, usual: Draw) -> Array:
    """Return the log of the factor on launches."""
    return np.asarray(usual["compiled_launches"] * k.compiled + usual["graphs"] * k.graphs)


def longer(one: Array, other: Array) -> Array:
    """Return approximately the longer of two concurrent times."""
    largest = np.maximum(np.maximum(one, other), 1e-300)
    powers = (one / largest) ** SHARPNESS + (other / largest) ** SHARPNESS
    return np.asarray(largest * powers ** (1 / SHARPNESS))


def with_data(busy: Array, reading: Array, k: KnobColumns, usual: Draw) -> Array:
    """Return the step time of a rank with ``busy`` seconds of work whose samples one process reads in ``reading``
    seconds.

    Without workers the two follow each other; with workers the longer one counts.
    """
    has_workers = k.num_workers > 0
    most = np.exp(usual["most_workers"])
    at_once = 1 / longer(1 / np.maximum(k.num_workers, 1.0), 1 / most)
    effective = at_once * np.exp(usual["worker_efficiency"])
    blocking = busy * (1 + np.exp(usual["worker_cost"]) * k.num_workers) + np.exp(usual["contention"]) * reading
    evened = usual["prefetch"] * np.log2(np.maximum(k.prefetch_factor, 1.0) / 2) + usual["persistent"] * k.persistent
    total = np.where(has_workers, longer(blocking, reading / effective) * np.exp(evened), busy + reading)
    return np.asarray(total * np.exp(usual["pinned"] * k.pinned))


def relative_step(k: KnobColumns, baseline: KnobColumns, usual: Draw) -> Array:
    """Return the log of the step time relative to that of ``baseline``, a single row."""
    return np.log(_step(k, baseline, usual)) - np.log(_step(baseline, baseline, usual))


def _step(k: KnobColumns, baseline: KnobColumns, usual: Draw) -> Array:
    """Return the time of a step, in units of the baseline's computing time of one sample."""
    share = k.tp * k.pp * k.cp
    first = float(baseline.micro_batch_size[0])
    samples = k.micro_batch_size * k.num_microbatches
    step = float(baseline.micro_batch_size[0] * baseline.num_microbatches[0])
    computing = _computing(k, first, usual) / share
    spread = (
        usual["tensor_parallel"] * np.log2(k.tp)
        + usual["pipelined"] * np.log2(k.pp)
        + usual["context_parallel"] * np.log2(k.cp)
    )
    bubble = (k.num_microbatches + k.pp - 1) / k.num_microbatches
    busy = computing * np.exp(spread) * bubble
    busy = busy + np.exp(usual["offload_activations"]) * k.offload_activations * computing
    host = np.exp(usual["offload_optimizer"]) * k.offload_optimizer
    busy = busy + step * (np.exp(usual["exchange"]) * bytes_sent(k) + np.exp(usual["update"]) / k.num_shards + host) / (
        k.tp * k.pp
    )
    reading = np.exp(usual["reading"]) * samples * np.where(k.full_batch > 0, k.dp, 1.0)
    return with_data(busy, reading, k, usual)


def _computing(k: KnobColumns, first: float, usual: Draw) -> Array:
    """Return the time of forward and backward passes, with launches; ``first``: the baseline's micro-batch."""
    slower = (
        usual["low_precision"] * k.low_precision
        + usual["low_weights"] * k.low_weights
        + usual["eight_bits"] * k.eight_bits
        + usual["fast_fp32"] * k.fast_fp32
        + usual["batch_slope"] * np.log2(k.micro_batch_size / first)
    )
    device = k.micro_batch_size * np.exp(kernel_effect(k, usual) + slower)
    launches = first * np.exp(usual["half_batch"] + launch_effect(k, usual))
    again = 1 + k.repeated_share * np.exp(usual["recompute"])
    return np.asarray(k.num_microbatches * (device + launches) * again)


def bytes_sent(k: KnobColumns) -> Array:
    """Return the bytes that a rank sends per step, in units of two replicas that reduce their gradients once.

    Of an all-reduce, one half scatters gradients, the other gathers them, or new weights instead.
    """
    others = 2 * (k.dp - 1) / k.dp
    gathers = np.where(k.zero_stage == 3, k.num_microbatches * GATHERS, 1.0)
    return np.asarray(others * 0.5 * (k.reductions + gathers))
