"""The search space: every candidate the knobs of a sweep span, once each, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from orchestrator.candidates import (
    build_layout,
    build_loader,
    canonical_precision,
    canonical_recompute,
    knob_values,
)
from orchestrator.errors import ConfigError
from orchestrator.knob_text import plain, precision_text
from orchestrator.knobs import KNOBS
from orchestrator.sweep import SweepSpec
from trials.spec import Candidate, FullRecompute, Kernels, Layout

MAX_PRODUCT_SIZE = 2_000_000
"""Combinations of choices a sweep may span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Distinct canonical values of each part of a candidate; the space is their product.

    Canonicalisation works within parts, so removing duplicates part by part removes all of them.
    """

    frames: tuple[Candidate, ...]
    """Layout and micro-batch size vary, the rest has the first value of its part."""
    rest: tuple[Mapping[str, Any], ...]
    """Recompute, precision, loader and kernels, as fields of Candidate."""
    product_size: int
    """Combinations of choices before duplicates are removed."""

    def __len__(self) -> int:
        return len(self.frames) * len(self.rest)

    @property
    def num_duplicates(self) -> int:
        return self.product_size - len(self)

    def completions(self, frame: Candidate) -> Iterator[Candidate]:
        """Candidates that share layout and micro-batch size with ``frame``."""
        for fields in self.rest:
            yield Candidate(layout=frame.layout, micro_batch_size=frame.micro_batch_size, **fields)

    def __iter__(self) -> Iterator[Candidate]:
        for frame in self.frames:
            yield from self.completions(frame)


def make_space(spec: SweepSpec) -> Space:
    """The space of a sweep.

    Raises:
        ConfigError: when the choices span more than ``MAX_PRODUCT_SIZE`` combinations.
    """
    choices = spec.choices
    size = math.prod(len(values) for values in choices.values())
    if size > MAX_PRODUCT_SIZE:
        raise _too_large(spec, size, choices)
    num_layers = spec.workload.model.num_layers
    rest = _products(
        {
            "recompute": _distinct(choices["recompute"], lambda value: canonical_recompute(value, num_layers)),
            "precision": _distinct(choices["precision"], canonical_precision),
            "loader": _distinct(_settings(choices, "loader"), build_loader),
            "kernels": _distinct(choices["compile"], lambda value: Kernels(compile=value)),
        }
    )
    layouts = _distinct(_settings(choices, "layout"), build_layout)
    frames = tuple(
        Candidate(layout=layout, micro_batch_size=micro_batch_size, **rest[0])
        for layout, micro_batch_size in product(layouts, choices["micro_batch_size"])
    )
    return Space(frames=frames, rest=rest, product_size=size)


def enumerate_space(spec: SweepSpec) -> Iterator[tuple[dict[str, Any], Candidate]]:
    """Every distinct candidate, legal or not, with its knob values; deterministic order."""
    for candidate in make_space(spec):
        yield knob_values(candidate), candidate


def _settings(choices: Mapping[str, tuple[Any, ...]], part: str) -> Iterator[dict[str, Any]]:
    """Every combination of the knobs that make up one part of a candidate."""
    names = [knob.name for knob in KNOBS if knob.part == part]
    for values in product(*(choices[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _distinct(values: Sequence[Any] | Iterator[Any], build: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(build(value) for value in values))


def _products(parts: Mapping[str, tuple[Any, ...]]) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(parts, values, strict=True)) for values in product(*parts.values()))


def _too_large(spec: SweepSpec, size: int, choices: Mapping[str, tuple[Any, ...]]) -> ConfigError:
    largest = sorted(choices, key=lambda name: len(choices[name]), reverse=True)[:3]
    shown = ", ".join(f"{name} ({len(choices[name])})" for name in largest)
    return spec.error(
        ("space",),
        f"the choices span {size:,} combinations, more than {MAX_PRODUCT_SIZE:,}",
        f"Shorten the longest lists: {shown}.",
    )


def short_name(candidate: Candidate) -> str:
    """Compact and different for different candidates, like ``dp2 z3x2 tp2sp mbs4 full O1-bf16 w2``.

    ``dp2f`` replicates with FSDP2, ``full3`` recomputes the first three layers and
    ``w2p4`` has a prefetch factor of 4.
    """
    words = [*_layout_words(candidate.layout), f"mbs{candidate.micro_batch_size}"]
    if isinstance(candidate.recompute, FullRecompute):
        words.append(f"full{candidate.recompute.num_layers}")
    words.append(precision_text(candidate.precision))
    loader = candidate.loader
    if loader.num_workers:
        words.append(f"w{loader.num_workers}" + (f"p{loader.prefetch_factor}" if loader.prefetch_factor != 2 else ""))
    if candidate.kernels.compile != "off":
        words.append("compile")
    return " ".join(words)


def _layout_words(layout: Layout) -> Iterator[str]:
    if layout.dp_replicate > 1 or layout.world_size == 1:
        yield f"dp{layout.dp_replicate}" + ("f" if layout.replicate_with == "fsdp2" else "")
    if layout.dp_shard > 1:
        yield f"z{layout.zero_stage}x{layout.dp_shard}"
    if layout.tp > 1:
        yield f"tp{layout.tp}" + ("sp" if layout.sequence_parallel else "")


def flat_params(candidate: Candidate) -> dict[str, str | int | float | bool]:
    """Knob values as scalars, plus ``world_size``: parameters of a record, features of a search."""
    params = {knob.name: plain(knob.read(candidate)) for knob in KNOBS}
    return {"world_size": candidate.layout.world_size, **params}


def diff(candidate: Candidate, baseline: Candidate) -> dict[str, tuple[Any, Any]]:
    """Knobs in which the two differ: name to (value in the baseline, value in the candidate), as scalars."""
    before, after = flat_params(baseline), flat_params(candidate)
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}
