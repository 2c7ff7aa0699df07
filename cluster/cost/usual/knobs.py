"""Candidates as numbers: what of them usually changes the speed of a program, built-in knobs and the user's own alike.

The user's own knobs count where their names say what they do: a ``--num-workers`` reads data, whatever the program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import Array
from trials.spec import Candidate, OwnChoice, Workload

TUNED_WORKERS = 4.0
"""Workers that hill climbing is taken to come to; with as many, most programs no longer wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobColumns:
    """Knobs of n candidates, arrays of shape (n,). Switches are 0 or 1."""

    micro_batch_size: Array
    num_microbatches: Array
    dp: Array
    num_shards: Array
    """Ranks that share optimiser states; 1: each has all."""
    zero_stage: Array
    reductions: Array
    """How often gradients are reduced in a step."""
    tp: Array
    pp: Array
    cp: Array
    repeated_share: Array
    """Share of the layers that the backward pass computes again."""
    low_precision: Array
    """Operators in 16 bits, by autocast or altogether."""
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
        """The rows that ``rows`` (indices, a mask or a slice) selects."""
        return KnobColumns(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def matrix(self) -> Array:
        """All columns side by side, shape (n, number of columns)."""
        return np.stack([getattr(self, f.name) for f in fields(self)], axis=1)

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[Workload, Candidate]]) -> KnobColumns:
        """One row per workload and candidate."""
        rows = [_row(workload, candidate) for workload, candidate in pairs]
        return cls(**{f.name: np.array([row[f.name] for row in rows], dtype=np.float64) for f in fields(cls)})

    @classmethod
    def of_table(cls, workload: Workload, table: CandidateTable) -> KnobColumns:
        """One row per candidate of the table, worked out once per combination of what it depends on."""
        columns: dict[str, Array] = {}
        for reads, read in _PARTS:
            rows, places = table.each(reads, functools.partial(read, workload))
            for name in rows[0] if rows else ():
                columns[name] = np.array([row[name] for row in rows], dtype=np.float64)[places]
        told, places = table.each(("own",), lambda candidate: _told_by_names(candidate.own))
        for name in dict.fromkeys(name for row in told for name in row):
            values = np.array([row.get(name, np.nan) for row in told])[places]
            columns[name] = np.where(np.isnan(values), columns[name], values)
        return cls(**columns)

    def followed_by(self, others: KnobColumns) -> KnobColumns:
        """These rows, and ``others`` after them."""
        pairs = {f.name: (getattr(self, f.name), getattr(others, f.name)) for f in fields(self)}
        return KnobColumns(**{name: np.concatenate(pair) for name, pair in pairs.items()})


def _row(workload: Workload, candidate: Candidate) -> dict[str, float]:
    parts = (read(workload, candidate) for _, read in _PARTS)
    return {name: value for part in (*parts, _told_by_names(candidate.own)) for name, value in part.items()}


def _layout_row(workload: Workload, candidate: Candidate) -> dict[str, float]:
    layout = candidate.layout
    number = max(1, candidate.num_microbatches(workload.global_batch_size))
    each = layout.zero_stage >= 2 and layout.gradient_reduction == "each"
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "num_microbatches": number,
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
    level, kernels = candidate.precision.level, candidate.kernels
    fits_format = level != "O0"
    return {
        "low_precision": level != "O0",
        "low_weights": level == "O2",
        "eight_bits": level == "O1-fp8",
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
    (("layout", "micro_batch_size", "recompute"), _layout_row),
    (("precision", "kernels"), _kernel_row),
    (("loader", "offload"), _loader_row),
)
"""Fields of candidates, and the columns that they decide."""


# ---- the user's own knobs, by their names ----

LOW = frozenset(("bf16", "bfloat16", "fp16", "float16", "half", "16", "amp", "mixed", "o1"))
"""Values by which programs call 16-bit formats."""


def _words(text: str) -> frozenset[str]:
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return frozenset(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def _is_on(value: Any) -> float | None:
    """1 for true, 0 for false, however programs spell that; None for other values."""
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
    """Whether a value names a 16-bit format; None where it names none at all."""
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
"""Columns, which words of a name mean them, and how a value is read; the first that understands one counts."""


def column_of(name: str, value: Any) -> tuple[str, float] | None:
    """The column that an own knob of this name is taken to set, and to what; None where its name says nothing."""
    words = _words(name)
    for column, is_meant, read in MEANINGS:
        if is_meant(words) and (found := read(value)) is not None:
            return column, found
    return None


def _told_by_names(own: Sequence[OwnChoice]) -> Mapping[str, float]:
    return dict(found for choice in own if (found := column_of(choice.name, choice.value)) is not None)
