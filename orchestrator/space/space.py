"""The search space: every candidate the knobs of a sweep span, once each, in a fixed order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.canonical import (
    build_kernels,
    build_layout,
    build_loader,
    build_offload,
    canonical_precision,
    engine_for,
    resolve_tp_engine,
    with_tp_engine,
)
from orchestrator.space.knobs.layer_choices import layers_of, resolve_recompute
from orchestrator.space.knobs.own import OwnKnob, combinations
from trials.spec import Candidate, Layout, Model, Recompute

Choices = Mapping[str, tuple[Any, ...]]
"""Values to try of every knob, by its name."""
MAX_SETTINGS = 200_000
"""Combinations of the knobs of one part of a candidate that are looked at; of more layouts, a random part."""


class SpaceTooLargeError(ValueError):
    """The knobs span more combinations than can be looked at; ``remedy`` names the longest lists."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What candidates of one layout and micro-batch size share."""

    layout: Layout
    micro_batch_size: int
    recomputes: tuple[Recompute, ...]
    """Distinct policies, resolved against the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Every distinct candidate once: per frame, the product of its recompute policies and ``parts``.

    What recompute and layers per stage mean depends on the layout, and the engine of tensor parallelism may depend on
    recompute; all else is canonical part by part, so removing duplicates per frame and part by part removes all.
    """

    frames: tuple[Frame, ...]
    parts: Mapping[str, tuple[Any, ...]]
    """Choices of precision, offload, loader, kernels and the user's own knobs, by field of Candidate."""
    product_size: int
    """Combinations of choices before duplicates are removed."""

    def __len__(self) -> int:
        return sum(map(self.num_completions, self.frames))

    @property
    def num_duplicates(self) -> int:
        return self.product_size - len(self)

    def num_completions(self, frame: Frame) -> int:
        return len(frame.recomputes) * self.num_choices

    @property
    def num_choices(self) -> int:
        """Combinations of the choices that do not depend on the layout."""
        return math.prod(map(len, self.parts.values()))

    def table(self) -> CandidateTable:
        """All candidates, frame by frame, in the order of :meth:`completions`."""
        rows = np.arange(len(self), dtype=np.int64)
        return self.rows_of(self.policies(), rows // self.num_choices, rows % self.num_choices)

    def first_completions(self) -> CandidateTable:
        """The first candidate of every frame."""
        starts = np.cumsum([0, *(len(frame.recomputes) for frame in self.frames)])[:-1]
        return self.rows_of(self.policies(), starts, np.zeros(len(starts), dtype=np.int64))

    def policies(self) -> CandidateTable:
        """Every frame with each of its recompute policies, and with the first choice of all else."""
        base = {name: values[:1] for name, values in self.parts.items()}
        layouts, sizes, recomputes = _Places(), _Places(), _Places()
        for frame in self.frames:
            layout, size = layouts.of(frame.layout), sizes.of(frame.micro_batch_size)
            for policy in frame.recomputes:
                layouts.add(layout)
                sizes.add(size)
                recomputes.add(recomputes.of(policy))
        found = {"layout": layouts, "micro_batch_size": sizes, "recompute": recomputes}
        zeros = np.zeros(len(layouts.codes), dtype=np.int32)
        return CandidateTable(
            {**{name: tuple(places.known) for name, places in found.items()}, **base},
            {**{name: np.array(p.codes, dtype=np.int32) for name, p in found.items()}, **dict.fromkeys(base, zeros)},
        )

    def rows_of(self, policies: CandidateTable, policy: NDArray[np.int64], choice: NDArray[np.int64]) -> CandidateTable:
        """Candidates by the rows of :meth:`policies` and the numbers of their combinations of choices."""
        values = {name: policies.values[name] for name in ("layout", "micro_batch_size", "recompute")}
        codes = {name: policies.codes[name][policy] for name in values}
        for name, choices in reversed(tuple(self.parts.items())):
            values[name] = choices
            codes[name] = (choice % len(choices)).astype(np.int32)
            choice = choice // len(choices)
        return CandidateTable(values, codes)

    def completions(self, frame: Frame) -> Iterator[Candidate]:
        """Candidates that share layout and micro-batch size with ``frame``."""
        layout, micro_batch_size = frame.layout, frame.micro_batch_size
        for recompute, *values in product(frame.recomputes, *self.parts.values()):
            fields = dict(zip(self.parts, values, strict=True))
            yield Candidate(layout=layout, micro_batch_size=micro_batch_size, recompute=recompute, **fields)

    def __iter__(self) -> Iterator[Candidate]:
        for frame in self.frames:
            yield from self.completions(frame)


class _Places:
    """Distinct values in order of appearance, and places of values among them."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.codes: list[int] = []

    def of(self, value: Any) -> int:
        return self.known.setdefault(value, len(self.known))

    def add(self, code: int) -> None:
        self.codes.append(code)


def make_space(choices: Choices, model: Model, own: Sequence[OwnKnob] = ()) -> Space:
    """The space that ``choices`` and the user's ``own`` knobs span for ``model``; of more than ``MAX_SETTINGS`` layouts
    a random part.

    Raises:
        SpaceTooLargeError: when the knobs of the loader, of the kernels or the user's own span more combinations.
    """
    for part in ("loader", "kernels"):
        if (size := _num_settings(choices, part)) > MAX_SETTINGS:
            raise _too_large(part, {name: len(choices[name]) for name in _knobs_of(part)}, size)
    own_sizes = {knob.name: len(knob.values) for knob in own}
    if (size := math.prod(own_sizes.values())) > MAX_SETTINGS:
        raise _too_large("workload", own_sizes, size)
    parts = {
        "precision": _distinct(choices["precision"], canonical_precision),
        "offload": _distinct(_settings(choices, "offload"), build_offload),
        "loader": _distinct(_settings(choices, "loader"), build_loader),
        "kernels": _distinct(_settings(choices, "kernels"), lambda values: build_kernels(values, model)),
        "own": tuple(dict.fromkeys(combinations(own))),
    }
    frames = tuple(
        Frame(layout=layout, micro_batch_size=micro_batch_size, recomputes=recomputes)
        for layout, recomputes in _layouts(choices, model).items()
        for micro_batch_size in choices["micro_batch_size"]
    )
    product_size = math.prod([*map(len, choices.values()), *own_sizes.values()])
    return Space(frames=frames, parts=parts, product_size=product_size)


def _layouts(choices: Choices, model: Model) -> dict[Layout, tuple[Recompute, ...]]:
    """Distinct layouts with the distinct recompute policies that go with each."""
    found: dict[Layout, dict[Recompute, None]] = {}
    num_layers = model.num_layers
    engines = tuple(dict.fromkeys(engine_for(engine, model) for engine in choices["tp_engine"]))
    without_engine = _distinct(_settings(choices, "layout"), lambda values: build_layout(values, num_layers))
    for layout, engine in product(without_engine, engines):
        present = layers_of(layout, num_layers)
        for choice in choices["recompute"]:
            policy = resolve_recompute(choice, present)
            resolved = resolve_tp_engine(engine, layout, recomputes_communication=policy.communication != ())
            found.setdefault(with_tp_engine(layout, resolved), {})[policy] = None
    return {layout: tuple(policies) for layout, policies in found.items()}


def _knobs_of(part: str) -> list[str]:
    return [knob.name for knob in KNOBS if knob.part == part]


def _num_settings(choices: Choices, part: str) -> int:
    return math.prod(len(choices[name]) for name in _knobs_of(part))


def _settings(choices: Choices, part: str) -> Iterator[dict[str, Any]]:
    """Combinations of the knobs that make up one part of a candidate: all, or ``MAX_SETTINGS`` drawn at random."""
    names = _knobs_of(part)
    size = _num_settings(choices, part)
    if size <= MAX_SETTINGS:
        for values in product(*(choices[name] for name in names)):
            yield dict(zip(names, values, strict=True))
        return
    for number in sorted(random.Random(0).sample(range(size), MAX_SETTINGS)):
        setting = {}
        for name in reversed(names):
            number, place = divmod(number, len(choices[name]))
            setting[name] = choices[name][place]
        yield setting


def _distinct(values: Sequence[Any] | Iterator[Any], build: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(build(value) for value in values))


def _too_large(part: str, sizes: Mapping[str, int], size: int) -> SpaceTooLargeError:
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
    shown = ", ".join(f"{name} ({sizes[name]})" for name in largest)
    return SpaceTooLargeError(
        f"the knobs of the {part} span {size:,} combinations, more than {MAX_SETTINGS:,}",
        remedy=f"Shorten the longest lists: {shown}.",
    )
